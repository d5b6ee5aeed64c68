"""Attention over keys and values kept as codes: the launch of attention.py, reading and appending codes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..registry import Case, Op, op
from .attention_cases import paged_case
from .attention_text import JOIN, source
from .kv_quant import CodedToken, Packed
from .paged_attention import WIDTHS, run, seen
from .paged_attention import paged_attention as plain_attention
from .qkv_layout import Pages, QKVLayout

BITS = (2, 4, 8)  # of which sixteen numbers are whole words
SOURCES = {(new, tiled): source(new=new, tiled=tiled, coded=True) for new in (True, False) for tiled in (True, False)}


@dataclass(frozen=True)
class PackedPages:
    """Where rows' coded keys and values lie: [blocks or R, keys, slots, width] both."""

    pool: Packed
    tail: Packed
    table: mx.array  # [R, W]
    where: mx.array  # [R, 3] as in Pages

    @property
    def layout(self) -> CodedToken:
        return self.pool.layout

    @property
    def words(self) -> Pages:
        """The arrays themselves."""
        return Pages(self.pool.words, self.tail.words, self.table, self.where)

    def kept(self, tail: mx.array) -> Packed:
        """A tail as such pages have it, of its array."""
        return Packed(tail, self.layout)

    def form(self) -> dict[str, Any]:
        """What a kernel must know of the codes, as constants."""
        return {"CODED": True, "KB": self.layout.key, "VB": self.layout.value, "GROUP": self.layout.group}


def packed_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        (1, 4, 2, 64, 8, 3, [19], 3, (8, 8), 32, {"norms": True, "turning": 32}),
        (2, 2, 1, 128, 32, 2, [40, 33], 0, (4, 4), 64, {"turning": 64, "window": 20, "sinks": True}),
        (2, 4, 1, 128, 16, 4, [50, 7], 15, (8, 4), 128, {"turning": 32, "softcap": 5.0}),
        (2, 2, 1, 64, 32, 80, [2500, 5], 6, (4, 2), 32, {"turning": 16, "magnitude": 1.3}),
        (1, 2, 1, 256, 8, 4, [27], 2, (8, 4), 32, {"turning": 32, "v_norm": True, "tied": True}),
        (1, 4, 1, 512, 8, 2, [9], 5, (8, 8), 64, {"read": True}),
        # Many rows: matrix units, in half precision. In the last two heads of a key go together.
        (8, 4, 2, 64, 8, 3, [19, 0, 1, 7, 8, 15, 16, 23], 3, (8, 8), 32, {"norms": True, "turning": 32}),
        (9, 2, 1, 128, 32, 2, [40, 33, 0, 63], 0, (4, 4), 64, {"turning": 64, "window": 20, "sinks": True}),
        (8, 2, 1, 256, 16, 4, [50, 7], 15, (2, 4), 128, {"turning": 32, "softcap": 5.0}),
        (8, 1, 1, 64, 8, 2, [9, 3], 5, (4, 8), 64, {"read": True}),
        (64, 8, 2, 64, 8, 1, [3, 6], 1, (8, 4), 64, {"turning": 32}),
        (8, 1, 1, 64, 32, 14, [440, 5, 201], 2, (8, 8), 32, {}),  # simdgroups take keys several times
        (1, 32, 8, 128, 32, 1024, [32000], 9, (4, 4), 64, {"norms": True, "turning": 64, "large": True}),
    ]
    for rows, h, kv, dim, size, blocks, start, used, bits, group, extra in shapes:
        mx.random.seed(dim + blocks)
        start = [start[i % len(start)] for i in range(rows)]

        layout = CodedToken(bits[0], bits[1], group, dtype)

        def coded(count, slots, heads=kv, dim=dim, layout=layout):
            return Packed(layout.encode(*(mx.random.normal((count, heads, slots, dim)) for _ in range(2))), layout)

        many = rows * blocks + 1
        base = [s // size * size - (blocks - 1) * size if s >= blocks * size else 0 for s in start]
        pages = PackedPages(
            coded(many, size),
            coded(rows, 16),
            mx.random.permutation(mx.arange(1, many)).reshape(rows, blocks).astype(mx.int32),
            mx.array([[b, s, used] for b, s in zip(base, start)]),
        )
        name = f"{bits} bits, {h}/{kv} heads of {dim}, {rows} rows of {start[:3]}"
        yield paged_case(name, pages, dtype, rows, (h, kv, dim), extra)


@op(packed_cases)
def quantized_paged_attention(qkv, heads, pages, scale, window=None, softcap=None, sinks=None):
    """(out [R, queries * dim], the tail with the new token, where there is one)."""
    used, tail = pages.where[:, 2], pages.tail
    at = pages.where[:, 1] + used
    q, *new = heads.prepare(qkv, at)
    if new:
        here = (mx.arange(tail.words.shape[2]) == used[:, None])[:, None, :, None]
        tail = Packed(mx.where(here, pages.layout.encode(*new)[:, :, None], tail.words), pages.layout)
    read = Pages(pages.pool.plain(), tail.plain(), pages.table, pages.where)
    ready = QKVLayout(heads.queries, heads.keys, heads.dim)  # q has its norm and its RoPE
    out, _ = plain_attention.reference(q.flatten(1), ready, read, scale, window, softcap, sinks)
    return out, tail


def unsupported(qkv, heads, pages, **rest) -> str | None:
    if heads.dim not in WIDTHS:
        return f"heads of {heads.dim}: {', '.join(map(str, WIDTHS))} are built"
    layout = pages.layout
    if {layout.key, layout.value} - set(BITS):
        return f"keys and values of {layout.key} and {layout.value} bits"
    if layout.dtype != qkv.dtype:
        return f"scales are {layout.dtype}, activations {qkv.dtype}"
    return None


@quantized_paged_attention.kernel(*SOURCES.values(), JOIN, unsupported=unsupported)
def launch(gpu, qkv, heads, pages, scale, window=None, softcap=None, sinks=None):
    form = seen(scale, window, softcap, sinks) | pages.form() | {"HEADS": qkv.shape[1] // heads.dim}
    out, *new = run(gpu, SOURCES, [qkv], qkv, qkv.shape[1], heads, pages.words, sinks, form)
    return out, pages.kept(new[0]) if new else pages.tail


def attention_op(pages: Pages | PackedPages) -> Op:
    """The op that reads such pages."""
    return quantized_paged_attention if isinstance(pages, PackedPages) else plain_attention
