"""A benchmark run: find the model, start the backends, run the cases, keep what was measured whatever happens."""

import datetime
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import BadRequest, MlxrtError
from . import SUITES, bench_model, machine
from .backend import Backend
from .bench_model import BenchModel
from .comparison import PROCESSOR, WALL, Comparison, Options
from .corpus import make_prompts
from .progress import Progress
from .result import OURS, Report
from .statistics import StoppingRule
from .suites import Case, cases

log = logging.getLogger("mlxrt")

CROWDED = 0.5  # free share of a machine up to which prompts are shorter
# Prompt lengths, tokens of a round, requests of a batch.
SIZES = {
    "crowded": ((32, 96, 256), 8, 4),
    "cpu": ((64, 256, 512), 12, 4),
    "metal": ((128, 2048, 8192), 64, 8),
    "cuda": ((128, 2048, 8192), 64, 16),
}
CLOCKS = {WALL: "wall", PROCESSOR: "processor"}


@dataclass(frozen=True)
class Plan:
    """What the user asked for. None: chosen by the device."""

    suites: tuple[str, ...]
    model: str
    peers: tuple[str, ...] | None = None
    lengths: tuple[int, ...] | None = None
    decoded: int | None = None
    minutes: float = 8.0
    width: float = StoppingRule.width
    level: float = StoppingRule.level
    rounds: int = StoppingRule.min_rounds
    threads: int | None = None
    text: Path | None = None
    requests: int | None = None
    clock: str | None = None  # wall or processor
    restarts: int = 0  # of every engine within a case
    kv: tuple[str, ...] | None = None

    def unknown_suites(self) -> list[str]:
        """An error line for each suite that does not exist."""
        return [f"there is no suite {s!r}; suites: {', '.join(SUITES)}" for s in self.suites if s not in SUITES]

    def options(self, kind: str, free_share: float) -> Options:
        """Sizes by device kind and its free share: a busy CPU gets shorter prompts, so that all cases fit in time."""
        rule = StoppingRule(self.width, self.level, self.rounds, min_late_rounds=min(2, self.rounds))
        size = "crowded" if kind == "cpu" and free_share <= CROWDED else kind
        lengths, decoded, requests = SIZES[size]
        return Options(
            self.lengths or lengths, self.decoded or decoded, rule, self.requests or requests, self.kv or Options.kv
        )


def run(plan: Plan, report: Report, stop: Callable[[], bool]) -> None:
    """Fill the report. Mistakes in the call are in its problems; KeyboardInterrupt leaves what was measured so far."""
    began = time.perf_counter()
    report.created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report.settings = {key: str(v) if isinstance(v, Path) else v for key, v in asdict(plan).items()}
    for line in plan.unknown_suites():
        report.problems.append(line)
        log.warning(line)
    suites = list(dict.fromkeys(s for s in plan.suites if s in SUITES))
    if not suites:
        raise BadRequest("no suite is left to run")
    model = BenchModel.find(plan.model)
    model.check_fits(1)
    report.model = model.to_dict()
    try:
        describe_machine(plan, report)
        run_suites(plan, suites, model, report, stop, began)
    finally:
        report.seconds = time.perf_counter() - began
        describe_load_after(report)


def describe_machine(plan: Plan, report: Report) -> None:
    """What the machine is, its load before the run, and the peak rates of its device."""
    before = machine.measure_load()
    report.machine = machine.describe() | {"before": before.to_dict(), "swapped": machine.swapped_pages()}
    threads = report.settings["threads"] = plan.threads or bench_model.free_cores(before.load)
    setting = {"threads": threads, "seconds": min(2.0, plan.minutes / 5)}
    with Backend("peak", setting, env=thread_limits(threads)) as peak:
        report.device_peak = peak.info


def describe_load_after(report: Report) -> None:
    after = machine.measure_load(0.3)
    before, swapped = report.machine.get("swapped"), machine.swapped_pages()
    report.machine["after"] = after.to_dict()
    report.machine["swapped_during"] = None if before is None or swapped is None else swapped - before
    if report.machine.get("before", {}).get("busy"):
        report.notes.append("the machine was busy before the run: figures are noisy, ratios less so")
    if report.machine["swapped_during"]:
        report.notes.append(f"{report.machine['swapped_during']} pages were swapped: the disk may have been measured")
    for line in report.notes:
        log.warning(line)


def run_suites(
    plan: Plan, suites: list[str], model: BenchModel, report: Report, stop: Callable[[], bool], began: float
) -> None:
    used = report.settings["threads"] / (os.cpu_count() or 1)
    options = plan.options(report.device_peak["device"], report.machine["before"]["share"] * used)
    backends: dict[str, Backend] = {}
    try:
        start_backends(plan, model, options, backends, report)
        prompts = make_prompts(backends[OURS], plan.text)
        sizes = {"lengths": options.lengths, "decoded": options.decoded, "requests": options.requests}
        report.settings |= sizes | {"prompts": prompts.source}
        comparison = Comparison(model, backends, options, report.device_peak, prompts, stop, problems=report.problems)
        comparison.real_text, comparison.restarts = prompts.real_text, plan.restarts
        comparison.clock = choose_clock(plan, report, list(backends))
        report.settings["clock"] = CLOCKS[comparison.clock]
        if backends[OURS].info["tokenizer"]:
            comparison.detokenize = lambda tokens: comparison.ours.ask(do="decode", tokens=tokens)
        todo = [case for suite in suites for case in cases(suite, options)]
        run_cases(todo, comparison, report, began + 60 * plan.minutes)
        report.backends[OURS] = report.backends[OURS] | {"said": comparison.ours.ask(do="log_lines")}
    finally:
        for backend in backends.values():
            backend.kill()


def choose_clock(plan: Plan, report: Report, backends: list[str]) -> str:
    """On a busy machine the wall clock mostly measures other processes; the CPU time of one thread does not."""
    usable = report.device_peak["device"] == "cpu" and all(
        name == OURS or name in bench_model.MODULES for name in backends
    )
    if plan.clock == "processor" and not usable:
        raise BadRequest("--clock processor is for CPUs and engines that run here; leave it out")
    preferred = usable and report.settings["threads"] == 1 and report.machine["before"]["busy"]
    return PROCESSOR if plan.clock == "processor" or (plan.clock is None and preferred) else WALL


def start_backends(
    plan: Plan, model: BenchModel, options: Options, backends: dict[str, Backend], report: Report
) -> None:
    """Start mlxrt, then every peer; a peer that is missing or fails is recorded as absent."""
    asked = tuple(bench_model.MODULES) if plan.peers is None else plan.peers
    for name in asked:
        bench_model.check_peer(name)
    absent = {name: why for name in asked if (why := bench_model.unavailable_reason(name, model))}
    peers = [name for name in asked if name not in absent]
    model.check_fits(1 + sum(name in bench_model.MODULES for name in peers))
    threads = report.settings["threads"]
    backends[OURS] = Backend(OURS, {"model": plan.model}, env=thread_limits(threads))
    report.backends[OURS] = backends[OURS].info
    for name, why in absent.items():
        report.backends[name] = {"absent": why}
        log.warning("%s is absent: %s", name, why)
    longest = min(max(options.lengths) + options.decoded + 64, backends[OURS].info["context"])
    for name in peers:
        try:
            backends[name] = start_peer(name, model, longest, options.requests, threads)
            report.backends[name] = backends[name].info
        except MlxrtError as error:
            report.backends[name] = {"absent": str(error)}
            report.problems.append(str(error))
            log.warning(str(error))


def thread_limits(threads: int) -> dict[str, str]:
    """The same for every engine; a GPU ignores it."""
    return {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}


def start_peer(name: str, model: BenchModel, longest: int, parallel: int, threads: int) -> Backend:
    if name not in bench_model.MODULES:
        return Backend(name, {"url": name, "prompt": [11, 12, 13]}, program="mlxrt.bench.backends.openai")
    setting = bench_model.peer_setting(name, model, longest, parallel, threads)
    return Backend(name, setting, env=thread_limits(threads))


def run_cases(todo: list[Case], comparison: Comparison, report: Report, end: float) -> None:
    """Run every case for its share of the time left; one that fails is reported, the others go on.

    A case that has begun takes the rounds it needs at least, so a slow machine may run out of time before the last.
    """
    progress = Progress(sum(case.weight for case in todo))
    comparison.on_round = progress.update
    for i, case in enumerate(todo):
        if i and time.perf_counter() > end:
            skipped = ", ".join(f"{c.suite} / {c.name}" for c in todo[i:])
            report.notes.append(f"time was up, NOT measured: {skipped}; raise --minutes")
            return
        left = sum(c.weight for c in todo[i:])
        comparison.time_limit = max(0.0, (end - time.perf_counter()) * case.weight / left)
        progress.begin(case.weight, f"{case.suite}: {case.name}")
        logged = len(report.problems)
        try:
            report.figures += case.run(comparison)
        except MlxrtError as error:
            report.problems.append(f"{case.suite} / {case.name}: {error}")
        progress.end()
        for line in report.problems[logged:]:
            log.warning(line)
        if comparison.stop():
            raise KeyboardInterrupt
    report.complete = True
