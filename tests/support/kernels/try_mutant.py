"""One mutant against all cases of the ops that hold it: who notices, and by what. Knows no rule."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrt.kernels import OPS, Case, Op, make_gpu
from mlxrt.kernels.selftest import compare_outputs, compute_reference

from ..metal_sim import ASCENDING, DESCENDING, MetalCompileError, Simulator
from .cases import all_cases
from .function_ops import FUNCTION_OPS
from .mutants import Mutant, Piece

# float32 notices most; bfloat16 reads memory in steps of another size. Wide cases are tried in the first way only.
WAYS = (("float32", ASCENDING), ("bfloat16", DESCENDING))
SECONDS = 8  # a run may take; the slowest case that is right takes one
REFUSED, SURVIVED = "does not compile", "survived"


def find_op(name: str) -> Op:
    return OPS.get(name) or FUNCTION_OPS[name]


@dataclass(frozen=True)
class Trial:
    """A case with everything about it that no mutant changes."""

    op: str
    case: Case
    dtype: str
    order: int
    plain: Any
    expected: Any

    def notices(self, factory: Callable[[Simulator], Callable[..., Any]], folder: Path) -> str | None:
        sim = Simulator(self.order, strict=False, portable=True, seconds=SECONDS, folder=folder)
        op = find_op(self.op)
        try:
            got = op.launch(make_gpu("metal", factory(sim)), **self.case.arguments())
        except MetalCompileError:
            return REFUSED
        if errors := sim.errors():
            return errors[0].kind
        report = compare_outputs(got, self.plain, self.expected)
        return None if report.within(op.tolerance[self.dtype]) else "numbers"


@functools.cache
def trials(name: str, dtype: str, order: int) -> tuple[Trial, ...]:
    op = find_op(name)
    cases = all_cases(op, dtype, wide=(dtype, order) == WAYS[0])
    return tuple(Trial(name, c, dtype, order, op.reference(**c.arguments()), compute_reference(op, c)) for c in cases)


def planted(mutant: Mutant, sim: Simulator) -> Callable[..., Any]:
    """A metal_kernel that makes the mutant of what it is given."""

    def make(source: str, header: str, **rest: Any) -> Any:
        return sim.metal_kernel(source=mutant.planted(source), header=mutant.planted(header), **rest)

    return make


def hunt(mutant: Mutant, folder: Path) -> str:
    """What noticed it first."""
    for trial in order_for(mutant):
        if found := trial.notices(lambda sim: planted(mutant, sim), folder):
            remember(mutant, trial)
            return found
    return SURVIVED


def alarms(op: str, folder: Path) -> list[str]:
    """Trials of an op that notice its kernels as they are: with one of those every mutant would count as noticed."""
    every = (trial for dtype, order in WAYS for trial in trials(op, dtype, order))
    seen = ((trial, trial.notices(lambda sim: sim.metal_kernel, folder)) for trial in every)
    return [f"{op} {trial.dtype}, {trial.case.name}: {found}" for trial, found in seen if found]


LUCKY: dict[tuple[Piece, ...], list[Trial]] = {}  # what noticed earlier mutants of a text likely notices the next


def remember(mutant: Mutant, trial: Trial) -> None:
    LUCKY[mutant.pieces] = [trial, *(t for t in LUCKY.get(mutant.pieces, []) if t is not trial)]


def order_for(mutant: Mutant) -> Iterator[Trial]:
    """Every trial once, made when it is asked for."""
    first = LUCKY.get(mutant.pieces, [])
    yield from first
    for dtype, order in WAYS:
        for name in (*mutant.users, *called_by(mutant)):
            yield from (t for t in trials(name, dtype, order) if not any(t is seen for seen in first))


def called_by(mutant: Mutant) -> list[str]:
    """Ops of single functions that call what it changes."""
    return [
        name
        for name, op in FUNCTION_OPS.items()
        for source in op.sources
        if any(f"{piece.name}(" in source.body for piece in mutant.pieces)
    ]
