"""Long-lived children, one input at a time each, watched: a death or a hang belongs to the input that caused it."""

import multiprocessing
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from tests.support.fuzz.child import serve
from tests.support.fuzz.mutate import Case

START_S, INPUT_S = 120, 20
Serve = Callable[[Any, str], None]


@dataclass(frozen=True)
class Outcome:
    case: Case
    outcome: str  # ok | refused | failed | died | hung
    details: str


class Child:
    """A process and the pipe to it."""

    def __init__(self, log: Path, serve: Serve):
        context = multiprocessing.get_context("spawn")
        self.log = log
        log.touch()
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, str(log)), daemon=True)
        self.process.start()
        other.close()
        if not self.pipe.poll(START_S) or self.pipe.recv()[0] != "ready":
            raise RuntimeError("a fuzz child did not start")

    def load(self, path: Path, limit: float) -> tuple[str, str]:
        try:
            self.pipe.send(str(path))
            if not self.pipe.poll(limit):
                return "hung", f"no answer in {limit} s"
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            tail = self.log.read_text(errors="replace")[-1000:]
            return "died", f"exit code {self.process.exitcode}; last output: {tail}"

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


class Pool:
    """Takes cases, gives outcomes. `seeds` are the sound files by name; a case replaces one of them."""

    def __init__(self, seeds: dict[str, bytes], size: int = 2, serve: Serve = serve, limit: float = INPUT_S):
        self.seeds, self.serve, self.limit = seeds, serve, limit
        self.folder = Path(tempfile.mkdtemp(prefix="mlxrt-fuzz-"))
        self.outcomes: list[Outcome] = []
        self.queue: Queue[Case | None] = Queue(maxsize=4 * size)
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self.work, args=(i,)) for i in range(size)]
        for thread in self.threads:
            thread.start()

    def work(self, number: int) -> None:
        child: Child | None = None
        try:
            while (case := self.queue.get()) is not None:
                child = child or Child(self.folder / f"log{number}", self.serve)
                outcome, details = child.load(self.write(case, self.folder / str(number)), self.limit)
                self.outcomes.append(Outcome(case, outcome, details))
                if outcome in ("died", "hung"):
                    child.stop()
                    child = None
        except BaseException as error:
            self.errors.append(error)
            while self.queue.get() is not None:
                continue  # let the feeder finish; close() raises what happened
        finally:
            if child:
                child.stop()

    def write(self, case: Case, place: Path) -> Path:
        """The path to load: a .gguf file, or the seed folder with one file replaced."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        files = [
            n for n in self.seeds if n == case.target or not (n.endswith(".gguf") or case.target.endswith(".gguf"))
        ]
        for name in files:
            (place / name).write_bytes(case.blob if name == case.target else self.seeds[name])
        return place / case.target if case.target.endswith(".gguf") else place

    def close(self) -> list[Outcome]:
        for _ in self.threads:
            self.queue.put(None)
        for thread in self.threads:
            thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.errors:
            raise self.errors[0]
        return self.outcomes


def load_all(seeds: dict[str, bytes], cases: Iterable[Case], size: int = 2, **options) -> list[Outcome]:
    pool = Pool(seeds, size, **options)
    for case in cases:
        pool.queue.put(case)
    return pool.close()
