"""Llama 3.1 to 3.3: a bare `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`, `;` between several.

Built-in tools are called in Python: `<|python_tag|>name.call(key="value")`.
"""

import re

from .calls import SPACES, Block, CallFormat, JsonScanner, PartialCall, RawCall, read_json_calls
from .lexer import Item
from .python_calls import read_python_calls

TAG, SEPARATOR = "<|python_tag|>", ";"
FIRST_KEY = re.compile(r'\s*\{\s*"([^"]*)"')
KEYS = ("name", "parameters", "arguments", "type", "function", "id")


class Llama3Block(Block):
    def __init__(self) -> None:
        self._written = PartialCall()
        super().__init__(self._written)
        self._body, self._scanner, self._tagged = "", JsonScanner(), False

    def push(self, item: Item) -> int | None:
        if item.marker == TAG and not self._body.strip():
            self._tagged = True
            return None
        if item.marker == TAG:
            return 0
        if self._tagged and not self._scanner.started and not (self._body + item.text).lstrip().startswith("{"):
            self._body += item.text  # Python, to the end of the answer
            return None
        end = self._scanner.push(item.text)
        self._body += item.text[:end]
        self._written.push(item.text[:end])
        if end is not None:
            self.closed = True
            return end
        first = FIRST_KEY.match(self._body)
        return 0 if self._scanner.wrong or (first and first[1] not in KEYS) else None

    def read_calls(self) -> list[RawCall] | None:
        if self._scanner.started:
            return read_json_calls(self._body) if self.closed else None
        return read_python_calls(self._body)


def find_start(text: str) -> int | None:
    """Where a bare call begins."""
    skipped = len(text) - len(text.lstrip(SPACES))
    return skipped if text[skipped : skipped + 1] == "{" else None


LLAMA3 = CallFormat("llama3", lambda _: Llama3Block(), opens=(TAG,), closes=(SEPARATOR,), begins=find_start)
