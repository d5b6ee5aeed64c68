"""The user's cache folder (MLXRT_CACHE) with a lock per folder."""

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

SHARED_MODE = 0o644  # of files that other users of this cache may read


def cache_root() -> Path:
    """$MLXRT_CACHE, else the platform's cache folder. Nothing is created."""
    if chosen := os.environ.get("MLXRT_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return home_dir() / "Library" / "Caches" / "mlxrt"
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative value is ignored.
    return (Path(shared) if os.path.isabs(shared) else home_dir() / ".cache") / "mlxrt"


def home_dir() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise HubError("this user has no home folder; set MLXRT_CACHE to a folder that can be written") from None


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn OSErrors of the disk (full, read-only, no permission) into a HubError that names the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise HubError(f"cannot use {error.filename or folder}: {reason}; free space or set MLXRT_CACHE") from error


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """One process at a time; partial files of a killed process are deleted."""
    import fcntl

    with open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info(f"another process is writing to {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for partial in folder.glob(PARTIAL + "*"):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        yield


def file_size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def digest(stream: BufferedReader) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()
