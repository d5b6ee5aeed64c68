"""Token streams for the parsers' tests: any text, cut anywhere, over a vocabulary made for it."""

import random
import re
from dataclasses import dataclass

from mlxrt.text.detokenizer import Detokenizer, Utf8
from mlxrt.text.parsing import OutputFormat, Segment
from mlxrt.text.parsing.lexer import LexerVocabulary

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
    },
    "search": {"type": "object", "properties": {"query": {"type": "string"}, "filters": {"type": "object"}}},
}


@dataclass(frozen=True)
class Result:
    """What the segments of one answer add up to."""

    answer: str
    reasoning: str
    calls: tuple
    raw: str


class Stream:
    """A text as tokens: the markers in `tokens` are one token each, the text between them is cut by `seed`."""

    def __init__(self, text: str, tokens: tuple[str, ...], special: tuple[str, ...], seed: int | None):
        self.added = {marker: i for i, marker in enumerate(tokens)}
        self.special = {self.added[marker] for marker in special if marker in self.added}
        self.pieces: list[bytes] = [marker.encode() for marker in tokens]
        self.ids: list[int] = []
        rng = random.Random(seed)
        pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"
        at = 0
        for found in re.finditer(pattern, text):
            self._cut(text[at : found.start()].encode(), rng if seed is not None else None)
            self.ids.append(self.added[found[0]])
            at = found.end()
        self._cut(text[at:].encode(), rng if seed is not None else None)

    def _cut(self, data: bytes, rng: random.Random | None) -> None:
        while data:
            size = len(data) if rng is None else rng.choice((1, 1, 1, 2, 3, 5, 9, 17))
            self.pieces.append(data[:size])
            self.ids.append(len(self.pieces) - 1)
            data = data[size:]

    @property
    def vocabulary(self) -> LexerVocabulary:
        make = lambda prompt: Detokenizer(len(self.pieces), self.pieces.__getitem__, [Utf8()])  # noqa: E731
        return LexerVocabulary(len(self.pieces), self.added, self.special, make)


def read(stream: Stream, form: OutputFormat, tools=TOOLS, tail: str = "", hide_last: bool = False) -> list[Segment]:
    parser = form.build_parser(stream.vocabulary, (), tools, True, tail)
    segments = []
    for i, token in enumerate(stream.ids):
        segments += parser.push(token, hide_last and i == len(stream.ids) - 1)
    return segments + parser.finish()


def fold(segments: list[Segment]) -> Result:
    shown = {kind: "".join(s.text for s in segments if s.kind == kind) for kind in ("answer", "reasoning")}
    calls = tuple(s.call for s in segments if s.call is not None)
    assert [c.index for c in calls] == list(range(len(calls)))
    check_deltas(segments)
    return Result(shown["answer"], shown["reasoning"], calls, "".join(s.raw for s in segments))


def check_deltas(segments: list[Segment]) -> None:
    """The deltas of a call begin with its name, go on without, and concatenate to the complete call."""
    begun: dict[int, tuple] = {}
    for delta in (s.delta for s in segments if s.delta is not None):
        assert (delta.name is None) == (delta.index in begun)
        id, name, text = begun.get(delta.index, (delta.id, delta.name, ""))
        assert delta.id == id
        begun[delta.index] = (id, name, text + delta.arguments)
        if (whole := delta.complete) is not None:
            assert (whole.id, whole.name, whole.arguments) == begun[delta.index]
