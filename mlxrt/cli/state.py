"""`mlxrt state`: lists, shows, verifies and removes saved states, archives of them and disk caches. Needs no model."""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cache.storage.archive import INDEX, Archive, format_names
from ..cache.storage.checksummed import has_magic, read_verified_header
from ..cache.storage.disk_index import IDENTITY, MARK, model_folders
from ..cache.storage.record import parse_name
from ..cache.storage.snapshot import check_header
from ..errors import BadRequest, BadSnapshot
from ..weights.json_object import parse_object
from .flags import Parser
from .terminal import format_bytes, one_line

Row = dict[str, Any]

ACTIONS = {
    "ls": "list what is saved",
    "show": "one state, or one model of a disk cache, in detail",
    "verify": "compare every file with its digest; exit code 1 when one differs",
    "rm": "remove it",
}


def add_flags(parser: Parser) -> None:
    actions = "; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    parser.add_argument("action", choices=tuple(ACTIONS), help=actions)
    parser.add_argument("path", metavar="PATH", help="a saved state, an archive of them, or the folder of a disk cache")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one state of an archive, or one model of a disk cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    saved = open_saved(args.path, args.name)
    found: dict[str, Any] = {"kind": saved.kind, "path": args.path}
    if args.action == "show":
        found |= saved.detail(args.name)
    elif args.action == "rm":
        found["removed"] = saved.remove(args.name)
    else:
        found["entries"] = saved.rows(args.name) if args.action == "ls" else saved.verify(args.name)
    if args.json:
        print(json.dumps(found, ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(map(one_line, format_rows(args.action, found))))
    return 1 if args.action == "verify" and any(not entry["ok"] for entry in found["entries"]) else 0


def format_rows(action: str, found: dict[str, Any]) -> list[str]:
    if action == "rm":
        return [f"removed {name}" for name in found["removed"]] or ["nothing to remove"]
    if action == "show":
        messages = [f"{message['role']}: {message['content']}" for message in found.get("messages", ())]
        shown = {key: value for key, value in found.items() if key != "messages"}
        return [*(f"{key:<12} {format_value(key, value)}" for key, value in shown.items()), *messages]
    rows = [[format_value(key, value) for key, value in entry.items()] for entry in found["entries"]]
    if not rows:
        return [f"{found['path']}: nothing is saved there"]
    heads = list(found["entries"][0])
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (heads, *rows)]


def format_value(key: str, value: Any) -> str:
    if key == "bytes":
        return format_bytes(value)
    if key == "ok":
        return "ok" if value else "BAD"
    if key == "cache":
        return count_layers(value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {str(v)[:60]}" for k, v in value.items())
    return str(value)


def count_layers(cache: str) -> str:
    """The kinds of layers of a model's cache, each once, with the number of layers that have it."""
    counts = Counter(cache.split("; "))
    return "; ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in counts.items())


def open_saved(path: str, name: str | None) -> "StateFile | StateArchive | DiskCache":
    at = Path(path).expanduser()
    if at.is_file():
        if name is not None:
            raise BadRequest(f"{at} is one saved state, not an archive: it has no names; leave {name!r} out")
        return StateFile(at)
    if not at.is_dir():
        raise BadSnapshot(f"there is nothing at {path}")
    if (at / MARK).is_file():
        return DiskCache(at)
    if (at / INDEX).is_file():
        return StateArchive(at)
    raise BadSnapshot(f"{path} is neither an archive of saved states ({INDEX}) nor a disk cache ({MARK})")


@dataclass(frozen=True)
class StateFile:
    """One saved state. Every kind answers the same questions; `remove` returns what was removed."""

    path: Path
    kind = "state"

    def rows(self, name):
        detail = self.detail(None)
        return [{"file": self.path.name} | {k: detail[k] for k in ("tokens", "turns", "model", "bytes")}]

    def detail(self, name):
        return describe_state(self.path)

    def verify(self, name):
        return [{"name": self.path.name} | check_digest(self.path)]

    def remove(self, name):
        if not has_magic(self.path):
            raise BadSnapshot(f"{self.path} is no state saved by mlxrt; it was not removed")
        self.path.unlink()
        return [str(self.path)]


@dataclass(frozen=True)
class StateArchive:
    path: Path
    kind = "bundle"

    def select(self, name):
        entries = Archive(self.path).entries()
        if name is not None and name not in entries:
            raise BadSnapshot(f"{self.path} holds no state {name!r}; there are: {format_names(entries)}")
        return {name: entries[name]} if name is not None else entries

    def rows(self, name):
        return [
            {"name": own, "tokens": e.tokens, "model": e.model, "created": e.created}
            | {"bytes": file_size(self.path / e.file)}
            for own, e in self.select(name).items()
        ]

    def detail(self, name):
        file, digest = Archive(self.path).find(name)
        return {"file": file.name, "sha256": digest} | describe_state(file, digest)

    def verify(self, name):
        return [{"name": own} | check_digest(self.path / e.file, e.sha256) for own, e in self.select(name).items()]

    def remove(self, name):
        names = list(self.select(name))
        for own in names:
            Archive(self.path).remove(own)
        return names


@dataclass(frozen=True)
class DiskCache:
    path: Path
    kind = "disk cache"

    def select(self, name):
        # The folder of a removed model stays: an engine may be writing into it.
        found = {f.name: f for f in model_folders(self.path) if (f / IDENTITY).exists() or list_records(f)}
        if name is None:
            return found
        matching = {own: folder for own, folder in found.items() if own.startswith(name)}
        if len(matching) != 1:
            there = ", ".join(own[:12] for own in found) or "none"
            raise BadRequest(f"{self.path} has {len(matching)} models named {name!r}...; there are: {there}")
        return matching

    def rows(self, name):
        return [
            {"name": own[:12]} | count_records(folder) | summarize_identity(folder)
            for own, folder in self.select(name).items()
        ]

    def detail(self, name):
        folders = self.select(name)
        if len(folders) != 1:
            there = ", ".join(own[:12] for own in folders)
            raise BadRequest(f"{self.path} has {len(folders)} models: {there or 'none'}; name one")
        [(own, folder)] = folders.items()
        return {"name": own} | count_records(folder) | read_identity(folder)

    def verify(self, name):
        """One row per model, and one per damaged record."""
        rows = []
        for own, folder in self.select(name).items():
            found = {path.name: check_digest(path) for path in list_records(folder)}
            bad = [{"name": record} | result for record, result in found.items() if not result["ok"]]
            sound = f"{len(found) - len(bad)} of {len(found)} records are intact"
            rows += [{"name": own[:12], "ok": not bad, "found": sound}, *bad]
        return rows

    def remove(self, name):
        removed = []
        for folder in self.select(name).values():
            for path in (*list_records(folder), folder / IDENTITY):
                path.unlink(missing_ok=True)
            removed.append(str(folder))
        return removed


def describe_state(path: Path, digest: str | None = None) -> Row:
    found, header = read_verified_header(path)
    if digest is not None and found != digest:
        raise BadSnapshot(f"{path} is not the file that the index names (sha256 {found[:12]}, not {digest[:12]})")
    check_header(path, header)
    turns, model = header["extra"].get("turns"), header["extra"].get("model")
    return {
        "tokens": len(header["tokens"]),
        "turns": len(turns) - 1 if isinstance(turns, list) else 0,
        "model": model if isinstance(model, str) else "",
        "bytes": file_size(path),
        **{field: str(value) for field, value in header["identity"].items()},
        "messages": list_messages(turns),
    }


def list_messages(turns: Any) -> list[Row]:
    """What was said: the messages of the last turn, which has them all."""
    last = turns[-1] if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else {}
    messages = last.get("messages")
    return [
        {"role": str(m.get("role", "")), "content": m["content"] if isinstance(m.get("content"), str) else ""}
        for m in (messages if isinstance(messages, list) else ())
        if isinstance(m, dict)
    ]


def check_digest(path: Path, digest: str | None = None) -> Row:
    try:
        found, _ = read_verified_header(path)
    except FileNotFoundError:
        return {"ok": False, "found": "the file is missing"}
    except BadSnapshot as error:
        return {"ok": False, "found": str(error)}
    if digest is not None and found != digest:
        return {"ok": False, "found": f"sha256 {found[:12]}, the index says {digest[:12]}"}
    return {"ok": True, "found": f"sha256 {found[:12]}"}


def list_records(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if parse_name(path.name))


def count_records(folder: Path) -> Row:
    found = list_records(folder)
    return {"records": len(found), "bytes": sum(map(file_size, found))}


def file_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def read_identity(folder: Path) -> Row:
    try:
        return {str(k): str(v) for k, v in parse_object((folder / IDENTITY).read_bytes()).items()}
    except (OSError, ValueError) as error:
        return {"identity": f"unknown ({error})"}


def summarize_identity(folder: Path) -> Row:
    identity = read_identity(folder)
    dtype = identity.get("dtype", "unknown").replace("mlx.core.", "")
    return {"weights": identity.get("weights", "unknown")[:12], "dtype": dtype}
