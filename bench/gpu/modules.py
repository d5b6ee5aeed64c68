"""MLX's compiled modules for processes side by side: each has a folder of its own, and finished modules are shared.

MLX compiles for minutes in a new folder. In one folder for all, a process may find a module that another is writing at
this moment: a .ptx whose names are missing is a module without kernels to it ("There is no kernel named ...").
"""

import os
import shutil
import time
from pathlib import Path

SUFFIXES = (".cu", ".txt", ".ptx")  # MLX writes them the other way round, and looks for the last one first
MIN_AGE = 1.0  # seconds since the last of them was written


class ModuleFolders:
    def __init__(self, source: Path, root: Path, parts: int):
        """`source` is where finished modules come from, and where they are kept for the next run."""
        self.parts = [root / str(i + 1) for i in range(parts)]
        self._folders = [source, *self.parts]
        self._known: set[str] = set()
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
        self.share()

    def share(self) -> int:
        """Give every folder what another has finished since the last call; how many modules that were."""
        before = len(self._known)
        for folder in self._folders:
            for code in folder.rglob("*.ptx"):
                name = str(code.relative_to(folder).with_suffix(""))
                if name not in self._known and is_finished(code):
                    for other in self._folders:
                        if other is not folder:
                            copy_module(folder, other, name)
                    self._known.add(name)
        return len(self._known) - before


def is_finished(code: Path) -> bool:
    try:
        files = [code.with_suffix(suffix).stat() for suffix in SUFFIXES]
    except OSError:  # mlxrt's own modules have no .cu; every process writes them itself
        return False
    return all(f.st_size for f in files) and time.time() - max(f.st_mtime for f in files) > MIN_AGE


def copy_module(source: Path, to: Path, name: str) -> None:
    """Every file whole, the one that is looked for first the last. What is there already stays."""
    for suffix in SUFFIXES:
        path = to / (name + suffix)
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".copy-{os.getpid()}")
        shutil.copyfile(source / (name + suffix), partial)
        os.replace(partial, path)
