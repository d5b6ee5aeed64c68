"""Streaming detokenizer: token ids in, text out as soon as it can no longer change.

A chain of stages makes text of vocabulary pieces (a tokenizer.json's `decoder` is such a chain). Each stage emits only
what later tokens cannot change and holds back the rest; `finish` flushes it. Ids and vocabularies are the tokenizer's.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import BadRequest
from .stop_strings import partial_match

Pieces = list[Any]  # bytes before a stage that decodes them, str after it


class Stage(ABC):
    @abstractmethod
    def push(self, pieces: Pieces) -> Pieces: ...

    def finish(self) -> Pieces:
        """What was held back; most stages hold nothing."""
        return []


class PerToken(Stage):
    """Maps every token by itself."""

    def __init__(self, change: Callable[[str], str]):
        self.change = change

    def push(self, pieces: Pieces) -> Pieces:
        return [self.change(p) for p in pieces]


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


class Utf8(Stage):
    """Bytes to characters; invalid sequences become U+FFFD."""

    def __init__(self, to_bytes: Callable[[Any], bytes] = bytes):
        self.to_bytes, self.decoder = to_bytes, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: Pieces) -> Pieces:
        return [self.decoder.decode(b"".join(self.to_bytes(p) for p in pieces))]

    def finish(self) -> Pieces:
        return [self.decoder.decode(b"", final=True)]


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
    """One stream of tokens. What `push` and `finish` return, concatenated, is the decoded text of all tokens."""

    def __init__(self, vocab_size: int, piece: Callable[[int], Any], stages: Sequence[Stage]):
        self._size, self._piece, self._stages = vocab_size, piece, tuple(stages)

    def push(self, token: int) -> str:
        """The text that is final with this token; empty while a character is incomplete."""
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._size:
            raise BadRequest(f"token {token!r} is not in the vocabulary; ids go from 0 to {self._size - 1}")
        piece = self._piece(token)
        if piece is None:
            return ""
        pieces = [piece]
        for stage in self._stages:
            pieces = stage.push(pieces)
        return "".join(pieces)

    def finish(self) -> str:
        """The text still held back, when no token follows."""
        pieces: list[Any] = []
        for stage in self._stages:
            pieces = (stage.push(pieces) if pieces else []) + stage.finish()
        return "".join(pieces)
