"""Attention of steps with prompts in C, for CPUs: tokens of any rows, whose keys and values are all in blocks.

Two calls with MLX's write of the pool between them: keys and values as the cache stores them, then attention. Both do
for a token what decode attention does for its newest one, in the same order of sums: so an answer does not depend on
how its prompt was cut up, on what was cached of it, or on the rows beside it.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..registry import Case, op
from .attention import AttentionParams, attend_decode, slot_positions
from .attention_layout import PackedKV, PrefillPages, QKVLayout
from .kv_codec import Codec, PlainKV, QuantizedKV
from .paged_attention import cpu_unsupported

SHAPES: list[tuple[Any, ...]] = [
    # queries, keys, dim, block size, (first position, tokens) of each row, bits and group of the cache, options
    (4, 2, 64, 8, [(0, 21)], None, {"norms": True, "rope_pairs": 32}),
    (3, 1, 64, 32, [(70, 1), (5, 40), (0, 9)], None, {"rope_pairs": 32}),
    (2, 2, 128, 16, [(48, 50)], None, {"rope_pairs": 64, "window": 20, "sinks": True, "base": 16}),
    (8, 1, 80, 8, [(0, 5), (19, 2)], None, {"rope_pairs": 8, "softcap": 5.0, "v_norm": True, "tied": True}),
    (5, 1, 32, 8, [(67, 30), (0, 3)], None, {"rope_pairs": 16, "window": 21, "keep": 5, "magnitude": 1.3}),
    (2, 1, 32, 8, [(67, 30)], None, {"rope_pairs": 16, "window": 21, "keep": 5, "base": 32}),  # kept, then a gap
    (2, 1, 512, 8, [(9, 4)], None, {"read": True, "rope_pairs": 64}),
    (49, 1, 16, 8, [(0, 9)], None, {"rope_pairs": 8}),  # more heads of a key than a task takes
    (3, 1, 64, 8, [(0, 30), (3, 1)], (8, 8, 32), {}),
    (4, 2, 64, 16, [(40, 17)], (4, 2, 64), {"window": 9, "keep": 2}),
    (2, 2, 128, 8, [(6, 6)], (6, 3, 128), {"sinks": True}),
]


def prefill_cases(dtype: mx.Dtype) -> Iterator[Case]:
    """Calls of `prefill_attention`."""
    for h, kv, dim, size, rows, bits, extra in SHAPES:
        mx.random.seed(dim + len(rows))
        base = extra.get("base", 0)
        blocks = max(-(-(start + count - base) // size) for start, count in rows)
        keys, values = (mx.random.normal((len(rows) * blocks, kv, size, dim)).astype(dtype) for _ in range(2))
        codec: Codec = PlainKV(dtype)
        if bits is not None:
            codec = QuantizedKV(bits[0], bits[1], bits[2], dtype)
        pool = codec.encode(keys, values)[0]
        table = mx.random.permutation(mx.arange(len(rows) * blocks)).reshape(len(rows), blocks).astype(mx.int32)
        row = [i for i, (_, count) in enumerate(rows) for _ in range(count)]
        ranges = [[base, start + i, 0] for start, count in rows for i in range(count)]
        held = PackedKV(pool, codec) if isinstance(codec, QuantizedKV) else pool
        pages = PrefillPages(held, table, mx.array(row), mx.array(ranges))
        width = h if extra.get("read") else h + kv if extra.get("tied") else h + 2 * kv
        arrays = {"qkv": mx.random.normal((len(row), width * dim)).astype(dtype)}
        if extra.get("sinks"):
            arrays["sinks"] = mx.random.normal((h,)).astype(dtype)
        options = {"layout": make_layout(h, kv, dim, dtype, extra), "pages": pages, "scale": dim**-0.5}
        options |= {k: v for k, v in extra.items() if k in ("window", "keep", "softcap")}
        yield Case(f"{bits or 'plain'}, {h}/{kv} heads of {dim}, {rows}", arrays, options)


def make_layout(h: int, kv: int, dim: int, dtype: mx.Dtype, extra: dict[str, Any]) -> QKVLayout:
    norms = [1 + 0.2 * mx.random.normal((dim,)).astype(dtype) for _ in range(2)] if extra.get("norms") else [None] * 2
    pairs = extra.get("rope_pairs")
    inv_freq = None if pairs is None else 1 / 10000.0 ** (mx.arange(pairs) / pairs)
    more = (bool(extra.get("v_norm")), 1e-6, inv_freq, extra.get("magnitude", 1.0), bool(extra.get("tied")))
    return QKVLayout(h, kv, dim, norms[0], norms[1], *more)


def encode_cases(dtype: mx.Dtype) -> Iterator[Case]:
    """Those of them that have new keys, of which one is no number."""
    for case in prefill_cases(dtype):
        layout, pages, qkv = case.options["layout"], case.options["pages"], case.arrays["qkv"]
        if qkv.shape[1] > layout.num_heads * layout.head_dim:
            qkv[1, layout.num_heads * layout.head_dim + 3] = mx.inf if isinstance(pages.pool, mx.array) else 0
            yield Case(case.name, {"qkv": qkv}, {"layout": layout, "pages": pages})


@op(encode_cases)
def encode_kv(qkv, layout, pages):
    """(keys and values of a QKV projection as the pool's slots have them, [N, ..]; [N] whether all of a token's are finite)."""
    _, k, v = layout.prepare(qkv, pages.positions)
    finite = mx.isfinite(k).all(axis=(1, 2)) & mx.isfinite(v).all(axis=(1, 2))
    return pages.wrap(pages.codec.encode(k, v)[0]), finite


@op(prefill_cases)
def prefill_attention(qkv, layout, pages, scale, window=None, keep=0, softcap=None, sinks=None):
    """out [N, heads * dim]: each token attends to its row's positions up to its own, whose keys and values are in the pool.

    With a window, to those in it and to the first `keep`. In float32, rounded once.
    """
    q, *_ = layout.prepare(qkv, pages.positions)
    base, table = pages.row_range[:, 0], pages.table[pages.row]
    params = AttentionParams(scale, window, keep, softcap, sinks)
    mask = params.mask(slot_positions(base, table.shape[1], pages.block_size, keep), pages.positions[:, None])
    blocks = [mx.concatenate(pages.codec.decode([pages.raw_pool[table]]), axis=-3)]
    out = attend_decode(q.astype(mx.float32), PlainKV(), blocks, None, mask, layout.num_kv_heads, params)
    return out.flatten(1).astype(qkv.dtype)


@encode_kv.cpu_kernel(unsupported=cpu_unsupported, cases=lambda: iter(()))
def launch_encode(cpu, qkv, layout, pages):
    return cpu.encode_kv(qkv, layout, pages)


@prefill_attention.cpu_kernel(unsupported=cpu_unsupported, cases=lambda: iter(()))
def launch_prefill(cpu, qkv, layout, pages, scale, window=None, keep=0, softcap=None, sinks=None):
    return cpu.attend_prefill(qkv, layout, pages, scale, window, keep, softcap, sinks)
