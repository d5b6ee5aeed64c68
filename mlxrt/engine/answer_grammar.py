"""The grammar of a request's answer: its response_format, or calls of its tools; from the end of the reasoning on."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..errors import BadRequest
from ..text import Tokenizer
from ..text.grammar import GatedMatcher, GrammarCompiler, GrammarMatcher
from ..text.lark_rules import literal
from ..text.parsing.harmony import END_THINKING
from ..text.parsing.select import HARMONY, REASONING_FORMATS, is_open
from ..text.response_format import ResponseFormat
from ..text.tool_grammar import CALL_GRAMMARS, CallGrammar, write_call_grammar
from ..text.tools import read_tools
from .answer_format import PROMPT_TAIL, AnswerFormat
from .request import Request

log = logging.getLogger("mlxrt")

Matcher = GrammarMatcher | GatedMatcher
FINAL = END_THINKING[END_THINKING.index("<|channel|>") :]


class AnswerGrammars:
    """Makes the matchers of one model's requests."""

    def __init__(self, tokenizer: Tokenizer, answers: AnswerFormat, vocab_size: int, stops: frozenset[int]):
        self._tokenizer, self._answers = tokenizer, answers
        self._compiler = GrammarCompiler(tokenizer, vocab_size, stops)
        self._lenient: dict[str, str] = {}  # a tool's schema -> what of it is not enforced, said once

    def build(self, request: Request, prompt: Sequence[int]) -> Matcher | None:
        """None: any text will do. BadRequest where what is asked for cannot be enforced."""
        tools = read_tools(request.tools) if request.messages is not None else None
        wanted = request.response_format
        if tools and request.tool_choice not in ("auto", "none"):
            if wanted is not None:
                raise BadRequest("tool_choice demands a call and response_format an answer; give one of the two")
            required, form = self._required_calls(request, tools), self._call_grammar
            if form is None or form.reasoning is None:
                return self._after_reasoning(required, request, prompt)
            if request.thinking_budget is not None:
                raise BadRequest(
                    f"tool_choice {request.tool_choice!r:.40} cannot be held together with thinking_budget here"
                )
            return required  # its grammar has the reasoning in it
        if wanted is not None:
            return self._after_reasoning(self._compiler.matcher(wanted), request, prompt)
        return self._optional_calls(request, tools) if tools and request.tool_choice == "auto" else None

    # Tool calls

    def _required_calls(self, request: Request, tools: list[dict[str, Any]]) -> GrammarMatcher:
        choice = request.tool_choice
        if choice != "required":
            tools = [tool for tool in tools if tool["function"]["name"] == choice]
            if not tools:
                raise BadRequest(f"tool_choice names {choice!r:.80}, which is none of the tools")
        form = self._call_grammar
        if form is None:
            raise BadRequest(
                f"tool_choice cannot be enforced for calls in the format {self._answers.found.calls}; use auto"
            )
        return self._compile_calls(form, tools, from_begin=True, several=request.parallel_tool_calls)

    def _optional_calls(self, request: Request, tools: list[dict[str, Any]]) -> GatedMatcher | None:
        form = self._call_grammar
        if form is None or not form.begin or not form.gated:
            if any(is_strict(tool) for tool in tools) or not request.parallel_tool_calls:
                kind = self._answers.found.calls
                log.info(f"calls in the format {kind} are not held to their schemas, nor to one call")
            return None
        try:
            matcher = self._compile_calls(form, tools, from_begin=False)
        except BadRequest as error:
            if any(is_strict(tool) for tool in tools):
                raise
            log.warning(f"calls are not held to their schemas: {error}")
            return None
        return GatedMatcher(matcher, self._tokenizer, form.begin, repeats=request.parallel_tool_calls, blank=False)

    @cached_property
    def _call_grammar(self) -> CallGrammar | None:
        return CALL_GRAMMARS.get(self._answers.found.calls)

    def _compile_calls(
        self, form: CallGrammar, tools: list[dict[str, Any]], from_begin: bool, several: bool = True
    ) -> GrammarMatcher:
        lenient = {tool["function"]["name"]: self._is_lenient(tool) for tool in tools}
        text = write_call_grammar(form, tools, lenient, self._write_text, from_begin, several)
        return self._compiler.matcher(ResponseFormat("grammar", text))

    def _is_lenient(self, tool: Mapping[str, Any]) -> bool:
        """Whether something in a tool's schema cannot be enforced: it is left out and logged, a strict tool refused."""
        schema = tool["function"].get("parameters")
        if not schema:
            return False
        form = ResponseFormat.parse({"type": "json_schema", "schema": schema})
        assert form is not None
        if form.text not in self._lenient:
            try:
                self._check_enforced(form, schema)
                self._lenient[form.text] = ""
            except BadRequest as error:
                self._lenient[form.text] = str(error)
                if not is_strict(tool):
                    log.warning(f"tool {tool['function']['name']}: not all of its schema is enforced: {error}")
        if (reason := self._lenient[form.text]) and is_strict(tool):
            raise BadRequest(f"tool {tool['function']['name']} is strict, but its schema cannot be enforced: {reason}")
        return bool(reason)

    def _check_enforced(self, form: ResponseFormat, schema: Mapping[str, Any]) -> None:
        """BadRequest that names what the calls' format, or a grammar of JSON, cannot hold."""
        calls = self._call_grammar
        if calls is not None and calls.unenforced is not None and (left := calls.unenforced(schema)):
            raise BadRequest(f"calls in the format {self._answers.found.calls} are not held to {', '.join(left)}")
        self._compiler.matcher(form)

    def _write_text(self, text: str) -> str:
        """A text in Lark: markers that are special tokens by their ids, since they are no text."""
        added, special = self._tokenizer.lexer_vocabulary.added, self._tokenizer.special_ids
        found = sorted((m for m, id in added.items() if id in special and m in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
        return " ".join(f"<[{added[part]}]>" if part in found else literal(part) for part in parts if part)

    # Reasoning

    def _after_reasoning(self, matcher: GrammarMatcher, request: Request, prompt: Sequence[int]) -> Matcher:
        if request.messages is None:
            return matcher
        reasoning = self._answers.found.reasoning
        if reasoning == HARMONY:
            return GatedMatcher(matcher, self._tokenizer, FINAL)
        if (form := REASONING_FORMATS.get(reasoning)) is None:
            return matcher
        tail = self._tokenizer.decode(list(prompt[-PROMPT_TAIL:]), skip_special=False)
        if is_open(tail, form):
            return GatedMatcher(matcher, self._tokenizer, form.close)
        opener = self._tokenizer.lexer_vocabulary.added.get(form.open)
        if request.thinking == "off" or opener is None:
            return matcher
        return GatedMatcher(matcher, self._tokenizer, form.close, opener=opener)


def is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool.get("strict") or tool["function"].get("strict"))
