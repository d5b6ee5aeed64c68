"""An op's own cases and a few more that only a test wants: values at which clamps matter, shapes that are tall enough
for another way through a kernel."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import mlx.core as mx

from mlxrt.kernels import OPS, Case, Op, QuantizedMatrix
from mlxrt.kernels.dtypes import DTYPES
from mlxrt.kernels.ops.attention_layout import PackedKV, Pages, QKVLayout, QuantizedPages
from mlxrt.kernels.ops.draw_rows import DrawRow, pack_rows
from mlxrt.kernels.ops.kv_codec import QuantizedKV
from mlxrt.kernels.selftest import list_cases
from mlxrt.kernels.testing import sample

EVERYTHING = os.environ.get("MLXRT_KERNEL_CASES") == "all"  # `make test-kernels`; `make test` takes a few of each op


def all_cases(op: Op, dtype: str, wide: bool = True) -> list[Case]:
    """What the kernel takes in this dtype. `wide`: also cases of many threadgroups, which take up to a second."""
    mx.random.seed(11)
    makers = MORE.get(op.name, ()) + (WIDE.get(op.name, ()) if wide else ())
    made = [*list_cases(op, dtype), *chain.from_iterable(make(DTYPES[dtype]) for make in makers)]
    return [case for case in made if not op.unsupported(**case.arguments())]


def choose_cases(cases: list[Case], dtype: str) -> list[Case]:
    """One of an op's cases, another for each dtype; all of them in `make test-kernels`."""
    number = list(DTYPES).index(dtype) % max(1, len(cases))
    return cases if EVERYTHING else cases[number : number + 1]


def normal(dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def packed(dtype: mx.Dtype, *shape: int) -> QuantizedMatrix:
    """4 bits in groups of 32."""
    return QuantizedMatrix(*mx.quantize(normal(dtype, *shape), 32, 4), 4, 32, "affine")


def strong_gates(dtype: mx.Dtype) -> Iterator[Case]:
    """Gates and ups far outside [-7, 7], where activations saturate and an exp would overflow."""
    for activation, pair in (("gelu", False), ("clamped", True), ("silu", True)):
        rows, width = 40, 64
        arrays = {"x": normal(dtype, 2, width)}
        if not pair:
            arrays["times"] = normal(dtype, 2, rows)
        weight = (normal(mx.float32, rows * (1 + pair), width) * 2.0).astype(dtype)
        yield Case(
            f"strong {activation}", arrays, {"matrix": QuantizedMatrix(weight), "activation": activation, "pair": pair}
        )


def tall(dtype: mx.Dtype) -> Iterator[Case]:
    """A simdgroup takes several rows at once, and some are left over."""
    for rows in (4101, 16387):
        yield Case(f"{rows} rows", {"x": normal(dtype, 1, 32)}, {"matrix": packed(dtype, rows, 32)})
    weight = QuantizedMatrix((normal(mx.float32, 4101, 1024) * 0.03).astype(dtype))
    yield Case("4101 plain rows of a whole tile", {"x": normal(dtype, 1, 1024)}, {"matrix": weight})
    options = {"matrix": packed(dtype, 8210, 32), "activation": "silu", "pair": True, "eps": 1e-6}
    yield Case("2 x 4105 rows", {"x": normal(dtype, 2, 32), "norm": normal(dtype, 32)}, options)


def wide(dtype: mx.Dtype) -> Iterator[Case]:
    """A lane has two pieces of x, of which the last simdgroup's second is none."""
    options = {"matrix": packed(dtype, 3, 17440), "eps": 1e-6}
    yield Case("3 rows of 17440", {"x": normal(dtype, 2, 17440), "norm": normal(dtype, 17440)}, options)


def many_parts(dtype: mx.Dtype) -> Iterator[Case]:
    """As many parts of k as there is threadgroup memory for."""
    yield Case("20 rows of 1024", {"x": normal(dtype, 64, 1024)}, {"matrix": packed(dtype, 20, 1024)})


def one_norm(dtype: mx.Dtype) -> Iterator[Case]:
    """Queries normed and keys not, and the other way round: no family does that, but the text tells them apart."""
    base = next(c for c in OPS["paged_attention"].cases(dtype) if c.options["layout"].q_norm is not None)
    for left_out in ("q_norm", "k_norm"):
        heads = replace(base.options["layout"], **{left_out: None})
        yield Case(f"without {left_out}", base.arrays, {**base.options, "layout": heads})


def one_norm_entered(dtype: mx.Dtype) -> Iterator[Case]:
    base = next(c for c in OPS["qkv_attention"].cases(dtype) if c.options["layout"].q_norm is not None)
    for left_out in ("q_norm", "k_norm"):
        heads = replace(base.options["layout"], **{left_out: None})
        yield Case(f"entered without {left_out}", base.arrays, {**base.options, "layout": heads})


def many_heads(dtype: mx.Dtype) -> Iterator[Case]:
    """So many that a threadgroup takes two or four that share a key head."""
    for rows, queries, dim, reads in (
        (64, 4, 64, False),
        (128, 4, 64, False),
        (128, 4, 64, True),
        (128, 2, 512, False),
    ):
        size = 8
        table = mx.arange(1, rows + 1).astype(mx.int32)[:, None]
        pool, tail = normal(dtype, rows + 1, 2, size, dim), normal(dtype, rows, 2, 16, dim)
        start = (mx.arange(rows) + 8) % (size + 1)  # the last of 128 has nothing but its tail, and that is full
        where = mx.stack([mx.zeros(rows, mx.int32), start, mx.full(rows, 15, mx.int32)], axis=1)
        pages = Pages(pool, tail, table, where)
        options = {"layout": QKVLayout(queries, 1, dim), "pages": pages, "scale": 0.125}
        width = queries if reads else queries + 2
        name = f"{rows} rows of {queries} heads of {dim}{', reading' if reads else ''}"
        yield Case(name, {"qkv": normal(dtype, rows, width * dim)}, options)


def even_parts(dtype: mx.Dtype) -> Iterator[Case]:
    """Even scores: a split's sum of exponentials is as large as it has keys, and far above its largest score."""
    table = mx.random.permutation(mx.arange(1, 65)).astype(mx.int32)[mx.arange(128) % 64][None]
    pool, tail = (1 + normal(dtype, count, 2, slots, 64) for count, slots in ((65, 32), (1, 16)))
    options = {"layout": QKVLayout(1, 1, 64), "scale": 0.125, "softcap": 0.01}
    options["pages"] = Pages(pool, tail, table, mx.array([[0, 4000, 4]]))
    yield Case("4000 keys, even scores", {"qkv": 1 + normal(dtype, 1, 3 * 64)}, options)


def odd_parts(dtype: mx.Dtype) -> Iterator[Case]:
    """Keys in parts, of which some are empty: a short row among long ones, a window that ends in the tail. And so many
    blocks that a threadgroup does not keep the table."""
    for rows, size, blocks, start, used, window in (
        (2, 32, 80, [2501, 5], 3, None),
        (1, 32, 80, [2500], 12, 4),
        (1, 8, 200, [1500], 12, 4),
        (1, 1, 600, [590], 2, None),
    ):
        table = mx.random.permutation(mx.arange(1, rows * blocks + 1)).reshape(rows, blocks).astype(mx.int32)
        where = mx.array([[0, s, used] for s in start])
        pages = Pages(normal(dtype, rows * blocks + 1, 2, size, 64), normal(dtype, rows, 2, 16, 64), table, where)
        options = {"layout": QKVLayout(2, 1, 64), "pages": pages, "scale": 0.125, "window": window}
        yield Case(f"{rows} rows of {start}, window {window}", {"qkv": normal(dtype, rows, 4 * 64)}, options)


def odd_groups(dtype: mx.Dtype) -> Iterator[Case]:
    """Values to encode whose ends are equally far from zero, the upper one where a lane's second number is; and none
    but zeros."""
    base = next(c for c in OPS["quantized_paged_attention"].cases(dtype) if c.options["pages"].codec.group == 64)
    qkv = mx.array(base.arrays["qkv"])
    values = mx.clip(qkv[:, -128:-64], -1, 1)
    values[:, 5], values[:, 32] = -2, 2
    qkv[:, -128:-64], qkv[:, -64:] = values, 0
    yield Case("odd groups", base.arrays | {"qkv": qkv}, base.options)


def odd_packed_parts(dtype: mx.Dtype) -> Iterator[Case]:
    """A row that has nothing but its tail beside one whose keys are split: its other parts are empty. Rows that a
    simdgroup meets in several rounds, and heads that go together. Tokens are so differently loud that none can be
    mistaken for another."""
    codec = QuantizedKV(8, 8, 32, dtype)
    shapes = [  # heads, tokens in the pool, those in the tail and how loud they are
        ((2, 1), [2500, 0], 80, 2, 4.0),
        ((1, 1), [440, 5, 201, 192, 384, 207, 208, 199], 14, 28, 4.0),
        ((8, 2), [230, 64] + [35] * 62, 8, 2, 0.1),
    ]
    for (queries, keys), start, blocks, used, size in shapes:
        rows = len(start)

        def random_kv(loud: mx.array, keys: int = keys) -> PackedKV:
            loud = loud[:, None, :, None] * mx.exp(normal(mx.float32, loud.shape[0], keys, 32, 1))
            return PackedKV(*codec.encode(*(loud * normal(dtype, *loud.shape[:3], 64) for _ in range(2))), codec)

        table = mx.random.permutation(mx.arange(1, rows * blocks + 1)).reshape(rows, blocks).astype(mx.int32)
        where = mx.array([[0, s, used] for s in start])
        pool = mx.where(mx.arange(rows * blocks + 1) == table[0, 6], 8.0, 1.0)  # tokens 192 to 223 of the first row
        tail = mx.where(mx.arange(32) == 0, 8.0, 1.0) * size
        pages = QuantizedPages(
            random_kv(mx.repeat(pool[:, None], 32, axis=1)),
            random_kv(mx.repeat(tail[None], rows, axis=0)),
            table,
            where,
        )
        options = {"layout": QKVLayout(queries, keys, 64), "pages": pages, "scale": 0.02}
        arrays = {"qkv": normal(dtype, rows, (queries + 2 * keys) * 64)}
        yield Case(f"{queries} heads, rows of {start[:8]}", arrays, options)


def even_logits(dtype: mx.Dtype) -> Iterator[Case]:
    """Of equals the first wins, whoever looks at it."""
    yield Case("all alike", {"x": mx.zeros((2, 3000), dtype)})


def even_experts(dtype: mx.Dtype) -> Iterator[Case]:
    """Pairs of experts alike, one lane's two among them: the lower number comes first."""
    w = mx.tile(normal(dtype, 32, 64), (3, 1))
    yield Case("alike", {"x": normal(dtype, 2, 64)}, {"matrix": QuantizedMatrix(w), "k": 5})


def wide_experts(dtype: mx.Dtype) -> Iterator[Case]:
    """x in more than one tile."""
    arrays = {"x": normal(dtype, 1, 5152), "experts": mx.array([[1, 0]], mx.uint32)}
    weight = (normal(mx.float32, 2, 18, 5152) * 0.02).astype(dtype)
    matrix = QuantizedMatrix(*mx.quantize(weight, 32, 4), 4, 32, "affine")
    yield Case("18 rows of 5152", arrays, {"matrix": matrix, "activation": "silu"})


def long_rows(dtype: mx.Dtype) -> Iterator[Case]:
    """Heads that share a key head go together, and the keys are split all the same."""
    for rows, queries, keys, blocks, start in ((1, 16, 4, 1024, 20000), (4, 4, 2, 512, 7001)):
        dim, size = 64, 32
        table = mx.random.permutation(mx.arange(1, 65)).astype(mx.int32)  # the same few blocks over and over
        table = mx.broadcast_to(mx.tile(table, blocks // 64), (rows, blocks))
        where = mx.array([[0, start + 13 * r, 7] for r in range(rows)])
        pages = Pages(normal(dtype, 65, 2 * keys, size, dim), normal(dtype, rows, 2 * keys, 32, dim), table, where)
        options = {"layout": QKVLayout(queries, keys, dim), "pages": pages, "scale": 0.125}
        yield Case(f"{rows} rows of {start}", {"qkv": normal(dtype, rows, (queries + 2 * keys) * dim)}, options)


def tall_experts(dtype: mx.Dtype) -> Iterator[Case]:
    experts = mx.array([[2, 0], [1, 1]], mx.uint32)
    arrays = {"x": normal(dtype, 2, 32), "experts": experts}
    yield Case("2 x 1025 rows", arrays, {"matrix": packed(dtype, 3, 2050, 32), "activation": "silu"})


def tall_routed(dtype: mx.Dtype) -> Iterator[Case]:
    """A simdgroup takes two turns, of rows that end with a tile."""
    options = {"router": sample("affine", (33, 1024), dtype, 4), "matrix": sample("affine", (33, 520, 1024), dtype, 8)}
    yield Case("8 x 2 x 260 rows", {"x": normal(dtype, 1, 1024)}, {**options, "k": 8, "activation": "silu"})


def tall_downs(dtype: mx.Dtype) -> Iterator[Case]:
    """The stack's last expert among those a simdgroup takes second: beyond its rows there is nothing."""
    experts, weights = mx.array([[2, 0, 1, 1, 0], [1, 1, 0, 0, 2]], mx.uint32), mx.random.uniform(0, 1, (2, 5))
    arrays = {"x": normal(dtype, 2, 5, 32), "experts": experts, "weights": weights}
    yield Case("4097 rows", arrays, {"matrix": packed(dtype, 3, 4097, 32)})


def tall_lut(dtype: mx.Dtype) -> Iterator[Case]:
    yield Case("4101 LUT rows", {"x": normal(dtype, 1, 64)}, {"matrix": sample("lut", (4101, 64), dtype, 3)})


def draw_case(dtype: mx.Dtype, name: str, x: mx.array, asked: list[dict[str, object]], **more: mx.array) -> Case:
    """Rows that draw from the same logits with these parameters, each with a seed of its own. A gap of 1 between logits
    is a factor of 2 between weights, exactly. Few sizes, so that few kernels are compiled."""
    given = [{"temperature": math.log2(math.e), "seed": 977 * i + 3, **a} for i, a in enumerate(asked)]
    rows = [DrawRow(**a) for a in given]  # type: ignore[arg-type]
    if x.ndim == 1:
        x = mx.pad(x, (0, max(0, 2112 - x.size)), constant_values=-mx.inf)
        x = mx.broadcast_to(x, (len(rows), x.size))
    arrays = {"x": x.astype(dtype), "rows": pack_rows(rows), "offset": mx.array([2], mx.uint32), **more}
    return Case(f"{name}, {x.shape[-1]} tokens", arrays)


def make_logits(*counts: int, seed: int = 5) -> mx.array:
    """So many tokens with logit 0, -1, -2 and so on, in any order."""
    logits = mx.concatenate([mx.full((n,), -float(level)) for level, n in enumerate(counts)])
    return logits[mx.random.permutation(logits.size, key=mx.random.key(seed))]


def exact_shares(dtype: mx.Dtype) -> Iterator[Case]:
    """Levels that weigh the same together: top-p ends exactly where one does, and min-p exactly at one."""
    counts = [1, 2, 4, 8, 16, 32, 64, 128]
    asked = [{"top_p": p} for p in (0.125, 0.25, 0.5, 0.75)] + [{"min_p": p} for p in (0.25, 0.125, 1 / 64)]
    small = [
        {"top_k": 7, "top_p": 2 / 3},
        {"top_k": 31, "top_p": 0.2},
        {"top_k": 31, "min_p": 0.25},
        {"top_k": 60, "top_p": 0.4},
    ]
    yield draw_case(dtype, "exact shares", make_logits(*counts), 2 * asked + 3 * small)
    large = [{"top_k": 511, "top_p": p} for p in (1 / 9, 4 / 9, 0.5)] + [{"top_k": 700, "min_p": 1 / 16}]
    yield draw_case(dtype, "exact shares", make_logits(*counts, 256, 512, 1024), 2 * asked + 2 * large)


def shares_among_equals(dtype: mx.Dtype) -> Iterator[Case]:
    """top-p and top-k that end among tokens alike, odd ones and even ones, also where min-p ends too."""
    asked = [{"top_p": 0.61 + 0.013 * i} for i in range(12)] + [
        {"top_p": 0.6 + 0.01 * i, "min_p": 0.5} for i in range(12)
    ]
    yield draw_case(dtype, "two levels", make_logits(700, 800), asked)
    asked = [{"top_k": k, "top_p": p} for k, p in ((1, 0.5), (2, 0.9), (3, 0.5), (5, 0.3), (9, 0.55), (20, 0.8))]
    yield draw_case(dtype, "few at the top", make_logits(2, 3, 4, 200), 4 * asked)
    yield draw_case(dtype, "peaked", mx.where(mx.arange(300) == 77, 9.0, -mx.arange(300) / 99), 2 * asked)


def close_logits(dtype: mx.Dtype) -> Iterator[Case]:
    """Neighbours among float32 numbers; keys of which first and last are exactly 2^22 apart; one logit far below."""
    bits = mx.random.permutation(1500, key=mx.random.key(1)).astype(mx.uint32) + 0x3F800000
    asked = [{"top_k": k} for k in (1, 1, 1, 1, 2, 2, 300, 301)] + [{"top_p": 0.3}, {"top_k": 400, "top_p": 0.3}]
    if dtype == mx.float32:
        yield draw_case(dtype, "neighbours", bits.view(mx.float32), asked)
    wide = 1 + mx.random.permutation(1025, key=mx.random.key(2)) / 2048
    yield draw_case(dtype, "a power of two apart", wide, [{"top_k": k} for k in (257, 300, 900, 1024, 1025, 2000)])
    far = mx.where(mx.arange(900) == 5, -100.0, -3 * mx.random.uniform(shape=(900,), key=mx.random.key(3)))
    asked = [{"min_p": 0.97}, {"min_p": 0.999}, {"min_p": 1.0}, {"top_k": 898}, {"top_k": 600, "min_p": 0.9}]
    yield draw_case(dtype, "one far below", far, 3 * asked)
    fall = mx.where(mx.arange(600) < 256, 2.0, 1.0) - mx.arange(600) / 2048
    yield draw_case(dtype, "falling", fall, [{"top_k": 300}] * 6 + [{"top_k": 270, "top_p": 0.9}] * 3)
    yield draw_case(dtype, "falling in a part", fall[256:], [{"top_k": 257}] * 4 + [{"top_k": 300}] * 2)


def odd_draws(dtype: mx.Dtype) -> Iterator[Case]:
    """NaNs that sort below all; lists with the first token of the next slice; a mask as long as the vocabulary."""
    if dtype == mx.float32:
        x = mx.broadcast_to(mx.arange(2112) / 512, (3, 2112)).view(mx.uint32)
        at = mx.array([[70], [2077], [333]])
        x = mx.where(mx.arange(2112) == at, 0xFFC00000, x).astype(mx.uint32).view(mx.float32)
        yield draw_case(dtype, "negative NaN", x, [{}, {"temperature": 0.0}, {"top_k": 5}])
    mx.random.seed(4)
    lists = [
        {"temperature": 0.0, "output": [2048, 2048, 4096], "presence_penalty": 9.0, "recent": 2},
        {"bias": {2048: 9.0, 4096: 3.0}, "recent": 1}, {"prompt": [2048], "repetition_penalty": 3.0, "recent": 3},
    ]  # fmt: skip
    recent = {"tokens": mx.array([2048, 4096, 1], mx.uint32), "recent": mx.full((3, 8), 2048, mx.uint32)}
    yield draw_case(dtype, "lists", mx.random.normal((3, 4100)), lists, **recent)
    mask = mx.random.randint(0, 2**31 - 1, (1, 66)).astype(mx.uint32)
    yield draw_case(dtype, "masked to its end", mx.random.normal((1, 2112)), [{"top_p": 0.9}], mask=mask)


def many_slices(dtype: mx.Dtype) -> Iterator[Case]:
    """More slices than a simdgroup has lanes: all alike, and two kinds in turn."""
    even = mx.zeros((70_000,))
    asked = [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.37}, {"top_k": 40_000, "top_p": 0.5}]
    yield draw_case(dtype, "all alike", even, asked)
    mx.random.seed(6)
    x = mx.random.normal((5, 70_000))
    asked = [{"top_k": 40}, {"top_k": 256, "top_p": 0.9}, {"top_p": 0.99}, {"min_p": 0.01}, {"top_k": 1}]
    yield draw_case(dtype, "many slices", x, asked)


def best_at_edges(dtype: mx.Dtype) -> Iterator[Case]:
    """The best tokens are the first and last ones of the parts that lanes look through."""
    x = normal(dtype, 2, 1100)
    for row, edge in enumerate(([0, 256, 768], [255, 511, 1023])):
        x[row, mx.array(edge)] = mx.array([20, 21, 22]).astype(dtype)
    yield Case("best at edges", {"x": x, "status": mx.array([[5, 0], [6, 0]], mx.uint32)}, {"n": 3})


def empty_slices(dtype: mx.Dtype) -> Iterator[Case]:
    """A slice of the vocabulary without a token that may be chosen, as grammars make them."""
    x = mx.where(mx.arange(4100) // 2048 == 1, -mx.inf, mx.random.normal((2, 4100), key=mx.random.key(7)))
    status = mx.array([[5, 0], [4099, 0]], mx.uint32)
    yield Case("4 of 4100, a slice without any", {"x": x.astype(dtype), "status": status}, {"n": 4})


MORE = {
    "top_logprobs": (empty_slices, best_at_edges),
    "draw": (exact_shares, shares_among_equals, close_logits, odd_draws),
    "qmv": (strong_gates, wide),
    "paged_attention": (one_norm, odd_parts, even_parts),
    "quantized_paged_attention": (odd_groups, odd_packed_parts),
    "qkv_attention": (one_norm_entered,),
    "argmax": (even_logits,),
    "moe_router": (even_experts,),
    "moe_gate_up": (wide_experts,),
}
WIDE = {
    "draw": (many_slices,),
    "qmv": (tall, tall_lut),
    "qmm": (many_parts,),
    "paged_attention": (many_heads, long_rows),
    "moe_gate_up": (tall_experts,),
    "moe_router_gate_up": (tall_routed,),
    "moe_down": (tall_downs,),
}
