"""The rows of a step as arrays: which tokens, at which positions, in which rows."""

import mlx.core as mx
import numpy as np

from ..cache.memory import TAIL, Batch, Group, TailSpan
from ..cache.memory.slices import ArrayCache, at_step
from ..kernels import DrawRow, pack_words
from .sequence import Step

HostTables = tuple[np.ndarray, np.ndarray]  # a table, and what changes with every step of a tail
RECENT = 1 << 30  # where a tail's arrays by layer have its tokens for penalties: after all layers
HISTORY_WIDTH = 1024  # numbers of a row whose tokens are penalised, at least: a wider table is another compiled step


def decode_batch(
    step: Step, groups: list[Group], tail: TailSpan, width: int, compiled: bool, arrays: ArrayCache
) -> tuple[Batch, list[dict], list[HostTables]]:
    """The batch and index of rows of one token that decode on: most arrays are those of the step before. With the block
    tables of the groups that have some, and where their rows' tails end at every step, as CUDA graphs take them."""
    tail = tail._replace(starts=tail.starts + [0] * (width - len(step.slices)))
    starts = arrays("start", tail.starts)
    batch = Batch(starts, arrays("row", list(range(width))), starts, arrays.number(tail.used), width)
    rows = [s.seq.parts for s in step.slices]
    index = [
        g.spec.index([parts[i] for parts in rows], width, False, compiled, arrays, tail) for i, g in enumerate(groups)
    ]
    return batch, index, [where.pop("host") for where in index if "host" in where]


def draw_batch(rows: list[DrawRow], width: int, history: bool, top: int, vocab: int = 0) -> dict:
    """What the draw op is told of a batch for all steps of a tail, as a group's index is: `table` stays, `steps` count;
    `host` has both as numpy arrays.

    `variant`: whether tokens of the tail are penalised, how many log probabilities are wanted, and whether rows of
    `vocab` tokens are masked: then `mask` has one that allows everything.
    """
    steps = np.arange(TAIL, dtype=np.uint32)[:, None]
    table = pack_words(rows, width, HISTORY_WIDTH) if history else pack_words(rows, width)
    mask = {"mask": mx.full((width, -(-vocab // 32)), 2**32 - 1, mx.uint32)} if vocab else {}
    arrays = {"table": mx.array(table), "steps": mx.array(steps), "host": (table, steps)}
    return arrays | {"variant": (int(history), top, bool(vocab)), **mask}


def step_of_tail(draws: dict, used: int) -> dict:
    """The same with `where`, the number of a step, a view of `steps`."""
    kept = {name: value for name, value in draws.items() if name not in ("steps", "host")}
    return kept | {"where": at_step(draws["steps"], used)}


def prefill_batch(step: Step, groups: list[Group], start: list[int], used: int, width: int) -> tuple[Batch, list[dict]]:
    """The batch and, for every group, the index of its rows' blocks. Rows beyond the step's own are idle."""
    idle = width - len(step.slices)
    positions = [p for s in step.slices for p in range(s.start, s.stop)] + [0] * idle
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
        mx.array(positions), mx.array(row), mx.array(start + [0] * idle), mx.array([used]), singles + idle, tuple(spans)
    )
    rows = [s.seq.parts for s in step.slices]
    index = [g.spec.index([parts[i] for parts in rows], width, prefill=True) for i, g in enumerate(groups)]
    return batch, index


def input_tokens(step: Step, width: int = 0) -> mx.array:
    """The step's tokens: those the host knows, and those on the device by their row in the step that sampled them.

    Up to `width`, idle rows get any token: rows that decode on take the array that the step before made.
    """
    host: list[int] = []
    pending: dict[int, mx.array] = {}
    picks: list[tuple[int | None, int]] = []
    for s in step.slices:
        known = s.seq.tokens[s.start : s.stop]
        picks += [(None, len(host) + i) for i in range(len(known))]
        host += known
        for i in range(s.start + len(known), s.stop):
            array, row = s.seq.pending[i - len(s.seq.tokens)]
            pending[id(array)] = array
            picks.append((id(array), row))
    idle = [0] * (width - len(picks))
    if not pending:
        return mx.array(host + idle, mx.uint32)
    base: dict[int | None, int] = {None: 0}
    n = len(host)
    for key, array in pending.items():
        base[key], n = n, n + array.shape[0]
    arrays = [mx.array(host, mx.uint32), *pending.values()] if host else list(pending.values())
    tokens = mx.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    picked = [base[key] + i for key, i in picks]
    if tokens.shape[0] == max(width, len(picked)) and picked == list(range(len(picked))):
        return tokens
    return tokens[mx.array(picked + idle)]
