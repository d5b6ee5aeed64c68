"""Regexes as users write them, for llguidance, which reads Rust's.

In Rust's character classes `[`, `&&`, `--` and `~~` are operators; in Python's, ECMAScript's and so JSON schema's they
are the characters. POSIX classes (`[[:alpha:]]`) keep their meaning in Rust. `a{ 3}` is a repetition in Rust; elsewhere
a repetition has no spaces, and these are five characters. A quantifier after a quantifier, as in `a?+`, repeats again
in Rust, is possessive in Python, for which llguidance has nothing, and an error in ECMAScript: it is refused.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import BadRequest, quote

REPETITION = r"\{\d+(?:,\d*)?\}"
OUTSIDE = re.compile(rf"\\.|\[\^?|{REPETITION}|[*+?]|[^\\\[{{*+?]+|.", re.DOTALL)
QUANTIFIER = re.compile(rf"{REPETITION}|[*+?]")
SPACED_REPETITION = re.compile(r"\{(?=[\d,]* [\d, ]*\})")
INSIDE = re.compile(r"\[:\^?[a-z]+:\]|\\.|.", re.DOTALL)
LARK_PART = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|(/(?:\\.|[^/\\\n])+/)')
NAMED_SCHEMAS = ("properties", "$defs", "definitions", "dependentSchemas")
VALUES = ("enum", "const", "default", "examples", "example")  # no schemas


def convert_pattern(pattern: str, strict: bool = True) -> str:
    """A regex of Python's or ECMAScript's in Rust's dialect; BadRequest where that cannot say it, if `strict`."""
    parts: list[str] = []
    at = 0
    quantifiers: list[str] = []  # right before
    while at < len(pattern):
        found = OUTSIDE.match(pattern, at)
        assert found is not None
        at = found.end()
        opens_group = found[0] == "?" and bool(parts) and parts[-1].endswith("(") and parts[-1] != r"\("
        quantifiers = [*quantifiers, found[0]] if QUANTIFIER.fullmatch(found[0]) and not opens_group else []
        if strict and len(quantifiers) > 1 and quantifiers[1:] != ["?"]:  # which makes it lazy
            raise BadRequest(f"the regex {quote(pattern)} has {''.join(quantifiers)}: group what is repeated again")
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


def convert_schema(schema: Any, strict: bool = True) -> Any:
    """A JSON schema with its patterns in Rust's dialect."""
    if isinstance(schema, (list, tuple)):
        return [convert_schema(one, strict) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: convert_keyword(key, value, strict) for key, value in schema.items()}


def convert_keyword(key: str, value: Any, strict: bool) -> Any:
    if key in VALUES:
        return value
    if key == "pattern" and isinstance(value, str):
        return convert_pattern(value, strict)
    if key == "patternProperties" and isinstance(value, Mapping):
        return {convert_pattern(str(name), strict): convert_schema(one, strict) for name, one in value.items()}
    if key in NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: convert_schema(one, strict) for name, one in value.items()}
    return convert_schema(value, strict)


def convert_schema_text(text: str) -> str:
    return json.dumps(convert_schema(json.loads(text)), ensure_ascii=False) if "attern" in text else text
