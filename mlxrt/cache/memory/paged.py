"""Keys and values in blocks: all of them, or a window. One storage for every codec.

A pool is [blocks, heads, size, width] per array of the codec. `live` is a tail [R, heads, TAIL, width] with the newest
tokens of each row, extended by every decode step and flushed when it is full.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...kernels import Packed, PackedPages, Pages
from ..blocks import BlockPool
from ..layer_state import BlockTable, LayerState
from .attention import Form, attend_singles, attend_span
from .codec import Codec, PlainKV, QuantizedKV
from .layer_spec import TAIL, Arrays, Batch, LayerSpec, LayerView, TailSpan
from .slices import ArrayCache, bucket, cut1, cut2, cut4, put, table


class KVView(LayerView):
    """Its scratch holds what attend gathered, for the layers that share this memory."""

    def attend(self, q, k=None, v=None, *, scale, softcap=None, sinks=None):
        """q [N, Hq, D], k and v [N, H, D] -> [N, Hq, D]. Without k and v it only reads."""
        if k is not None:
            self._write(self.spec.codec.encode(k, v))
            self.scratch.clear()
        form = Form(scale, self.spec.window, self.spec.keep, softcap, sinks)
        s = self.batch.singles
        out = [self._singles(q[:s], s, form)] if s else []
        out += [self._span(q[a:b], r, start, form) for r, (a, b, start) in enumerate(self.batch.spans, s)]
        return mx.concatenate(out) if len(out) > 1 else out[0]

    def pages(self) -> Pages | PackedPages | None:
        """Blocks and tail, for the paged attention kernels; None if they cannot read them, and in prefill steps."""
        if not self.live or not self.spec.pages:
            return None
        where = (self.index["table"], self.index["where"])
        if isinstance(codec := self.spec.codec, QuantizedKV):
            return PackedPages(Packed(self.pool[0], codec.layout), Packed(self.live[0], codec.layout), *where)
        return Pages(self.pool[0], self.live[0], *where)

    def replace_tail(self, tail: mx.array) -> None:
        """The tail with the step's tokens, as a kernel wrote it."""
        self.live = (tail,)
        self.scratch.clear()

    def _write(self, new):
        if self.live:
            here = self._once("here", lambda: (mx.arange(TAIL) == self.batch.used)[:, None])
            self.live = tuple(mx.where(here, x[:, :, None], t) for t, x in zip(self.live, new))
        else:
            where = self.batch.positions, self.batch.row, self.index
            at = self._once("slots", lambda: places(self.pool, *self.spec.slots(*where)))
            self.pool = place(self.pool, new, at)

    def _gather(self, rows):
        """Each part's blocks, [..., M, heads, S, width]: of one row, or of as many as `rows` says from the first."""
        if rows not in self.scratch:
            named = self.index["table"]
            where = self._once(f"row {rows[0]}", lambda: named[rows[0]]) if len(rows) == 1 else cut2(named, *rows)
            self.scratch[rows] = [p[where] for p in self.pool]
        return self.scratch[rows]

    def _once(self, name, make):
        """What is the same for all layers of the group, made by the first of them: `index` lives for one step."""
        if name not in self.index:
            self.index[name] = make()
        return self.index[name]

    def _seen(self, form):
        """Which slots each row of one token sees, [s, slots]."""
        s = self.batch.singles
        known = cut2(self.spec.known(self.index), 0, s)
        if self.live:
            start = self.batch.start[:, None]
            known = mx.concatenate([mx.where(known < start, known, -1), start + mx.arange(TAIL)], axis=1)
        return form.visible(known, cut1(self.batch.positions, 0, s)[:, None])

    def _singles(self, q, s, form):
        seen = self._once("seen", lambda: self._seen(form))
        tail = self.live or None
        return attend_singles(q, self.spec.codec, self._gather((0, s)), tail, seen, self.spec.heads, form)

    def _span(self, q, r, start, form):
        n = q.shape[0]
        first, length = self.spec.reach(self.index, r, start + n)
        parts = [p.swapaxes(0, 1).flatten(1, 2)[:, :length] for p in self._gather((r,))]  # [heads, T, width]
        k, v = self.spec.codec.decode(parts)
        seen = None
        if not form.causal(q.shape[-1], start, start + n, first):
            seen = self._once(f"seen {r} {n}", lambda: self._span_seen(r, n, start, length, form))
        return attend_span(q, k, v, seen, form)

    def _span_seen(self, r, n, start, length, form):
        return form.visible(self.spec.known(self.index)[r, :length], (start + mx.arange(n))[:, None])


def places(pool: Arrays, block: mx.array, slot: mx.array) -> list[tuple[mx.array, ...]]:
    """Where tokens go in each array of a layer, as in all layers like it. A slice among indices costs four launches."""
    return [(block[:, None], mx.arange(p.shape[1]), slot[:, None]) for p in pool]


def place(pool: Arrays, new, at: list[tuple[mx.array, ...]]) -> Arrays:
    return tuple(put(p, where, x) for p, x, where in zip(pool, new, at, strict=True))


@dataclass(frozen=True)
class PagedKV(LayerSpec):
    heads: int
    dim: int
    codec: Codec = PlainKV()
    size: int = 32  # tokens in a block
    paged = True

    @property
    def pages(self) -> bool:  # type: ignore[override]
        return isinstance(self.codec, (PlainKV, QuantizedKV)) and self.paged and not self.keep

    @property
    def window(self) -> int | None:
        """A token sees itself and window - 1 before it; None: everything."""
        return None

    @property
    def keep(self) -> int:
        """First tokens that a window leaves visible."""
        return 0

    @property
    def signature(self) -> str:
        return f"FullKV({self.fields_text()})"

    def fields_text(self) -> str:
        return f"heads={self.heads}, dim={self.dim}, codec={self.codec.signature}, size={self.size}"

    def empty(self, pool: BlockPool) -> LayerState:
        return BlockTable(pool, self.size, self.window, TAIL + self.size)

    def pool(self, blocks: int) -> Arrays:
        return tuple(mx.zeros((blocks, h, self.size, d), t) for h, d, t in self.codec.shapes(self.heads, self.dim))

    def nbytes(self) -> int:
        return sum(h * self.size * d * t.size for h, d, t in self.codec.shapes(self.heads, self.dim))

    def index(
        self,
        states: list[Any],
        rows: int,
        alone: bool = False,
        compiled: bool = False,
        held: ArrayCache | None = None,
        tail: TailSpan | None = None,
    ) -> dict[str, Any]:
        held, width = held or ArrayCache(), max(len(s.blocks) for s in states)
        width = bucket(width) if compiled else width

        def named(known: list) -> mx.array:
            return mx.array(table([[b.check() for b in s.blocks] for s in states], rows, width))

        base = [s.first * s.size for s in states]
        first = base + [0] * (rows - len(base))
        # Decoding goes on in the same blocks for many steps.
        known = [states[0].pool.revoked, rows, width, *(s.serial for s in states)]
        where = {"table": held((self, "table"), known, named), "base": held((self, "base"), first)}
        if tail is not None:  # for kernels: all they need besides the table, as one array
            start, used = tail
            pairs = [list(pair) for pair in zip(first, start, strict=True)]
            where["steps"], where["where"] = held.counted((self, "where"), pairs, used, TAIL)
        return where | {"first": base} if alone else where

    def open(self, pool: Arrays, index: dict[str, Any], rows: int, held: ArrayCache) -> Arrays:
        return tuple(held.zeros((rows, p.shape[1], TAIL, p.shape[3]), p.dtype) for p in pool)

    def flush(self, pool: Arrays, live: Arrays, batch: Batch, index: dict[str, Any], whole: bool) -> Arrays:
        if whole and self.paged and self.size == TAIL:
            if "block" not in index:
                index["block"] = self.slots(batch.start, mx.arange(batch.start.shape[0]), index)[0]
            return tuple(put(p, index["block"], t) for p, t in zip(pool, live))
        n = int(batch.used.item())  # type: ignore[arg-type]  # a count
        if "flushed" not in index:  # the same for all layers of the group
            at = (batch.start[:, None] + mx.arange(n)).reshape(-1)
            index["flushed"] = places(pool, *self.slots(at, mx.repeat(mx.arange(batch.start.shape[0]), n), index))
        return place(pool, [cut4(t, 0, n).swapaxes(1, 2).flatten(0, 1) for t in live], index["flushed"])

    def slots(self, positions, row, index):
        """Block and place in it of each token."""
        return index["table"][row, (positions - index["base"][row]) // self.size], positions % self.size

    def place(self, state: BlockTable, position: int) -> int:
        return state.blocks[position // self.size - state.first].check()

    def known(self, index) -> mx.array:
        """The position in every slot the table names, [R, slots]. Those not written yet lie after every query."""
        return index["base"][:, None] + mx.arange(index["table"].shape[1] * self.size)

    def reach(self, index, r: int, end: int) -> tuple[int, int]:
        """Of a row in a step that runs alone: the position of its first slot, and how many slots hold tokens."""
        first = index["first"][r]
        return first, end - first

    def view(self, batch: Batch, index: dict[str, Any], pool: Arrays, live: Arrays) -> LayerView:
        return KVView(self, batch, index, pool, live)


@dataclass(frozen=True)
class WindowKV(PagedKV):
    window: int = 512  # a token sees itself and window - 1 before it

    @property
    def signature(self) -> str:
        return f"WindowKV({self.fields_text()}, window={self.window})"
