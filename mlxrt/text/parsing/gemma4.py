"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:42,list:[...]}<tool_call|>`, strings between quote tokens."""

import json
import re
from typing import Any

from .calls import MAX_NESTING, Block, CallFormat, RawCall, read_number
from .lexer import Item

OPEN, CLOSE, QUOTE, RESPONSE = "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"
HEAD = re.compile(r"\s*call\s*:\s*([^\s{]+)\s*")
BARE = re.compile(r"[^,\]}:{\[]*")
MARK = "\ufdd3"  # stands for the quote token in a block's text
WORDS = {"true": True, "false": False, "null": None}


class Gemma4Block(Block):
    def __init__(self) -> None:
        super().__init__()
        self._body = ""

    def push(self, item: Item) -> int | None:
        if item.marker in (CLOSE, RESPONSE):  # the model waits for a result: the call is complete
            self.closed = True
            return len(item.raw)
        if item.marker == QUOTE:
            self._body += MARK
        elif item.marker:
            return None if item.marker == OPEN and not self._body else 0
        else:
            self._body += item.text
        return None

    def read_calls(self) -> list[RawCall] | None:
        head = HEAD.match(self._body)
        if head is None:
            return None
        reader = ArgumentReader(self._body)
        try:
            value, at = reader.read_value(head.end(), 0) if head.end() < len(self._body) else ({}, len(self._body))
            if not isinstance(value, dict) or self._body[at:].strip():
                raise ValueError("the arguments are no object")
        except ValueError as error:
            if not self.closed:
                return None
            written = self._body[head.end() :].replace(MARK, QUOTE).strip()
            return [RawCall(head[1], written, error=f"not valid arguments: {error}")]
        return [RawCall(head[1], json.dumps(value, ensure_ascii=False))] if self.closed or value else None


class ArgumentReader:
    """Reads Gemma's notation of a value; ValueError when it is none."""

    def __init__(self, text: str):
        self.text = text

    def read_value(self, at: int, depth: int) -> tuple[Any, int]:
        if depth > MAX_NESTING:
            raise ValueError("it nests too deeply")
        at = self.skip(at)
        first = self.text[at : at + 1]
        if first == MARK:
            return self.read_string(at)
        if first == "{":
            return self.read_object(at, depth)
        if first == "[":
            return self.read_list(at, depth)
        found = BARE.match(self.text, at)
        word = found[0].strip() if found else ""
        if not word or MARK in word:
            raise ValueError(f"no value at character {at}")
        return read_word(word), at + len(found[0] if found else "")

    def read_string(self, at: int) -> tuple[str, int]:
        end = self.text.find(MARK, at + 1)
        if end < 0:
            raise ValueError("a string has no end")
        return self.text[at + 1 : end], end + 1

    def read_object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self.skip(at + 1)
        while self.text[at : at + 1] != "}":
            if self.text[at : at + 1] == MARK:
                key, at = self.read_string(at)
            else:
                end = self.text.find(":", at)
                key, at = self.text[at:end].strip(), end
                if end < 0 or not key or MARK in key:
                    raise ValueError("a key has no value")
            at = self.skip(at)
            if self.text[at : at + 1] != ":":
                raise ValueError("a key has no value")
            found[key], at = self.read_value(at + 1, depth + 1)
            at = self.read_comma(at, "}")
        return found, at + 1

    def read_list(self, at: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = self.skip(at + 1)
        while self.text[at : at + 1] != "]":
            value, at = self.read_value(at, depth + 1)
            found.append(value)
            at = self.read_comma(at, "]")
        return found, at + 1

    def read_comma(self, at: int, end: str) -> int:
        at = self.skip(at)
        if self.text[at : at + 1] == ",":
            return self.skip(at + 1)
        if self.text[at : at + 1] != end:
            raise ValueError(f"no , or {end} at character {at}")
        return at

    def skip(self, at: int) -> int:
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at


def read_word(word: str) -> Any:
    """A number, true, false, null; any other bare word is a string."""
    if word in WORDS:
        return WORDS[word]
    number = read_number(word)
    if number is not None:
        return number
    if len(word) > 1 and word[0] == word[-1] == '"':
        return word[1:-1]
    return word


GEMMA4 = CallFormat("gemma4", lambda _: Gemma4Block(), opens=(OPEN,), inner=(QUOTE, RESPONSE), closes=(CLOSE,))
