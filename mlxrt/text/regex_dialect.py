"""Regexes as users write them, for llguidance, which reads Rust's.

In Rust's character classes `[`, `&&`, `--` and `~~` are operators; in Python's, ECMAScript's and so JSON schema's they
are the characters. POSIX classes (`[[:alpha:]]`) keep their meaning in Rust. `a{ 3}` is a repetition in Rust; elsewhere
a repetition has no spaces, and these are five characters.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

OUTSIDE = re.compile(r"\\.|\[\^?|[^\\\[{]+|.", re.DOTALL)
SPACED_REPETITION = re.compile(r"\{(?=[\d,]* [\d, ]*\})")
INSIDE = re.compile(r"\[:\^?[a-z]+:\]|\\.|.", re.DOTALL)
LARK_PART = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|(/(?:\\.|[^/\\\n])+/)')
NAMED_SCHEMAS = ("properties", "$defs", "definitions", "dependentSchemas")
VALUES = ("enum", "const", "default", "examples", "example")  # no schemas


def convert_pattern(pattern: str) -> str:
    """A regex of Python's or ECMAScript's in Rust's dialect."""
    parts, at = [], 0
    while at < len(pattern):
        found = OUTSIDE.match(pattern, at)
        assert found is not None
        at = found.end()
        parts.append(r"\{" if SPACED_REPETITION.match(pattern, found.start()) else found[0])
        if found[0] in ("[", "[^"):
            inner, at = convert_class(pattern, at)
            parts.append(inner)
    return "".join(parts)


def convert_class(pattern: str, at: int) -> tuple[str, int]:
    """What follows the `[` of a class, its `]` included, and where that ends."""
    parts: list[str] = []
    begins_range = ends_range = False  # the item before may begin a range; a range has its `-`
    while at < len(pattern):
        found = INSIDE.match(pattern, at)
        assert found is not None
        part, at = found[0], found.end()
        if part == "]" and parts:
            return "".join(parts) + part, at
        if part == "-" and begins_range and pattern[at : at + 1] != "]":
            begins_range, ends_range = False, True
            parts.append(part)
            continue
        begins_range, ends_range = not ends_range, False
        parts.append(f"\\{part}" if part in ("[", "]", "&", "~", "-") else part)
    return "".join(parts), at  # without an end: refused by the parser


def convert_lark(grammar: str) -> str:
    """A Lark grammar with its regexes in Rust's dialect."""
    return LARK_PART.sub(lambda found: convert_pattern(found[0]) if found[1] else found[0], grammar)


def convert_schema(schema: Any) -> Any:
    """A JSON schema with its patterns in Rust's dialect."""
    if isinstance(schema, (list, tuple)):
        return [convert_schema(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: convert_keyword(key, value) for key, value in schema.items()}


def convert_keyword(key: str, value: Any) -> Any:
    if key in VALUES:
        return value
    if key == "pattern" and isinstance(value, str):
        return convert_pattern(value)
    if key == "patternProperties" and isinstance(value, Mapping):
        return {convert_pattern(str(name)): convert_schema(one) for name, one in value.items()}
    if key in NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: convert_schema(one) for name, one in value.items()}
    return convert_schema(value)


def convert_schema_text(text: str) -> str:
    return json.dumps(convert_schema(json.loads(text)), ensure_ascii=False) if "attern" in text else text
