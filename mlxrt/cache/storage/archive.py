"""A folder of named states with an index. The index says which file a name means and what its digest must be.

A state is written first and named after: whoever dies in between leaves a file nobody names, which the next save
removes. Knows files and names; how a state is written and read is given to it.
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

from ...errors import BadRequest, BadSnapshot, shown
from ...weights.formats.json_text import parse_object
from .checksummed import landing, sweep

INDEX, LOCK, SUFFIX = "index.json", ".lock", ".state"
KIND, FORMAT = "bundle", "1"
FILE = re.compile(rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}")
LONGEST_NAME = 200


@dataclass(frozen=True)
class Entry:
    file: str
    sha256: str  # the digest the file carries
    tokens: int
    model: str
    created: str  # UTC, ISO 8601


def is_bundle(path: Path, name: str | None) -> bool:
    if name is not None and path.exists() and not path.is_dir():
        raise BadRequest(f"{path} is one saved state, not a bundle: it has no names; leave {name!r} out")
    return name is not None or path.is_dir()


class Bundle:
    def __init__(self, folder: Path):
        self.folder = folder

    def entries(self) -> dict[str, Entry]:
        """The index, checked. Empty where the folder has none."""
        path = self.folder / INDEX
        try:
            told = parse_object(path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise BadSnapshot(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise BadSnapshot(f"{path} is no index of saved states ({error})") from None
        if told.get("mlxrt") != KIND or told.get("format") != FORMAT or not isinstance(told.get("states"), dict):
            raise BadSnapshot(f"{path} is no index of saved states that this version of mlxrt can read")
        return {name: read_entry(path, name, entry) for name, entry in told["states"].items()}

    def find(self, name: str | None) -> tuple[Path, str]:
        """The file of a state and its digest. Without a name, of the only one."""
        entries = self.entries()
        if not entries:
            raise BadSnapshot(f"{self.folder} holds no saved states")
        if name is None and len(entries) > 1:
            raise BadRequest(f"{self.folder} holds {len(entries)} states: {listed(entries)}; name one")
        chosen = next(iter(entries)) if name is None else name
        if chosen not in entries:
            raise BadSnapshot(f"{self.folder} holds no state {chosen!r}; there are: {listed(entries)}")
        path = self.folder / entries[chosen].file
        if not path.is_file():
            raise BadSnapshot(f"{self.folder / INDEX} names {path.name} for {chosen!r}, but there is no such file")
        return path, entries[chosen].sha256

    def save(self, name: str | None, write: Callable[[Path], str], tokens: int, model: str) -> None:
        """`write` makes the state's file and answers with its digest. The old state of this name stays until then."""
        check_name(self.folder, name)
        assert name is not None
        self.folder.mkdir(exist_ok=True)
        with self._alone():
            entries = self.entries()  # an index that is not ours is refused before anything is written
            file = f"{uuid4().hex}{SUFFIX}"
            digest = write(self.folder / file)
            created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self._write(entries | {name: Entry(file, digest, tokens, model, created)})

    def remove(self, name: str) -> None:
        with self._alone():
            entries = self.entries()
            if name not in entries:
                raise BadSnapshot(f"{self.folder} holds no state {name!r}; there are: {listed(entries)}")
            del entries[name]
            self._write(entries)

    def _write(self, entries: dict[str, Entry]) -> None:
        told = {"mlxrt": KIND, "format": FORMAT, "states": {name: asdict(e) for name, e in entries.items()}}
        with landing(self.folder / INDEX) as file:
            file.write(json.dumps(told, indent=1, ensure_ascii=False).encode())
        named = {entry.file for entry in entries.values()}
        for path in self.folder.glob(f"*{SUFFIX}"):
            if FILE.fullmatch(path.name) and path.name not in named:
                path.unlink(missing_ok=True)
        sweep(self.folder)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time changes a bundle; whoever dies lets go."""
        import fcntl

        with open(self.folder / LOCK, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def listed(entries: dict[str, Entry]) -> str:
    names = [shown(name) for name in entries]
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") if names else "none"


def check_name(folder: Path, name: str | None) -> None:
    if name is None:
        raise BadRequest(f"{folder} is a folder: give the state a name in it, or name a file")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise BadRequest(f"a state's name is 1..{LONGEST_NAME} printable characters, not {shown(name)}")


def read_entry(path: Path, name: str, told: Any) -> Entry:
    kinds = {field.name: field.type for field in fields(Entry)}
    if not isinstance(told, dict) or set(told) != set(kinds) or any(type(told[k]) is not t for k, t in kinds.items()):
        raise BadSnapshot(f"{path}: the state {shown(name)} is described by {shown(told)}")
    # Only plain names: an index must not make us read, or remove, anything outside its folder.
    if not FILE.fullmatch(told["file"]):
        raise BadSnapshot(f"{path}: the state {shown(name)} lies in {shown(told['file'])}, no name that mlxrt gives")
    return Entry(**told)
