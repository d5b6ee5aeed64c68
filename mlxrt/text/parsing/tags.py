"""Reads output in which markers enclose the thinking and the calls: every format but gpt-oss's."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .calls import Block, CallFormat, RawCall, Schema, parse_json, type_arguments
from .lexer import Item
from .reasoning import ReasoningFormat
from .segments import ANSWER, REASONING, TOOL_CALL, SegmentWriter, ToolCall

log = logging.getLogger("mlxrt")


@dataclass(frozen=True)
class Tools:
    """The tools a request offers. None: any name may be called, for prompts that are not ours."""

    schemas: Mapping[str, Schema | None] | None = None
    id_prefix: str = "call_"

    def build_calls(self, raw: list[RawCall] | None, before: int) -> list[ToolCall] | None:
        """The calls, if every name is one of the tools'; `before` counts the calls so far."""
        if not raw:
            return None
        if unknown := [c.name for c in raw if not self.offers(c.name)]:
            log.info(f"the model called {unknown[0][:60]!r}, which is none of the tools; kept as text")
            return None
        return [self._build(call, before + i) for i, call in enumerate(raw)]

    def make_id(self, index: int) -> str:
        return f"{self.id_prefix}{index}"

    def offers(self, name: str) -> bool:
        return self.schemas is None or name in self.schemas

    def _build(self, call: RawCall, index: int) -> ToolCall:
        id, parsed, error = call.id or self.make_id(index), None, call.error
        if isinstance(call.arguments, str):
            text = call.arguments
            if not error:
                parsed, error = parse_arguments(text)
        else:
            parsed = type_arguments(call.arguments, (self.schemas or {}).get(call.name))
            text = json.dumps(parsed, ensure_ascii=False)
        if error:
            log.info(f"the arguments of a call of {call.name[:60]!r} cannot be used: {error[:200]}")
        return ToolCall(id, call.name, text, parsed, error or None, index)


def parse_arguments(text: str) -> tuple[dict[str, Any] | None, str]:
    try:
        value = parse_json(text)
    except ValueError as error:
        return None, f"not valid JSON: {error}"
    return (value, "") if isinstance(value, dict) else (None, "not an object")


class TagReader:
    """Items in, segments out. `kind` is what the next text belongs to."""

    def __init__(
        self, reasoning: ReasoningFormat | None, calls: CallFormat | None, tools: Tools, thinking: bool = False
    ):
        self._reasoning, self._calls, self._tools = reasoning, calls, tools
        self.kind = REASONING if thinking else ANSWER
        self.writer = SegmentWriter(reasoning_first=thinking)
        self._header: str | None = None  # of a reasoning block, while it may be incomplete
        self._block: Block | None = None
        self._items: list[Item] = []  # of the block
        self._after_call = False
        self.may_think = True

    @property
    def thinking(self) -> bool:
        return self.kind == REASONING

    @property
    def reading(self) -> str:
        """The kind of what is being read, a call that is not complete included."""
        return TOOL_CALL if self._block is not None else self.kind

    def push(self, item: Item) -> None:
        rest: Item | None = item
        while rest is not None:
            rest = self._push_block(rest) if self._block is not None else self._push_plain(rest)

    def finish(self) -> None:
        if self._block is not None:
            self._end_block()
        self._header = None  # cut off: a channel's name is no thinking
        self.writer.finish()

    # Outside of calls

    def _push_plain(self, item: Item) -> Item | None:
        marker, reasoning = item.marker, self._reasoning
        if reasoning is not None and marker == reasoning.open and self.may_think:
            self.writer.skip(REASONING, item.raw)
            self._set_kind(REASONING)
            self._header = "" if reasoning.header else None
        elif reasoning is not None and marker in reasoning.markers:
            self.writer.skip(self.kind, item.raw)
            self._set_kind(ANSWER)
        elif self._calls is not None and marker in self._calls.opens:
            return self._open_block(item)
        elif self._calls is not None and marker in self._calls.closes and self._after_call:
            self.writer.skip(TOOL_CALL, item.raw)
        elif self._header is not None:
            self._push_header(item)
        else:
            return self._push_text(item)
        return None

    def _set_kind(self, kind: str) -> None:
        self.kind, self._header, self._after_call = kind, None, False
        self.writer.add_border(kind)

    def _push_header(self, item: Item) -> None:
        """The channel's name is not shown; any other beginning is text."""
        assert self._reasoning is not None and self._header is not None
        full, before = self._reasoning.header, self._header
        now = before + item.text
        if full.startswith(now):
            self._header = now if now != full else None
            self.writer.skip(REASONING, item.raw)
            return
        self._header = None
        text = now.removeprefix(full) if now.startswith(full) else now
        self.writer.write(REASONING, text, item.raw)

    def _push_text(self, item: Item) -> Item | None:
        calls = self._calls
        begins = calls.begins if calls is not None and self.kind == ANSWER and not item.marker else None
        if begins is not None and (self._after_call or self.writer.answer_empty):
            at = begins(item.text)
            if at is not None:
                if at:
                    self.writer.write(ANSWER, item.text[:at], item.raw[:at])
                return self._open_block(Item(item.raw[at:], item.text[at:]))
        self._write_text(item)
        return None

    def _write_text(self, item: Item) -> None:
        self._after_call &= not item.text.strip()
        self.writer.write(self.kind, item.text, item.raw)

    # Inside a call

    def _open_block(self, item: Item) -> Item | None:
        assert self._calls is not None
        self._block, self._items = self._calls.block(item.marker), []
        end = self._block.push(item)
        if end == 0:  # no call after all
            self._block = None
            self._write_text(item)
            return None
        return self._continue_block(item, end)

    def _push_block(self, item: Item) -> Item | None:
        assert self._block is not None
        if self._reasoning is None or item.marker not in self._reasoning.markers:
            return self._continue_block(item, self._block.push(item))
        if self.thinking and item.marker == self._reasoning.close:
            self._end_block()
            return item
        return self._continue_block(item, self._block.push(Item(item.raw, item.raw)))  # inside an argument

    def _continue_block(self, item: Item, end: int | None) -> Item | None:
        """Keep an item of the block, and end it there if it ends; what is left of the item."""
        self._give_out_partial()
        if end is None:
            self._items.append(item)
            return None
        if item.marker or end >= len(item.raw):
            if end:
                self._items.append(item)
            self._end_block()
            return None if end else item
        if end:
            self._items.append(Item(item.raw[:end], item.text[:end]))
        self._end_block()
        rest = Item(item.raw[end:], item.text[end:])
        if end:
            return rest
        self._write_text(rest)
        return None

    def _give_out_partial(self) -> None:
        """As much of the call's arguments as is certain."""
        partial = self._block.partial if self._block is not None else None
        if partial is not None and (text := partial.take()) and self._tools.offers(partial.name):
            self.writer.add_delta(partial.id or self._tools.make_id(self.writer.next_index), partial.name, text)

    def _end_block(self) -> None:
        block, items = self._block, self._items
        assert block is not None
        self._block, self._items = None, []
        calls = self._tools.build_calls(block.read_calls(), self.writer.next_index)
        if calls is None:
            self.writer.drop_call()
            for item in items:
                self._write_text(item)
            return
        self.writer.add_calls(calls, "".join(item.raw for item in items))
        if self.thinking:
            self._set_kind(ANSWER)
        self._after_call = True
