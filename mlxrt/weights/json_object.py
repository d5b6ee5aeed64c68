"""JSON objects from untrusted files: no duplicate keys, no nesting that would exhaust the stack later."""

import json
from pathlib import Path
from typing import Any

from ..errors import BadCheckpoint

MAX_DEPTH = 64  # real files stay under 10; printing a value in an error recurses as deep as the value
MAX_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; BadCheckpoint if there is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadCheckpoint(f"{path}: larger than {MAX_BYTES} bytes, which no {path.name} is")
        return parse_object(path.read_bytes())
    except FileNotFoundError:
        raise BadCheckpoint(f"{path.parent}: no {path.name}; give a folder with config.json and safetensors") from None
    except OSError as bad:
        raise BadCheckpoint(f"{path}: cannot be read ({bad.strerror})") from None
    except ValueError as bad:
        raise BadCheckpoint(f"{path}: not usable JSON ({str(bad)[:120]}); download it again") from None


def parse_object(text: bytes) -> dict[str, Any]:
    """The object, or a ValueError that says what is wrong."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, expected an object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in children(node)]
        if not level:
            return value
    raise ValueError(f"nested deeper than {MAX_DEPTH}")


def children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {ascii(twice)[:80]} appears twice")
    return made
