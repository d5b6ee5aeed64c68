"""Where mlxrt keeps what it fetched: one folder per user, movable by an environment variable.

It knows nothing of models; whoever stores something here chooses the name below the root.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from ...cache.files import PARTIAL
from ...errors import HubError

log = logging.getLogger("mlxrt")

SHARED_MODE = 0o644  # mode of files that other users of this cache may read


def cache_root() -> Path:
    """$MLXRT_CACHE, else the platform's cache folder. Nothing is created."""
    if chosen := os.environ.get("MLXRT_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return home() / "Library" / "Caches" / "mlxrt"
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says a relative value is to be ignored.
    return (Path(shared) if os.path.isabs(shared) else home() / ".cache") / "mlxrt"


def home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise HubError("this user has no home folder; set MLXRT_CACHE to a folder that can be written") from None


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the disk refuses (full, read-only, not ours) into one line that names the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise HubError(f"cannot use {error.filename or folder}: {reason}; free space or set MLXRT_CACHE") from error


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time; what a killed predecessor left half-written is swept away."""
    import fcntl

    with open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info(f"another process is filling {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(PARTIAL + "*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield


def size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def digest(stream: BufferedReader) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()
