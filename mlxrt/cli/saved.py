"""What `mlxrt state` finds at a path: a single state, a bundle or a disk store. Each says the same things of itself."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from ..cache.storage.archive import INDEX, Bundle, listed
from ..cache.storage.checksummed import AT, OPENING, inspect_sealed
from ..cache.storage.disk_index import IDENTITY, MARK, model_folders
from ..cache.storage.record import parse_name
from ..cache.storage.snapshot import check_header
from ..errors import BadRequest, BadSnapshot
from ..weights.formats.json_text import parse_object

Row = dict[str, Any]


def open_saved(path: str) -> "Saved":
    at = Path(path).expanduser()
    if at.is_file():
        return SingleState(at)
    if not at.is_dir():
        raise BadSnapshot(f"there is nothing at {path}")
    if (at / MARK).is_file():
        return StoreFolder(at)
    if (at / INDEX).is_file():
        return SavedBundle(at)
    raise BadSnapshot(f"{path} is neither a bundle of saved states ({INDEX}) nor a disk cache ({MARK})")


class Saved(ABC):
    kind = ""

    def __init__(self, path: Path):
        self.path = path

    @abstractmethod
    def rows(self, name: str | None) -> list[Row]: ...

    @abstractmethod
    def detail(self, name: str | None) -> Row: ...

    @abstractmethod
    def verify(self, name: str | None) -> list[Row]: ...

    @abstractmethod
    def remove(self, name: str | None) -> list[str]:
        """What was removed."""


class SingleState(Saved):
    kind = "state"

    def rows(self, name):
        refuse(self.path, name)
        told = self.detail(None)
        return [{"file": self.path.name} | {k: told[k] for k in ("tokens", "turns", "model", "bytes")}]

    def detail(self, name):
        refuse(self.path, name)
        return describe_state(self.path)

    def verify(self, name):
        refuse(self.path, name)
        return [{"name": self.path.name} | verdict(self.path)]

    def remove(self, name):
        refuse(self.path, name)
        with open(self.path, "rb") as file:
            if file.read(AT)[8:] != OPENING:
                raise BadSnapshot(f"{self.path} is no state saved by mlxrt; it was not removed")
        self.path.unlink()
        return [str(self.path)]


class SavedBundle(Saved):
    kind = "bundle"

    def chosen(self, name):
        entries = Bundle(self.path).entries()
        if name is not None and name not in entries:
            raise BadSnapshot(f"{self.path} holds no state {name!r}; there are: {listed(entries)}")
        return {name: entries[name]} if name is not None else entries

    def rows(self, name):
        return [
            {"name": own, "tokens": e.tokens, "model": e.model, "created": e.created, "bytes": size(self.path / e.file)}
            for own, e in self.chosen(name).items()
        ]

    def detail(self, name):
        file, digest = Bundle(self.path).find(name)
        return {"file": file.name, "sha256": digest} | describe_state(file, digest)

    def verify(self, name):
        return [{"name": own} | verdict(self.path / e.file, e.sha256) for own, e in self.chosen(name).items()]

    def remove(self, name):
        names = list(self.chosen(name))
        for own in names:
            Bundle(self.path).remove(own)
        return names


class StoreFolder(Saved):
    kind = "disk cache"

    def chosen(self, name):
        found = {folder.name: folder for folder in model_folders(self.path)}
        if name is None:
            return found
        matching = {own: folder for own, folder in found.items() if own.startswith(name)}
        if len(matching) != 1:
            there = ", ".join(own[:12] for own in found) or "none"
            raise BadRequest(f"{self.path} has {len(matching)} models named {name!r}...; there are: {there}")
        return matching

    def rows(self, name):
        return [
            {"name": own[:12], "records": len(found), "bytes": sum(map(size, found))} | told_identity(folder)
            for own, folder in self.chosen(name).items()
            if (found := records(folder)) is not None
        ]

    def detail(self, name):
        folders = self.chosen(name)
        if len(folders) != 1:
            there = ", ".join(own[:12] for own in folders)
            raise BadRequest(f"{self.path} has {len(folders)} models: {there or 'none'}; name one")
        [(own, folder)] = folders.items()
        found = records(folder)
        return {"name": own, "records": len(found), "bytes": sum(map(size, found))} | read_identity(folder)

    def verify(self, name):
        """One row a model, and one for each record that is not what was written."""
        rows = []
        for own, folder in self.chosen(name).items():
            found = {path.name: verdict(path) for path in records(folder)}
            bad = [{"name": record} | told for record, told in found.items() if not told["ok"]]
            sound = f"{len(found) - len(bad)} of {len(found)} records are sound"
            rows += [{"name": own[:12], "ok": not bad, "found": sound}, *bad]
        return rows

    def remove(self, name):
        removed = []
        for folder in self.chosen(name).values():
            for path in (*records(folder), folder / IDENTITY):
                path.unlink(missing_ok=True)
            removed.append(str(folder))
        return removed


def refuse(path: Path, name: str | None) -> None:
    if name is not None:
        raise BadRequest(f"{path} is one saved state, not a bundle: it has no names; leave {name!r} out")


def describe_state(path: Path, digest: str | None = None) -> Row:
    found, header = inspect_sealed(path)
    if digest is not None and found != digest:
        raise BadSnapshot(f"{path} is another file than the index names (sha256 {found[:12]}, not {digest[:12]})")
    check_header(path, header)
    turns, model = header["extra"].get("turns"), header["extra"].get("model")
    return {
        "tokens": len(header["tokens"]),
        "turns": len(turns) - 1 if isinstance(turns, list) else 0,
        "model": model if isinstance(model, str) else "",
        "bytes": size(path),
        **{f"{field}": str(value) for field, value in header["identity"].items()},
    }


def verdict(path: Path, digest: str | None = None) -> Row:
    try:
        found, _ = inspect_sealed(path)
    except FileNotFoundError:
        return {"ok": False, "found": "the file is missing"}
    except BadSnapshot as error:
        return {"ok": False, "found": str(error)}
    if digest is not None and found != digest:
        return {"ok": False, "found": f"sha256 {found[:12]}, the index says {digest[:12]}"}
    return {"ok": True, "found": f"sha256 {found[:12]}"}


def records(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if parse_name(path.name))


def size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def read_identity(folder: Path) -> Row:
    try:
        return {str(k): str(v) for k, v in parse_object((folder / IDENTITY).read_bytes()).items()}
    except (OSError, ValueError) as error:
        return {"identity": f"unknown ({error})"}


def told_identity(folder: Path) -> Row:
    told = read_identity(folder)
    return {"weights": told.get("weights", "unknown")[:12], "dtype": told.get("dtype", "unknown")}
