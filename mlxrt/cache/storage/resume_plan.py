"""Resume plan: how far a prompt can be resumed from memory and disk together, and which blocks that takes.

Host arithmetic over what each group has at each node; no file is opened here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .. import BlockTable, LayerState

Available = Sequence[Sequence[bool]]  # by group, then by node


@dataclass(frozen=True)
class ResumePlan:
    """Resume at the end of `depth` nodes; group g needs its blocks from node `first[g]` on."""

    depth: int
    first: tuple[int, ...]


def plan_resume(
    empty: Sequence[LayerState], available: Available, tokens: int, size: int, limit: int
) -> ResumePlan | None:
    """The deepest plan of at most `limit` nodes. One of the prompt's `tokens` is always left to compute."""
    runs = [run_lengths(row) for row in available]
    for depth in range(min(limit, *map(len, available)), 0, -1):
        n = min(depth * size, tokens - 1)
        if n < depth * size and any(state.sparse for state in empty):
            continue  # checkpoints lie at the ends of nodes
        first = tuple(first_needed(state, n, depth, size) for state in empty)
        if all(run[depth - 1] >= depth - start for run, start in zip(runs, first)):
            return ResumePlan(depth, first)
    return None


def first_needed(state: LayerState, n: int, depth: int, size: int) -> int:
    """The first node whose block a state of n tokens needs."""
    if state.sparse:
        return depth - 1
    window = state.window if isinstance(state, BlockTable) else None
    return 0 if window is None else max(0, n - window + 1) // size


def run_lengths(row: Sequence[bool]) -> list[int]:
    """For each node, how many available ones in a row end with it."""
    runs, length = [], 0
    for available in row:
        length = length + 1 if available else 0
        runs.append(length)
    return runs
