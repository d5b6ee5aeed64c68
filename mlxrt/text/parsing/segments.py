"""Segments, the parsers' output: a kind, the text to show, and the raw text it came from.

The raw texts of all segments concatenate to everything the model wrote. The shown texts leave out markers, and white
space around reasoning and calls: before, after and inside a reasoning block's ends, before and after a call.
"""

from dataclasses import dataclass, replace
from typing import Any

ANSWER, REASONING, TOOL_CALL = "answer", "reasoning", "tool_call"


@dataclass(frozen=True)
class ToolCall:
    """A call the model made. `parsed` is None where the arguments are no JSON object: then `error` says why."""

    id: str
    name: str
    arguments: str  # JSON
    parsed: dict[str, Any] | None = None
    error: str | None = None
    index: int = 0


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call, as streams give it out: the arguments of a call's deltas concatenate to its own.

    `complete` is on the last one. A call that is cut off has none: its text comes as text.
    """

    index: int
    id: str
    name: str | None  # on the first
    arguments: str
    complete: ToolCall | None = None


@dataclass(frozen=True)
class Segment:
    kind: str
    text: str = ""
    raw: str = ""
    delta: ToolCallDelta | None = None

    @property
    def call(self) -> ToolCall | None:
        """A complete call."""
        return self.delta.complete if self.delta is not None else None


class TextChannel:
    """The shown text of one kind, with the white space at its borders left out.

    White space at the end waits for what follows it. At a border (a call, another kind) one run of white space stays
    between two texts, none before the first or after the last.
    """

    def __init__(self, at_border: bool):
        self._at_border = at_border  # at the beginning: leading white space is left out
        self._started, self._trailing, self._leading = False, "", ""

    @property
    def empty(self) -> bool:
        """Nothing but white space so far."""
        return not self._started

    def push(self, text: str, between: str = "") -> str:
        """The text to show now; `between` separates it from the text before a border that had no white space."""
        if self._at_border:
            rest = text.lstrip()
            self._leading += text[: len(text) - len(rest)]
            if not rest:
                return ""
            text = (self._trailing or self._leading or between) + rest if self._started else rest
            self._at_border = False
        else:
            text = self._trailing + text
        shown = text.rstrip()
        self._trailing, self._leading = text[len(shown) :], ""
        self._started |= bool(shown)
        return shown

    def add_border(self) -> None:
        self._at_border, self._leading = True, ""

    def finish(self) -> str:
        """White space that waits, unless a border came after it."""
        rest = "" if self._at_border else self._trailing
        self._trailing = self._leading = ""
        return rest


class SegmentWriter:
    """Collects the segments of one answer."""

    def __init__(self, reasoning_first: bool):
        self._channels = {ANSWER: TextChannel(reasoning_first), REASONING: TextChannel(True)}
        self._segments: list[Segment] = []
        self._calls, self._dropped = 0, 0  # complete calls, and those that were begun only
        self._begun: ToolCallDelta | None = None  # the call under way: its arguments so far

    @property
    def answer_empty(self) -> bool:
        return self._channels[ANSWER].empty

    def write(self, kind: str, text: str, raw: str, between: str = "") -> None:
        """Text of the answer or the reasoning."""
        self._add(Segment(kind, self._channels[kind].push(text, between) if text else "", raw))

    def skip(self, kind: str, raw: str) -> None:
        """What is not shown: a marker."""
        self._add(Segment(kind, "", raw))

    def add_border(self, kind: str) -> None:
        self._channels[kind].add_border()

    def add_calls(self, calls: list[ToolCall], raw: str) -> None:
        """Complete calls that were written as `raw`."""
        for channel in self._channels.values():
            channel.add_border()
        for i, call in enumerate(calls):
            if (begun := self._begun) and not (begun.name == call.name and call.arguments.startswith(begun.arguments)):
                self.drop_call()
            begun, self._begun = self._begun, None
            if begun is None:
                delta = ToolCallDelta(self.next_index, call.id, call.name, call.arguments)
            else:
                delta = replace(begun, name=None, arguments=call.arguments[len(begun.arguments) :])
            whole = replace(call, index=self._calls, id=delta.id)
            self._segments.append(Segment(TOOL_CALL, "", "" if i else raw, replace(delta, complete=whole)))
            self._calls += 1

    @property
    def next_index(self) -> int:
        """Of the next call's deltas."""
        return self._calls + self._dropped

    def add_delta(self, id: str, name: str, arguments: str) -> None:
        """More of a call that is not complete. Its arguments' text must be how that of the complete call begins."""
        begun = self._begun or ToolCallDelta(self.next_index, id, name, "")
        delta = replace(begun, name=None if self._begun else name, arguments=arguments)
        self._segments.append(Segment(TOOL_CALL, delta=delta))
        self._begun = replace(begun, arguments=begun.arguments + arguments)

    def drop_call(self) -> None:
        """What was begun is no call: its text follows as text."""
        self._dropped += self._begun is not None  # its index is used up
        self._begun = None

    def take(self) -> list[Segment]:
        segments, self._segments = self._segments, []
        return segments

    def finish(self) -> None:
        if rest := self._channels[ANSWER].finish():
            self._add(Segment(ANSWER, rest))

    def _add(self, segment: Segment) -> None:
        last = self._segments[-1] if self._segments else None
        if last is not None and last.kind == segment.kind and last.delta is None:
            self._segments[-1] = replace(last, text=last.text + segment.text, raw=last.raw + segment.raw)
        elif segment.text or segment.raw:
            self._segments.append(segment)
