"""Which formats a model writes: from its chat template, its special tokens and what its files declare."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import BadRequest
from . import harmony
from .calls import CallFormat, Schema
from .deepseek import DEEPSEEK
from .gemma4 import GEMMA4
from .hermes import HERMES
from .lexer import LexerVocabulary
from .llama3 import LLAMA3
from .minimax_m2 import MINIMAX_M2
from .mistral import MISTRAL
from .parser import OutputParser
from .python_calls import PYTHON
from .qwen3_coder import QWEN3_CODER
from .reasoning import GEMMA4_CHANNEL, MISTRAL_THINK, THINK, ReasoningFormat
from .smollm3 import SMOLLM3
from .tags import TagReader, Tools

HARMONY = "harmony"
REASONING_FORMATS = {f.name: f for f in (THINK, MISTRAL_THINK, GEMMA4_CHANNEL)}
CALL_FORMATS = {
    f.name: f for f in (HERMES, QWEN3_CODER, GEMMA4, LLAMA3, MISTRAL, MINIMAX_M2, DEEPSEEK, PYTHON, SMOLLM3)
}
REASONING_PARSERS = ("none", *REASONING_FORMATS, HARMONY)
TOOL_PARSERS = ("none", *CALL_FORMATS, HARMONY)
# Names that other engines and the `capabilities` of JANG packs use.
ALIASES = {
    "reasoning": {
        "qwen3": "think", "deepseek_r1": "think", "deepseek_v3": "think", "minimax_m2": "think", "think_xml": "think",
        "smollm3": "think", "minimax": "think", "qwen": "think", "qwq": "think", "magistral": "mistral",
        "gemma": "gemma4", "gpt_oss": HARMONY, "openai_gptoss": HARMONY,
    },
    "tool": {
        "qwen": "hermes", "qwen25": "hermes", "qwen2_5": "hermes", "qwen3": "hermes", 
        "qwen3_xml": "qwen3_coder", "qwen3_5": "qwen3_coder", "qwen35": "qwen3_coder", "llama": "llama3",
        "llama3_json": "llama3", "llama4_json": "llama3", "minimax": "minimax_m2", "deepseek_v3": "deepseek",
        "deepseek_v31": "deepseek", "deepseekv3": "deepseek", "gemma": "gemma4", "gpt_oss": HARMONY,
        "openai": HARMONY, "pythonic": "python",
    },
}  # fmt: skip


@dataclass(frozen=True)
class OutputFormat:
    """The formats of one model; "none" where it has none."""

    reasoning: str = "none"
    calls: str = "none"
    calls_known: bool = True  # False: nothing in the files tells how calls are written, Hermes's form is a guess

    def build_parser(
        self,
        vocabulary: LexerVocabulary,
        prompt: Sequence[int],
        tools: Mapping[str, Schema | None] | None,
        parse_calls: bool,
        tail: str = "",
        id_prefix: str = "call_",
        tools_as_text: bool = False,
    ) -> OutputParser | None:
        """A parser for one answer to a prompt that ends with `tail`; None when there is nothing to look for.

        `tools_as_text`: the model was told of Hermes's form, so calls are read in that form too.
        """
        offered = Tools(tools, id_prefix)
        if HARMONY in (self.reasoning, self.calls):
            for_calls = offered if parse_calls and self.calls == HARMONY else None
            split = self.reasoning == HARMONY
            return OutputParser(vocabulary, harmony.MARKERS, harmony.HarmonyReader(for_calls, tail, split), prompt)
        reasoning = REASONING_FORMATS.get(self.reasoning)
        calls = CALL_FORMATS.get(self.calls) if parse_calls else None
        if calls is not None and tools_as_text and HERMES.opens[0] not in calls.opens:
            calls = combine_formats(calls, HERMES)
        if reasoning is None and calls is None:
            return None
        markers = (*(reasoning.markers if reasoning else ()), *(calls.markers if calls else ()))
        reader = TagReader(reasoning, calls, offered, reasoning is not None and is_open(tail, reasoning))
        return OutputParser(vocabulary, tuple(dict.fromkeys(markers)), reader, prompt)

    def call_start(self) -> str:
        """What a model writes before a call; empty where nothing marks it."""
        if self.calls == HARMONY:
            return harmony.CALL_HEADER
        calls = CALL_FORMATS.get(self.calls)
        return calls.opens[0] if calls is not None and calls.begins is None else ""

    def closing_text(self) -> str:
        """What ends a model's reasoning."""
        if self.reasoning == HARMONY:
            return harmony.END_THINKING
        return REASONING_FORMATS[self.reasoning].close


def combine_formats(one: CallFormat, other: CallFormat) -> CallFormat:
    """Calls in either form."""
    return CallFormat(
        f"{one.name}, {other.name}",
        lambda marker: other.block(marker) if marker in other.opens else one.block(marker),
        opens=one.opens + other.opens,
        inner=one.inner + other.inner,
        closes=one.closes + other.closes,
        begins=one.begins or other.begins,
    )


def is_open(tail: str, reasoning: ReasoningFormat) -> bool:
    """Whether the prompt ends inside a reasoning block that the template opened, and nothing else after it."""
    _, opened, rest = tail.rpartition(reasoning.open)
    return bool(opened) and reasoning.header.strip().startswith(rest.strip())


def find_format(templates: Collection[str], added: Collection[str], declared: Mapping[str, Any]) -> OutputFormat:
    """By the templates' text, the added tokens, and `declared`: what the files name themselves, which wins."""
    source = "\n".join(templates)
    known = lambda text: text in source or text in added  # noqa: E731
    if known(harmony.CHANNEL) and known(harmony.MESSAGE):
        found = OutputFormat(HARMONY, HARMONY)
    else:
        calls_found = find_calls(source, known)
        found = OutputFormat(find_reasoning(known), calls_found or HERMES.name, calls_found is not None)
    reasoning = resolve_name(declared.get("reasoning_parser"), "reasoning", REASONING_PARSERS)
    calls = resolve_name(declared.get("tool_parser"), "tool", TOOL_PARSERS)
    return OutputFormat(reasoning or found.reasoning, calls or found.calls, bool(calls) or found.calls_known)


def find_reasoning(known) -> str:
    for reasoning in (GEMMA4_CHANNEL, MISTRAL_THINK, THINK):
        if known(reasoning.open) and known(reasoning.close):
            return reasoning.name
    return "none"


def find_calls(source: str, known) -> str | None:
    """None where nothing is known: then it is Hermes's form, which a template without tools is told to use."""
    written = {
        GEMMA4.name: known("<|tool_call>"),
        MINIMAX_M2.name: known("<minimax:tool_call>"),
        QWEN3_CODER.name: "<function=" in source and "<parameter=" in source,
        DEEPSEEK.name: known("<｜tool▁call▁begin｜>") and "<tool_call>" not in source,
        MISTRAL.name: known("[TOOL_CALLS]") and "<tool_call>" not in source,
        SMOLLM3.name: "<tool_call>" in source and "python_tools" in source,
        HERMES.name: "<tool_call>" in source,
        LLAMA3.name: known("<|python_tag|>"),
    }
    return next((name for name, found in written.items() if found), None)


def resolve_name(name: Any, what: str, known: Sequence[str]) -> str | None:
    """The format of this name, or alias; None where the name is not known to us."""
    if not isinstance(name, str):
        return None
    key = name.lower().replace("-", "_")
    return key if key in known else ALIASES[what].get(key)


def check_parser(name: str | None, what: str) -> str | None:
    """A parser the user names. BadRequest when there is none of this name."""
    known = REASONING_PARSERS if what == "reasoning" else TOOL_PARSERS
    found = resolve_name(name, what, known)
    if name is not None and found is None:
        raise BadRequest(f"{what}_parser must be one of {', '.join(known)}, not {json.dumps(str(name))[:60]}")
    return found
