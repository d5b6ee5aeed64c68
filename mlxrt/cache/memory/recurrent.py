"""A running summary per sequence: linear attention, state space, short convolution."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..layer_state import RecurrentState
from .layer_spec import LayerSpec, LayerView
from .slices import put


class RecurrentView(LayerView):
    """Its scratch holds the checkpoints inside this step: parts by place."""

    def scan(self, cell, *xs):
        """cell(parts [B, ...], *xs [B, L, ...]) -> (parts, y [B, L, ...]); here xs and y are packed, [N, ...].

        Rows of one token run as a batch, each chunk by itself, so a cell never sees padding.
        """
        s, parts = self.batch.singles, self._load()
        made, ys = [], []
        if s:
            new, y = cell(tuple(p[:s] for p in parts), *(x[:s, None] for x in xs))
            made.append(new)
            ys.append(y[:, 0])
        for r, (a, b, _) in enumerate(self.batch.spans, s):
            new, y = self._chunk(cell, tuple(p[r : r + 1] for p in parts), [x[None, a:b] for x in xs], r)
            made.append(new)
            ys.append(y)
        self._store(tuple(join(p).astype(old.dtype) for p, old in zip(zip(*made), parts)))
        return join(ys)

    def _chunk(self, cell, parts, xs, r):
        """A chunk of one row, cut where a checkpoint is to be kept."""
        ys, done = [], 0
        for end, place in [*self.index["stops"][r], (xs[0].shape[1], None)]:
            parts, y = cell(parts, *(x[:, done:end] for x in xs))
            ys.append(y[0])
            done = end
            if place is not None:
                self.scratch[place] = parts
        return parts, join(ys)

    def _load(self):
        return self.live or self.spec.before(self.pool, self.index)

    def _store(self, parts):
        if self.live:
            self.live = parts
        else:
            self.pool = self.spec.after(self.pool, parts, self.index)
            for place, kept in self.scratch.items():
                self.pool = tuple(put(p, mx.array([place]), x.astype(p.dtype)) for p, x in zip(self.pool, kept))


def join(arrays) -> mx.array:
    return mx.concatenate(list(arrays)) if len(arrays) > 1 else arrays[0]


@dataclass(frozen=True)
class Recurrent(LayerSpec):
    """Arrays of these shapes and dtypes, zero before the first token."""

    parts: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    stride: int = 32  # tokens between two checkpoints

    @property
    def signature(self):
        return f"Recurrent(parts={self.parts}, stride={self.stride})"

    def empty(self, pool):
        return RecurrentState(pool, self.stride)

    def pool(self, blocks):
        return tuple(mx.zeros((blocks, *shape), dtype) for shape, dtype in self.parts)

    def nbytes(self):
        return sum(mx.zeros(shape, dtype).nbytes for shape, dtype in self.parts)

    def index(self, states, rows, alone=False, compiled=False, held=None, tail=None) -> dict[str, Any]:
        pad = [0] * (rows - len(states))
        read = [s.before[0].check() if s.before else 0 for s in states]
        where = {"read": mx.array(read + pad), "write": mx.array([s.blocks[0].check() for s in states] + pad)}
        if not alone:
            return where
        before = [s.before_length for s in states]
        stops = [[(n - was, b.check()) for n, b in s.inner] for s, was in zip(states, before)]
        return where | {"stops": stops}

    def open(self, pool, index, rows, held):
        return self.before(pool, index)

    def before(self, pool, index):
        """The state before the step; place 0 is nowhere, so whoever reads there begins with zeros."""
        fresh = index["read"] == 0
        return tuple(
            mx.where(fresh.reshape(-1, *[1] * (p.ndim - 1)), mx.array(0, p.dtype), p[index["read"]]) for p in pool
        )

    def flush(self, pool, live, batch, index, whole):
        return self.after(pool, live, index)

    def after(self, pool, parts, index):
        """The pool with the states after a step."""
        return tuple(put(p, index["write"], x) for p, x in zip(pool, parts))

    def view(self, batch, index, pool, live):
        return RecurrentView(self, batch, index, pool, live)
