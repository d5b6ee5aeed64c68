"""The parser of one answer: tokens in, segments out.

It never raises on what a model writes: what is no call and no reasoning is text.
"""

from collections.abc import Sequence
from typing import Protocol

from .lexer import Item, Lexer, LexerVocabulary
from .segments import Segment, SegmentWriter


class Reader(Protocol):
    """What makes segments of the lexer's items."""

    writer: SegmentWriter
    may_think: bool  # False: markers open no more reasoning, the budget is spent

    @property
    def thinking(self) -> bool: ...
    @property
    def reading(self) -> str: ...
    def push(self, item: Item) -> None: ...
    def finish(self) -> None: ...


class OutputParser:
    def __init__(
        self, vocabulary: LexerVocabulary, markers: tuple[str, ...], reader: Reader, prompt: Sequence[int] = ()
    ):
        self._lexer, self._reader = Lexer(vocabulary, markers, prompt), reader
        self.reasoning_tokens = 0  # tokens between the markers of reasoning

    @property
    def thinking(self) -> bool:
        """Whether the model is in the middle of its reasoning."""
        return self._reader.thinking

    @property
    def kind(self) -> str:
        """The kind of what is being read now."""
        return self._reader.reading

    def push(self, token: int, hidden: bool = False) -> list[Segment]:
        """The segments that are certain with this token; a `hidden` one ended the answer and is not shown."""
        before = self._reader.thinking
        for item in self._lexer.push(token, hidden):
            self._reader.push(item)
        self.reasoning_tokens += before and self._reader.thinking and self._reader.may_think
        return self._reader.writer.take()

    def end_thinking(self) -> None:
        """From now on no marker opens reasoning."""
        self._reader.may_think = False

    def finish(self) -> list[Segment]:
        """What was held back, when no token follows."""
        for item in self._lexer.finish():
            self._reader.push(item)
        self._reader.finish()
        return self._reader.writer.take()
