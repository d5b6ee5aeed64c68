"""`mlxrt generate --prompts`: many prompts at once, the results in the order of the lines.

A line that cannot be answered is one result that says so; the others go on.
"""

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import mlx.core as mx

from ..engine.output import complete
from ..engine.request import Event, Request, SamplingParams
from ..engine.request_stream import Stream
from ..errors import BadRequest, MlxrtError
from .defaults import seeded, settled
from .document import document
from .jobs import Job, read_jobs
from .outcome import FAILED, INTERRUPTED
from .prompt import require_template
from .terminal import note

if TYPE_CHECKING:
    from ..engine.engine import Engine


class Line:
    """One line of the file on its way to a result."""

    def __init__(self, job: Job):
        self.job, self.events, self.result = job, [], None  # type: Job, list[Event], dict[str, Any] | None


class Batch:
    def __init__(self, engine: "Engine", jobs: list[Job], ask: Callable[[Job], Request], out: TextIO):
        self.engine, self._ask, self._out = engine, ask, out
        self._waiting = deque(Line(job) for job in jobs)
        self._order = deque(self._waiting)
        self._by: dict[int, Line] = {}
        self.done = self.failed = self.tokens = 0

    def run(self, parallel: int, tell: Callable[["Batch"], None]) -> None:
        with self.engine.stream_of([]) as stream:
            while self._order:
                while self._waiting and len(stream.ids) < parallel:
                    self._begin(self._waiting.popleft(), stream)
                if stream.ids:
                    self._hear(next(stream))
                self._write()
                tell(self)

    def _begin(self, line: Line, stream: Stream) -> None:
        try:
            id = self.engine.submit(self._ask(line.job))
        except MlxrtError as error:
            self._end(line, {"error": str(error)})
            return
        self._by[id] = line
        stream.add(id)

    def _hear(self, event: Event) -> None:
        line = self._by[event.id]
        line.events.append(event)
        self.tokens += event.token is not None
        if event.error is not None:
            self._end(line, {"error": str(event.error)})
        elif event.finish_reason:
            self._end(line, document(self.engine, complete(line.events), mx.get_peak_memory()))

    def _end(self, line: Line, result: dict[str, Any]) -> None:
        own = {} if line.job.id is None else {"id": line.job.id}
        line.result = {"line": line.job.line, **own, **result}
        self.failed += "error" in result
        self.done += 1

    def _write(self) -> None:
        """Results whose turn has come."""
        while self._order and (result := self._order[0].result) is not None:
            self._order.popleft()
            print(json.dumps(result, ensure_ascii=False, allow_nan=False), file=self._out, flush=True)


def run_batch(args: argparse.Namespace, load: Callable[[], "Engine"], given: dict[str, Any]) -> int:
    jobs = read_jobs(args.prompts)
    with opened(args.output) as out, load() as engine:
        base = settled(dict(engine.source.generation), given)
        batch = Batch(engine, jobs, lambda job: request_of(engine, args, job, base), out)
        try:
            with progress(len(jobs)) as tell:
                batch.run(args.parallel or 8, tell)
        except KeyboardInterrupt:
            note(
                f"stopped after {batch.done} of {len(jobs)} prompts; the results are those before the first unfinished"
            )
            return INTERRUPTED
        stats = engine.stats()
        note(
            f"{batch.done} prompts, {batch.failed} not answered | {batch.tokens} tokens | "
            f"{100 * stats.cached_share:.0f} % of prompt tokens cached | {stats.preemptions} preemptions"
        )
    return FAILED if batch.failed else 0


def request_of(engine: "Engine", args: argparse.Namespace, job: Job, base: dict[str, Any]) -> Request:
    params, value = SamplingParams(**seeded({**base, **job.sampling})), job.value
    if job.source == "prompt" and not args.raw:
        require_template(engine)
        system = ({"role": "system", "content": args.system},) if args.system is not None else ()
        return Request(messages=(*system, {"role": "user", "content": value}), params=params, **job.options)
    fields: dict[str, Any] = {job.source: value}
    return Request(**fields, params=params, **job.options)


@contextmanager
def opened(path: str | None):
    """Where results go. A file is opened before the model is loaded: a wrong name is answered at once."""
    if path is None:
        yield sys.stdout
        return
    try:
        out = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  used as one below
    except OSError as bad:
        raise BadRequest(f"--output {path}: {bad.strerror}") from None
    with out:
        yield out


@contextmanager
def progress(total: int):
    """A live bar on a terminal; nothing where stderr goes elsewhere."""
    if not sys.stderr.isatty():
        yield lambda batch: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, told="")

        def tell(batch: Batch) -> None:
            running = len(batch.engine.scheduler.running)
            rate = batch.engine.metrics.rates()[1]
            bar.update(task, completed=batch.done, told=f"{running} running, {rate:.1f} tok/s")

        yield tell
