"""Model identity: which model and settings a saved state belongs to, and digests of weight files.

Digests are cached by path, size and modification times; without a writable cache folder they are computed every time.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.files import atomic_write
from ..errors import BadSnapshot, HubError
from ..models import CausalLM
from ..text import Tokenizer
from .json_object import parse_object
from .source.cache_dir import SHARED_MODE, cache_root, digest, writing

FORMAT = "4"


def identify(
    model: CausalLM, specs: list, tokenizer: Tokenizer | None, files: Iterable[Path], block: int
) -> dict[str, str]:
    """Reads all weight files the first time, so it is called only when something outlives this process."""
    files = tuple(files)
    arrays: Any = tree_flatten(model.parameters())
    return {
        "format": FORMAT,
        "weights": weights_digest(files) if files else parameters_digest(model, arrays),
        "adapter": "none",
        "tokenizer": tokenizer.digest if tokenizer else "none",
        "cache": "; ".join(spec.signature for spec in specs),
        "block": str(block),
        # dequantised weights and other compute dtypes round differently
        "dtype": ", ".join(sorted({str(array.dtype) for _, array in arrays})),
    }


def parameters_digest(model: CausalLM, arrays: list) -> str:
    """For a model without files."""
    config = repr(model.config).replace("RopeParams(", "Rope(")  # files of format 4 were hashed under this name
    digest = hashlib.sha256(config.encode())
    for name, array in arrays:
        digest.update(name.encode())
        digest.update(memoryview(mx.contiguous(array.reshape(-1).view(mx.uint8))))  # type: ignore[arg-type]
    return digest.hexdigest()


def identity_digest(identity: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def check_same(path: Path, saved: dict[str, str], here: dict[str, str]) -> None:
    for field, value in here.items():
        if saved.get(field) != value:
            raise BadSnapshot(
                f"{path} was saved with another {field} ({str(saved.get(field))[:60]!r}, here {value[:60]!r}); "
                "restore it with the same model and settings"
            )


MIN_AGE = 2.0  # seconds: a file changed this recently may change again within the clock's resolution


def weights_digest(files: Iterable[Path]) -> str:
    """The digest of all files and their names, in order."""
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name} {file_digest(path)}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def file_digest(path: Path) -> str:
    real = path.resolve()
    before = file_stamp(real)
    cache = digest_cache_path(real)
    if known := read_cached_digest(cache, before):
        return known
    with open(real, "rb") as file:
        found = digest(file)
    newest = max(int(before[-1]), int(before[-2])) / 1e9
    if file_stamp(real) == before and time.time() - newest > MIN_AGE:
        write_cached_digest(cache, before, found)
    return found


def file_stamp(path: Path) -> list[str]:
    at = os.stat(path)
    return [str(path), str(at.st_size), str(at.st_mtime_ns), str(at.st_ctime_ns)]


def digest_cache_path(path: Path) -> Path | None:
    """Where a file's digest is cached; None where there is no cache folder."""
    with contextlib.suppress(HubError):
        return cache_root() / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"
    return None


def read_cached_digest(cache: Path | None, now: list[str]) -> str | None:
    try:
        cached = parse_object(cache.read_bytes()) if cache else {}
    except (OSError, ValueError):
        return None  # missing or damaged: computed again
    found = cached.get("sha256")
    return found if cached.get("stamp") == now and isinstance(found, str) and len(found) == 64 else None


def write_cached_digest(cache: Path | None, now: list[str], found: str) -> None:
    if cache is None:
        return
    with contextlib.suppress(HubError), writing(cache.parent), atomic_write(cache, mode=SHARED_MODE) as file:
        file.write(json.dumps({"stamp": now, "sha256": found}).encode())
