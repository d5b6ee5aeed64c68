"""One mutant against all cases of the ops that hold it: who notices, and by what. Knows no rule."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrt.kernels import OPS, Case, gpu_of
from mlxrt.kernels.proof import compare, truth

from ..metal_sim import ASCENDING, DESCENDING, MetalCompileError, Simulator
from .cases import all_cases
from .mutants import Mutant, Piece

# float32 notices most; the others read memory in steps of another size
WAYS = (("float32", ASCENDING), ("bfloat16", ASCENDING), ("float32", DESCENDING), ("float16", DESCENDING))
REFUSED, SURVIVED = "does not compile", "survived"


@dataclass(frozen=True)
class Trial:
    """A case with everything about it that no mutant changes."""

    op: str
    case: Case
    dtype: str
    order: int
    plain: Any
    expected: Any
    seconds: int  # a run may take

    def notices(self, factory: Callable[[Simulator], Callable[..., Any]], folder: Path) -> str | None:
        sim = Simulator(self.order, strict=False, portable=True, seconds=self.seconds, folder=folder)
        op = OPS[self.op]
        try:
            got = op.launch(gpu_of("metal", factory(sim)), **self.case.arguments())
        except MetalCompileError:
            return REFUSED
        if errors := sim.errors():
            return errors[0].kind
        proof = compare(got, self.plain, self.expected)
        return None if proof.holds(op.tolerance[self.dtype]) else "numbers"


@functools.cache
def trials(name: str, dtype: str, order: int) -> tuple[Trial, ...]:
    op, made = OPS[name], []
    for case in all_cases(op, dtype):
        sim = Simulator(order, portable=True)
        op.launch(gpu_of("metal", sim.metal_kernel), **case.arguments())
        limit = math.ceil(1 + 5 * max(launch.seconds for launch in sim.launches))
        made.append(Trial(name, case, dtype, order, op.reference(**case.arguments()), truth(op, case), limit))
    return tuple(made)


def planted(mutant: Mutant, sim: Simulator) -> Callable[..., Any]:
    """A metal_kernel that puts the mutant where its piece was."""

    def make(source: str, header: str, **rest: Any) -> Any:
        source = mutant.text if source == mutant.piece.text else source
        return sim.metal_kernel(source=source, header=header.replace(mutant.piece.text, mutant.text), **rest)

    return make


def hunt(mutant: Mutant, folder: Path) -> str:
    """What noticed it first."""
    for trial in order_for(mutant.piece):
        if found := trial.notices(lambda sim: planted(mutant, sim), folder):
            remember(mutant.piece, trial)
            return found
    return SURVIVED


LUCKY: dict[Piece, list[Trial]] = {}  # what noticed earlier mutants of a piece likely notices the next


def remember(piece: Piece, trial: Trial) -> None:
    LUCKY[piece] = [trial, *(t for t in LUCKY.get(piece, []) if t is not trial)]


def order_for(piece: Piece) -> Iterator[Trial]:
    """Every trial once, made when it is asked for."""
    first = LUCKY.get(piece, [])
    yield from first
    for dtype, order in WAYS:
        for name in piece.users:
            yield from (t for t in trials(name, dtype, order) if not any(t is seen for seen in first))
