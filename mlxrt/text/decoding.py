"""From pieces of the vocabulary to text, one stage after the other, each giving out only what can no longer change.

A stage takes the pieces of new tokens and answers with the pieces that are certain; `finish` gives up the rest.
Knows nothing of ids and vocabularies.
"""

import codecs
import re
from collections.abc import Callable
from typing import Any, Protocol

from .stops import held_back

Pieces = list[Any]  # bytes before a stage that makes text of them, str after it


class Stage(Protocol):
    def push(self, pieces: Pieces) -> Pieces: ...

    def finish(self) -> Pieces: ...


class PerToken:
    """A change of each token by itself."""

    def __init__(self, change: Callable[[str], str]):
        self.change = change

    def push(self, pieces: Pieces) -> Pieces:
        return [self.change(p) for p in pieces]

    def finish(self) -> Pieces:
        return []


class FirstToken:
    """One change for the first token of a text, another for all later ones."""

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str]):
        self.first, self.later, self.started = first, later, False

    def push(self, pieces: Pieces) -> Pieces:
        out = []
        for piece in pieces:
            out.append(self.later(piece) if self.started else self.first(piece))
            self.started = True
        return out

    def finish(self) -> Pieces:
        return []


class LastToken:
    """One change for the last token of a text, another for all before it: a token waits for its successor."""

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


class Utf8:
    """Bytes to characters; bytes that no continuation can mend become U+FFFD."""

    def __init__(self, bytes_of: Callable[[Any], bytes] = bytes):
        self.bytes_of, self.decoder = bytes_of, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: Pieces) -> Pieces:
        return [self.decoder.decode(b"".join(self.bytes_of(p) for p in pieces))]

    def finish(self) -> Pieces:
        return [self.decoder.decode(b"", final=True)]


class ByteRuns:
    """Tokens spelled <0xE2> are bytes. A run of them is one text: when it is not valid, every byte of it is U+FFFD."""

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


class Replace:
    """str.replace over the whole text, whatever the borders of the pieces."""

    def __init__(self, old: str, new: str):
        self.old, self.new, self.held = old, new, ""

    def push(self, pieces: Pieces) -> Pieces:
        *done, tail = (self.held + "".join(pieces)).split(self.old)
        cut = len(tail) - held_back(tail, self.old)
        self.held = tail[cut:]
        return [self.new.join([*done, tail[:cut]])]

    def finish(self) -> Pieces:
        rest, self.held = self.held, ""
        return [rest]


class Strip:
    """Without up to `count` leading characters of the whole text, where they are `mark`."""

    def __init__(self, mark: str, count: int):
        self.mark, self.left = mark, count

    def push(self, pieces: Pieces) -> Pieces:
        text = "".join(pieces)
        while self.left and text:
            self.left = self.left - 1 if text[0] == self.mark else 0
            text = text.removeprefix(self.mark) if text[0] == self.mark else text
        return [text]

    def finish(self) -> Pieces:
        return []
