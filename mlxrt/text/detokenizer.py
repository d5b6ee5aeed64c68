"""Streaming detokenizer: token ids in, text out as soon as it can no longer change.

A chain of stages makes text of vocabulary pieces (a tokenizer.json's `decoder` is such a chain). Each stage emits only
what later tokens cannot change and holds back the rest; `finish` flushes it. Ids and vocabularies are the tokenizer's.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from ..errors import BadRequest, show
from .stop_strings import partial_match

TAIL = 64  # tokens of a prompt that decide how its continuation is decoded; patterns and characters are shorter
Pieces = list[Any]  # bytes before a stage that decodes them, str after it


class Stage(ABC):
    @abstractmethod
    def push(self, pieces: Pieces) -> Pieces: ...

    def finish(self) -> Pieces:
        """What was held back; most stages hold nothing."""
        return []

    def convert(self, piece: str) -> str | bytes:
        """What one piece becomes in the middle of a text; bytes are final, they may be part of a character."""
        return piece


class PerToken(Stage):
    """Maps every token by itself."""

    def __init__(self, change: Callable[[str], str]):
        self.change = change

    def push(self, pieces: Pieces) -> Pieces:
        return [self.change(p) for p in pieces]

    def convert(self, piece: str) -> str | bytes:
        return self.change(piece)


class FirstToken(Stage):
    """Maps the first token of a text in one way and all later ones in another."""

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str]):
        self.first, self.later, self.started = first, later, False

    def push(self, pieces: Pieces) -> Pieces:
        out = []
        for piece in pieces:
            out.append(self.later(piece) if self.started else self.first(piece))
            self.started = True
        return out

    def convert(self, piece: str) -> str | bytes:
        return self.later(piece)


class LastToken(Stage):
    """Maps the last token of a text differently, so every token waits for its successor."""

    def __init__(self, inner: Callable[[str], str], last: Callable[[str], str]):
        self.inner, self.last = inner, last
        self.waiting: Pieces = []

    def push(self, pieces: Pieces) -> Pieces:
        pieces = self.waiting + pieces
        self.waiting = pieces[-1:]
        return [self.inner(p) for p in pieces[:-1]]

    def finish(self) -> Pieces:
        rest, self.waiting = self.waiting, []
        return [self.last(p) for p in rest]

    def convert(self, piece: str) -> str | bytes:
        return self.inner(piece)


class Utf8(Stage):
    """Bytes to characters; invalid sequences become U+FFFD."""

    def __init__(self, to_bytes: Callable[[Any], bytes] = bytes):
        self.to_bytes, self.decoder = to_bytes, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: Pieces) -> Pieces:
        return [self.decoder.decode(b"".join(self.to_bytes(p) for p in pieces))]

    def finish(self) -> Pieces:
        return [self.decoder.decode(b"", final=True)]

    def convert(self, piece: str) -> str | bytes:
        return self.to_bytes(piece)


class ByteFallback(Stage):
    """Decodes runs of byte tokens (<0xE2>). A run that is not valid UTF-8 gives one U+FFFD per byte."""

    BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")

    def __init__(self):
        self.run = bytearray()

    def push(self, pieces: Pieces) -> Pieces:
        out = []
        for piece in pieces:
            if self.BYTE.fullmatch(piece):
                self.run.append(int(piece[3:5], 16))
            else:
                out += [*self.finish(), piece]
        return out

    def finish(self) -> Pieces:
        run, self.run = bytes(self.run), bytearray()
        if not run:
            return []
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)

    def convert(self, piece: str) -> str | bytes:
        return bytes([int(piece[3:5], 16)]) if self.BYTE.fullmatch(piece) else piece


class Replace(Stage):
    """str.replace over the full text, across the borders of pieces."""

    def __init__(self, old: str, new: str):
        self.old, self.new, self.held = old, new, ""

    def push(self, pieces: Pieces) -> Pieces:
        *done, tail = (self.held + "".join(pieces)).split(self.old)
        cut = len(tail) - partial_match(tail, self.old)
        self.held = tail[cut:]
        return [self.new.join([*done, tail[:cut]])]

    def finish(self) -> Pieces:
        rest, self.held = self.held, ""
        return [rest]

    def convert(self, piece: str) -> str | bytes:
        return piece.replace(self.old, self.new)


class Strip(Stage):
    """Removes up to `count` leading characters `char` of the full text."""

    def __init__(self, char: str, count: int):
        self.char, self.left = char, count

    def push(self, pieces: Pieces) -> Pieces:
        text = "".join(pieces)
        while self.left and text:
            self.left = self.left - 1 if text[0] == self.char else 0
            text = text.removeprefix(self.char) if text[0] == self.char else text
        return [text]


class Detokenizer:
    """One stream of tokens. What `push` and `finish` return, concatenated, is the decoded text of all tokens.

    With a `prompt`, it is what the tokens add to the prompt's text: decoders that drop the space at the start of a text
    must not drop the one between prompt and answer.
    """

    def __init__(
        self, vocab_size: int, piece: Callable[[int], Any], stages: Sequence[Stage], prompt: Sequence[int] = ()
    ):
        self._size, self._piece, self._stages = vocab_size, piece, tuple(stages)
        self._skip = ""  # text that belongs to the prompt but is still in the stages
        if pieces := self._tail(prompt):
            run_stages(self._stages, pieces)
            self._skip = flush_stages(deepcopy(self._stages))

    def _tail(self, prompt: Sequence[int]) -> Pieces:
        """The last pieces of a prompt. No stage looks back further than a run of byte tokens."""
        pieces: Pieces = []
        for token in reversed(prompt):
            if len(pieces) >= TAIL and not (isinstance(pieces[-1], str) and ByteFallback.BYTE.fullmatch(pieces[-1])):
                break
            if token < self._size and (piece := self._piece(token)) is not None:
                pieces.append(piece)
        return pieces[::-1]

    def push(self, token: int) -> str:
        """The text that is final with this token; empty while a character is incomplete."""
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._size:
            raise BadRequest(f"token {show(token)} is not in the vocabulary; ids go from 0 to {self._size - 1}")
        piece = self._piece(token)
        return "" if piece is None else self._skip_prompt(run_stages(self._stages, [piece]))

    def finish(self) -> str:
        """The text still held back, when no token follows."""
        return self._skip_prompt(flush_stages(self._stages))

    def _skip_prompt(self, text: str) -> str:
        """The text without what the prompt showed already. It may also have come out otherwise, with these tokens."""
        if self._skip and text:
            same = common_prefix(text, self._skip)
            self._skip = self._skip[same:] if same == len(text) else ""
            text = text[same:]
        return text


def common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def run_stages(stages: Sequence[Stage], pieces: Pieces) -> str:
    for stage in stages:
        pieces = stage.push(pieces)
    return "".join(pieces)


def flush_stages(stages: Sequence[Stage]) -> str:
    pieces: Pieces = []
    for stage in stages:
        pieces = (stage.push(pieces) if pieces else []) + stage.finish()
    return "".join(pieces)
