"""What the formats of tool calls share: the block that is being read, JSON in pieces, values typed by a schema."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .lexer import Item

NAME_KEY = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)+)"')
ARGUMENT_KEYS = ("arguments", "parameters")
ARGUMENTS_KEY = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
DECODER = json.JSONDecoder(strict=False)  # models write newlines into strings
MAX_NESTING = 200  # of JSON and call syntax: no schema needs more, and recursion has an end
SPACES = " \t\r\n"

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class RawCall:
    """A call as it was written: its arguments as JSON text, or as the texts of an XML form by name."""

    name: str
    arguments: str | dict[str, str]
    id: str = ""
    error: str = ""


class Block(ABC):
    """One tool call that is being read, from the marker that opened it."""

    def __init__(self, partial: "PartialCall | None" = None) -> None:
        self.closed = False  # complete as its format asks, well-formed or not
        self.partial = partial  # None where nothing is certain before the end

    @abstractmethod
    def push(self, item: Item) -> int | None:
        """None: more is needed. Else the block ends after so many characters of the item; 0: before it."""

    @abstractmethod
    def read_calls(self) -> list[RawCall] | None:
        """The calls of a block that has ended; None when it is no call: then it is text."""


@dataclass(frozen=True)
class CallFormat:
    """How a family writes tool calls."""

    name: str
    block: Callable[[str], Block]  # a new block, by the marker that opens it
    opens: tuple[str, ...]  # markers that begin a block
    inner: tuple[str, ...] = ()  # markers that only mean something inside one
    closes: tuple[str, ...] = ()  # markers that may follow a call and are not shown then
    begins: Callable[[str], int | None] | None = None  # where a call begins at the start of an answer, without marker

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, *self.inner, *self.closes)


JSON_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
LONGEST_HEAD = 1000  # characters before the arguments: a longer one is not looked for any more


class PartialCall:
    """The name of a call that is being written, and the text of its arguments as it comes.

    Given out is only what stays, whatever follows: a JSON object's text, up to its end.
    """

    def __init__(self, head: re.Pattern[str] = JSON_CALL, name: str = "", id: str = ""):
        self.name, self.id = name, id  # by the head's group, where it has one; the id only if the model gives one
        self._head, self._text, self._scanner = head, "", JsonScanner()
        self._fresh, self._begun, self._ended = "", False, False

    def push(self, text: str) -> None:
        """More of the block's text."""
        if self._ended:
            return
        if not self._begun:
            self._text += text
            found = self._head.match(self._text)
            if found is None:
                self._ended = len(self._text) > LONGEST_HEAD
                return
            self._begun, text, self._text = True, self._text[found.end() :], ""
            self.name = found[found.lastindex] if found.lastindex else self.name
        end = self._scanner.push(text)
        self._fresh += text[:end]
        self._ended = end is not None or self._scanner.wrong

    def take(self) -> str:
        """The text of the arguments since the last time."""
        fresh, self._fresh = self._fresh, ""
        return fresh


class JsonScanner:
    """Finds the end of the first JSON object or array in a text that comes in pieces."""

    def __init__(self) -> None:
        self.depth, self.started, self.wrong = 0, False, False
        self._string = self._escaped = False

    def push(self, text: str) -> int | None:
        """How many characters of this piece belong to the value, when it is complete; `wrong` when none begins."""
        for i, c in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._string = False
            elif c == '"' and self.started:
                self._string = True
            elif c in "{[":
                self.depth, self.started = self.depth + 1, True
            elif c in "}]" and self.started:
                self.depth -= 1
                if self.depth == 0:
                    return i + 1
            elif not self.started and c not in SPACES:
                self.wrong = True
                return None
        return None


def parse_json(text: str) -> Any:
    """The JSON value of a text. ValueError when it is none."""
    try:
        return json.loads(text, strict=False)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def split_object(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as it was written. ValueError when it is none."""
    members: dict[str, str] = {}
    at = skip_spaces(text, 0)
    if text[at : at + 1] != "{":
        raise ValueError("it is no object")
    at = skip_spaces(text, at + 1)
    try:
        while text[at : at + 1] != "}":
            key, at = DECODER.raw_decode(text, at)
            at = skip_spaces(text, at)
            if not isinstance(key, str) or text[at : at + 1] != ":":
                raise ValueError("a key is no string, or no colon follows it")
            start = skip_spaces(text, at + 1)
            _, at = DECODER.raw_decode(text, start)
            members.setdefault(key, text[start:at])  # the first of equal keys: it may have been given out already
            at = skip_spaces(text, at)
            if text[at : at + 1] == ",":
                at = skip_spaces(text, at + 1)
            elif text[at : at + 1] != "}":
                raise ValueError("it has no end")
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    return members


def skip_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACES:
        at += 1
    return at


def read_json_calls(text: str) -> list[RawCall] | None:
    """Calls written as a JSON object, or an array of them, of a name and arguments; None: neither."""
    text = text.strip()
    try:
        value = parse_json(text)
    except ValueError as error:
        return recover_call(text, str(error))
    if isinstance(value, list):
        found = [read_json_calls(json.dumps(one, ensure_ascii=False)) for one in value if isinstance(one, dict)]
        calls = [call for one in found if one for call in one]
        return calls if calls and len(calls) == len(value) else None
    if not isinstance(value, dict):
        return None
    members = split_object(text)
    name = parse_json(members.get("name", "null"))
    if not isinstance(name, str) and isinstance(value.get("function"), dict):  # the OpenAI form, which models imitate
        inner = read_json_calls(members["function"])
        return [RawCall(c.name, c.arguments, str(value.get("id") or "")) for c in inner] if inner else None
    if not isinstance(name, str) or not name:
        return None
    arguments = next((members[key] for key in members if key in ARGUMENT_KEYS), "{}")
    id = value.get("id")
    return [RawCall(name, unwrap_arguments(arguments), id if isinstance(id, str) else "")]


def unwrap_arguments(text: str) -> str:
    """Arguments that were encoded twice, or left out."""
    try:
        value = parse_json(text)
        if isinstance(value, str):
            return text if not isinstance(parse_json(value or "{}"), dict) else value or "{}"
    except ValueError:
        return text
    return "{}" if value is None else text


def recover_call(text: str, error: str) -> list[RawCall] | None:
    """A call whose JSON is broken, if its name can be read."""
    named = NAME_KEY.search(text)
    if named is None:
        return None
    begun = ARGUMENTS_KEY.search(text)
    arguments = text[begun.end() :].removesuffix("}").rstrip() if begun else ""  # the bracket of the call itself
    return [RawCall(named[1], arguments, error=f"not valid JSON: {error}")]


def type_arguments(arguments: Mapping[str, str], schema: Schema | None) -> dict[str, Any]:
    """The values of an XML form, typed by the tool's schema: what it calls a string stays one."""
    properties = (schema or {}).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    return {key: type_value(value, properties.get(key)) for key, value in arguments.items()}


def type_value(text: str, schema: Any) -> Any:
    """One value, by the first of these types that the schema allows and the text has."""
    kinds = schema_types(schema)
    if not kinds:
        return guess_value(text)
    bare = text.strip()
    if "null" in kinds and bare.lower() in ("null", "none"):
        return None
    if "integer" in kinds and re.fullmatch(r"[+-]?\d{1,400}", bare):
        return int(bare)
    if "number" in kinds and (number := read_number(bare)) is not None:
        return number
    if "boolean" in kinds and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    if kinds & {"object", "array"}:
        try:
            value = parse_json(bare)
        except ValueError:
            return text
        if isinstance(value, (dict, list)):
            return value
    return text


def read_number(text: str) -> int | float | None:
    if re.fullmatch(r"[+-]?\d{1,400}", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) and abs(value := float(text)) < float("inf"):
        return value
    return None


def guess_value(text: str) -> Any:
    """A value without a schema: JSON's objects and arrays are read, everything else is the text it is."""
    bare = text.strip()
    try:
        return parse_json(bare) if bare[:1] in ("{", "[") else text
    except ValueError:
        return text


def schema_types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty when it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    found = {kinds} if isinstance(kinds, str) else {k for k in kinds or () if isinstance(k, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(key) or ():
            found |= schema_types(option)
    if not found and isinstance(schema.get("enum"), list):
        found = {JSON_TYPES.get(type(value), "string") for value in schema["enum"]}
    return {{"str": "string", "int": "integer", "float": "number", "bool": "boolean"}.get(k, k) for k in found}


JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"} | {
    type(None): "null"
}
