"""Recurrent states: linear attention, state space models, short convolutions."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...kernels import PackedRows
from ..layer_state import RecurrentState
from .layer_spec import Arrays, LayerSpec, LayerView, TailPiece
from .slices import update


class RecurrentView(LayerView):
    """`live` holds the states before the step, its scratch the checkpoints within a prefill step in their order."""

    index: dict[str, Any]

    def scan(self, cell, *xs):
        """Run cell(state [B, ...], *xs [B, L, ...]) -> (state, y [B, L, ...]) over packed xs [N, ...]; y [N, ...].

        Rows of one token run as a batch, each chunk by itself, so a cell never sees padding.
        """
        s, states = self.batch.singles, self.live
        news, ys = [], []
        if s:
            new, y = cell(tuple(p[:s] for p in states), *(x[:s, None] for x in xs))
            news.append(new)
            ys.append(y[:, 0])
        for r, (a, b, _) in enumerate(self.batch.spans, s):
            new, y = self._chunk(cell, tuple(p[r : r + 1] for p in states), [x[None, a:b] for x in xs], r)
            news.append(new)
            ys.append(y)
        news += self.scratch.values()
        self.write_rows(tuple(concat(p).astype(old.dtype) for p, old in zip(zip(*news), states)))
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

    @property
    def is_prefill(self) -> bool:
        return "checkpoints" in self.index

    def packed_rows(self) -> PackedRows | None:
        """The rows of a prefill step, for a kernel that takes them all at once; None in a decode step."""
        if not self.is_prefill:
            return None
        if "packed_rows" not in self.index:  # the same for all layers of the group
            lengths = [1] * self.batch.singles + [b - a for a, b, _ in self.batch.spans]
            inner = [[n for n, _ in row] for row in self.index["checkpoints"]]
            self.index["packed_rows"] = PackedRows.pack(list(zip(lengths, inner, strict=True)))
        return self.index["packed_rows"]

    def write_rows(self, states: Arrays) -> None:
        """Keep the states after the rows and, in a prefill step, those at the checkpoints of each row in turn."""
        if self.is_prefill:
            self.pool = self.spec.write(self.pool, states, self.index)
            if self.on_write:
                self.on_write()
        else:
            self.live = tuple(states)


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
        read = [s.before[0].check() if s.before else 0 for s in states] + pad
        write = [s.blocks[0].check() for s in states] + pad
        if not prefill:
            return {"read": mx.array(read), "write": mx.array(write)}
        checkpoints = [[(n - s.before_length, b.check()) for n, b in s.inner] for s in states]
        write += [block for row in checkpoints for _, block in row]
        known = {"fresh": not any(read), "begun": all(read), "checkpoints": checkpoints}
        return {"read": mx.array(read), "write": mx.array(write), **known}

    def open_live(self, pool, index, rows, arrays):
        return self.read(pool, index)

    def open_prefill(self, pool, index):
        return self.read(pool, index)

    def tail_pieces(self, state, start, count):
        return [TailPiece(0, state.blocks[0].check(), 0, 1)]

    def read(self, pool, index):
        """The states before the step; zeros where the block is 0, the dummy."""
        if index.get("fresh"):  # one array for all layers of the group
            if "zeros" not in index:
                index["zeros"] = self.pool(index["read"].shape[0])
            return index["zeros"]
        states = tuple(p[index["read"]] for p in pool)
        if index.get("begun"):
            return states
        fresh = index["read"] == 0
        return tuple(mx.where(fresh.reshape(-1, *[1] * (p.ndim - 1)), mx.array(0, p.dtype), p) for p in states)

    def flush(self, pool, live, batch, index, full):
        return self.write(pool, live, index)

    def write(self, pool, states, index):
        """The pool with the states after the step and at its checkpoints."""
        return tuple(update(p, index["write"], x) for p, x in zip(pool, states))

    def view(self, batch, index, pool, live):
        return RecurrentView(self, batch, index, pool, live)
