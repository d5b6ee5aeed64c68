"""Disk index: which records a disk cache has, how many bytes they take, and which are evicted first (LRU).

Other processes use the same folder, so files may vanish or appear at any time and the index is a guess that the disk
corrects. Each model has its own folder below the root; the byte limit is for all together.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import BadRequest
from ..files import atomic_write, remove_partial_files
from .record import file_name, parse_name

MARK, IDENTITY = "mlxrt-store.json", "identity.json"
MODEL_FOLDER = re.compile(r"[0-9a-f]{64}")
EVICT_TO = 0.95  # of the limit: sorting all files by age is not repeated for every new one
LRU_STEP = 1000  # ns between the records of one text: its end counts as older, so it is evicted first


@contextmanager
def refuse_folder(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadRequest(f"disk_cache {root} cannot be used: {error.strerror}; name another folder") from None


def write_mark(root: Path) -> None:
    write_json_once(root / MARK, {"mlxrt": "disk store", "format": "1"})


def prepare_root(root: Path) -> None:
    """Create the folder of all models where it is missing; refuse one that cannot be written."""
    with refuse_folder(root):
        root.mkdir(parents=True, exist_ok=True)
        write_mark(root)


class DiskIndex:
    def __init__(self, root: Path, digest: str, identity: Mapping[str, str], limit: int):
        self.root, self.folder, self.limit = root, root / digest, limit
        self.groups: dict[str, set[int]] = {}  # this model's records: node digest -> bit masks of groups, one per file
        self._identity = dict(identity)
        self.nbytes = 0  # of all models
        self._sizes: dict[Path, int] = {}
        self._mtimes: dict[Path, int] = {}  # of folders
        with refuse_folder(root):
            self.prepare()
            remove_partial_files(self.folder)
            self.refresh()

    def prepare(self) -> None:
        """Create the folder where it is missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_mark(self.root)
        write_json_once(self.folder / IDENTITY, self._identity)

    def __len__(self) -> int:
        """The number of this model's records."""
        return sum(map(len, self.groups.values()))

    def path(self, digest: str, groups: int) -> Path:
        return self.folder / file_name(digest, groups)

    def files(self) -> Iterator[Path]:
        """This model's records."""
        yield from (self.path(digest, groups) for digest, masks in self.groups.items() for groups in masks)

    def refresh(self) -> None:
        """See what other processes did. A folder that did not change is not listed."""
        folders = set(model_folders(self.root))
        for gone in self._mtimes.keys() - folders:
            del self._mtimes[gone]
            self._keep_only(gone, set())
        for folder in folders:
            with suppress(FileNotFoundError):
                changed = folder.stat().st_mtime_ns
                if self._mtimes.get(folder) != changed:
                    self._read(folder)
                    self._mtimes[folder] = changed

    def _read(self, folder: Path) -> None:
        names = {name for name in os.listdir(folder) if parse_name(name)}
        self._keep_only(folder, names)
        for name in names:
            if (path := folder / name) not in self._sizes:
                self.add(path)

    def _keep_only(self, folder: Path, names: set[str]) -> None:
        for path in [p for p in self._sizes if p.parent == folder and p.name not in names]:
            self.forget(path)

    def add(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            self.nbytes += size - self._sizes.get(path, 0)
            self._sizes[path] = size
            if path.parent == self.folder and (name := parse_name(path.name)):
                self.groups.setdefault(name[0], set()).add(name[1])

    def forget(self, path: Path) -> None:
        """Drop a record whose file is gone."""
        self.nbytes -= self._sizes.pop(path, 0)
        name = parse_name(path.name)
        if path.parent == self.folder and name and name[0] in self.groups:
            self.groups[name[0]].discard(name[1])
            if not self.groups[name[0]]:
                del self.groups[name[0]]

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.forget(path)

    def touch(self, paths: Iterable[Path]) -> None:
        """Mark the records of one text, in order, as used now, where the file system lets us."""
        now = time.time_ns()
        for i, path in enumerate(paths):
            with suppress(OSError):
                os.utime(path, ns=(now - i * LRU_STEP, now - i * LRU_STEP))

    def evict(self) -> int:
        """Remove the least recently used records until the limit holds; returns how many."""
        if self.nbytes <= self.limit:
            return 0
        removed = 0
        for path in sorted(self._sizes, key=last_used):
            if self.nbytes <= self.limit * EVICT_TO:
                break
            self.remove(path)
            removed += 1
        return removed


def last_used(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


def model_folders(root: Path) -> list[Path]:
    """The folders below a disk cache's root, one per model."""
    with suppress(FileNotFoundError), os.scandir(root) as entries:
        return [Path(e.path) for e in entries if MODEL_FOLDER.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return []


def write_json_once(path: Path, content: Mapping[str, str]) -> None:
    """Write a small file that says what a folder is, unless it exists."""
    if not path.exists():
        with atomic_write(path) as file:
            file.write(json.dumps(content, indent=1, sort_keys=True).encode())
