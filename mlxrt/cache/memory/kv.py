"""Keys and values in blocks, all of them or a window. One storage, plain or coded.

A pool is [blocks, 2 H, size, D]: heads of keys, then heads of values. `live` is a tail [R, 2 H, TAIL, D] with the
newest tokens of each row, extended by every decode step and flushed when it is full.
"""

from dataclasses import dataclass

import mlx.core as mx

from ..states import BlockTable
from .attention import attend_singles, attend_span
from .codec import Plain
from .slices import bucket, put, table
from .spec import TAIL, LayerSpec, LayerView


class KVView(LayerView):
    _read: dict  # what attend gathered, kept for the layers that share this memory

    def __post_init__(self):
        self._read = {}

    def attend(self, q, k=None, v=None, *, scale):
        """q [N, Hq, D], k and v [N, H, D] -> [N, Hq, D]. Without k and v it only reads."""
        if k is not None:
            self._write(self.spec.codec.encode(mx.concatenate([k, v], axis=1)))
            self._read = {}
        s = self.batch.singles
        out = [self._singles(q[:s], s, scale)] if s else []
        out += [self._span(q[a:b], r, start, b - a, scale) for r, (a, b, start) in enumerate(self.batch.spans, s)]
        return mx.concatenate(out) if len(out) > 1 else out[0]

    def _write(self, new):
        if self.live:
            here = (mx.arange(TAIL) == self.batch.used)[:, None]
            self.live = tuple(mx.where(here, x[:, :, None], t) for t, x in zip(self.live, new))
        else:
            self.pool = self.spec.scatter(self.pool, new, self.batch.positions, self.batch.row, self.index)

    def _gather(self, rows):
        """[..., M, 2H, S, D] of the blocks that these rows of the table name."""
        if rows not in self._read:
            where = self.index["table"][rows[0]] if len(rows) == 1 else self.index["table"][rows[0] : rows[1]]
            self._read[rows] = self.spec.codec.decode([p[where] for p in self.pool])
        return self._read[rows]

    def _singles(self, q, s, scale):
        known, tail = self.spec.known(self.index)[:s], None
        if self.live:
            start = self.batch.start[:, None]
            known = mx.concatenate([mx.where(known < start, known, -1), start + mx.arange(TAIL)], axis=1)
            tail = self.spec.codec.decode(self.live)
        at, heads, window = self.batch.positions[:s], self.spec.heads, self.spec.window
        return attend_singles(q, self._gather((0, s)), tail, known, at, heads=heads, window=window, scale=scale)

    def _span(self, q, r, start, n, scale):
        first = self.index["first"][r]
        kv = self._gather((r,)).swapaxes(0, 1).flatten(1, 2)[:, : start + n - first]  # [2H, T, D]
        k, v = kv[: self.spec.heads], kv[self.spec.heads :]
        return attend_span(q, k, v, first, start, window=self.spec.window, scale=scale)


@dataclass(frozen=True)
class FullKV(LayerSpec):
    heads: int
    dim: int
    codec: Plain = Plain()
    size: int = 32  # tokens in a block
    window = None

    def empty(self, pool):
        return BlockTable(pool, self.size, self.window, TAIL + self.size)

    def pool(self, blocks):
        return tuple(mx.zeros((blocks, 2 * self.heads, self.size, d), t) for d, t in self.codec.parts(self.dim))

    def nbytes(self):
        return sum(2 * self.heads * self.size * d * t.size for d, t in self.codec.parts(self.dim))

    def index(self, states, rows, alone=False):
        ids = [[b.check() for b in s.blocks] for s in states]
        base = [s.first * s.size for s in states]
        where = {"table": table(ids, rows, bucket(max(map(len, ids)))), "base": mx.array(base + [0] * (rows - len(ids)))}
        return where | {"first": base} if alone else where

    def open(self, pool, index, rows):
        return tuple(mx.zeros((rows, p.shape[1], TAIL, p.shape[3]), p.dtype) for p in pool)

    def flush(self, pool, live, batch, index):
        n = batch.used.item()
        at = (batch.start[:, None] + mx.arange(n)).reshape(-1)
        row = mx.repeat(mx.arange(batch.start.shape[0]), n)
        return self.scatter(pool, [t[:, :, :n].swapaxes(1, 2).flatten(0, 1) for t in live], at, row, index)

    def scatter(self, pool, new, positions, row, index):
        block = index["table"][row, (positions - index["base"][row]) // self.size]
        return tuple(put(p, (block, slice(None), positions % self.size), x) for p, x in zip(pool, new))

    def known(self, index):
        """The position in every slot the table names, [R, slots]. Those not written yet lie after every query."""
        return index["base"][:, None] + mx.arange(index["table"].shape[1] * self.size)

    def view(self, batch, index, pool, live):
        return KVView(self, batch, index, pool, live)


@dataclass(frozen=True)
class WindowKV(FullKV):
    window: int = 512  # a token sees itself and window - 1 before it
