"""How a model's answers are read: which parser a request gets, and what ends its thinking."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..config import EngineConfig
from ..errors import BadRequest
from ..text import Tokenizer
from ..text.parsing import OutputFormat, OutputParser
from ..text.parsing.select import check_parser
from ..text.tools import read_tools, tool_schemas
from .request import Request

log = logging.getLogger("mlxrt")

PROMPT_TAIL = 16  # tokens at the end of a prompt that show whether its template opened a reasoning block


class AnswerFormat:
    """The parsers for one model: its own formats, or those the configuration names."""

    def __init__(self, tokenizer: Tokenizer | None, config: EngineConfig, capabilities: Mapping[str, Any]):
        self._tokenizer, self._capabilities = tokenizer, capabilities
        self._reasoning = check_parser(config.reasoning_parser, "reasoning")
        self._calls = check_parser(config.tool_parser, "tool")
        self._guess_logged = False

    @cached_property
    def found(self) -> OutputFormat:
        """The model's formats, by its files and the configuration."""
        assert self._tokenizer is not None
        own = self._tokenizer.chat_format.output_format(self._capabilities)
        return OutputFormat(
            self._reasoning or own.reasoning, self._calls or own.calls, self._calls is not None or own.calls_known
        )

    @property
    def call_start(self) -> str:
        """What the model writes before a tool call; empty where a call has no marker, or the model makes none."""
        return self.found.call_start() if self._tokenizer is not None else ""

    def build_parser(self, request: Request, prompt: Sequence[int]) -> OutputParser | None:
        """A parser for the answer; none for raw text and tokens, unless one was named."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        tail = tokenizer.decode(list(prompt[-PROMPT_TAIL:]), skip_special=False)
        prefix, vocabulary = f"call_{secrets.token_hex(8)}", tokenizer.lexer_vocabulary
        if request.messages is None:
            named = OutputFormat(self._reasoning or "none", self._calls or "none")
            return named.build_parser(vocabulary, prompt, None, named.calls != "none", tail, prefix)
        tools = read_tools(request.tools) if request.tool_choice != "none" else None
        as_text = bool(tools) and not tokenizer.chat_format.compile(tools).features.tools
        if tools and not as_text and not self.found.calls_known:
            self._log_guess()
        return self.found.build_parser(
            vocabulary, prompt, tool_schemas(tools), bool(tools), tail, prefix, tools_as_text=as_text
        )

    def _log_guess(self) -> None:
        """The template has tools in a form that none of the parsers reads."""
        if not self._guess_logged:
            log.warning(
                "the chat template writes tool calls in a form that is not known; "
                f"they are read as {self.found.calls}: others stay text, name theirs with tool_parser"
            )
        self._guess_logged = True

    def closing_tokens(self, request: Request) -> tuple[int, ...]:
        """The tokens that end the thinking; BadRequest for a model, or a prompt, without any."""
        form = (
            self.found if request.messages is not None and self._tokenizer else OutputFormat(self._reasoning or "none")
        )
        thinks = self._reasoning or (self._tokenizer is not None and self._tokenizer.chat_format.thinks)
        if form.reasoning == "none" or not thinks or self._tokenizer is None:
            raise BadRequest("thinking_budget does not apply: this model has no thinking, or the prompt is not parsed")
        return tuple(self._tokenizer.encode(form.closing_text(), special=False))
