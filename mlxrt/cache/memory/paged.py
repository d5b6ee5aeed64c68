"""Paged KV cache: keys and values in blocks, for full attention and windows, with any codec.

A pool is [blocks, heads, size, width] per array of the codec. `live` is the decode tail [R, heads, TAIL, width]: the
newest tokens of each row, extended by every decode step and flushed to the pool when it is full.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ...kernels import Codec, PackedKV, Pages, PlainKV, PrefillPages, QuantizedKV, QuantizedPages
from ...kernels.ops.attention import AttentionParams, attend_causal, attend_decode, attend_masked, slot_positions
from ..blocks import BlockPool
from ..layer_state import BlockTable, LayerState
from .layer_spec import TAIL, Arrays, Batch, LayerSpec, LayerView, TailPiece
from .slices import ArrayCache, at_step, bucket, pad_table, repeat_with_step, slice1, slice2, slice4, update

MIN_TILE = 256  # queries of a chunk that attend together under a window: what is masked is computed, too
KEY_MULTIPLE = 8  # of the keys of a masked product: cuBLAS takes five times as long for others


class KVView(LayerView):
    """Its scratch holds gathered blocks, for the layers that share this cache."""

    def attend(self, q, k=None, v=None, *, scale, softcap=None, sinks=None):
        """q [N, Hq, D], k and v [N, H, D] -> [N, Hq, D]. Without k and v it only reads."""
        if k is not None:
            self._write(self.spec.codec.encode(k, v))
            self.scratch.clear()
            self.scratch["new"] = k, v
        params = AttentionParams(scale, self.spec.window, self.spec.keep, softcap, sinks)
        s = self.batch.singles
        out = [self._decode(q[:s], s, params)] if s else []
        out += [self._prefill(q[a:b], r, start, params) for r, (a, b, start) in enumerate(self.batch.spans, s)]
        return mx.concatenate(out) if len(out) > 1 else out[0]

    def pages(self) -> Pages | QuantizedPages | None:
        """Blocks and tail, for the paged attention kernels; None if they cannot read them, and in prefill steps."""
        if not self.live or not self.spec.pages:
            return None
        table = self.index["table"], self.index["where"]
        if isinstance(codec := self.spec.codec, QuantizedKV):
            return QuantizedPages(PackedKV(self.pool[0], codec), PackedKV(self.live[0], codec), *table)
        return Pages(self.pool[0], self.live[0], *table)

    def prefill_pages(self) -> PrefillPages | None:
        """Blocks alone, for the CPU's kernels; None if they cannot read them, and in decode steps."""
        if self.live or not self.spec.pages:
            return None
        pool: Any = self.pool[0]
        if isinstance(codec := self.spec.codec, QuantizedKV):
            pool = PackedKV(pool, codec)
        return PrefillPages(pool, self.index["table"], self.batch.row, self._once("row_range", self._row_range))

    def _row_range(self) -> mx.array:
        base, positions = self.index["base"][self.batch.row], self.batch.positions
        return mx.stack([base, positions, mx.zeros_like(positions)], axis=1).astype(mx.int32)

    def write_encoded(self, slots: mx.array | PackedKV, finite: mx.array) -> None:
        """Put into the pool what a kernel made of the step's keys and values; `finite` [N]: whether it is."""
        self._write((slots.words if isinstance(slots, PackedKV) else slots,))
        self.scratch["finite"] = finite

    def replace_tail(self, tail: mx.array) -> None:
        """The tail with the step's tokens, as a kernel wrote it."""
        self.live = (tail,)
        self.scratch.clear()

    def release(self):
        self.scratch.clear()

    def finite(self):
        if "finite" in self.scratch:
            return self.scratch["finite"]
        if "new" not in self.scratch:
            return None
        k, v = (mx.isfinite(x).all(axis=(1, 2)) for x in self.scratch["new"])
        return k & v

    def _write(self, new):
        if self.live:
            here = self._once("here", lambda: (mx.arange(TAIL) == self.batch.used)[:, None])
            self.live = tuple(mx.where(here, x[:, :, None], t) for t, x in zip(self.live, new))
        else:
            tokens = self.batch.positions, self.batch.row, self.index
            at = self._once("slots", lambda: slot_indices(self.pool, *self.spec.slot_mapping(*tokens)))
            self.pool = write_slots(self.pool, new, at)
            if self.on_write:
                self.on_write()

    def _gather(self, rows):
        """The blocks of each array, [..., M, heads, S, width]: of row (r,), or of rows (start, count)."""
        if rows not in self.scratch:
            table = self.index["table"]
            ids = self._once(f"row {rows[0]}", lambda: table[rows[0]]) if len(rows) == 1 else slice2(table, *rows)
            self.scratch[rows] = [p[ids] for p in self.pool]
        return self.scratch[rows]

    def _once(self, name, make):
        """Memoises what all layers of the group share; `index` lives for one step."""
        if name not in self.index:
            self.index[name] = make()
        return self.index[name]

    def _decode_mask(self, params):
        """Which slots each row of one token sees, [s, slots]."""
        s = self.batch.singles
        keys, queries = slice2(self.spec.key_positions(self.index), 0, s), slice1(self.batch.positions, 0, s)
        if self.live:
            return params.mask_decode(keys, self.batch.start, TAIL, queries)
        return params.mask(keys, queries[:, None])

    def _decode(self, q, s, params):
        mask = self._once("mask", lambda: self._decode_mask(params))
        tail = self.live or None
        filled: Any = self.index.get("filled", 0)
        return attend_decode(q, self.spec.codec, self._gather((0, s)), tail, mask, self.spec.heads, params, filled)

    def _prefill(self, q, r, start, params):
        n = q.shape[0]
        first = self.index["first"][r]  # position of the row's first slot, if no blocks are kept before a gap
        length = start + n - first  # slots that hold tokens
        parts = [p.swapaxes(0, 1).flatten(1, 2)[:, :length] for p in self._gather((r,))]  # [heads, T, width]
        k, v = self.spec.codec.decode(parts)
        if params.is_causal(q.shape[-1], start, start + n, first):
            return attend_causal(q, k, v, params)
        if params.window is None:
            return self._attend_masked(q, k, v, r, start, params)
        return self._attend_window(q, k, v, r, start, params)

    def _attend_window(self, q, k, v, r, start, params):
        """In tiles of queries, each over the keys that any of it sees. A window's keys lie the same way to its queries
        wherever it is, so tiles are a batch with one mask. Queries too near the row's first key come before it, what is
        left after it."""
        n, first, keep = q.shape[0], self.index["first"][r], params.keep
        tile = max(MIN_TILE, bucket(params.window))
        before = params.window - 1  # keys before a tile that it sees
        before += -(keep + before + tile) % KEY_MULTIPLE
        front = -(-keep // self.spec.size) * self.spec.size  # slots of kept blocks
        head = max(0, front + before + first - start)
        count = max(0, n - head) // tile
        if not count:
            return self._attend_masked(q, k, v, r, start, params)
        stop = head + count * tile
        mask = self._once(f"band {tile}", lambda: params.for_sdpa(params.mask_band(before, tile), q.dtype))
        begin, end = start + head - before - first, start + stop - first
        keys, values = (make_windows(x, begin, end, before, tile, keep) for x in (k, v))
        middle = attend_masked(mx.unflatten(q[head:stop], 0, (count, tile)), keys, values, mask, params).flatten(0, 1)
        out = [middle]
        if head:
            out.insert(0, self._attend_masked(q[:head], k, v, r, start, params))
        if stop < n:
            out.append(self._attend_masked(q[stop:], k, v, r, start + stop, params))
        return mx.concatenate(out) if len(out) > 1 else middle

    def _attend_masked(self, q, k, v, r, start, params):
        """Queries from `start` on, with a mask of their own, over keys from the first that any of them sees."""
        n, first = q.shape[0], self.index["first"][r]
        end, begin = start + n - first, 0  # slots
        if params.window is not None and not params.keep:
            begin = max(0, start - params.window + 1 - first)
        more = -(end - begin) % KEY_MULTIPLE
        if more <= begin:
            begin, more = begin - more, 0
        positions = self._once("positions", lambda: self.spec.key_positions(self.index))

        def make_mask():
            seen = params.mask(positions[r, begin:end], start + mx.arange(n)[:, None])
            return params.for_sdpa(mx.pad(seen, [(0, 0), (0, more)]) if more else seen, q.dtype)

        mask = self._once(f"mask {r} {start} {n}", make_mask)
        k, v = k[None, :, begin:end], v[None, :, begin:end]
        if more:
            k, v = (mx.pad(x, [(0, 0), (0, 0), (0, more), (0, 0)]) for x in (k, v))
        return attend_masked(q[None], k, v, mask, params)[0]


def make_windows(x: mx.array, begin: int, end: int, before: int, tile: int, keep: int) -> mx.array:
    """Keys or values [H, T, D] of tiles, the first of which begins `before` slots after `begin`, while the last ends at
    `end`: [tiles, H, keep + before + tile, D]. Neighbours share all but `tile` of them."""
    heads, _, width = x.shape
    count, length = (end - begin - before) // tile, end - begin
    strides = tile * width, length * width, width, 1
    out = mx.as_strided(x[:, begin:end], (count, heads, before + tile, width), strides)
    if not keep:
        return out
    return mx.concatenate([mx.broadcast_to(x[:, :keep], (count, heads, keep, width)), out], axis=2)


def slot_indices(pool: Arrays, block: mx.array, slot: mx.array) -> list[tuple[mx.array, ...]]:
    """Indices of tokens in each array of a layer, the same in all layers of a group. `:` would cost four launches."""
    return [(block[:, None], mx.arange(p.shape[1]), slot[:, None]) for p in pool]


def write_slots(pool: Arrays, new, at: list[tuple[mx.array, ...]]) -> Arrays:
    return tuple(update(p, indices, x) for p, x, indices in zip(pool, new, at, strict=True))


@dataclass(frozen=True)
class PagedKV(LayerSpec):
    """Full attention."""

    heads: int
    dim: int
    codec: Codec = PlainKV()
    size: int = 32  # tokens in a block
    paged = True

    @property
    def pages(self) -> bool:  # type: ignore[override]
        return isinstance(self.codec, (PlainKV, QuantizedKV))

    @property
    def window(self) -> int | None:
        """A token sees itself and window - 1 before it; None: everything."""
        return None

    @property
    def keep(self) -> int:
        """First tokens that stay visible under a window."""
        return 0

    @property
    def signature(self) -> str:
        return f"FullKV({self.fields_text()})"

    def fields_text(self) -> str:
        return f"heads={self.heads}, dim={self.dim}, codec={self.codec.signature}, size={self.size}"

    def empty(self, pool: BlockPool) -> LayerState:
        return BlockTable(pool, self.size, self.window, TAIL + self.size, self.keep)

    def pool(self, blocks: int) -> Arrays:
        return tuple(mx.zeros((blocks, h, self.size, d), t) for h, d, t in self.codec.shapes(self.heads, self.dim))

    def nbytes(self) -> int:
        return sum(h * self.size * d * t.size for h, d, t in self.codec.shapes(self.heads, self.dim))

    def gathered_bytes(self, context: int, tokens: int) -> int:
        seen = context if self.window is None else min(context, self.keep + self.window + tokens)
        return -(-seen // self.size) * self.nbytes()

    def index(self, states, rows, prefill=False, compiled=False, arrays=None, tail=None) -> dict[str, Any]:
        arrays, width = arrays or ArrayCache(), max(len(s.blocks) for s in states)
        if compiled:  # as wide as it gets before the tail is flushed: another width is another step
            ends = [s.length for s in states] if tail is None else [start + tail.size for start in tail.starts]
            width = bucket(max(max(len(s.blocks), self.max_blocks(end)) for s, end in zip(states, ends)))

        def block_table(key: list) -> np.ndarray:
            return pad_table([[b.check() for b in s.blocks] for s in states], rows, width)

        base = [s.first * s.size for s in states]
        first = base + [0] * (rows - len(base))
        # Decoding stays in the same blocks for many steps.
        key = [rows, width, *(s.serial for s in states)]
        table = arrays.with_host((self, "table"), key, block_table)
        index = {"table": table.array, "base": arrays((self, "base"), first)}
        if tail is not None:  # all that kernels need beside the table, as one array
            pairs = [list(pair) for pair in zip(first, tail.starts, strict=True)]
            steps = arrays.with_host((self, "where"), pairs, lambda pairs: repeat_with_step(pairs, TAIL))
            index["where"], index["host"] = at_step(steps.array, tail.used), (table.host, steps.host)
        if not compiled:  # an int: each of its values would be another compiled step
            written = [s.length for s in states] if tail is None else tail.starts
            index["filled"] = min((n - n0) // self.size for n, n0 in zip(written, base))  # without idle rows
        return index | {"first": base} if prefill else index

    def max_blocks(self, end: int) -> int:
        """That a row holds while it decodes, up to a position."""
        blocks = -(-end // self.size)
        if self.window is None:
            return blocks
        return min(blocks, -(-self.keep // self.size) + (self.window + TAIL + self.size) // self.size + 2)

    def open_live(self, pool: Arrays, index: dict[str, Any], rows: int, arrays: ArrayCache) -> Arrays:
        return tuple(arrays.zeros((rows, p.shape[1], TAIL, p.shape[3]), p.dtype) for p in pool)

    def flush(self, pool: Arrays, live: Arrays, batch: Batch, index: dict[str, Any], full: bool) -> Arrays:
        if full and self.size == TAIL:
            if "block" not in index:
                index["block"] = self.slot_mapping(batch.start, mx.arange(batch.start.shape[0]), index)[0]
            return tuple(update(p, index["block"], t) for p, t in zip(pool, live))
        n = int(batch.used.item())  # type: ignore[arg-type]  # a count
        if "flushed" not in index:  # the same for all layers of the group
            at = (batch.start[:, None] + mx.arange(n)).reshape(-1)
            rows = mx.repeat(mx.arange(batch.start.shape[0]), n)
            index["flushed"] = slot_indices(pool, *self.slot_mapping(at, rows, index))
        return write_slots(pool, [slice4(t, 0, n).swapaxes(1, 2).flatten(0, 1) for t in live], index["flushed"])

    def slot_mapping(self, positions, row, index):
        """Block and slot in it of each token."""
        return index["table"][row, (positions - index["base"][row]) // self.size], positions % self.size

    def tail_pieces(self, state: BlockTable, start: int, count: int) -> list[TailPiece]:
        pieces, n = [], 0
        while n < count:
            block, slot = divmod(start + n, self.size)
            tokens = min(count - n, self.size - slot)
            pieces.append(TailPiece(n, state.blocks[block - state.first].check(), slot, tokens))
            n += tokens
        return pieces

    def key_positions(self, index) -> mx.array:
        """The position in every slot of the block table, [R, slots]. Slots not written yet come after every query."""
        return slot_positions(index["base"], index["table"].shape[1], self.size, self.keep)

    def view(self, batch: Batch, index: dict[str, Any], pool: Arrays, live: Arrays) -> LayerView:
        return KVView(self, batch, index, pool, live)


@dataclass(frozen=True)
class WindowKV(PagedKV):
    """Sliding-window attention: blocks outside the window are released."""

    window: int = 512  # a token sees itself and window - 1 before it

    @property
    def signature(self) -> str:
        return f"WindowKV({self.fields_text()}, window={self.window})"


@dataclass(frozen=True)
class RotatingKV(WindowKV):
    """A window on full attention (`max_kv_size`), beside which the first `keep` tokens stay visible: many heads use
    them as attention sinks. A row's block table has their blocks at its front, then those of the window."""

    keep: int = 0

    @property
    def signature(self) -> str:
        return f"RotatingKV({self.fields_text()}, window={self.window}, keep={self.keep})"
