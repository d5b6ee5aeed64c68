"""Model identity: which model and settings a saved state belongs to, and digests of weight files.

The files may change while an engine runs, so they are stamped when they are read: the identity is that of the bytes
that were loaded, or there is none. Digests are cached by path, size and modification times; without a writable cache
folder they are computed every time.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.files import atomic_write
from ..errors import BadCheckpoint, BadSnapshot, HubError
from ..models import CausalLM
from ..text import Tokenizer
from .json_object import parse_object
from .source.cache_dir import SHARED_MODE, cache_root, digest, writing

FORMAT = "4"
# Raise it when the same files give other keys and values than before by more than rounding: a mended RoPE variant,
# another reading of a config key. States of before are then refused.
ARITHMETIC = "1"
MISSING = {"arithmetic": "1", "activations": "float32"}  # what fields mean that files of older versions do not have


def identify(
    model: CausalLM, specs: list, tokenizer: Tokenizer | None, files: Iterable["FileStamp"], block: int
) -> dict[str, str]:
    """Reads all weight files the first time, so it is called only when something outlives this process."""
    files = tuple(files)
    arrays: Any = tree_flatten(model.parameters())
    return {
        "format": FORMAT,
        "arithmetic": ARITHMETIC,
        "weights": loaded_digest(files) if files else parameters_digest(model, arrays),
        "adapter": "none",
        "tokenizer": tokenizer.digest if tokenizer else "none",
        "cache": "; ".join(spec.signature for spec in specs),
        "block": str(block),
        # dequantised weights and other compute dtypes round differently
        "dtype": ", ".join(sorted({str(array.dtype) for _, array in arrays})),
        "activations": model.kernels.cpu.activations if model.kernels.cpu is not None else "float32",
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
    known_before = {k: v for k, v in identity.items() if MISSING.get(k) != v}  # so that older disk caches are found
    return hashlib.sha256(json.dumps(known_before, sort_keys=True).encode()).hexdigest()


def differing_field(saved: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """The first field in which a saved identity is not the one here."""
    found = MISSING | dict(saved)
    return next((field for field in (*here, *found) if found.get(field) != here.get(field)), None)


SETTINGS = {
    "dtype": "the same model and settings (dtype, and dequantise: packed or unpacked weights)",
    "activations": "the same cpu_activations",
}


def check_same(path: Path, saved: dict[str, str], here: dict[str, str]) -> None:
    if field := differing_field(saved, here):
        raise BadSnapshot(
            f"{path} was saved with another {field} ({str((MISSING | saved).get(field))[:60]!r}, here "
            f"{str(here.get(field))[:60]!r}); restore it with {SETTINGS.get(field, 'the same model and settings')}"
        )


# Files as they were when a model was loaded

HASHED_AT_LOAD = 64 << 20  # bytes: smaller files are hashed while they are loaded, larger ones when that is needed


@dataclass(frozen=True)
class FileStamp:
    """A file when it was read. `sha256`: of the bytes, where they were hashed then."""

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: tuple[int, int]
    sha256: str | None = None

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        at = os.stat(path)
        return cls(path, at.st_size, at.st_mtime_ns, at.st_ctime_ns, (at.st_dev, at.st_ino))

    def to_list(self, path: Path) -> list[str]:
        """As a cached digest has it, under the file's real path."""
        return [str(path), str(self.size), str(self.mtime_ns), str(self.ctime_ns)]

    @property
    def is_young(self) -> bool:
        """Changed so recently that it could change again and keep its times."""
        return time.time() - max(self.mtime_ns, self.ctime_ns) / 1e9 < MIN_AGE


def stamp_files(path: Path) -> dict[Path, FileStamp]:
    """The stamps of a model's folder, or of a file and those of its kind beside it, before anything of it is read."""
    stamps = {}
    for file in path.iterdir() if path.is_dir() else {path, *path.parent.glob(f"*{path.suffix}")}:
        with contextlib.suppress(OSError):  # gone, or a broken link: whoever needs it says so
            stamp = FileStamp.of(file)
            small = stamp.size <= HASHED_AT_LOAD and file.is_file()
            stamps[file] = replace(stamp, sha256=hash_file(file)) if small and stamp.is_young else stamp
    return stamps


def check_loaded(before: Mapping[Path, FileStamp], files: Iterable[Path]) -> tuple[FileStamp, ...]:
    """The stamps of the files that were read since `before`; BadCheckpoint where one of them changed meanwhile."""
    return tuple(check_loaded_file(before.get(path), path) for path in files)


def check_loaded_file(before: FileStamp | None, path: Path) -> FileStamp:
    changed = BadCheckpoint(f"{path} changed while it was loaded; load the model again")
    try:
        now = FileStamp.of(path)
        if now.size <= HASHED_AT_LOAD:
            now = replace(now, sha256=hash_file(path))
    except OSError:
        raise changed from None
    if before is None or replace(now, sha256=None) != replace(before, sha256=None):
        raise changed
    if before.sha256 not in (None, now.sha256):
        raise changed
    return now


def loaded_digest(stamps: Iterable[FileStamp]) -> str:
    """The digest of the files as they were loaded; BadSnapshot where a file that was not hashed then has changed."""
    return combine_digests((stamp.path, stamp.sha256 or digest_as_loaded(stamp)) for stamp in stamps)


def digest_as_loaded(stamp: FileStamp) -> str:
    real = stamp.path.resolve()
    try:
        if FileStamp.of(stamp.path) == stamp:
            found = file_digest(stamp.path)
            if FileStamp.of(stamp.path) == stamp:
                return found
        else:  # the same bytes under another date, if they were ever hashed under the old one
            if (known := read_cached_digest(digest_cache_path(real), stamp.to_list(real))) and hash_file(real) == known:
                return known
    except OSError as error:
        raise BadSnapshot(f"{stamp.path} cannot be read any more ({error.strerror}): {UNNAMED}") from None
    raise BadSnapshot(f"{stamp.path} has changed since it was loaded: {UNNAMED}")


UNNAMED = "no state of this engine can be saved or restored; load the model again"


# Digests

MIN_AGE = 2.0  # seconds: a file changed this recently may change again within the clock's resolution


def weights_digest(files: Iterable[Path]) -> str:
    """The digest of all files and their names, in order."""
    return combine_digests((path, file_digest(path)) for path in files)


def combine_digests(files: Iterable[tuple[Path, str]]) -> str:
    total = hashlib.sha256()
    for path, found in files:
        total.update(f"{path.name} {found}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def file_digest(path: Path) -> str:
    real = path.resolve()
    before = FileStamp.of(real)
    cache, stamp = digest_cache_path(real), before.to_list(real)
    if known := read_cached_digest(cache, stamp):
        return known
    found = hash_file(real)
    if FileStamp.of(real).to_list(real) == stamp and not before.is_young:
        write_cached_digest(cache, stamp, found)
    return found


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return digest(file)


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
