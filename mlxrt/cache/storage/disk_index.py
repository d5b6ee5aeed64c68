"""The files of a store's folder: which records there are, how many bytes they take, which of them go first.

Other processes use the same folder: a file may vanish at any moment and new ones appear, so everything remembered here
is a guess that the disk corrects. Each model has a folder of its own below the root; the budget is for all together.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ...errors import BadRequest
from .checksummed import landing, sweep
from .record import file_name, parse_name

MARK, IDENTITY = "mlxrt-store.json", "identity.json"
OWN_FOLDER = re.compile(r"[0-9a-f]{64}")
AFTER_EVICTION = 0.95  # of the budget: looking at the age of every file is not repeated for every new one
APART = 1000  # ns between the records of one text: its end counts as older than its beginning, so it goes first


class Shelf:
    def __init__(self, root: Path, digest: str, identity: Mapping[str, str], limit: int):
        self.root, self.folder, self.limit = root, root / digest, limit
        self.held: dict[str, set[int]] = {}  # of this model: key -> groups, one set of bits per file
        self._identity = dict(identity)
        self.nbytes = 0  # of all models
        self._sizes: dict[Path, int] = {}
        self._seen: dict[Path, int] = {}  # when a folder last changed
        self.prepare()
        sweep(self.folder)
        self.refresh()

    def prepare(self) -> None:
        """Make the folder; BadRequest where it cannot be."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            note(self.root / MARK, {"mlxrt": "disk store", "format": "1"})
            note(self.folder / IDENTITY, self._identity)
        except OSError as error:
            raise BadRequest(
                f"disk_cache {self.root} cannot be used: {error.strerror}; name a folder that can be written"
            ) from None

    def __len__(self) -> int:
        """Records of this model."""
        return sum(map(len, self.held.values()))

    def path(self, key: str, groups: int) -> Path:
        return self.folder / file_name(key, groups)

    def files(self) -> Iterator[Path]:
        """This model's records."""
        yield from (self.path(key, groups) for key, all_groups in self.held.items() for groups in all_groups)

    def refresh(self) -> None:
        """See what others did. A folder that did not change is not read."""
        folders = set(model_folders(self.root))
        for gone in self._seen.keys() - folders:
            del self._seen[gone]
            self._forget(gone, set())
        for folder in folders:
            with suppress(FileNotFoundError):
                changed = folder.stat().st_mtime_ns
                if self._seen.get(folder) != changed:
                    self._read(folder)
                    self._seen[folder] = changed

    def _read(self, folder: Path) -> None:
        names = {name for name in os.listdir(folder) if parse_name(name)}
        self._forget(folder, names)
        for name in names:
            if (path := folder / name) not in self._sizes:
                self.add(path)

    def _forget(self, folder: Path, names: set[str]) -> None:
        for path in [p for p in self._sizes if p.parent == folder and p.name not in names]:
            self.lose(path)

    def add(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            self.nbytes += size - self._sizes.get(path, 0)
            self._sizes[path] = size
            if path.parent == self.folder and (named := parse_name(path.name)):
                self.held.setdefault(named[0], set()).add(named[1])

    def lose(self, path: Path) -> None:
        """Forget a record that is not there any more."""
        self.nbytes -= self._sizes.pop(path, 0)
        named = parse_name(path.name)
        if path.parent == self.folder and named and named[0] in self.held:
            self.held[named[0]].discard(named[1])
            if not self.held[named[0]]:
                del self.held[named[0]]

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.lose(path)

    def use(self, paths: Iterable[Path]) -> None:
        """Mark the records of one text, its beginning first, as used now."""
        now = time.time_ns()
        for i, path in enumerate(paths):
            with suppress(FileNotFoundError):
                os.utime(path, ns=(now - i * APART, now - i * APART))

    def trim(self) -> int:
        """Remove what was used longest ago until the budget holds; how many records went."""
        if self.nbytes <= self.limit:
            return 0
        removed = 0
        for path in sorted(self._sizes, key=last_use):
            if self.nbytes <= self.limit * AFTER_EVICTION:
                break
            self.remove(path)
            removed += 1
        return removed


def last_use(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


def model_folders(root: Path) -> list[Path]:
    """The folders below a store's root, one per model."""
    with suppress(FileNotFoundError), os.scandir(root) as found:
        return [Path(e.path) for e in found if OWN_FOLDER.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return []


def note(path: Path, told: Mapping[str, str]) -> None:
    """A small file that says what a folder is, written once."""
    if not path.exists():
        with landing(path) as file:
            file.write(json.dumps(told, indent=1, sort_keys=True).encode())
