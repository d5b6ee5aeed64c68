"""Lark for the values of calls that are not written in JSON: Gemma 4's notation, and Python's literals.

Enforced are names, types, enums, required members and the shape of arrays and objects; `unenforced_keywords` names the
rest.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .lark_rules import LarkRules, literal

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
ENFORCED = {
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "$ref",
    "$defs",
    "definitions",
}
ANNOTATIONS = {"description", "title", "default", "examples", "example", "$schema", "$id", "$comment", "deprecated"}
INTEGER, NUMBER = r"/-?(0|[1-9][0-9]{0,17})/", r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"


@dataclass(frozen=True)
class Notation:
    """How values are written: Lark for any string, and texts for the rest."""

    string: str
    write_string: Callable[[str], str]  # a given one
    write_key: Callable[[str], str]  # of an object, what follows it included
    any_key: str
    comma: str
    words: tuple[str, str, str] = ("true", "false", "null")


class ValueWriter:
    """Writes rules for one tool's values."""

    def __init__(self, notation: Notation, rules: LarkRules, root: Mapping[str, Any]):
        self._notation, self._rules, self._root = notation, rules, root
        self._refs: dict[str, str] = {}  # a $ref -> the rule of what it refers to

    def write(self, schema: Any) -> str:
        """A Lark expression for the values that a schema allows."""
        return f"({' | '.join(dict.fromkeys(self._alternatives(schema)))})"

    def write_members(self, schema: Mapping[str, Any], write_key: Callable[[str], str], comma: str) -> str:
        """The members of an object in the order of its properties; those that are not required may be left out."""
        required = set(schema.get("required") or ())
        properties = schema.get("properties") or {}
        rest = {True: "", False: ""}  # what may follow: after a member, and where none was written yet
        for key in reversed(properties):
            member = f"{write_key(key)} {self.write(properties[key])}"
            written = {first: f"{'' if first else literal(comma)} {member} {rest[False]}" for first in (True, False)}
            if key not in required:
                written = {f: f"({text} | {rest[f]})" if rest[f] else f"({text})?" for f, text in written.items()}
            rest = {first: self._rules.add(text) for first, text in written.items()}
        return rest[True]

    def _alternatives(self, schema: Any) -> Iterator[str]:
        if not isinstance(schema, Mapping):
            yield self._any()
        elif "$ref" in schema:
            yield self._refer(str(schema["$ref"]))
        elif "const" in schema or "enum" in schema:
            for value in [schema["const"]] if "const" in schema else schema["enum"]:
                yield self._literal(value)
        elif schema.get("anyOf") or schema.get("oneOf"):
            for one in schema.get("anyOf") or schema["oneOf"]:
                yield from self._alternatives(one)
        else:
            kinds = schema.get("type") or ("object" if "properties" in schema else TYPES)
            for kind in [kinds] if isinstance(kinds, str) else kinds:
                yield self._of_type(kind, schema)

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        notation = self._notation
        if kind in ("integer", "number"):
            return INTEGER if kind == "integer" else NUMBER
        if kind == "boolean":
            return f"{literal(notation.words[0])} | {literal(notation.words[1])}"
        if kind == "null":
            return literal(notation.words[2])
        if kind == "array":
            return self._list(self.write(schema["items"]) if "items" in schema else self._any())
        if kind == "object":
            if not schema.get("properties"):
                return f"{literal('{')} {self._several(f'{notation.any_key} {self._any()}')} {literal('}')}"
            return f"{literal('{')} {self.write_members(schema, notation.write_key, notation.comma)} {literal('}')}"
        return notation.string

    def _any(self) -> str:
        if "" not in self._refs:
            self._refs[""] = self._rules.reserve()
            self._rules.define(self._refs[""], " | ".join(self._of_type(kind, {}) for kind in TYPES))
        return self._refs[""]

    def _refer(self, ref: str) -> str:
        if ref not in self._refs:
            self._refs[ref] = self._rules.reserve()
            target: Any = self._root
            for part in ref.removeprefix("#").strip("/").split("/") if ref != "#" else ():
                target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
            self._rules.define(self._refs[ref], self.write(target))
        return self._refs[ref]

    def _list(self, item: str) -> str:
        return f"{literal('[')} {self._several(item)} {literal(']')}"

    def _several(self, item: str) -> str:
        return f"({item} ({literal(self._notation.comma)} {item})*)?"

    def _literal(self, value: Any) -> str:
        notation = self._notation
        if isinstance(value, str):
            return notation.write_string(value)
        if isinstance(value, list):
            inner = f" {literal(notation.comma)} ".join(map(self._literal, value))
            return f"{literal('[')} {inner} {literal(']')}"
        if isinstance(value, Mapping):
            members = (f"{notation.write_key(key)} {self._literal(one)}" for key, one in value.items())
            return f"{literal('{')} {f' {literal(notation.comma)} '.join(members)} {literal('}')}"
        words = {True: notation.words[0], False: notation.words[1], None: notation.words[2]}
        return literal(words[value] if isinstance(value, bool) or value is None else json.dumps(value))


def unenforced_keywords(schema: Any) -> list[str]:
    """What a schema asks for beyond what these grammars hold a value to."""
    if not isinstance(schema, Mapping):
        return []
    found = [str(k) for k in schema if k not in ENFORCED | ANNOTATIONS]
    if isinstance(schema.get("additionalProperties"), bool):  # members without a property are not written at all
        found.remove("additionalProperties")
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items")]
    for group in ("properties", "$defs", "definitions"):
        inner += list((schema.get(group) or {}).values())
    return list(dict.fromkeys([*found, *(k for one in inner for k in unenforced_keywords(one))]))
