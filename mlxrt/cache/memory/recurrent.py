"""Recurrent states: linear attention, state space models, short convolutions."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..layer_state import RecurrentState
from .layer_spec import LayerSpec, LayerView
from .slices import update


class RecurrentView(LayerView):
    """Its scratch holds the checkpoints within this step: arrays by block id."""

    def scan(self, cell, *xs):
        """Run cell(state [B, ...], *xs [B, L, ...]) -> (state, y [B, L, ...]) over packed xs [N, ...]; y [N, ...].

        Rows of one token run as a batch, each chunk by itself, so a cell never sees padding.
        """
        s, states = self.batch.singles, self._load()
        news, ys = [], []
        if s:
            new, y = cell(tuple(p[:s] for p in states), *(x[:s, None] for x in xs))
            news.append(new)
            ys.append(y[:, 0])
        for r, (a, b, _) in enumerate(self.batch.spans, s):
            new, y = self._chunk(cell, tuple(p[r : r + 1] for p in states), [x[None, a:b] for x in xs], r)
            news.append(new)
            ys.append(y)
        self._store(tuple(concat(p).astype(old.dtype) for p, old in zip(zip(*news), states)))
        return concat(ys)

    def _chunk(self, cell, state, xs, r):
        """A chunk of one row, split at its checkpoints."""
        ys, done = [], 0
        for end, block in [*self.index["checkpoints"][r], (xs[0].shape[1], None)]:
            state, y = cell(state, *(x[:, done:end] for x in xs))
            ys.append(y[0])
            done = end
            if block is not None:
                self.scratch[block] = state
        return state, concat(ys)

    def _load(self):
        return self.live or self.spec.read(self.pool, self.index)

    def _store(self, states):
        if self.live:
            self.live = states
        else:
            self.pool = self.spec.write(self.pool, states, self.index)
            for block, state in self.scratch.items():
                self.pool = tuple(update(p, mx.array([block]), x.astype(p.dtype)) for p, x in zip(self.pool, state))


def concat(arrays) -> mx.array:
    return mx.concatenate(list(arrays)) if len(arrays) > 1 else arrays[0]


@dataclass(frozen=True)
class Recurrent(LayerSpec):
    """Arrays of these shapes and dtypes, zero before the first token."""

    parts: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    stride: int = 32  # tokens between two checkpoints
    recurrent = True

    @property
    def signature(self):
        return f"Recurrent(parts={self.parts}, stride={self.stride})"

    def empty(self, pool):
        return RecurrentState(pool, self.stride)

    def pool(self, blocks):
        return tuple(mx.zeros((blocks, *shape), dtype) for shape, dtype in self.parts)

    def nbytes(self):
        return sum(mx.zeros(shape, dtype).nbytes for shape, dtype in self.parts)

    def index(self, states, rows, prefill=False, compiled=False, arrays=None, tail=None) -> dict[str, Any]:
        pad = [0] * (rows - len(states))
        read = [s.before[0].check() if s.before else 0 for s in states]
        index = {"read": mx.array(read + pad), "write": mx.array([s.blocks[0].check() for s in states] + pad)}
        if not prefill:
            return index
        checkpoints = [[(n - s.before_length, b.check()) for n, b in s.inner] for s in states]
        return index | {"checkpoints": checkpoints}

    def open_live(self, pool, index, rows, arrays):
        return self.read(pool, index)

    def block_id(self, state, position):
        return state.blocks[0].check()

    def read(self, pool, index):
        """The states before the step; zeros where the block is 0, the dummy."""
        fresh = index["read"] == 0
        return tuple(
            mx.where(fresh.reshape(-1, *[1] * (p.ndim - 1)), mx.array(0, p.dtype), p[index["read"]]) for p in pool
        )

    def flush(self, pool, live, batch, index, full):
        return self.write(pool, live, index)

    def write(self, pool, states, index):
        """The pool with the states after the step."""
        return tuple(update(p, index["write"], x) for p, x in zip(pool, states))

    def view(self, batch, index, pool, live):
        return RecurrentView(self, batch, index, pool, live)
