"""A disk cache whose folder becomes read-only, full, unreadable, vanishes or turns into a file, at random moments.

    python -m tests.long.break_disk [--programs 100] [--seed 1] [--processes 4]

Faults are real (folders removed, replaced by files, records replaced by folders or cut off) and injected: any call that
opens, lists, links, renames, removes or touches something below the folder may fail, in the middle of a request too.
No request ends by it, every answer is right, and each kind of trouble is logged once. Exit code 1 otherwise.
"""

import argparse
import errno
import os
import random
import shutil
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

from mlxrt import Engine, EngineConfig, MlxrtError
from mlxrt.cache.storage import disk_store
from tests.support import oracle
from tests.support.log_lines import capture_log, reset_log
from tests.support.parallel import run_parts, split
from tests.support.toy_models import KINDS, VOCAB

ERRORS = (errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENOTDIR, errno.ENOENT)
WRITES = ("os.link", "os.rename", "os.remove", "os.mkdir", "os.utime", "os.chmod", "tempfile.mkstemp")
READS = ("os.listdir", "os.scandir")
KIND = ("gemma", "hybrid", "rotating-keep")


@cache
def model(kind: str):
    return KINDS[kind]()


def prompt(k: int) -> tuple[int, ...]:
    """Prompts share beginnings."""
    return tuple((3 * i * i + i + (i // 20) * k) % VOCAB for i in range(30 + 4 * k))


@cache
def truth(kind: str, k: int) -> tuple[int, ...]:
    return oracle.truth(model(kind), prompt(k), 4)


class Faults:
    """Makes calls of this process fail that touch anything below `root`. An audit hook cannot be removed: it sleeps."""

    def __init__(self) -> None:
        self.root, self.calls, self.share, self.errno, self.rng = "", (), 0.0, errno.EIO, random.Random()
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple) -> None:
        if not self.share or event not in self.calls or not arguments:
            return
        below = any(isinstance(a, (str, os.PathLike)) and os.fspath(a).startswith(self.root) for a in arguments[:2])
        if below and (event != "open" or self.opens(arguments)) and self.rng.random() < self.share:
            raise OSError(self.errno, os.strerror(self.errno), str(arguments[0]))

    def opens(self, arguments: tuple) -> bool:
        """A read-only file system refuses to write, not to read."""
        writes = bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        return writes or self.calls != (*WRITES, "open")

    def begin(self, root: Path, rng: random.Random) -> str:
        self.root, self.rng, self.errno = str(root), rng, rng.choice(ERRORS)
        self.calls = rng.choice([(*WRITES, "open"), (*READS, "open", ""), (*WRITES, *READS, "open", "")])
        self.share = rng.choice([1.0, 0.5, 0.1])
        return f"{os.strerror(self.errno)} in {self.share} of {self.calls}"

    def end(self) -> None:
        self.share = 0.0


FAULTS = Faults()


def break_really(root: Path, rng: random.Random) -> str:
    records = [r for r in root.glob("*/*-*.safetensors") if r.is_file()] if root.is_dir() else []
    how = rng.choice(["vanish", "become a file", "folder becomes a file", "records become folders", "cut", "link"])
    shutil.rmtree(root, ignore_errors=True) if how in ("vanish", "become a file", "link") else None
    if how == "become a file" and not root.exists():
        root.write_text("not a folder")
    if how == "link" and not root.exists() and not root.is_symlink():
        root.symlink_to(root.with_name("nowhere"))
    for folder in {record.parent for record in records} if how == "folder becomes a file" else ():
        shutil.rmtree(folder)
        folder.write_text("not a folder")
    for record in records:
        if how == "records become folders":
            record.unlink()
            record.mkdir()
        if how == "cut":
            os.truncate(record, rng.randrange(record.stat().st_size + 1))
    return how


def mend(root: Path) -> None:
    if root.is_symlink() or root.is_file():
        root.unlink()


def run_program(root: Path, rng: random.Random, requests: int = 8) -> list[str]:
    """What went wrong in one engine's life."""
    kind, wrong, history = rng.choice(KIND), [], []
    lines = capture_log("disk cache: ")
    config = EngineConfig(chunk=16, disk_cache=str(root), disk_cache_bytes=rng.choice(["8G", "200K"]))
    with Engine(model(kind), config) as engine:
        for _ in range(requests):
            act = rng.random()
            if act < 0.3:
                share, FAULTS.share = FAULTS.share, 0.0
                history.append(break_really(root, rng))
                FAULTS.share = share
            elif act < 0.6:
                history.append(FAULTS.begin(root, rng))
            elif act < 0.8:
                FAULTS.end()
                mend(root)
            if rng.random() < 0.7:
                engine.core.prefix_cache.clear()  # what it has of the prompt must come from the disk
            k = rng.randrange(4)
            try:
                found = engine.generate(prompt(k), max_tokens=4).tokens
            except (OSError, MlxrtError) as error:
                wrong.append(f"{kind}: {error!r} after {history}")
                break
            if found != truth(kind, k):
                wrong.append(f"{kind}: wrong tokens after {history}")
        FAULTS.end()
    for act in ("read", "written"):
        said = [line for line in lines if f"cannot be {act}" in line]
        again = [line for line in lines if "written again" in line]
        if len(said) > 1 + len(again):
            wrong.append(f"{len(said)} lines: {said}")
    reset_log()
    return wrong


def run_programs(root: Path, programs: int, seed: int, first: int = 0) -> list[str]:
    wrong = []
    for n in range(first, first + programs):
        rng = random.Random(f"{seed} {n}")
        disk_store.RETRY_WRITE = rng.choice([0.0, 60.0])
        wrong += [f"program {n}: {line}" for line in run_program(root / str(n) / "store", rng)]
    disk_store.RETRY_WRITE = 60.0
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    parts = [(first, n, options.seed) for first, n in split(options.programs, options.processes)]
    wrong = [line for found in run_parts(run_part, parts, options.processes) for line in found]
    print(f"{options.programs} programs: {len(wrong)} wrong", *wrong[:20], sep="\n")
    return 1 if wrong else 0


def run_part(first: int, programs: int, seed: int) -> list[str]:
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as name:
        os.environ["MLXRT_CACHE"] = f"{name}/cache"
        return run_programs(Path(name), programs, seed, first)


if __name__ == "__main__":
    sys.exit(main())
