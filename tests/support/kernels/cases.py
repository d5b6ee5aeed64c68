"""An op's own cases and a few more that only a test wants: values at which clamps matter, shapes that are tall enough
for another way through a kernel."""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import mlx.core as mx

from mlxrt.kernels import OPS, Case, Op, QuantizedMatrix
from mlxrt.kernels.ops.attention_layout import PackedKV, Pages, QKVLayout, QuantizedPages
from mlxrt.kernels.ops.kv_codec import QuantizedKV
from mlxrt.kernels.selftest import DTYPES, list_cases
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


MORE = {
    "qmv": (strong_gates, wide),
    "paged_attention": (one_norm, odd_parts),
    "quantized_paged_attention": (odd_groups, odd_packed_parts),
    "qkv_attention": (one_norm_entered,),
    "argmax": (even_logits,),
    "moe_router": (even_experts,),
    "moe_gate_up": (wide_experts,),
}
WIDE = {
    "qmv": (tall, tall_lut),
    "qmm": (many_parts,),
    "paged_attention": (many_heads, long_rows),
    "moe_gate_up": (tall_experts,),
    "moe_router_gate_up": (tall_routed,),
    "moe_down": (tall_downs,),
}
