"""A model's chat format: its template, what the template can express, and how the model's answers are written."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import BadRequest, BadTemplate, show
from .builtin_templates import find_builtin
from .chat_template import ChatTemplate, check_messages, select_template
from .guard import SpecialTextGuard, find_structural
from .messages import TemplateFeatures, find_features, normalise_messages
from .parsing import OutputFormat, find_format, harmony
from .parsing.select import CALL_FORMATS, REASONING_FORMATS
from .tools import read_tools
from .vocabulary import Vocabulary

log = logging.getLogger("mlxrt")

SWITCHES = ("enable_thinking", "thinking")  # variables that turn thinking on and off, of one template or another
RESERVED = ("messages", "tools", "add_generation_prompt")
MAX_WARNINGS = 32
PROBE = [{"role": "user", "content": "qzuserqz"}]


@dataclass(frozen=True)
class CompiledTemplate:
    template: ChatTemplate
    features: TemplateFeatures
    source: str


@dataclass(frozen=True)
class RenderedPrompt:
    """A template's text. `guarded`: with guards around its special tokens, since a message holds such strings too."""

    text: str
    guarded: bool = False


class ChatFormat:
    """What a tokenizer's files say about conversations."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self.templates: Mapping[str, str] = vocabulary.templates
        self._compiled: dict[str, CompiledTemplate] = {}
        self._tools_as_text = False  # said once
        self._without_effect: set[str] = set()  # variables this was said of

    def use_builtin(self) -> None:
        """Where the files have no template, take the built-in one of a family with these special tokens."""
        builtin = find_builtin(self._vocabulary.added)
        if not self.templates and builtin is not None:
            name, source = builtin
            self.templates = {"default": source}
            log.info(f"the model's files have no chat template; using the built-in one for {name}")

    @cached_property
    def guard(self) -> SpecialTextGuard:
        vocab = self._vocabulary
        markers = {m for f in CALL_FORMATS.values() for m in f.markers}
        markers |= {m for f in REASONING_FORMATS.values() for m in f.markers}
        return SpecialTextGuard(
            find_structural(vocab.added, vocab.special_ids, self.templates.values(), markers | {*harmony.MARKERS})
        )

    def output_format(self, declared: Mapping[str, Any]) -> OutputFormat:
        """How the model writes reasoning and calls; `declared`: what its other files say."""
        return find_format(self.templates.values(), self._vocabulary.added, declared)

    def compile(self, tools: object) -> CompiledTemplate:
        name = select_template(self.templates, tools)
        if name not in self._compiled:
            source = self.templates[name]
            template = ChatTemplate(source, self._vocabulary.names)

            def render(messages, **variables) -> str | None:
                try:
                    return template.render(messages, {"tools": None} | variables, True, probing=True)
                except BadTemplate:
                    return None

            self._compiled[name] = CompiledTemplate(template, find_features(render, source), source)
        return self._compiled[name]

    def takes(self, variable: str) -> bool:
        """Whether a template of the model's uses this variable."""
        return any(has_word(source, variable) for source in self.templates.values())

    # Thinking

    @cached_property
    def thinks(self) -> bool:
        """Whether the model can think before it answers, as its template shows it."""
        source = "\n".join(self.templates.values())
        opens = [f.open for f in REASONING_FORMATS.values()]
        return any(word in source for word in ("enable_thinking", "reasoning_effort", harmony.CHANNEL, *opens))

    @cached_property
    def switchable(self) -> bool:
        """Whether the template has a variable that turns thinking on and off."""
        found = []
        for on in (True, False):
            variables = dict.fromkeys(SWITCHES, on)
            try:
                found.append(self.compile(None).template.render(PROBE, {"tools": None} | variables, True, probing=True))
            except BadTemplate:
                return False
        return found[0] != found[1]

    def thinking_variables(self, thinking: str) -> dict[str, bool]:
        """The template's variables for thinking="on" or "off"; BadRequest where it cannot be had."""
        if thinking == "auto":
            return {}
        if thinking == "on" and not self.thinks:
            raise BadRequest("this model has no thinking to switch on: its chat template knows none")
        if thinking == "off" and self.thinks and not self.switchable:
            raise BadRequest("this model always thinks: its chat template has no switch; try thinking_budget=0")
        return dict.fromkeys(SWITCHES, thinking == "on") if self.thinks and self.switchable else {}

    # Prompts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        thinking: str = "auto",
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        """Normalise the messages and apply the template."""
        known = read_tools(tools)
        chosen = self.compile(known)
        features = chosen.features
        if known and not features.tools and not self._tools_as_text:
            self._tools_as_text = True
            log.info("the chat template takes no tools: they are described in the system message, in Hermes's form")
        normal = normalise_messages(check_messages(messages), features, known, chosen.source)
        variables = self._variables(known if features.tools else None, thinking, options)
        self._warn_without_effect(options or {}, chosen.source)
        if features.tools == "xml_tools":
            variables.setdefault("xml_tools", known)
        (safe, given), found = self.guard.protect((normal, variables))
        text = chosen.template.render(safe, given, add_generation_prompt)
        return RenderedPrompt(self.guard.add_guards(text), True) if found else RenderedPrompt(text)

    def _variables(self, tools, thinking: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
        switches, given = self.thinking_variables(thinking), dict(options or {})
        if bad := [key for key in given if not isinstance(key, str) or key in RESERVED]:
            raise BadRequest(f"template_options cannot set {show(bad[0])}")
        if twice := [key for key in switches if key in given and given[key] != switches[key]]:
            raise BadRequest(
                f"thinking={thinking!r} and template_options {twice[0]}={show(given[twice[0]])} contradict"
            )
        return {"documents": None} | switches | given | {"tools": tools}

    def _warn_without_effect(self, options: Mapping[str, Any], source: str) -> None:
        """Say once of each variable that the template does not read it; names come from clients, so of some only."""
        for name in options:
            if has_word(source, name) or name in self._without_effect:
                continue
            if len(self._without_effect) < MAX_WARNINGS:
                self._without_effect.add(name)
                log.warning(f"template option {show(name)} has no effect: the chat template does not read it")

    @cached_property
    def encode_guarded(self):
        """Text with guards to ids; built when it is first needed, it is a second tokenizer."""
        rename = self._vocabulary.rename
        assert rename is not None
        return rename(self.guard.forms)


def has_word(source: str, name: str) -> bool:
    """Whether a template names a variable; `age` is not in `message`."""
    return re.search(rf"\b{re.escape(name)}\b", source) is not None
