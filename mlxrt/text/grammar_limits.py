"""How deep a grammar may go. llguidance compiles by recursion: too deep a one would overflow the stack, which ends the
process and not the request."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import BadRequest
from .regex_dialect import LARK_PART

STACK_BYTES = 256 << 20  # of the thread that compiles; a level of a schema takes up to 8 KB, of a rule up to 3 KB
MAX_REFERRED_DEPTH = 10_000  # of nested schemas, references followed
MAX_RULES = 2_000  # of a Lark grammar, each of which may be 30 levels deep
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
UNKNOWN_DEPTH = 128  # of a reference to an anchor or an $id
LARK_TOKEN = re.compile(rf"{LARK_PART.pattern}|%json\s*(?=\{{)|:")  # strings, comments and regexes, to skip them


def check_referred_depth(schema: Any) -> None:
    """BadRequest where references make a schema too deep, though what is nested in place is not."""
    if measure_referred_depth(schema) > MAX_REFERRED_DEPTH:
        raise BadRequest(f"the schema's references lead through more than {MAX_REFERRED_DEPTH} levels; make it flatter")


def measure_referred_depth(schema: Any) -> int:
    """The depth of a schema and of all that it refers to: no path through it is longer."""
    depths: dict[int, int] = {}
    references: set[str] = set()
    total = measure_depth(schema, depths, references)
    for reference in references:
        target = follow(reference, schema) if reference.startswith("#") else None
        total += UNKNOWN_DEPTH if target is None else depths.get(id(target), 1)
    return total


def measure_depth(value: Any, depths: dict[int, int], references: set[str]) -> int:
    if isinstance(value, Mapping):
        references.update(str(value[key]) for key in REFERENCES if isinstance(value.get(key), str))
    elif not isinstance(value, list):
        return 1
    inner = value.values() if isinstance(value, Mapping) else value
    depth = depths[id(value)] = 1 + max((measure_depth(one, depths, references) for one in inner), default=0)
    return depth


def follow(reference: str, root: Any) -> Any:
    target = root
    for part in reference[1:].strip("/").split("/") if reference[1:].strip("/") else ():
        part = part.replace("~1", "/").replace("~0", "~")
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def check_lark(grammar: str) -> None:
    """BadRequest where a grammar has too many rules, since any may refer to the next, or too deep a schema in it."""
    rules, at, decoder = 0, 0, json.JSONDecoder()
    while (found := LARK_TOKEN.search(grammar, at)) is not None:
        at = found.end()
        rules += found[0] == ":"
        if found[0].startswith("%json"):
            try:
                schema, at = decoder.raw_decode(grammar, at)
            except (ValueError, RecursionError):
                continue  # llguidance says what is wrong with it
            check_referred_depth(schema)
    check_rules(rules)


def check_rules(rules: int) -> None:
    if rules > MAX_RULES:
        raise BadRequest(f"the grammar has {rules} rules, at most {MAX_RULES} are taken")
