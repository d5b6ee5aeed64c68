"""Calls written as XML elements, one for the function and one for each parameter, their values raw text."""

import re
from dataclasses import dataclass

from .calls import Block, RawCall
from .lexer import Item


@dataclass(frozen=True)
class XmlTags:
    wrapper: str  # around one or more calls; models leave it out
    wrapper_end: str
    function: str  # how a call begins: its name follows
    function_end: str
    name: re.Pattern[str]  # the rest of the tag that `function` begins
    parameter: re.Pattern[str]  # groups: name, value


class XmlBlock(Block):
    """From the wrapper, or the function without one, to the function's end."""

    def __init__(self, tags: XmlTags):
        super().__init__()
        self._tags, self._body, self._begun = tags, "", False

    def push(self, item: Item) -> int | None:
        tags, marker = self._tags, item.marker
        if not marker:
            if not self._begun and item.text.strip():
                return 0  # the wrapper holds something else
            self._body += item.text
            return None
        if marker == tags.function and not self._begun:
            self._begun = True
            return None
        if marker in (tags.function_end, tags.wrapper_end) and self._begun:
            self.closed = True
            return len(item.raw)
        if marker == tags.wrapper and not self._begun and not self._body.strip():
            return None
        self.closed = self._begun and marker in (tags.function, tags.wrapper)  # its end is missing
        return 0

    def read_calls(self) -> list[RawCall] | None:
        if not self.closed:
            return None
        body = self._body.strip()
        named = self._tags.name.match(body)
        if named is None:
            return None
        rest = body[named.end() :]
        values = {name: strip_newlines(value) for name, value in self._tags.parameter.findall(rest)}
        return [RawCall(named[1].strip(), values)]


def strip_newlines(text: str) -> str:
    """Without one newline at each end: the format writes them."""
    return text.removeprefix("\n").removesuffix("\n")
