"""A step's rows as arrays: which tokens, at which positions, in which rows."""

import mlx.core as mx

from ..cache.memory import Batch, Group
from ..cache.memory.slices import ArrayCache
from .step import Step


def follow(
    step: Step, groups: list[Group], start: list[int], used: int, width: int, compiled: bool, held: ArrayCache
) -> tuple[Batch, list[dict]]:
    """What `place` gives for rows of one token that decode on: most of it is what it was a step before."""
    idle = [0] * (width - len(step.slices))
    tail = (start + idle, used)
    starts = held("start", tail[0])
    batch = Batch(starts, held("row", list(range(width))), starts, held.number(used), width)
    rows = [s.seq.parts for s in step.slices]
    return batch, [
        g.spec.index([parts[i] for parts in rows], width, False, compiled, held, tail) for i, g in enumerate(groups)
    ]


def place(step: Step, groups: list[Group], start: list[int], used: int, width: int) -> tuple[Batch, list[dict]]:
    """The batch and, for every group, where its rows' memory lies. Rows beyond the step's own are idle."""
    idle = width - len(step.slices)
    at = [p for s in step.slices for p in range(s.start, s.stop)] + [0] * idle
    row = [i for i, s in enumerate(step.slices) for _ in range(s.start, s.stop)] + list(range(len(step.slices), width))
    singles, n = 0, 0
    spans: list[tuple[int, int, int]] = []
    for s in step.slices:
        k = s.stop - s.start
        if k == 1 and not spans:
            singles += 1
        else:
            spans.append((n, n + k, s.start))
        n += k
    batch = Batch(
        mx.array(at), mx.array(row), mx.array(start + [0] * idle), mx.array([used]), singles + idle, tuple(spans)
    )
    rows = [s.seq.parts for s in step.slices]
    index = [g.spec.index([parts[i] for parts in rows], width, bool(spans)) for i, g in enumerate(groups)]
    return batch, index


def inputs(step: Step, width: int = 0) -> mx.array:
    """The step's tokens: those the host knows, and those on the device by their place in the step that made them.

    Up to `width` there are tokens of idle rows behind them, any: rows that decode on take what the step before made.
    """
    host: list[int] = []
    late: dict[int, mx.array] = {}
    pick: list[tuple[int | None, int]] = []
    for s in step.slices:
        known = s.seq.tokens[s.start : s.stop]
        pick += [(None, len(host) + i) for i in range(len(known))]
        host += known
        for i in range(s.start + len(known), s.stop):
            array, row = s.seq.pending[i - len(s.seq.tokens)]
            late[id(array)] = array
            pick.append((id(array), row))
    idle = [0] * (width - len(pick))
    if not late:
        return mx.array(host + idle, mx.uint32)
    base: dict[int | None, int] = {None: 0}
    n = len(host)
    for key, array in late.items():
        base[key], n = n, n + array.shape[0]
    arrays = [mx.array(host, mx.uint32), *late.values()] if host else list(late.values())
    every = mx.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    where = [base[key] + i for key, i in pick]
    if every.shape[0] == max(width, len(where)) and where == list(range(len(where))):
        return every
    return every[mx.array(where + idle)]
