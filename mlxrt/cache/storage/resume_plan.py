"""Resume plan: how far a prompt can be resumed from memory and disk together, and which blocks that takes.

Host arithmetic over what each group has at each node; no file is opened here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .. import BlockTable, LayerState

Available = Sequence[Sequence[bool]]  # by group, then by node


@dataclass(frozen=True)
class ResumePlan:
    """Resume at the end of `depth` nodes; group g needs its blocks of the first `kept[g]` and from `first[g]` on."""

    depth: int
    kept: tuple[int, ...]
    first: tuple[int, ...]

    def nodes(self, g: int) -> list[int]:
        return [*range(self.kept[g]), *range(self.first[g], self.depth)]


def plan_resume(
    empty: Sequence[LayerState], available: Available, tokens: int, size: int, limit: int
) -> ResumePlan | None:
    """The deepest plan of at most `limit` nodes. One of the prompt's `tokens` is always left to compute."""
    runs = [run_lengths(row) for row in available]
    for depth in range(min(limit, *map(len, available)), 0, -1):
        n = min(depth * size, tokens - 1)
        if n < depth * size and any(state.has_checkpoints for state in empty):
            continue  # checkpoints lie at the ends of nodes
        first = tuple(first_needed(state, n, depth) for state in empty)
        kept = tuple(min(start, kept_nodes(state)) for state, start in zip(empty, first))
        if all(
            run[depth - 1] >= depth - start and (not n or run[n - 1] == n) for run, start, n in zip(runs, first, kept)
        ):
            return ResumePlan(depth, kept, first)
    return None


def kept_nodes(state: LayerState) -> int:
    return state.kept if isinstance(state, BlockTable) else 0


def first_needed(state: LayerState, n: int, depth: int) -> int:
    """The first node, but for the kept ones, whose block a state of n tokens needs."""
    if state.has_checkpoints:
        return depth - 1
    return state.first_visible(n) if isinstance(state, BlockTable) else 0


def run_lengths(row: Sequence[bool]) -> list[int]:
    """For each node, how many available ones in a row end with it."""
    runs, length = [], 0
    for available in row:
        length = length + 1 if available else 0
        runs.append(length)
    return runs
