"""Hermes and Qwen 2.5/3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one block for each call."""

from .calls import SPACES, Block, CallFormat, JsonScanner, PartialCall, RawCall, read_json_calls
from .lexer import Item

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesBlock(Block):
    """Ends with its JSON; stray closing brackets up to the end marker belong to it."""

    def __init__(self) -> None:
        self._written = PartialCall()
        super().__init__(self._written)
        self._body, self._scanner, self._complete = "", JsonScanner(), False

    def push(self, item: Item) -> int | None:
        if item.marker == CLOSE:
            self.closed = True
            return len(item.raw)
        if item.marker and not (item.marker == OPEN and not self._scanner.started):
            return 0  # another call, or the end of thinking
        if item.marker:
            return None
        if self._complete:
            rest = item.text.lstrip(SPACES + "}]")
            return len(item.text) - len(rest) if rest else None
        end = self._scanner.push(item.text)
        if self._scanner.wrong:
            return 0
        self._body += item.text[:end]
        self._written.push(item.text[:end])
        if end is None:
            return None
        self._complete = self.closed = True
        rest = item.text[end:].lstrip(SPACES + "}]")
        return len(item.text) - len(rest) if rest else None

    def read_calls(self) -> list[RawCall] | None:
        return read_json_calls(self._body) if self.closed and self._scanner.started else None


HERMES = CallFormat("hermes", lambda _: HermesBlock(), opens=(OPEN,), closes=(CLOSE,))
