"""`response_format`: the form an answer must have, checked and hashable. What enforces it is grammar.py."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..errors import BadRequest, quote

MAX_BYTES = 1 << 20  # of a schema, pattern or grammar
MAX_DEPTH = 128  # of nested JSON
KINDS = {"json_schema": "schema", "json_object": None, "regex": "pattern", "choice": "choices", "grammar": "grammar"}


@dataclass(frozen=True)
class ResponseFormat:
    """A checked `response_format`: hashable, so that it is compiled once."""

    kind: str
    text: str  # the schema as JSON, the pattern, the choices as JSON, the grammar

    @classmethod
    def parse(cls, value: Any) -> Self | None:
        """From a request; None where any text will do."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
            raise BadRequest(f'response_format must be a dict with a "type", not {quote(value)}')
        kind = value["type"]
        if kind == "text":
            return None
        if kind not in KINDS:
            raise BadRequest(f"response_format type {quote(kind)} is unknown; known: text, {', '.join(KINDS)}")
        field = KINDS[kind]
        given = dict(value)
        if kind == "json_schema" and isinstance(given.get("json_schema"), Mapping):  # as OpenAI nests it
            given = {"type": kind, **given["json_schema"]}
            for name in ("name", "description", "strict"):
                given.pop(name, None)
        if unknown := given.keys() - {"type", field}:
            raise BadRequest(f"response_format has the unknown key {quote(sorted(map(str, unknown))[0])}")
        if field is None:
            return cls(kind, "")
        if field not in given:
            raise BadRequest(f'response_format of type {kind} needs "{field}"')
        return cls(kind, check_size(kind, read_field(kind, given[field])))


def read_field(kind: str, value: Any) -> str:
    if kind == "json_schema":
        if not isinstance(value, Mapping):
            raise BadRequest(f"the schema of response_format must be a dict, not {type(value).__name__}")
        return dump(value)
    if kind == "choice":
        if not isinstance(value, (list, tuple)) or not value or not all(isinstance(c, str) and c for c in value):
            raise BadRequest(f"choices must be a list of one or more non-empty strings, not {quote(value)}")
        return dump(list(dict.fromkeys(value)))
    if not isinstance(value, str) or not value:
        raise BadRequest(f"the {KINDS[kind]} of response_format must be a non-empty string, not {quote(value)}")
    return value


def dump(value: Any) -> str:
    """As JSON with the order of its keys, which is the order in which properties are written."""
    check_depth(value, MAX_DEPTH)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"response_format is not JSON: {error}") from None


def check_depth(value: Any, left: int) -> None:
    if left < 0:
        raise BadRequest(f"response_format is nested deeper than {MAX_DEPTH}; make it flatter")
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        check_depth(inner, left - 1)


def check_size(kind: str, text: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise BadRequest(f"response_format of type {kind} holds a lone surrogate, which is no character") from None
    if size > MAX_BYTES:
        raise BadRequest(f"response_format of type {kind} has {size} bytes, at most {MAX_BYTES} are taken")
    return text
