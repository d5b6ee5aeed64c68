"""Archive: a folder of named saved states with an index, which gives each name its file and that file's digest.

A state is written before the index names it, so a crash in between leaves a file without a name, which the next save
removes. Handles files and names only; callers pass in how a state is written.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

from ...errors import BadRequest, BadSnapshot, quote
from ...weights.json_object import parse_object
from ..files import atomic_write, remove_partial_files

INDEX, LOCK, SUFFIX = "index.json", ".lock", ".state"
KIND, FORMAT = "bundle", "1"
FILE_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}")
MAX_NAME_LENGTH = 200


@dataclass(frozen=True)
class SavedState:
    file: str
    sha256: str  # the digest in the file
    tokens: int
    model: str
    created: str  # UTC, ISO 8601


def is_archive(path: Path, name: str | None) -> bool:
    if name is not None and path.exists() and not path.is_dir():
        raise BadRequest(f"{path} is one saved state, not an archive: it has no names; leave {name!r} out")
    return name is not None or path.is_dir()


class Archive:
    def __init__(self, folder: Path):
        self.folder = folder

    def entries(self) -> dict[str, SavedState]:
        """Read and check the index. Empty where the folder has none."""
        path = self.folder / INDEX
        try:
            index = parse_object(path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise BadSnapshot(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise BadSnapshot(f"{path} is no index of saved states ({error})") from None
        if index.get("mlxrt") != KIND or index.get("format") != FORMAT or not isinstance(index.get("states"), dict):
            raise BadSnapshot(f"{path} is no index of saved states that this version of mlxrt can read")
        return {name: parse_saved_state(path, name, raw) for name, raw in index["states"].items()}

    def find(self, name: str | None) -> tuple[Path, str]:
        """The file of a state and its digest. The name may be left out if there is only one."""
        entries = self.entries()
        if not entries:
            raise BadSnapshot(f"{self.folder} holds no saved states")
        if name is None and len(entries) > 1:
            raise BadRequest(f"{self.folder} holds {len(entries)} states: {format_names(entries)}; name one")
        chosen = next(iter(entries)) if name is None else name
        if chosen not in entries:
            raise BadSnapshot(f"{self.folder} holds no state {chosen!r}; there are: {format_names(entries)}")
        path = self.folder / entries[chosen].file
        if not path.is_file():
            raise BadSnapshot(f"{self.folder / INDEX} names {path.name} for {chosen!r}, but there is no such file")
        return path, entries[chosen].sha256

    def save(self, name: str | None, write: Callable[[Path], str], tokens: int, model: str) -> None:
        """`write` writes the state's file and returns its digest. An older state of that name is replaced."""
        check_name(self.folder, name)
        assert name is not None
        self.folder.mkdir(exist_ok=True)
        with self._locked():
            entries = self.entries()  # refuses an unreadable index before anything is written
            file = f"{uuid4().hex}{SUFFIX}"
            digest = write(self.folder / file)
            created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self._write_index(entries | {name: SavedState(file, digest, tokens, model, created)})

    def remove(self, name: str) -> None:
        with self._locked():
            entries = self.entries()
            if name not in entries:
                raise BadSnapshot(f"{self.folder} holds no state {name!r}; there are: {format_names(entries)}")
            del entries[name]
            self._write_index(entries)

    def _write_index(self, entries: dict[str, SavedState]) -> None:
        index = {"mlxrt": KIND, "format": FORMAT, "states": {name: asdict(e) for name, e in entries.items()}}
        with atomic_write(self.folder / INDEX) as file:
            file.write(json.dumps(index, indent=1, ensure_ascii=False).encode())
        named = {saved.file for saved in entries.values()}
        for path in self.folder.glob(f"*{SUFFIX}"):
            if FILE_NAME.fullmatch(path.name) and path.name not in named:
                path.unlink(missing_ok=True)
        remove_partial_files(self.folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Serialises writers across processes; the system releases the lock of one that dies."""
        import fcntl

        with open(self.folder / LOCK, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def format_names(entries: dict[str, SavedState]) -> str:
    names = [quote(name) for name in entries]
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") if names else "none"


def check_name(folder: Path, name: str | None) -> None:
    if name is None:
        raise BadRequest(f"{folder} is a folder: give the state a name in it, or name a file")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise BadRequest(f"a state's name is 1..{MAX_NAME_LENGTH} printable characters, not {quote(name)}")


def parse_saved_state(path: Path, name: str, raw: Any) -> SavedState:
    kinds = {field.name: field.type for field in fields(SavedState)}
    if not isinstance(raw, dict) or set(raw) != set(kinds) or any(type(raw[k]) is not t for k, t in kinds.items()):
        raise BadSnapshot(f"{path}: the state {quote(name)} is described by {quote(raw)}")
    # Only plain names: an index must not make us read, or remove, anything outside its folder.
    if not FILE_NAME.fullmatch(raw["file"]):
        raise BadSnapshot(f"{path}: the state {quote(name)} lies in {quote(raw['file'])}, no name that mlxrt gives")
    return SavedState(**raw)
