"""Atomic file writes, for everything mlxrt keeps on disk: downloads, saved states, disk cache, compiled kernels."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PARTIAL = ".mlxrt-partial-"  # prefix of a file that is being written
ABANDONED_AFTER = 600  # seconds after which the writer of a partial file must be dead


@contextlib.contextmanager
def atomic_write(path: Path, *, replace: bool = True, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """Write to a temporary file beside `path`, then rename: readers see the old file or the new one, never half.

    With `replace` off an existing file is left as it is. By default only the owner may read: states quote prompts.
    """
    handle, name = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        if replace or not link_if_absent(name, path):
            os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def link_if_absent(name: str, path: Path) -> bool:
    """Hard-link the file to `path` unless that exists. False where the file system has no hard links."""
    try:
        os.link(name, path)
    except FileExistsError:
        return True
    except OSError:
        return path.exists()
    return True


def remove_partial_files(folder: Path) -> None:
    """Remove what killed writers left, where the file system lets us."""
    for partial in folder.glob(PARTIAL + "*"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > ABANDONED_AFTER:
                partial.unlink()
