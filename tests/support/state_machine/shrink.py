"""Hypothesis makes programs and shrinks the first that fails. Knows nothing of processes or printing."""

import math
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisException

from mlxrt.errors import MlxrtError

from .checker import Checker
from .machine import Machine, explain
from .program import Program, programs

# What has to happen in a run, or it has shown nothing about it.
EVENTS = (
    "submits",
    "tokens compared",
    "tokens drawn or penalised",
    "log probabilities compared",
    "logit rows compared",
    "steps with 0 in the air",
    "steps with 1 in the air",
    "steps with 2 in the air",
    "steps with 3 in the air",
    "requests with cached tokens",
    "cancels of running requests",
    "cancels of waiting requests",
    "cancels with tokens in the air",
    "ended by stop",
    "ended by length",
    "preemptions",
    "evictions",
    "evictions by hand",
    "clears",
    "restarts",
    "values found",
    "values continued",
    "values rewound",
    "rewinds refused",
    "values stored",
    "values through a file",
    "scores",
    "answers",
    "answers with cached tokens",
    "answers stopped halfway",
    "forks",
    "turns rewound",
    "saves",
    "restores",
    "restores that were reused",
    "compiled programs",
    "tokens held to a form",
    "forms completed",
    "forms cut by a stop string",
    "answers held to a form that were preempted",
    "cancels of answers held to a form",
    "answers held to a form stopped halfway",
    "answers of sessions held to a form",
    "requests that part inside an answer held to a form",
)


@dataclass
class Hunt:
    """What some programs of some kinds have shown."""

    tally: Counter = field(default_factory=Counter)
    ties: list[str] = field(default_factory=list)
    failure: str = ""
    program: Program | None = None  # the one that failed, shrunk

    def missing(self) -> list[str]:
        return [event for event in EVENTS if not self.tally[event]]


class Court:
    """One checker per kind, kept over many programs. Tries no new program after `patience` seconds of shrinking."""

    def __init__(self, tally: Counter, patience: float = 60):
        self.tally, self.patience = tally, patience
        self.checkers: dict[str, Checker] = {}
        self.failed: set[Program] = set()
        self.last: Program | None = None
        self._until = math.inf

    def spent(self, program: Program) -> bool:
        """Whether there is no time left to find out about a program; those known to fail are always run."""
        return time.monotonic() > self._until and program not in self.failed

    def note_failure(self, program: Program) -> None:
        self.failed.add(program)
        self.last = program
        self._until = min(self._until, time.monotonic() + self.patience)

    def checker(self, kind: str) -> Checker:
        if kind not in self.checkers:
            self.checkers[kind] = Checker(kind, self.tally)
        return self.checkers[kind]

    def ties(self) -> list[str]:
        return [tie for checker in self.checkers.values() for tie in checker.ties]


# What a program can provoke: wrong answers, typed errors out of place, and whatever a broken engine trips over.
FAILURES = (
    *(AssertionError, MlxrtError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    *(OSError, ExceptionGroup, HypothesisException),
)


def try_program(program: Program, court: Court) -> None:
    """Run one. Where it fails, the error carries a note with the whole story."""
    if court.spent(program):
        return
    machine = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            machine = Machine(program, court.checker(program.kind), Path(folder))
            machine.run()
    except FAILURES as error:
        court.note_failure(program)
        error.add_note(explain(program, machine, error))
        raise
    court.tally["compiled programs"] += program.compiled
    court.tally[f"programs of {program.kind}"] += 1


def hunt(kinds: tuple[str, ...], count: int, begin: int, shrink: bool = True) -> Hunt:
    found = Hunt()
    court = Court(found.tally)
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @seed(begin)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(*kinds))
    def each(program: Program) -> None:
        try_program(program, court)

    try:
        each()
    except FAILURES as error:
        found.program = court.last
        notes = getattr(error, "__notes__", [])  # there only once a note was added
        found.failure = next((note for note in notes if "what was done" in note), repr(error))
    found.ties = court.ties()
    return found
