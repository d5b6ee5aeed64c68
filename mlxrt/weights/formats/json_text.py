"""JSON objects out of files nobody vouches for: no duplicate keys, no nesting that would exhaust the stack later.

Knows JSON only; the caller says which file it was.
"""

import json
from typing import Any

DEEPEST = 64  # real files stay under 10; printing a value in an error recurses as deep as the value


def parse_object(text: bytes) -> dict[str, Any]:
    """The object, or a ValueError whose text says why not."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, expected an object")
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [child for node in level for child in children(node)]
        if not level:
            return value
    raise ValueError(f"nested deeper than {DEEPEST}")


def children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {ascii(twice)[:80]} appears twice")
    return entries
