"""DeepSeek V3, R1 and V3.1: calls between special tokens, the arguments fenced as ```json (V3) or bare (V3.1)."""

import re

from .calls import Block, CallFormat, PartialCall, RawCall, parse_json
from .lexer import Item

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCED = re.compile(r"\s*([^\n`]+?)\s*\n\s*```(?:json)?\s*(.*?)\s*(?:```)?\s*\Z", re.DOTALL)
MARK = "\0"  # stands for the separator
HEAD = re.compile(r"\s*(?:function\s*\0\s*([^\n`\0]+?)\s*\n\s*```(?:json)?|([^\n`\0]+?)\s*\0)\s*(?=\{)")


class DeepSeekBlock(Block):
    def __init__(self) -> None:
        self._written = PartialCall(HEAD)
        super().__init__(self._written)
        self._parts: list[str] | None = None  # split at separators; None before the call begins

    def push(self, item: Item) -> int | None:
        marker = item.marker
        if marker == CALL_END and self._parts is not None:
            self.closed = True
            return len(item.raw)
        if marker in (CALL, CALLS) and self._parts is None:
            self._parts = [""] if marker == CALL else None
        elif marker == SEPARATOR and self._parts is not None:
            self._parts.append("")
            self._written.push(MARK)
        elif marker:
            self.closed = marker in (CALL, CALLS_END)  # its end is missing
            return 0
        elif self._parts is not None:
            self._parts[-1] += item.text
            self._written.push(item.text)
        elif item.text.strip():
            return 0
        return None

    def read_calls(self) -> list[RawCall] | None:
        if self._parts is None or len(self._parts) != 2:
            return None
        name, arguments = (part.strip() for part in self._parts)
        if fenced := FENCED.fullmatch(self._parts[1]) if name == "function" else None:
            name, arguments = fenced[1], fenced[2]
        if not self.closed and not is_json(arguments):
            return None
        return [RawCall(name, arguments or "{}")]


def is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


DEEPSEEK = CallFormat(
    "deepseek", lambda _: DeepSeekBlock(), opens=(CALLS, CALL), inner=(SEPARATOR,), closes=(CALL_END, CALLS_END)
)
