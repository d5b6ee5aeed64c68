"""Structured output: response formats compiled to matchers that say which tokens may come next.

llguidance does the parsing. It is given our own vocabulary (the bytes of every token), so that all tokenizer formats
work and no file is read twice. Building its tokenizer takes a second or more: it happens on first use, once per model.
"""

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import BadRequest, GrammarFailed
from .grammar_limits import STACK_BYTES, check_lark, check_referred_depth, check_rules
from .regex_dialect import convert_lark, convert_pattern, convert_schema_text
from .response_format import ResponseFormat
from .tokenizer import Tokenizer
from .tool_grammar import WHITE_SPACE

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger("mlxrt")

T = TypeVar("T")
COMPILE_SECONDS = 10.0
COMPILING = 3  # formats at a time
CACHED = 64  # compiled formats kept
# Characters to put before a text, for vocabularies that mark the start of words; one may merge with the text.
LEADS = ("x", "\n", "}", "7")
AHEAD = 256  # characters of a forced text that are tokenized: llguidance asks again after every token
UNSETTLED = 8  # tokens before a cut that might be others without it
STARTING = threading.Lock()  # of a thread with a stack of its own size: that is a setting of the process
META = frozenset("\\.+*?()|[]{}^$#&-~/")  # what a regex gives a meaning


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """What every token adds to a text."""
    return [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]


class TokenizerView:
    """The tokenizer as llguidance's TokenizerWrapper wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stops: frozenset[int]):
        self._tokenizer = tokenizer
        # Rows that pad the embedding have no bytes, and are never allowed.
        self.tokens = token_bytes(tokenizer)[:vocab_size] + [b""] * (vocab_size - tokenizer.vocab_size)
        self.special_token_ids = sorted(t for t in tokenizer.special_ids | stops if t < vocab_size)
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = min(stops) if stops else None
        self._leads = [(lead, tokenizer.encode(lead, special=False)) for lead in LEADS]

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text in the middle of an answer: what llguidance forces. To the byte they are the text, or the
        beginning of a long one."""
        if len(text) <= AHEAD:
            return self._encode(text)
        ids = self._encode(text[:AHEAD])
        return ids[: max(1, len(ids) - UNSETTLED)]

    def _encode(self, text: str) -> list[int]:
        for lead, before in self._leads:
            ids = self._tokenizer.encode(lead + text, special=False)
            rest = ids[len(before) :]
            if ids[: len(before)] == before and self._is_text(rest, text):
                return rest
        ids = self._tokenizer.encode(text, special=False)
        return ids if self._is_text(ids, text) else self._encode_greedily(text.encode())

    def _encode_greedily(self, text: bytes) -> list[int]:
        """The longest token first, for a text that the tokenizer normalises; ends where no token fits."""
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            found = next((id for n in sizes if (id := self._ids.get(text[at : at + n])) is not None), None)
            if found is None:
                break
            ids.append(found)
            at += len(self.tokens[found])
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {token: i for i, token in enumerate(self.tokens) if token and i not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    def _is_text(self, ids: list[int], text: str) -> bool:
        return b"".join(self.tokens[i] for i in ids) == text.encode()


class GrammarMatcher:
    """Where one answer stands in its format."""

    def __init__(self, matcher: "LLMatcher"):
        self._matcher = matcher

    def copy(self) -> "GrammarMatcher":
        return GrammarMatcher(self._matcher.deep_copy())

    def fill_mask(self, row: np.ndarray) -> None:
        """One bit per token of the vocabulary that may come next, into uint32s."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        row[:] = mask[: len(row)]  # one more where the model has no end token: llguidance adds one
        self._check()  # past its limits llguidance allows nothing but the end, which would be half an answer

    def advance(self, token: int) -> bool:
        """A token was chosen. True where the answer is complete and nothing can follow."""
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(
                f"the answer cannot be held to its response_format any more: {first_line(self._matcher.get_error())}"
            )


class GatedMatcher:
    """A matcher that holds from a marker on: after the reasoning, or inside tool calls.

    `opener`: the answer may begin with this token, and is free up to the marker then; otherwise it is held at once.
    `repeats`: what is complete may be followed by anything, and by the marker again. `blank`: an empty line may come
    after the marker, as models write it after their reasoning.
    """

    def __init__(
        self,
        matcher: GrammarMatcher,
        tokenizer: Tokenizer,
        marker: str,
        opener: int | None = None,
        repeats: bool = False,
        blank: bool = True,
    ):
        self._matcher, self._fresh = matcher, matcher.copy() if repeats else None
        self._tokenizer, self._marker, self._opener = tokenizer, marker.encode(), opener
        self._blank = tokenizer.blank_ids if blank else ()
        self._state = "free" if opener is None else "first"
        self._seen = b""

    def fill_mask(self, row: np.ndarray) -> None:
        if self._state == "free":
            return
        self._matcher.fill_mask(row)
        first = () if self._opener is None else (self._opener,)
        for token in {"first": first, "after": self._blank}.get(self._state, ()):
            row[token // 32] |= np.uint32(1 << token % 32)

    def advance(self, token: int) -> bool:
        if self._state == "first" and token == self._opener:
            self._state = "free"
            return False
        if self._state == "free":
            self._seen = (self._seen + self._tokenizer.token_bytes(token))[-4 * len(self._marker) - 64 :]
            if self._marker in self._seen:
                self._state, self._seen = "after", b""
            return False
        if self._state == "after" and token in self._blank:
            self._seen += self._tokenizer.token_bytes(token)
            self._state = "after" if len(self._seen) < 2 else "held"
            return False
        self._state = "held"
        if not self._matcher.advance(token):
            return False
        if self._fresh is None:
            return True
        self._matcher, self._state = self._fresh.copy(), "free"
        return False


class GrammarCompiler:
    """Compiles response formats for one vocabulary, each once; threads may share one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stops: frozenset[int]):
        self._source, self._vocab_size, self._stops = tokenizer, vocab_size, stops
        self._lock = threading.Lock()
        self._compiled: OrderedDict[ResponseFormat, LLMatcher] = OrderedDict()
        self._compiling = threading.Semaphore(COMPILING)
        self._tokenizer: Future[LLTokenizer] | None = None

    def matcher(self, wanted: ResponseFormat) -> GrammarMatcher:
        """A matcher for one answer. BadRequest where the format cannot be enforced."""
        with self._lock:
            found = self._compiled.get(wanted)
            if found is not None:
                self._compiled.move_to_end(wanted)
                return GrammarMatcher(found.deep_copy())
            if self._tokenizer is None:
                self._tokenizer = run_in_thread(self._build_tokenizer)
            tokenizer = self._tokenizer
        matcher = self._compile(wanted, tokenizer.result())
        with self._lock:
            self._compiled[wanted] = matcher
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
            return GrammarMatcher(matcher.deep_copy())

    def _compile(self, wanted: ResponseFormat, tokenizer: "LLTokenizer") -> "LLMatcher":
        """In a thread, which nothing can stop: a few formats that never end leave others their time."""

        def work() -> "LLMatcher":
            try:
                return compile_format(wanted, tokenizer)
            finally:
                self._compiling.release()

        until = time.monotonic() + COMPILE_SECONDS
        try:
            if not self._compiling.acquire(timeout=COMPILE_SECONDS):
                raise Late
            return run_in_thread(work).result(max(until - time.monotonic(), 0.1))
        except Late:
            raise make_timeout_error() from None

    def _build_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        view = TokenizerView(self._source, self._vocab_size, self._stops)
        return LLTokenizer(TokenizerWrapper(view), n_vocab=self._vocab_size, eos_token=sorted(self._stops) or None)


def make_timeout_error() -> BadRequest:
    return BadRequest(f"response_format was not compiled within {COMPILE_SECONDS:g} s; make it smaller or flatter")


def run_in_thread(work: Callable[[], T]) -> "Future[T]":
    """Not of a pool: Python waits for a pool's threads when it exits, and llguidance may take minutes to refuse."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    thread = threading.Thread(target=run, name="mlxrt-grammar", daemon=True)
    with STARTING:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return future


def check_format(wanted: ResponseFormat) -> None:
    """BadRequest for a format that no vocabulary could be held to: known before a model is loaded."""

    def work() -> str:
        from llguidance import LLMatcher

        try:
            return LLMatcher.validate_grammar(write_grammar(wanted))
        except ValueError as error:
            return str(error)

    try:
        problem = run_in_thread(work).result(COMPILE_SECONDS)
    except Late:
        raise make_timeout_error() from None
    if problem:
        raise BadRequest(f"response_format of type {wanted.kind}: {first_line(problem)}")


def compile_format(wanted: ResponseFormat, tokenizer: "LLTokenizer") -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)  # or every message ends with the parser's state
    try:
        matcher = LLMatcher(tokenizer, write_grammar(wanted), log_level=0, limits=limits)
    except ValueError as error:
        raise BadRequest(f"response_format of type {wanted.kind}: {first_line(error)}") from None
    if not matcher.is_error():
        matcher.compute_bitmask()  # a grammar that no text fits fails here, not in the middle of an answer
    if matcher.is_error():
        raise BadRequest(f"response_format of type {wanted.kind}: {first_line(matcher.get_error())}")
    return matcher


def write_grammar(wanted: ResponseFormat) -> str:
    """The format in llguidance's language."""
    from llguidance import LLMatcher

    text = wanted.text
    overrides: Any = {"whitespace_pattern": WHITE_SPACE}
    if wanted.kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=overrides)
    if wanted.kind == "json_schema":
        check_referred_depth(json.loads(text))
        return LLMatcher.grammar_from_json_schema(convert_schema_text(text), overrides=overrides)
    if wanted.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(escape, json.loads(text))))
    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(convert_pattern(text))
    lark = convert_gbnf(text) if "::=" in text else convert_lark(text)
    check_lark(lark)
    return LLMatcher.grammar_from_lark(lark)


def convert_gbnf(text: str) -> str:
    from llguidance import gbnf_to_lark

    check_rules(text.count("::="))  # before, since the converter takes long for many
    try:
        return gbnf_to_lark.gbnf_to_lark(decode_escapes(text))
    except Exception as error:  # a rule that is not there is a plain Exception
        raise ValueError(f"no GBNF: {first_line(error)}") from None


def decode_escapes(gbnf: str) -> str:
    r"""GBNF's \uNNNN and \UNNNNNNNN as the characters they are: llguidance's reading of them is wrong."""

    def decode(found: re.Match[str]) -> str:
        digits = found[1] or found[2]
        code = int(digits, 16) if digits else 0
        if not digits or code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            return found[0]
        return chr(code) if code >= 0x80 else f"\\x{code:02x}"

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", decode, gbnf)


def escape(text: str) -> str:
    return "".join(f"\\{c}" if c in META else c for c in text)


def first_line(error: object) -> str:
    text = " ".join(str(error).replace("<non-verbose/>", "").split())
    return "no token of the vocabulary fits" if text == "NoExtensionBias" else text[:300]
