"""A whole run: find the model, start the engines, go through the cases, keep what was measured whatever happens."""

import datetime
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import BadRequest, MlxrtError
from . import SUITES, machine, subject
from .contest import PROCESSOR, WALL, Contest, Options
from .progress import Progress
from .prompts import find_prompts
from .result import OURS, Report
from .side import Side
from .statistics import Patience
from .subject import Subject
from .suites import Case, cases

CROWDED = 0.5  # of a machine: up to that much prompts are shorter
# Prompt lengths, tokens of a round, requests of a batch.
SIZES = {
    "crowded": ((32, 96, 256), 8, 4),
    "cpu": ((64, 256, 512), 12, 4),
    "metal": ((128, 2048, 8192), 64, 8),
    "cuda": ((128, 2048, 8192), 64, 16),
}
CLOCKS = {WALL: "wall", PROCESSOR: "processor"}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What the user asked for. None: chosen by the device."""

    suites: tuple[str, ...]
    model: str
    peers: tuple[str, ...] | None = None
    lengths: tuple[int, ...] | None = None
    decoded: int | None = None
    minutes: float = 8.0
    width: float = Patience.width
    level: float = Patience.level
    rounds: int = Patience.least
    threads: int | None = None
    text: Path | None = None
    requests: int | None = None
    clock: str | None = None  # wall or processor
    restarts: int = 0  # of every engine within a case

    def known(self) -> tuple[list[str], list[str]]:
        """The suites there are, and a line for each there is not."""
        unknown = [s for s in self.suites if s not in SUITES]
        told = [f"there is no suite {s!r}; suites: {', '.join(SUITES)}" for s in unknown]
        return list(dict.fromkeys(s for s in self.suites if s in SUITES)), told

    def options(self, kind: str, share: float) -> Options:
        """`share`: of the machine that we use. A slow one is asked for less, so that it is asked for all of it."""
        patience = Patience(self.width, self.level, self.rounds, hurried=min(2, self.rounds))
        size = "crowded" if kind == "cpu" and share <= CROWDED else kind
        lengths, decoded, requests = SIZES[size]
        return Options(self.lengths or lengths, self.decoded or decoded, patience, self.requests or requests)


def run(plan: Plan, report: Report, say: Say, stop: Callable[[], bool]) -> None:
    """Fill the report. What was wrong with the call is in its problems; KeyboardInterrupt leaves it as it is then."""
    began = time.perf_counter()
    report.created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report.settings = {key: str(v) if isinstance(v, Path) else v for key, v in asdict(plan).items()}
    wanted, wrong = plan.known()
    for line in wrong:
        report.problems.append(line)
        say(line)
    if not wanted:
        raise BadRequest("no suite is left to run")
    under = Subject.find(plan.model)
    under.check_fits(1)
    report.model = under.to_dict()
    try:
        look(plan, report)
        with_sides(plan, wanted, under, report, say, stop, began)
    finally:
        report.seconds = time.perf_counter() - began
        look_again(report, say)


def look(plan: Plan, report: Report) -> None:
    """The machine first: what it is, what else it does, what it can do at most."""
    before = machine.look_around()
    report.machine = machine.describe() | {"before": before.to_dict(), "swapped": machine.swapped()}
    threads = report.settings["threads"] = plan.threads or subject.thread_count(before.load)
    setting = {"threads": threads, "seconds": min(2.0, plan.minutes / 5)}
    with Side("roof", setting, env=thread_limits(threads)) as roof:
        report.roof = roof.told


def look_again(report: Report, say: Say) -> None:
    after = machine.look_around(0.3)
    before, swapped = report.machine.get("swapped"), machine.swapped()
    report.machine["after"] = after.to_dict()
    report.machine["swapped_during"] = None if before is None or swapped is None else swapped - before
    if report.machine.get("before", {}).get("busy"):
        report.notes.append("the machine was busy before we started: figures are noisy, ratios less so")
    if report.machine["swapped_during"]:
        report.notes.append(f"{report.machine['swapped_during']} pages were swapped: figures may be of the disk")
    for line in report.notes:
        say(line)


def with_sides(
    plan: Plan, wanted: list[str], under: Subject, report: Report, say: Say, stop: Callable[[], bool], began: float
) -> None:
    used = report.settings["threads"] / (os.cpu_count() or 1)
    options = plan.options(report.roof["device"], report.machine["before"]["share"] * used)
    sides: dict[str, Side] = {}
    try:
        start_sides(plan, under, options, sides, report, say)
        prompts = find_prompts(sides[OURS], plan.text, say)
        sizes = {"lengths": options.lengths, "decoded": options.decoded, "requests": options.requests}
        report.settings |= sizes | {"prompts": prompts.source}
        contest = Contest(under, sides, options, report.roof, prompts, stop, problems=report.problems)
        contest.language, contest.restarts = prompts.language, plan.restarts
        contest.clock = choose_clock(plan, report, list(sides))
        report.settings["clock"] = CLOCKS[contest.clock]
        if sides[OURS].told["tokenizer"]:
            contest.texts = lambda tokens: contest.ours.ask(do="decode", tokens=tokens)
        todo = [case for suite in wanted for case in cases(suite, options)]
        go_through(todo, contest, report, say, began + 60 * plan.minutes)
        report.sides[OURS] = report.sides[OURS] | {"said": contest.ours.ask(do="said")}
    finally:
        for side in sides.values():
            side.abandon()


def choose_clock(plan: Plan, report: Report, sides: list[str]) -> str:
    """On a busy machine the wall clock mostly measures the others: one thread's processor time does not."""
    usable = report.roof["device"] == "cpu" and all(name == OURS or name in subject.MODULES for name in sides)
    if plan.clock == "processor" and not usable:
        raise BadRequest("--clock processor is for CPUs and engines that run here; leave it out")
    alone = usable and report.settings["threads"] == 1 and report.machine["before"]["busy"]
    return PROCESSOR if plan.clock == "processor" or (plan.clock is None and alone) else WALL


def start_sides(plan: Plan, under: Subject, options: Options, sides: dict[str, Side], report: Report, say: Say) -> None:
    asked = tuple(subject.MODULES) if plan.peers is None else plan.peers
    for name in asked:
        subject.check_peer(name)
    absent = {name: why for name in asked if (why := subject.absence(name, under))}
    peers = [name for name in asked if name not in absent]
    under.check_fits(1 + sum(name in subject.MODULES for name in peers))
    threads = report.settings["threads"]
    sides[OURS] = Side(OURS, {"model": plan.model}, program="mlxrt.bench.sides.ours", env=thread_limits(threads))
    report.sides[OURS] = sides[OURS].told
    for name, why in absent.items():
        report.sides[name] = {"absent": why}
        say(f"{name} is absent: {why}")
    longest = min(max(options.lengths) + options.decoded + 64, sides[OURS].told["context"])
    for name in peers:
        try:
            sides[name] = start_peer(name, under, longest, options.requests, threads)
            report.sides[name] = sides[name].told
        except MlxrtError as error:
            report.sides[name] = {"absent": str(error)}
            report.problems.append(str(error))
            say(str(error))


def thread_limits(threads: int) -> dict[str, str]:
    """The same for every engine; a GPU does not mind."""
    return {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}


def start_peer(name: str, under: Subject, longest: int, parallel: int, threads: int) -> Side:
    if name not in subject.MODULES:
        return Side(name, {"url": name, "prompt": [11, 12, 13]}, program="mlxrt.bench.sides.openai")
    return Side(name, subject.setting(name, under, longest, parallel, threads), env=thread_limits(threads))


def go_through(todo: list[Case], contest: Contest, report: Report, say: Say, end: float) -> None:
    """Every case gets its share of the time that is left; one that fails is told of, the others go on.

    A case that has begun takes the rounds it needs at least, so on a slow machine time may be up before the last.
    """
    progress = Progress(sum(case.weight for case in todo))
    contest.tell = progress.tell
    for i, case in enumerate(todo):
        if i and time.perf_counter() > end:
            skipped = ", ".join(f"{c.suite} / {c.name}" for c in todo[i:])
            report.notes.append(f"time was up, NOT measured: {skipped}; raise --minutes")
            return
        left = sum(c.weight for c in todo[i:])
        contest.allowance = max(0.0, (end - time.perf_counter()) * case.weight / left)
        progress.begin(case.weight, f"{case.suite}: {case.name}")
        told = len(report.problems)
        try:
            report.figures += case.run(contest)
        except MlxrtError as error:
            report.problems.append(f"{case.suite} / {case.name}: {error}")
        progress.end()
        for line in report.problems[told:]:
            say(line)
        if contest.stop():
            raise KeyboardInterrupt
    report.complete = True


def outcome(report: Report) -> dict[str, Any]:
    """What a script wants to know at once."""
    return {"figures": len(report.figures), "problems": report.problems, "wrong": report.wrong}
