"""python -m tests.long.fuzz_kernels [--op X,Y] [--count 40] [--seed 1]: calls drawn at random, in the simulator.

An op's own cases are what somebody thought of. Every call here is compared with the op's meaning in float32; a line for
each that is wrong or that the simulator objects to. A call is a few seconds: most of it compiles the text.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from mlxrt.kernels import OPS, Case, PackedRows, QuantizedMatrix, make_gpu
from mlxrt.kernels.device import MIN_THREADGROUP_MEMORY
from mlxrt.kernels.dtypes import DTYPES
from mlxrt.kernels.ops.attention_layout import PackedKV, Pages, QKVLayout, QuantizedPages
from mlxrt.kernels.ops.k_quants import SPLIT_KINDS
from mlxrt.kernels.ops.kv_codec import QuantizedKV
from mlxrt.kernels.ops.paged_attention import MAX_SHORT_TOKENS
from mlxrt.kernels.ops.qkv_attention import fuse_case, threadgroup_bytes
from mlxrt.kernels.selftest import check_case, compute_reference
from mlxrt.kernels.testing import sample

from ..support.metal_sim import ASCENDING, DESCENDING, MetalSimError, Simulator

Draw = Callable[[random.Random, mx.Dtype], Case]


def normal(dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def matrix(rng: random.Random, dtype: mx.Dtype, *shape: int) -> QuantizedMatrix:
    """Plain, packed or coded, [.., rows, width]."""
    group = rng.choice([g for g in (32, 64, 128) if shape[-1] % g == 0])
    kinds = ["affine", "affine", "affine", "lut", "lut", "mxfp4", "dense", "iq4_nl_split"]
    kinds += [f"{k}_split" for k, split in SPLIT_KINDS.items() if shape[-1] % split.elements == 0] * 2
    kind = rng.choice(kinds)
    if kind == "mxfp4" or kind.endswith("_split"):
        return sample(kind, shape, dtype)
    return sample(kind, shape, dtype, rng.choice([1, 2, 3, 4, 8] if kind == "lut" else [2, 3, 4, 5, 6, 8]), group)


def product(rng: random.Random, dtype: mx.Dtype, rows: range, step: int) -> Case:
    width, outs, n = step * rng.randint(1, 2048 // step), rng.randint(1, 70), rng.choice(rows)
    pair = rng.random() < 0.3
    m = matrix(rng, dtype, outs * (1 + pair), width)
    arrays, options = {"x": normal(dtype, n, width)}, {"matrix": m, "pair": pair}
    if pair or rng.random() < 0.2:
        options["activation"] = rng.choice(["silu", "gelu", "clamped"] if pair else ["silu", "gelu"])
    if rng.random() < 0.3:
        arrays["bias"] = normal(dtype, outs * (1 + pair))
    if not pair and options.get("activation") and rng.random() < 0.5:
        arrays["times"] = normal(dtype, n, outs)
    elif rng.random() < 0.5:
        arrays["residual"] = normal(dtype, n, outs)
    return Case(f"{n} x [{m.rows}, {width}] {m.mode}{m.bits}/{m.group}", arrays, options)


def draw_qmv(rng: random.Random, dtype: mx.Dtype) -> Case:
    case = product(rng, dtype, range(1, 5), 32)
    if rng.random() < 0.5:
        case.arrays["norm"] = normal(dtype, case.options["matrix"].width)
        case.options["eps"] = 1e-6
    return case


def draw_of_sum(rng: random.Random, dtype: mx.Dtype) -> Case:
    case = draw_qmv(rng, dtype)
    shape = case.arrays["x"].shape
    case.arrays.update(residual=normal(dtype, *shape), post=normal(dtype, shape[1]))
    case.options["post_eps"] = rng.choice([1e-6, 0.1])
    if rng.random() < 0.3:
        case.arrays["scalar"] = normal(dtype, 1)
    return case


def draw_qmm(rng: random.Random, dtype: mx.Dtype) -> Case:
    return product(rng, dtype, range(5, 65), 128)


def rows_of(rng: random.Random) -> dict[str, Any]:
    """Rows at all sorts of places: short ones beside long ones, some whose first blocks are gone, all or
    but for those of a few tokens that are kept."""
    rows, size = rng.choice([1, 1, 2, 3, 5]), rng.choice([1, 8, 16, 32])
    blocks = rng.choice([1, 2, 5, 40, 90]) * rng.choice([1, 1, 32 // size])
    base = [size * rng.choice([0, 0, rng.randint(0, 50)]) for _ in range(rows)]
    start = [b + rng.randint(0, blocks * size) for b in base]
    used = rng.randint(0, 31)
    window, keep = rng.choice([None, None, 1, 7, 40, 700]), 0
    if window is not None and rng.random() < 0.4:
        keep = rng.choice([1, 4, size + 1])
        kept = -(-keep // size)
        # A block is gone only after the window has left it and the kept ones before it.
        base = [min(b, max(0, (s + used - window + 1) // size - kept) * size) for b, s in zip(base, start)]
        start = [min(s, b + blocks * size) for b, s in zip(base, start)]
        base = [min(b, max(0, (s + used - window + 1) // size - kept) * size) for b, s in zip(base, start)]
    return dict(rows=rows, size=size, blocks=blocks, base=base, start=start, used=used, window=window, keep=keep)


def heads_of(rng: random.Random, dtype: mx.Dtype, dims: list[int]) -> QKVLayout:
    keys, group, dim = rng.choice([1, 2]), rng.choice([1, 2, 3, 4, 8]), rng.choice(dims)
    norms = [normal(dtype, dim) for _ in range(2)] if rng.random() < 0.5 else [None, None]
    pairs = rng.choice([None, dim // 2, dim // 4])
    inv_freq = None if pairs is None else 1 / 10000.0 ** (mx.arange(pairs) / pairs)
    return QKVLayout(keys * group, keys, dim, norms[0], norms[1], False, 1e-6, inv_freq, rng.choice([1.0, 1.3]))


def attention(rng: random.Random, dtype: mx.Dtype, heads: QKVLayout, at: dict[str, Any], pages: Any) -> Case:
    width = heads.num_heads + (heads.num_kv_heads if heads.tied else 2 * heads.num_kv_heads)
    arrays = {"qkv": normal(dtype, at["rows"], width * heads.head_dim)}
    if rng.random() < 0.3:
        arrays["sinks"] = normal(dtype, heads.num_heads)
    options = {"layout": heads, "pages": pages, "scale": heads.head_dim**-0.5}
    options |= {"window": at["window"], "keep": at["keep"]}
    options["softcap"] = rng.choice([None, None, 5.0])
    shown = ", ".join(f"{k} {v}" for k, v in at.items())
    return Case(f"{heads.num_heads}/{heads.num_kv_heads} heads of {heads.head_dim}, {shown}", arrays, options)


def table_and_ranges(at: dict[str, Any]) -> tuple[mx.array, mx.array]:
    many = at["rows"] * at["blocks"]
    table = mx.random.permutation(mx.arange(1, many + 1)).reshape(at["rows"], at["blocks"]).astype(mx.int32)
    return table, mx.array([[b, s, at["used"]] for b, s in zip(at["base"], at["start"])])


def draw_pages(rng: random.Random, dtype: mx.Dtype) -> Case:
    at, heads = rows_of(rng), heads_of(rng, dtype, [64, 64, 128, 256, 512])
    heads = replace(heads, v_norm=rng.random() < 0.2, tied=rng.random() < 0.2)
    pool = normal(dtype, at["rows"] * at["blocks"] + 1, 2 * heads.num_kv_heads, at["size"], heads.head_dim)
    tail = normal(dtype, at["rows"], 2 * heads.num_kv_heads, 32, heads.head_dim)
    return attention(rng, dtype, heads, at, Pages(pool, tail, *table_and_ranges(at)))


def draw_packed(rng: random.Random, dtype: mx.Dtype) -> Case:
    at, heads = rows_of(rng), heads_of(rng, dtype, [64, 128])
    codec = QuantizedKV(rng.choice([2, 4, 8]), rng.choice([2, 4, 8]), rng.choice([32, 64]), dtype)

    def random_kv(count: int, slots: int) -> PackedKV:
        both = [normal(dtype, count, heads.num_kv_heads, slots, heads.head_dim) for _ in range(2)]
        return PackedKV(*codec.encode(*both), codec)

    pool, tail = random_kv(at["rows"] * at["blocks"] + 1, at["size"]), random_kv(at["rows"], 32)
    return attention(rng, dtype, heads, at, QuantizedPages(pool, tail, *table_and_ranges(at)))


def draw_qkv_attention(rng: random.Random, dtype: mx.Dtype) -> Case:
    """Attention whose heads come from a product, where both fit into one launch."""
    while True:
        case = draw_pages(rng, dtype)
        (rows, outs), width = case.arrays["qkv"].shape, 32 * rng.randint(1, 70)
        m, pages = matrix(rng, dtype, outs, width), case.options["pages"]
        arrays = {"x": normal(dtype, rows, width) * width**-0.5}
        if (
            pages.max_tokens > MAX_SHORT_TOKENS
            or threadgroup_bytes(arrays["x"], m, case.options["layout"], pages) > MIN_THREADGROUP_MEMORY
        ):
            continue
        if rng.random() < 0.5:
            arrays |= {"norm": normal(dtype, width) * width**-0.5}
        if rng.random() < 0.3:
            arrays |= {"bias": normal(dtype, outs)}
        return fuse_case(case, f"{m.mode}{m.bits}/{m.group} of {width}", arrays, m)


def draw_routed(rng: random.Random, dtype: mx.Dtype) -> Case:
    n, count, outs, width = rng.randint(1, 3), rng.randint(4, 140), rng.randint(1, 40), 32 * rng.randint(1, 40)
    k, few = rng.randint(1, min(count, 8)), rng.random() < 0.5
    router, m = matrix(rng, dtype, count, width), matrix(rng, dtype, count, 2 * outs, width)
    arrays = {"x": normal(dtype, n, width) * width**-0.5}
    for name, size in (("norm", width), ("rbias", count), ("correction", count), ("scales", count)):
        if rng.random() < 0.4:
            arrays[name] = normal(dtype, size) * (width**-0.5 if name == "norm" else 1)
    options = {"router": router, "matrix": m, "k": k, "activation": rng.choice(["silu", "gelu", "clamped"])}
    options |= {"eps": 1e-6, "sigmoid": few, "normalise": rng.random() < 0.5}
    return Case(
        f"{n} tokens, {k} of {count} by {router.mode}{router.bits}, {m.mode}{m.bits} [{2 * outs}, {width}]",
        arrays,
        options,
    )


def routed(
    rng: random.Random, dtype: mx.Dtype, step: int
) -> tuple[int, int, int, int, QuantizedMatrix, dict[str, mx.array]]:
    n, k, count = rng.randint(1, 12), rng.randint(1, 8), rng.randint(1, 20)
    width, outs = step * rng.randint(1, 1200 // step), rng.randint(1, 40)
    experts = mx.random.randint(0, count, (n, k)).astype(mx.uint32)
    return n, k, count, outs, matrix(rng, dtype, count, 2 * outs, width), {"experts": experts}


def draw_gate_up(rng: random.Random, dtype: mx.Dtype) -> Case:
    n, k, count, outs, m, arrays = routed(rng, dtype, 32)
    arrays["x"] = normal(dtype, n, m.width)
    if rng.random() < 0.5:
        arrays["norm"] = normal(dtype, m.width)
    options = {"matrix": m, "activation": rng.choice(["silu", "gelu", "clamped"]), "eps": 1e-6}
    return Case(f"{n} tokens, {k} of {count} [{2 * outs}, {m.width}] {m.mode}{m.bits}", arrays, options)


def draw_down(rng: random.Random, dtype: mx.Dtype) -> Case:
    n, k, count, outs, m, arrays = routed(rng, dtype, 32)
    arrays |= {"x": normal(dtype, n, k, m.width), "weights": mx.random.uniform(0, 1, (n, k))}
    if rng.random() < 0.5:
        arrays["residual"] = normal(dtype, n, 2 * outs)
    return Case(f"{n} tokens, {k} of {count} [{2 * outs}, {m.width}] {m.mode}{m.bits}", arrays, {"matrix": m})


def draw_grouped(rng: random.Random, dtype: mx.Dtype) -> Case:
    n, k, count, outs, m, arrays = routed(rng, dtype, 128)
    order, bounds = OPS["moe_sort"].reference(arrays["experts"], count)
    each = rng.choice([1, k])
    arrays |= {"order": order, "bounds": bounds, "x": normal(dtype, n * k // each, m.width)}
    options = {"matrix": m, "each": each, "dtype": dtype}
    if each == k:
        options |= {"pair": True, "activation": "silu"}
    return Case(f"{n} tokens, {k} of {count} [{2 * outs}, {m.width}] {m.mode}{m.bits}, each {each}", arrays, options)


def draw_delta(rng: random.Random, dtype: mx.Dtype) -> Case:
    rows, keys, each = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 4)
    key_dim, value_dim, width = 32 * rng.randint(1, 8), 32 * rng.randint(1, 8), rng.randint(2, 8)
    heads = keys * each
    channels = 2 * keys * key_dim + heads * value_dim
    arrays = {"projected": normal(dtype, rows, channels + heads * (value_dim + 2)) * rng.choice([1, 5])}
    arrays |= {"norm": normal(dtype, value_dim), "conv_state": normal(dtype, rows, width - 1, channels)}
    arrays |= {name: normal(rng.choice([dtype, mx.float32]), heads) for name in ("a_log", "dt_bias")}
    arrays["conv_weight"] = normal(rng.choice([dtype, mx.float32]), channels, width)
    arrays["state"] = normal(mx.float32, rows, heads, key_dim, value_dim)
    return Case(f"{rows} rows, {keys} x {each} heads of {key_dim} x {value_dim}, width {width}", arrays, {"eps": 1e-6})


def draw_delta_prefill(rng: random.Random, dtype: mx.Dtype) -> Case:
    step = draw_delta(rng, dtype)
    lengths = [rng.choice([1, rng.randint(1, 30)]) for _ in range(step.arrays["state"].shape[0])]
    rows = [(n, sorted(rng.sample(range(1, n), rng.randint(0, min(3, n - 1))))) for n in lengths]
    width = step.arrays["projected"].shape[1]
    arrays = step.arrays | {"projected": normal(dtype, sum(lengths), width) * rng.choice([1, 5])}
    return Case(f"{lengths} tokens, {step.name}", arrays, {"rows": PackedRows.pack(rows), **step.options})


DRAWS: dict[str, Draw] = {
    "paged_attention": draw_pages,
    "quantized_paged_attention": draw_packed,
    "qkv_attention": draw_qkv_attention,
    "moe_router_gate_up": draw_routed,
    "qmv": draw_qmv,
    "add_norm_qmv": draw_of_sum,
    "qmm": draw_qmm,
    "moe_gate_up": draw_gate_up,
    "moe_down": draw_down,
    "moe_grouped": draw_grouped,
    "gated_delta_step": draw_delta,
    "gated_delta_prefill": draw_delta_prefill,
}


def look(name: str, case: Case, dtype: str, order: int) -> str | None:
    """What is wrong, if anything is."""
    op = OPS[name]
    try:
        report = check_case(
            op, case, make_gpu("metal", Simulator(order, portable=True).metal_kernel), compute_reference(op, case)
        )
    except MetalSimError as found:
        return str(found).splitlines()[0]
    return None if report.within(op.tolerance[dtype]) else report.message


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default=",".join(DRAWS))
    parser.add_argument("--count", type=int, default=40, help="of each op")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if unknown := set(args.op.split(",")) - DRAWS.keys():
        parser.error(f"no calls are drawn for {', '.join(sorted(unknown))}: {', '.join(DRAWS)}")
    tried = refused = wrong = 0
    for name in args.op.split(","):
        rng = random.Random(f"{name} {args.seed}")
        for i in range(args.count):
            mx.random.seed(args.seed * 100000 + i)
            dtype = rng.choice(list(DTYPES))
            case = DRAWS[name](rng, DTYPES[dtype])
            if OPS[name].unsupported(**case.arguments()):
                refused += 1
                continue
            tried += 1
            if found := look(name, case, dtype, rng.choice([ASCENDING, DESCENDING])):
                wrong += 1
                print(f"{name} {dtype}, {case.name}, {sorted(case.arrays)}: {found}", flush=True)
    print(f"{tried} calls, {refused} refused, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
