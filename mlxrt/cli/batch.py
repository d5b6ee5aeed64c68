"""`mlxrt generate --prompts FILE.jsonl`: many prompts in one batch, results as JSON lines in the file's order.

Every line is validated before a model is loaded. A prompt that cannot be answered gives one result with an error; the
others go on.
"""

import argparse
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..engine.request import Event, Request, SamplingParams
from ..errors import BadRequest, MlxrtError, quote
from ..text.response_format import ResponseFormat
from .exit_status import FAILED, INTERRUPTED
from .flags import Parser
from .request import (
    add_seed,
    chat_request,
    decode_utf8,
    merge_defaults,
    open_model,
    require_template,
    require_tokenizer,
)
from .terminal import note

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..engine.engine import Engine
    from ..engine.load import OpenModel
    from ..engine.output import RequestStream

log = logging.getLogger("mlxrt")

INPUTS = ("prompt", "messages", "tokens")
REQUEST_FIELDS = (
    "tools", "tool_choice", "parallel_tool_calls", "template_options", "thinking", "thinking_budget",
    "enable_thinking", "priority", "deadline_s", "response_format", "cache_salt", "id",
)  # fmt: skip
SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))
MAX_ERRORS = 5  # bad lines named at once
DEFAULT_PARALLEL = 8


def add_batch_flags(parser: Parser) -> None:
    parser.add_argument(
        "--prompts", metavar="FILE.jsonl", help="many prompts, one JSON string or object per line; - reads stdin"
    )
    parser.add_argument("--parallel", type=int, metavar="N", help="with --prompts: run N at once (default: 8)")
    parser.add_argument("--output", metavar="FILE", help="with --prompts: write the results there, not to stdout")


def check_batch_flags(args: argparse.Namespace) -> None:
    if args.prompts is None:
        for name in ("parallel", "output"):
            if vars(args)[name] is not None:
                raise BadRequest(f"--{name} goes with --prompts FILE.jsonl")
        return
    if args.prompt is not None or args.words:
        raise BadRequest("there is a prompt and a file of prompts; give one of them")
    if args.parallel is not None and not 1 <= args.parallel <= 4096:
        raise BadRequest(f"--parallel must be in 1..4096, not {args.parallel}")


@dataclass
class Job:
    """One line of the file and what has come of it."""

    line: int
    input: str  # prompt, messages or tokens
    value: Any
    sampling: Mapping[str, Any]
    options: Mapping[str, Any]  # further fields of Request
    id: Any = None  # the user's own, copied to the result
    events: list[Event] = field(default_factory=list)
    result: dict[str, Any] | None = None


def read_jobs(path: str) -> list[Job]:
    try:
        text = decode_utf8(sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes(), path)
    except OSError as error:
        raise BadRequest(f"--prompts {path}: {error.strerror}") from None
    jobs: list[Job] = []
    errors: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            jobs.append(parse_job(number, line))
        except BadRequest as error:
            errors.append(f"line {number}: {error}")
    if errors:
        more = f"; and {len(errors) - MAX_ERRORS} lines more" if len(errors) > MAX_ERRORS else ""
        raise BadRequest(f"--prompts {path}: {'; '.join(errors[:MAX_ERRORS])}{more}; nothing was run")
    if not jobs:
        raise BadRequest(f"--prompts {path} holds no prompt; write one JSON value per line")
    return jobs


def parse_job(number: int, line: str) -> Job:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"not JSON ({error})") from None
    found = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise BadRequest(f"expected a string or an object, found {quote(json.dumps(value)[:60])}")
    if "custom_id" in found:  # OpenAI's name of it
        found = {"id": found["custom_id"]} | {k: v for k, v in found.items() if k != "custom_id"}
    known = {*INPUTS, *REQUEST_FIELDS, *SAMPLING_FIELDS}
    if unknown := found.keys() - known:
        near = get_close_matches(min(unknown), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadRequest(f"unknown key {', '.join(map(quote, sorted(unknown)))}{hint}")
    given = [name for name in INPUTS if name in found]
    if len(given) != 1:
        raise BadRequest(f"exactly one of prompt, messages, tokens is needed, found {given or 'none'}")
    [name] = given
    check_input(name, found[name])
    sampling = {k: v for k, v in found.items() if k in SAMPLING_FIELDS}
    if isinstance(sampling.get("logit_bias"), dict):  # keys of JSON objects are strings
        bias = sampling["logit_bias"]
        sampling["logit_bias"] = {int(k) if k.isascii() and k.isdigit() else k: v for k, v in bias.items()}
    try:
        SamplingParams(**sampling)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"a sampling option has the wrong type ({error})") from None
    options = {k: v for k, v in found.items() if k in REQUEST_FIELDS and k != "id"}
    if options.get("response_format") is not None:
        ResponseFormat.parse(options["response_format"])
    return Job(number, name, found[name], sampling, options, found.get("id"))


def check_input(name: str, value: Any) -> None:
    valid = {
        "prompt": isinstance(value, str),
        "messages": isinstance(value, list) and all(isinstance(m, dict) for m in value),
        "tokens": isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in value),
    }
    if not valid[name] or not value:
        expected = {"prompt": "a string", "messages": "a list of objects", "tokens": "a list of integers"}[name]
        raise BadRequest(f"{name} must be {expected}, not empty")


class Batch:
    """Keeps up to `parallel` jobs running and writes results as soon as those before them are written."""

    def __init__(self, engine: "Engine", jobs: list[Job], make_request: Callable[[Job], Request], out: TextIO):
        self.engine, self._make_request, self._out = engine, make_request, out
        self._waiting = deque(jobs)
        self._unwritten = deque(jobs)
        self._running: dict[int, Job] = {}
        self.done = self.failed = self.tokens = 0

    def run(self, parallel: int, on_progress: Callable[["Batch"], None]) -> None:
        with self.engine.stream_of([]) as stream:
            while self._unwritten:
                while self._waiting and len(stream.ids) < parallel:
                    self._submit(self._waiting.popleft(), stream)
                if stream.ids:
                    self._process(next(stream))
                self._write_results()
                on_progress(self)

    def _submit(self, job: Job, stream: "RequestStream") -> None:
        try:
            id = self.engine.submit(self._make_request(job))
        except MlxrtError as error:
            self._finish(job, {"error": str(error)})
            return
        self._running[id] = job
        stream.add(id)

    def _process(self, event: Event) -> None:
        job = self._running[event.id]
        job.events.append(event)
        self.tokens += event.token is not None
        if event.error is not None:
            self._finish(job, {"error": str(event.error)})
        elif event.finish_reason:
            import mlx.core as mx

            from ..engine.output import complete
            from .output import completion_to_dict

            self._finish(job, completion_to_dict(self.engine, complete(job.events), mx.get_peak_memory()))

    def _finish(self, job: Job, result: dict[str, Any]) -> None:
        id = {} if job.id is None else {"id": job.id}
        job.result = {"line": job.line, **id, **result}
        self.failed += "error" in result
        self.done += 1

    def _write_results(self) -> None:
        while self._unwritten and (result := self._unwritten[0].result) is not None:
            self._unwritten.popleft()
            print(json.dumps(result, ensure_ascii=False, allow_nan=False), file=self._out, flush=True)


def run_batch(args: argparse.Namespace, config: "EngineConfig", sampling: dict[str, Any]) -> int:
    jobs = read_jobs(args.prompts)
    model = open_model(args, config)
    check_inputs(model, jobs, args.raw)
    with open_output(args.output) as out, model.load() as engine:
        base = merge_defaults(dict(engine.source.generation), sampling)
        batch = Batch(engine, jobs, lambda job: make_request(engine, args, job, base), out)
        began = time.perf_counter()
        try:
            with show_progress(len(jobs)) as on_progress:
                batch.run(args.parallel or DEFAULT_PARALLEL, on_progress)
        except KeyboardInterrupt:
            stopped = f"stopped after {batch.done} of {len(jobs)} prompts"
            note(f"{stopped}; the results are those before the first unfinished")
            return INTERRUPTED
        stats, spent = engine.stats(), time.perf_counter() - began
        log.info(
            f"{batch.done} prompts, {batch.failed} not answered | "
            f"{batch.tokens} tokens in {spent:.1f} s, {batch.tokens / spent:.1f} tok/s | "
            f"{100 * stats.cached_share:.0f} % of prompt tokens cached | {stats.preemptions} preemptions"
        )
    return FAILED if batch.failed else 0


def check_inputs(model: "OpenModel", jobs: list[Job], raw: bool) -> None:
    """Refuse a file that this model can answer no line of, before its weights are loaded."""
    if all((job.input == "prompt" and not raw) or job.input == "messages" for job in jobs):
        require_template(model)
    elif all(job.input != "tokens" for job in jobs):
        require_tokenizer(model)


def make_request(engine: "Engine", args: argparse.Namespace, job: Job, base: dict[str, Any]) -> Request:
    params = SamplingParams(**add_seed({**base, **job.sampling}))
    if job.input == "prompt" and not args.raw:
        return chat_request(engine, args.system, job.value, params, **job.options)
    inputs: dict[str, Any] = {job.input: job.value}
    return Request(**inputs, params=params, **job.options)


@contextmanager
def open_output(path: str | None) -> Iterator[TextIO]:
    """Where results go. A file is opened before the model is loaded, so that a wrong name fails at once."""
    if path is None:
        yield sys.stdout
        return
    try:
        out = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  closed by the with below
    except OSError as error:
        raise BadRequest(f"--output {path}: {error.strerror}") from None
    with out:
        yield out


@contextmanager
def show_progress(total: int) -> Iterator[Callable[[Batch], None]]:
    """A progress bar where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda batch: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, rate="")

        def update(batch: Batch) -> None:
            running = len(batch.engine.core.scheduler.running)
            rate = batch.engine.core.metrics.rates()[1]
            bar.update(task, completed=batch.done, rate=f"{running} running, {rate:.1f} tok/s")

        yield update
