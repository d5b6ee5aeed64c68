"""Tokens of one answer into segments, where no parser does it; and the stop strings that end an answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ..text import Detokenizer, StopMatcher, Tokenizer
from ..text.parsing import Segment

ANSWER = "answer"


class SegmentSource(Protocol):
    """What makes segments of tokens."""

    reasoning_tokens: int

    @property
    def kind(self) -> str: ...
    def push(self, token: int, hidden: bool = False) -> list[Segment]: ...
    def finish(self) -> list[Segment]: ...


class PlainText:
    """Text that is not parsed: all of it is the answer, without special tokens."""

    kind, reasoning_tokens = ANSWER, 0

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer, self._prompt = tokenizer, prompt
        self._shown = tokenizer.detokenizer(prompt=prompt)
        self._raw: Detokenizer | None = None  # from the first token on that is not shown
        self._tokens: list[int] = []  # before that one

    def push(self, token: int, hidden: bool = False) -> list[Segment]:
        vocabulary = self._tokenizer.lexer_vocabulary
        if not 0 <= token < vocabulary.size:  # a row that pads the embedding
            return []
        raw = ""
        if self._raw is None and (hidden or token in vocabulary.special):
            self._raw = self._tokenizer.detokenizer(skip_special=False, prompt=self._prompt)
            emitted = self._tokenizer.detokenizer(prompt=self._prompt)
            before = sum(len(emitted.push(t)) for t in self._tokens)
            raw = "".join(map(self._raw.push, self._tokens))[before:]
        text = "" if hidden else self._shown.push(token)
        if self._raw is None:
            self._tokens.append(token)
            return [Segment(ANSWER, text, text)] if text else []
        return [Segment(ANSWER, text, raw + self._raw.push(token))]

    def finish(self) -> list[Segment]:
        text = self._shown.finish()
        raw = text if self._raw is None else self._raw.finish()
        return [Segment(ANSWER, text, raw)] if text or raw else []


def match_stops(segments: list[Segment], matcher: StopMatcher | None, last: bool) -> list[Segment]:
    """Segments whose answer a stop string may end. Reasoning and calls are not searched; `last`: nothing follows."""
    if matcher is None:
        return segments
    found = []
    for segment in segments:
        if matcher.matched:  # what comes after the stop string is kept as raw text only
            segment = replace(segment, text="", delta=None)
        elif segment.kind == ANSWER:
            segment = replace(segment, text=matcher.push(segment.text)[0])
        found.append(segment)
    if last and not matcher.matched and (rest := matcher.finish()):
        found.append(Segment(ANSWER, rest))
    return found
