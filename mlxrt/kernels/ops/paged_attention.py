"""Paged decode attention: one token a row against its row's keys and values, plain or quantised.

One launch does what stands between the QKV projection and the output projection: norms of the heads, RoPE, the new token
into the tail, and attention over an exact window with sinks and softcap. Long contexts are split over threadgroups and
combined by a second launch (metal/paged_attention.metal, metal/attention_reduce.metal).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from ..device import DeviceProfile
from ..dispatch import Gpu
from ..registry import Case, KernelSource, Op, op
from .attention import AttentionParams, attend_decode, slot_positions
from .attention_layout import PackedKV, Pages, QKVLayout, QuantizedPages
from .kv_codec import PlainKV, QuantizedKV
from .qmv import bits_of

HEAD_DIMS = (64, 128, 256, 512)
FULL_WORD_BITS = (2, 4, 8)  # of keys and values: sixteen are full words
MAX_TILED_HEAD_DIM = 256  # up to which matrix units hold queries and results in a lane's registers
# Threadgroups that fill the tuned device (DeviceProfile) once and twice. On an H200 at 32,768 tokens (32 heads of 128) 40.0 us with 128
# of them and 43.2 with 256 for bfloat16, but 35.0 and 33.6 for 8 bit, 32.1 and 29.7 for 4 bit.
ONE_WAVE, TWO_WAVES = 128, 256
# A few short rows are faster without matrix units: 9.5 us against 11.2 on an H200 (16 heads of 128, 512 tokens).
MAX_SHORT_TOKENS, MIN_TILED_ROWS = 1024, 8
MIN_SPLIT_KEYS, MAX_SPLITS = 512, 64
# Splits that the output projection combines (attention_qmv): each of its threadgroups reads the results of all. With eight
# splits instead of four Qwen3-0.6B is 1 % slower, 30B-A3B 5 %.
MIN_PARTIAL_KEYS, MAX_PARTIAL_SPLITS, MAX_PARTIAL_BYTES = 128, 4, 68_000
REDUCE_THREADS = 128

INPUTS = ("kv_pool", "kv_tail", "block_table", "row_range", "rope_freqs", "q_norm", "k_norm", "sinks")
REDUCE = KernelSource("attention_reduce.metal", ("parts", "sinks"), ("out",))
SourceKey = tuple[bool, bool]  # with a new token, by matrix units


def make_source(new_token: bool, tiled: bool, quantized: bool, projection: tuple[str, ...] = ()) -> KernelSource:
    """The kernel of one kind of call. `projection`: inputs of a QKV projection that it computes itself."""
    named = {"fused_qkv": bool(projection), "tiled": tiled, "quantized": quantized, "read": not new_token}
    return KernelSource(
        "paged_attention.metal",
        (*(projection or ("qkv",)), *INPUTS),
        ("out", "tail_out") if new_token else ("out",),
        {
            "NEW_TOKEN": int(new_token),
            "TILED": int(tiled),
            "QUANTIZED_KV": int(quantized),
            "FUSED_QKV": int(bool(projection)),
        },
        "_".join(name for name, yes in named.items() if yes),
    )


def make_sources(quantized: bool) -> dict[SourceKey, KernelSource]:
    return {(new, tiled): make_source(new, tiled, quantized) for new in (True, False) for tiled in (True, False)}


SOURCES, QUANTIZED_SOURCES = make_sources(quantized=False), make_sources(quantized=True)


def paged_case(
    name: str, pages: Any, dtype: mx.Dtype, rows: int, heads: tuple[int, int, int], extra: dict[str, Any]
) -> Case:
    """A call for `rows` tokens over these pages; `heads` are queries, keys and how wide they are."""
    h, kv, dim = heads
    norms = [1 + 0.2 * mx.random.normal((dim,)).astype(dtype) for _ in range(2)] if extra.get("norms") else [None] * 2
    pairs = extra.get("rope_pairs")
    inv_freq = None if pairs is None else 1 / 10000.0 ** (mx.arange(pairs) / pairs)
    more = (bool(extra.get("v_norm")), 1e-6, inv_freq, extra.get("magnitude", 1.0), bool(extra.get("tied")))
    width = h if extra.get("read") else h + kv if extra.get("tied") else h + 2 * kv
    arrays = {"qkv": mx.random.normal((rows, width * dim)).astype(dtype)}
    if extra.get("sinks"):
        arrays["sinks"] = mx.random.normal((h,)).astype(dtype)
    options = {"layout": QKVLayout(h, kv, dim, norms[0], norms[1], *more), "pages": pages, "scale": dim**-0.5}
    options |= {k: v for k, v in extra.items() if k in ("window", "keep", "softcap")}
    return Case(name, arrays, options, large=bool(extra.get("large")))


def table_and_ranges(rows: int, size: int, blocks: int, start: list[int], used: int) -> tuple[mx.array, mx.array]:
    """A random block table [rows, blocks], and row ranges."""
    table = mx.random.permutation(mx.arange(1, rows * blocks + 1)).reshape(rows, blocks)
    base = [s // size * size - (blocks - 1) * size if s >= blocks * size else 0 for s in start]
    return table.astype(mx.int32), mx.array([[b, s, used] for b, s in zip(base, start)])


def attention_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        # R, queries, keys, dim, size, blocks a row, start, used, options
        (1, 4, 2, 64, 8, 3, [19], 3, {"norms": True, "rope_pairs": 32}),
        (3, 2, 2, 128, 32, 2, [0, 40, 33], 0, {"rope_pairs": 64, "window": 20, "sinks": True}),
        (2, 8, 1, 256, 16, 4, [50, 7], 15, {"rope_pairs": 32, "v_norm": True, "softcap": 5.0, "tied": True}),
        (2, 4, 1, 512, 8, 2, [9, 3], 5, {"read": True}),
        # Split over threadgroups; a short row has fewer keys than there are parts.
        (2, 2, 1, 64, 32, 80, [2500, 5], 6, {"rope_pairs": 16, "magnitude": 1.3, "sinks": True}),
        # Many rows: matrix units, in half precision. In the last two heads of a key go together.
        (8, 4, 2, 64, 8, 3, [19, 0, 1, 7, 8, 15, 16, 23], 3, {"norms": True, "rope_pairs": 32}),
        (9, 2, 2, 128, 32, 2, [0, 40, 33, 63, 17], 0, {"rope_pairs": 64, "window": 20, "sinks": True}),
        (8, 2, 1, 256, 16, 4, [50, 7, 33], 15, {"rope_pairs": 32, "v_norm": True, "softcap": 5.0, "tied": True}),
        (8, 1, 1, 64, 8, 2, [9, 3], 5, {"read": True}),
        (64, 8, 2, 64, 8, 1, [3, 6], 1, {"rope_pairs": 32}),
        (128, 8, 1, 64, 8, 1, [3, 6], 1, {"rope_pairs": 32}),  # as many simdgroups as heads to prepare
        (8, 1, 1, 64, 32, 14, [440, 5, 201], 2, {}),  # simdgroups take keys several times
        (1, 2, 1, 64, 32, 40, [1270], 9, {"window": 4}),  # a window within the tail, in parts
        # Simdgroups take keys twice, the last ones at the tail's end.
        (1, 2, 1, 64, 32, 9, [280], 15, {"rope_pairs": 32}),
        # The first tokens stay visible beside a window, before a gap, without one, and in the tail.
        (3, 4, 2, 64, 8, 5, [67, 23, 2], 3, {"rope_pairs": 32, "window": 21, "keep": 5}),
        (2, 2, 1, 64, 8, 6, [90, 2], 15, {"window": 8, "keep": 11}),
        (8, 4, 2, 64, 8, 5, [67, 23, 2, 0, 80, 66, 18], 3, {"rope_pairs": 32, "window": 21, "keep": 5}),
        (8, 2, 1, 64, 32, 6, [900, 193, 2], 9, {"window": 120, "keep": 4}),
        (2, 2, 1, 64, 32, 40, [2000, 5], 6, {"rope_pairs": 16, "window": 900, "keep": 4, "sinks": True}),
        (1, 32, 8, 128, 32, 1024, [32000], 9, {"norms": True, "rope_pairs": 64, "large": True}),
    ]
    for rows, h, kv, dim, size, blocks, start, used, extra in shapes:
        mx.random.seed(dim + rows)
        start = [start[i % len(start)] for i in range(rows)]
        table, ranges = table_and_ranges(rows, size, blocks, start, used)
        pool = mx.random.normal((rows * blocks + 1, 2 * kv, size, dim)).astype(dtype)
        pages = Pages(pool, mx.random.normal((rows, 2 * kv, 16, dim)).astype(dtype), table, ranges)
        name = f"{h}/{kv} heads of {dim}, {rows} rows of {start[:3]}"
        yield paged_case(name, pages, dtype, rows, (h, kv, dim), extra)


def quantized_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        (1, 4, 2, 64, 8, 3, [19], 3, (8, 8), 32, {"norms": True, "rope_pairs": 32}),
        (2, 2, 1, 128, 32, 2, [40, 33], 0, (4, 4), 64, {"rope_pairs": 64, "window": 20, "sinks": True}),
        (2, 4, 1, 128, 16, 4, [50, 7], 15, (8, 4), 128, {"rope_pairs": 32, "softcap": 5.0}),
        (2, 2, 1, 64, 32, 80, [2500, 5], 6, (4, 2), 32, {"rope_pairs": 16, "magnitude": 1.3}),
        (1, 2, 1, 256, 8, 4, [27], 2, (8, 4), 32, {"rope_pairs": 32, "v_norm": True, "tied": True}),
        (1, 4, 1, 512, 8, 2, [9], 5, (8, 8), 64, {"read": True}),
        # Many rows: matrix units, in half precision. In the last two heads of a key go together.
        (8, 4, 2, 64, 8, 3, [19, 0, 1, 7, 8, 15, 16, 23], 3, (8, 8), 32, {"norms": True, "rope_pairs": 32}),
        (9, 2, 1, 128, 32, 2, [40, 33, 0, 63], 0, (4, 4), 64, {"rope_pairs": 64, "window": 20, "sinks": True}),
        (8, 2, 1, 256, 16, 4, [50, 7], 15, (2, 4), 128, {"rope_pairs": 32, "softcap": 5.0}),
        (8, 1, 1, 64, 8, 2, [9, 3], 5, (4, 8), 64, {"read": True}),
        (64, 8, 2, 64, 8, 1, [3, 6], 1, (8, 4), 64, {"rope_pairs": 32}),
        (8, 1, 1, 64, 32, 14, [440, 5, 201], 2, (8, 8), 32, {}),  # simdgroups take keys several times
        # The first tokens stay visible beside a window.
        (3, 4, 2, 64, 8, 5, [67, 23, 2], 3, (8, 4), 32, {"rope_pairs": 32, "window": 21, "keep": 5}),
        (8, 2, 1, 64, 32, 6, [900, 193, 2], 9, (4, 4), 64, {"window": 120, "keep": 4}),
        (1, 32, 8, 128, 32, 1024, [32000], 9, (4, 4), 64, {"norms": True, "rope_pairs": 64, "large": True}),
    ]
    for rows, h, kv, dim, size, blocks, start, used, bits, group, extra in shapes:
        mx.random.seed(dim + blocks)
        start = [start[i % len(start)] for i in range(rows)]
        codec = QuantizedKV(bits[0], bits[1], group, dtype)
        pool, tail = (
            PackedKV(codec.encode(*(mx.random.normal((count, kv, slots, dim)) for _ in range(2)))[0], codec)
            for count, slots in ((rows * blocks + 1, size), (rows, 16))
        )
        pages = QuantizedPages(pool, tail, *table_and_ranges(rows, size, blocks, start, used))
        name = f"{bits} bits, {h}/{kv} heads of {dim}, {rows} rows of {start[:3]}"
        yield paged_case(name, pages, dtype, rows, (h, kv, dim), extra)


@op(attention_cases)
def paged_attention(qkv, layout, pages, scale, window=None, keep=0, softcap=None, sinks=None):
    """(out [R, heads * dim], tail with the new token): each row's token attends to its row's positions up to its own.

    With a window, to those in it and to the first `keep`. In float32, rounded once. From a quantised KV cache the new token, too, reads its key and value as they are kept.
    """
    raw, codec = pages.raw, pages.codec
    base, start, used = raw.row_range.T
    q, *new = layout.prepare(qkv, start + used)
    tail = raw.tail
    if new:
        here = (mx.arange(tail.shape[2]) == used[:, None])[:, None, :, None]
        tail = mx.where(here, codec.encode(*new)[0][:, :, None], tail)
    params = AttentionParams(scale, window, keep, softcap, sinks)
    keys = slot_positions(base, raw.table.shape[1], raw.pool.shape[2], keep)
    mask = params.mask_decode(keys, start, tail.shape[2], start + used)
    blocks, newest = ([mx.concatenate(codec.decode([x]), axis=-3)] for x in (raw.pool[raw.table], tail))
    out = attend_decode(q.astype(mx.float32), PlainKV(), blocks, newest, mask, layout.num_kv_heads, params)
    return out.flatten(1).astype(qkv.dtype), pages.wrap_tail(tail)


@op(quantized_cases)
def quantized_paged_attention(qkv, layout, pages, scale, window=None, keep=0, softcap=None, sinks=None):
    """`paged_attention` over a quantised KV cache."""
    return paged_attention.reference(qkv, layout, pages, scale, window, keep, softcap, sinks)


def attention_op(pages: Pages | QuantizedPages) -> Op:
    """The op that reads such pages."""
    return quantized_paged_attention if isinstance(pages, QuantizedPages) else paged_attention


def unsupported(qkv, layout, pages, **rest) -> str | None:
    if layout.head_dim not in HEAD_DIMS:
        return f"heads of {layout.head_dim}: {', '.join(map(str, HEAD_DIMS))} are built"
    if isinstance(pages, QuantizedPages):
        quant = pages.codec
        if {quant.key_bits, quant.value_bits} - set(FULL_WORD_BITS):
            return f"keys and values of {quant.key_bits} and {quant.value_bits} bits"
        return f"scales are {quant.dtype}, activations {qkv.dtype}" if quant.dtype != qkv.dtype else None
    if qkv.dtype != pages.pool.dtype:
        return f"keys are kept as {pages.pool.dtype}, activations are {qkv.dtype}"
    return (
        f"{layout.num_heads} queries for {layout.num_kv_heads} keys" if layout.num_heads % layout.num_kv_heads else None
    )


@quantized_paged_attention.kernel(*QUANTIZED_SOURCES.values(), REDUCE, unsupported=unsupported)
@paged_attention.kernel(*SOURCES.values(), REDUCE, unsupported=unsupported)
def launch(gpu, qkv, layout, pages, scale, window=None, keep=0, softcap=None, sinks=None):
    sources = QUANTIZED_SOURCES if isinstance(pages, QuantizedPages) else SOURCES
    constants = score_constants(scale, window, keep, softcap, sinks) | {"QKV_HEADS": qkv.shape[1] // layout.head_dim}
    return launch_attention(gpu, sources, [qkv], qkv, qkv.shape[1], layout, pages, sinks, constants)


def cpu_unsupported(qkv, layout, pages, **rest) -> str | None:
    if qkv.dtype != mx.float32 or pages.codec.dtype != mx.float32:
        return f"keys are kept as {pages.codec.dtype}, activations are {qkv.dtype}"
    if layout.head_dim % 16 or layout.num_heads % layout.num_kv_heads:
        return f"{layout.num_heads} queries for {layout.num_kv_heads} keys of {layout.head_dim}"
    return None


@quantized_paged_attention.cpu_kernel(unsupported=cpu_unsupported, cases=lambda: iter(()))
@paged_attention.cpu_kernel(unsupported=cpu_unsupported, cases=lambda: iter(()))
def launch_cpu(cpu, qkv, layout, pages, scale, window=None, keep=0, softcap=None, sinks=None):
    return cpu.attend(qkv, layout, pages, scale, window, keep, softcap, sinks)


def score_constants(
    scale: float, window: int | None, keep: int, softcap: float | None, sinks: mx.array | None
) -> dict[str, Any]:
    cap = 0 if softcap is None else bits_of(softcap)
    return {"SCALE": bits_of(scale), "WINDOW": window or 0, "KEEP": keep, "SOFTCAP": cap, "SINKS": sinks is not None}


def launch_attention(
    gpu: Gpu,
    sources: dict[SourceKey, KernelSource],
    projection: list[mx.array | None],
    x: mx.array,
    width: int,
    layout: QKVLayout,
    pages: Pages | QuantizedPages,
    sinks: mx.array | None,
    constants: dict[str, Any],
    *,
    fused: bool = False,
    partial: bool = False,
) -> tuple[mx.array, mx.array | PackedKV]:
    """(out [R, heads * dim], the tail with the new token, if there is one).

    `projection`: what the kernel reads q, k and v from, for rows like x's and `width` outputs of a QKV projection;
    `fused`: it computes that itself; `partial`: keys may be split as `launch_config` says, and out is what the splits
    have, not combined, as metal/attention_reduce.metal reads it.
    """
    rows, dim, (pool, tail, table, row_range) = x.shape[0], layout.head_dim, arrays_of(pages)
    new_token, tiled = width > layout.num_heads * dim, is_tiled(x, layout, pages)
    kind = {"quantized": isinstance(pages, QuantizedPages), "tiled": tiled, "fused": fused, "partial": partial}
    # The fused kernel is chosen by its threadgroup memory (qkv_attention.is_faster) before the device is known.
    profile = DeviceProfile() if fused else gpu.profile
    c = launch_config(profile, rows, layout, pages.max_tokens, **kind)
    split_out = ((rows, layout.num_heads, c.splits * (dim + 2)), mx.float32)
    out = ((rows, layout.num_heads * dim), x.dtype) if c.splits == 1 else split_out
    result, *new_tail = gpu(
        sources[new_token, tiled],
        [*projection, pool, tail, table, row_range, layout.inv_freq, layout.q_norm, layout.k_norm, sinks],
        (rows * layout.num_heads // c.heads, c.splits, 1),
        32 * c.simdgroups,
        [out, (tail.shape, tail.dtype)] if new_token else [out],
        T=x.dtype,
        OUT=out[1],
        NUM_HEADS=layout.num_heads,
        NUM_KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=dim,
        HEADS=c.heads,
        SIMDGROUPS=c.simdgroups,
        UNROLL=2,
        SPLITS=c.splits,
        RESIDENT=c.resident,
        Q_NORM=layout.q_norm is not None,
        K_NORM=layout.k_norm is not None,
        V_NORM=layout.v_norm,
        TIED_KV=layout.tied,
        NORM_EPS=bits_of(layout.eps),
        ROPE_PAIRS=0 if layout.inv_freq is None else layout.inv_freq.shape[0],
        ROPE_MAGNITUDE=bits_of(layout.magnitude),
        BLOCK_SIZE=pool.shape[2],
        TAIL_SIZE=tail.shape[2],
        MAX_BLOCKS=table.shape[1],
        **pages.constants(),
        **constants,
    )
    if c.splits > 1 and not partial:
        result = reduce_splits(gpu, result, dim, x.dtype, sinks)
    return result, pages.wrap_tail(new_tail[0]) if new_token else pages.tail


def arrays_of(pages: Pages | QuantizedPages) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    raw = pages.raw
    return raw.pool, raw.tail, raw.table, raw.row_range


def is_tiled(x: mx.array, layout: QKVLayout, pages: Pages | QuantizedPages) -> bool:
    """Whether matrix units do it: not for a few short rows; in half precision, where what a lane takes of a quantisation group
    is full words."""
    sizes = pages.constants()
    full_words = min(sizes["K_BITS"] * 2, sizes["V_BITS"]) * sizes["KV_GROUP"] >= 256
    fits = x.dtype != mx.float32 and layout.head_dim <= MAX_TILED_HEAD_DIM and full_words
    return fits and (pages.max_tokens > MAX_SHORT_TOKENS or x.shape[0] >= MIN_TILED_ROWS)


def reduce_splits(gpu: Gpu, parts: mx.array, dim: int, dtype: mx.Dtype, sinks: mx.array | None) -> mx.array:
    """Parts [R, heads, splits * (dim + 2)] -> attention's output [R, heads * dim]."""
    rows, heads, width = parts.shape
    sizes = {"NUM_HEADS": heads, "HEAD_DIM": dim, "SPLITS": width // (dim + 2), "THREADS": REDUCE_THREADS}
    out = [((rows, heads * dim), dtype)]
    return gpu(REDUCE, [parts, sinks], rows * heads, REDUCE_THREADS, out, T=dtype, SINKS=sinks is not None, **sizes)[0]


class LaunchConfig(NamedTuple):
    heads: int  # query heads a threadgroup takes together
    simdgroups: int
    splits: int  # of the keys
    resident: int  # threadgroups for a multiprocessor


def launch_config(
    profile: DeviceProfile,
    rows: int,
    layout: QKVLayout,
    tokens: int,
    *,
    tiled: bool,
    quantized: bool,
    fused: bool = False,
    partial: bool = False,
) -> LaunchConfig:
    """Heads that share a KV head read it once if they go together; they may where enough threadgroups are left.

    Simdgroups are as many as registers (of 65,536 on CUDA, where a lane takes up to 170 for heads of 128, 250 for 256) and
    20 KB of threadgroup memory for their results allow. Two threadgroups of 8 hide each other's waiting, if there are so
    many; four heads of 128 with few keys take less time by 4 (32 rows with 250 keys on an H200: 18.7 us, 20.8 by 8).
    """
    num_heads, dim = layout.num_heads, layout.head_dim
    one_wave, two_waves = profile.scale(ONE_WAVE), profile.scale(TWO_WAVES)
    for heads in (8, 4, 2, 1) if dim <= 256 else (4, 2, 1):
        groups = rows * num_heads // heads
        wanted = two_waves if tiled and quantized else one_wave
        keys = MIN_SPLIT_KEYS if fused else min_split_keys(tokens, dim, partial)
        splits = num_splits(tokens, groups, wanted, keys)
        if partial and tokens <= MAX_SHORT_TOKENS:
            splits = min(splits, max_partial_splits(rows * num_heads, dim))
        if heads == 1 or (num_heads // layout.num_kv_heads % heads == 0 and groups * splits >= one_wave):
            break
    resident = 2 if tiled and dim <= 128 and groups * splits >= two_waves else 1
    if tiled:
        most = 12 if dim <= 128 and resident == 1 else 8
        if resident == 2 and heads * dim == 512 and tokens <= MAX_SHORT_TOKENS:
            most = 4
    else:
        most = 16 if heads == 1 and dim <= (256 if fused else 128) and not quantized else 8
    return LaunchConfig(heads, max(1, min(most, 5120 // (heads * dim))), splits, resident)


def max_partial_splits(heads: int, dim: int) -> int:
    """Splits, a power of two, whose results each threadgroup of a product can read again."""
    most = min(MAX_PARTIAL_SPLITS, MAX_PARTIAL_BYTES // (4 * heads * (dim + 2)))
    return max(1, 1 << most.bit_length() - 1)


def min_split_keys(tokens: int, dim: int, partial: bool = False) -> int:
    """Wide heads are worth a second launch for fewer keys: 16 of 256 with 544 keys take 13.7 us in one, 10.2 in four splits
    and their sum on an H200; 16 of 128 8.1 and 7.4. Splits that no launch of its own combines are worth it for fewer still."""
    if partial and tokens <= MAX_SHORT_TOKENS:
        return MIN_PARTIAL_KEYS
    return MIN_SPLIT_KEYS * 128 // max(dim, 128) if tokens <= 2 * MIN_SPLIT_KEYS else MIN_SPLIT_KEYS


def num_splits(tokens: int, groups: int, wanted: int, keys: int) -> int:
    """Splits of so many keys at least, until there are as many threadgroups as wanted; for short contexts one launch is
    better than two."""
    splits = 1
    while tokens > max(2, splits) * keys and groups * splits < wanted and splits < MAX_SPLITS:
        splits *= 2
    return splits
