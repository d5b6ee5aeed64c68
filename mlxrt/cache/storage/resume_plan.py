"""How far a text can be resumed from what memory and disk hold, and which pieces of it must come from the disk.

Host arithmetic over what each group has at each node; no file is opened here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .. import BlockTable, LayerState

Have = Sequence[Sequence[bool]]  # by group, then by node


@dataclass(frozen=True)
class Route:
    """The text can be resumed at the end of `depth` nodes; group g needs its pieces from node `first[g]` on."""

    depth: int
    first: tuple[int, ...]


def find_route(empty: Sequence[LayerState], have: Have, tokens: int, size: int, limit: int) -> Route | None:
    """The deepest one, at most `limit` nodes. One of the text's `tokens` is always left to compute."""
    runs = [unbroken(row) for row in have]
    for depth in range(min(limit, *map(len, have)), 0, -1):
        n = min(depth * size, tokens - 1)
        if n < depth * size and any(part.sparse for part in empty):
            continue  # checkpoints lie at the ends of nodes
        first = tuple(first_needed(part, n, depth, size) for part in empty)
        if all(run[depth - 1] >= depth - begin for run, begin in zip(runs, first)):
            return Route(depth, first)
    return None


def first_needed(part: LayerState, n: int, depth: int, size: int) -> int:
    """The first node whose piece a state of n tokens is made of."""
    if part.sparse:
        return depth - 1
    window = part.window if isinstance(part, BlockTable) else None
    return 0 if window is None else max(0, n - window + 1) // size


def unbroken(row: Sequence[bool]) -> list[int]:
    """For each node, how many in a row up to and with it are there."""
    runs, length = [], 0
    for there in row:
        length = length + 1 if there else 0
        runs.append(length)
    return runs
