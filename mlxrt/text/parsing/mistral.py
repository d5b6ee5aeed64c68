"""Mistral: `[TOOL_CALLS]` and a JSON array (v3, v7), or `[TOOL_CALLS]NAME[CALL_ID]id[ARGS]{...}` (v11, v13).

No marker ends a call: it ends with its JSON.
"""

import re

from .calls import SPACES, Block, CallFormat, JsonScanner, PartialCall, RawCall, read_json_calls
from .lexer import Item

OBJECT = re.compile(r"(?=\s*\{)")
CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self._head: dict[str, str] = {CALLS: ""}  # the texts after each marker before the arguments
        self._field, self._json, self._scanner = CALLS, "", JsonScanner()

    def push(self, item: Item) -> int | None:
        if item.marker == CALLS and not any(self._head.values()):
            return None
        if item.marker in (CALL_ID, ARGS) and not self._scanner.started:
            self._field = item.marker
            self._head.setdefault(self._field, "")
            return None
        if item.marker:
            return 0
        text, before = item.text, 0
        if not self._scanner.started:
            before = self._read_head(text)
            text = text[before:]
        end = self._scanner.push(text) if text else None
        self._json += text[:end]
        self._push_partial(text[:end])
        if end is not None:
            self.closed = True
            return before + end
        return 0 if self._scanner.wrong else None

    def _push_partial(self, text: str) -> None:
        name = self._head[CALLS].strip(SPACES)
        if self.partial is None and name and self._scanner.started:
            self.partial = PartialCall(OBJECT, name, self._head.get(CALL_ID, "").strip(SPACES))
            text = self._json
        if self.partial is not None:
            self.partial.push(text)

    def _read_head(self, text: str) -> int:
        """Take the name or id in front of the arguments; how many characters it was."""
        if self._field == ARGS:
            return 0
        name = self._head[self._field]
        for i, c in enumerate(text):
            if c == "{" or (c == "[" and not name.strip()):
                self._head[self._field] = name
                return i
            name += c
        self._head[self._field] = name
        return len(text)

    def read_calls(self) -> list[RawCall] | None:
        if not self.closed:
            return None
        name = self._head[CALLS].strip(SPACES)
        if not name:
            return read_json_calls(self._json)
        return [RawCall(name, self._json, self._head.get(CALL_ID, "").strip(SPACES))]


MISTRAL = CallFormat("mistral", lambda _: MistralBlock(), opens=(CALLS,), inner=(CALL_ID, ARGS))
