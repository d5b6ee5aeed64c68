"""The digest of a model's files, computed once: remembered by path, size and the times of the last change.

Knows files and the cache folder. A cache folder that cannot be written costs time, nothing else.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from ...cache.files import atomic_write
from ...errors import HubError
from ..formats.json_text import parse_object
from ..source.cache_dir import SHARED_MODE, cache_root, digest, writing

SETTLED = 2.0  # seconds: a file changed this recently may change again without its times showing it


def weights_digest(files: Iterable[Path]) -> str:
    """One digest of all files and their names, in their order."""
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.name} {file_digest(path)}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def file_digest(path: Path) -> str:
    real = path.resolve()
    before = stamp(real)
    memory = memory_of(real)
    if known := recall(memory, before):
        return known
    with open(real, "rb") as file:
        found = digest(file)
    newest = max(int(before[-1]), int(before[-2])) / 1e9
    if stamp(real) == before and time.time() - newest > SETTLED:
        remember(memory, before, found)
    return found


def stamp(path: Path) -> list[str]:
    at = os.stat(path)
    return [str(path), str(at.st_size), str(at.st_mtime_ns), str(at.st_ctime_ns)]


def memory_of(path: Path) -> Path | None:
    """Where a file's digest is remembered; None where there is no cache folder."""
    with contextlib.suppress(HubError):
        return cache_root() / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"
    return None


def recall(memory: Path | None, now: list[str]) -> str | None:
    try:
        told = parse_object(memory.read_bytes()) if memory else {}
    except (OSError, ValueError):
        return None  # never written, or not by us: computed anew
    found = told.get("sha256")
    return found if told.get("stamp") == now and isinstance(found, str) and len(found) == 64 else None


def remember(memory: Path | None, now: list[str], found: str) -> None:
    if memory is None:
        return
    with contextlib.suppress(HubError), writing(memory.parent), atomic_write(memory, mode=SHARED_MODE) as file:
        file.write(json.dumps({"stamp": now, "sha256": found}).encode())
