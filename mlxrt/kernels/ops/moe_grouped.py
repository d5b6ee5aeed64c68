"""The experts of many tokens: pairs of token and expert are put in order, so that every expert is read once for all of
its tokens and multiplied by matrix units.

Four launches: the order, gates and ups, downs, and each token's weighted sum.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..registry import Case, KernelSource, op
from ..testing import sample
from .activation import activate
from .k_quants import K_QUANTS, SHORT_BLOCKS
from .moe_qmv import gather_qmm
from .qmm import QMM, is_paired, make_config, unsupported
from .qmv import epilogue_constants

MAX_SORT_PAIRS = 2048  # they are in threadgroup memory while they are sorted
SORT_THREADS = 512
SIZE = 256
SORT = KernelSource("moe_sort.metal", ("experts",), ("order", "bounds"))
COMBINE = KernelSource("moe_combine.metal", ("parts", "weights", "residual"), ("y",))


def sort_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, k, count in [(1, 1, 1), (5, 2, 8), (33, 4, 300), (64, 8, 128)]:
        mx.random.seed(rows)
        experts = mx.random.randint(0, count, (rows, k)).astype(mx.uint32)
        yield Case(f"{rows} x {k} of {count}", {"experts": experts}, {"count": count})


@op(sort_cases)
def moe_sort(experts, count):
    """experts [N, k] -> (pairs in the order of their experts [N k], where each expert's begin [count + 1])."""
    flat = experts.flatten()
    bounds = (flat[None] < mx.arange(count + 1)[:, None]).sum(axis=1)
    place = flat.astype(mx.int64) * flat.size + mx.arange(flat.size)  # argsort alone does not promise to be stable
    return mx.argsort(place).astype(mx.uint32), bounds.astype(mx.uint32)


@moe_sort.kernel(SORT, is_faster=lambda experts, count: experts.size <= MAX_SORT_PAIRS)
def launch_sort(gpu, experts, count):
    outputs = [((experts.size,), mx.uint32), ((count + 1,), mx.uint32)]
    order, bounds = gpu(SORT, [experts], 1, SORT_THREADS, outputs, P=experts.size, E=count, THREADS=SORT_THREADS)
    return order, bounds


@moe_sort.cpu_kernel(
    unsupported=lambda experts, count: None if experts.dtype == mx.uint32 else f"experts are {experts.dtype}",
    cases=lambda: iter(()),
)
def launch_sort_cpu(cpu, experts, count):
    return cpu.sort_pairs(experts, count)


def grouped_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        (5, 2, 4, 128, 24, "affine", {"pair": True, "activation": "silu"}),
        (12, 2, 3, 384, 40, "affine", {"down": True}),
        (9, 3, 5, 256, 19, "mxfp4", {"pair": True, "activation": "clamped", "bias": True}),
        (6, 1, 2, 128, 33, "mxfp4", {"down": True, "bias": True}),
        (9, 2, 4, 256, 24, "lut", {"bits": 2, "pair": True, "activation": "silu"}),
        (13, 2, 2, 128, 19, "lut", {"bits": 3, "down": True}),  # two tiles of columns at once
        (43, 2, 3, 128, 20, "lut", {"bits": 4, "pair": True, "activation": "gelu"}),  # four, and some left over
        (5, 1, 3, 384, 17, "lut", {"bits": 8, "down": True}),
        (4, 2, 3, 128, 16, "lut", {"bits": 1, "down": True}),
        (20, 1, 5, 256, 24, "affine", {"pair": True, "activation": "silu", "lean": True}),  # some of its columns again
        (40, 1, 4, 128, 40, "mxfp4", {"down": True, "lean": True}),
        (9, 2, 3, 192, 24, "mxfp4", {"pair": True, "activation": "clamped", "bias": True}),  # half a part at the end
        (11, 2, 3, 96, 17, "affine", {"down": True}),
        # Steps of k whose scales lanes hand round: more than four for a simdgroup, the last of them past the end.
        (6, 2, 4, 1280, 40, "affine", {"pair": True, "activation": "silu", "group": 64}),
        (7, 1, 3, 1152, 24, "mxfp4", {"down": True, "exponent": 9}),  # scales above 1: all bits of their bytes
        (9, 2, 4, 768, 24, "affine", {"down": True, "group": 128}),
        (60, 1, 2, 1024, 36, "affine", {"down": True}),
        (9, 2, 3, 256, 19, "q4_k_split", {"pair": True, "activation": "silu"}),
        (12, 2, 3, 512, 18, "q6_k_split", {"down": True}),
    ]
    for rows, k, count, width, outs, mode, extra in shapes:
        mx.random.seed(width + outs)
        total = outs * 2 if extra.get("pair") else outs
        experts = mx.random.randint(0, count, (rows, k)).astype(mx.uint32)
        if extra.get("lean"):  # nearly all go to the first
            experts = mx.where(mx.arange(rows)[:, None] % 10 < 9, 0, experts)
        order, bounds = moe_sort.reference(experts, count)
        each = 1 if extra.get("down") else k
        arrays = {"x": mx.random.normal((rows * k // each, width)).astype(dtype)}
        arrays |= {"experts": experts, "order": order, "bounds": bounds}
        if extra.get("bias"):
            arrays["bias"] = mx.random.normal((count, total)).astype(dtype)
        matrix = sample(mode, (count, total, width), dtype, extra.get("bits", 4), extra.get("group", 32))
        if extra.get("exponent"):
            matrix = replace(matrix, scales=matrix.scales + extra["exponent"])
        options = {"matrix": matrix, "each": each, "pair": bool(extra.get("pair"))}
        options |= {"activation": extra.get("activation"), "dtype": mx.float32 if extra.get("down") else dtype}
        yield Case(f"{mode}{matrix.bits} {k} of {count} [{total}, {width}], {rows} tokens", arrays, options)


@op(grouped_cases)
def moe_grouped(x, experts, order, bounds, matrix, each, dtype, activation=None, pair=False, bias=None):
    """[N k, O]: every pair's expert times its row of x, which `each` pairs share; activated, of gate times up."""
    rows, chosen = x[mx.arange(experts.size) // each], experts.reshape(-1, 1)
    y = gather_qmm(matrix, rows[:, None], chosen)[:, 0]
    if bias is not None:
        y = y + bias[chosen[:, 0]]
    if activation is not None:
        y = activate(activation, *mx.split(y, 2, axis=-1)) if pair else activate(activation, y, None)
    return y.astype(dtype)


@moe_grouped.kernel(QMM, unsupported=unsupported)
def launch_grouped(gpu, x, experts, order, bounds, matrix, each, dtype, activation=None, pair=False, bias=None):
    rows, count = matrix.rows // 2 if pair else matrix.rows, matrix.weight.shape[0]
    config = grouped_config(experts.size / count, matrix.width, is_paired(x, matrix))
    [y] = gpu(
        QMM,
        [x, *matrix.inputs(), bias, None, order, bounds],
        (math.ceil(matrix.rows / (8 * config["RT"] * config["RG"])), count, 1),
        32 * config["RG"] * config["KS"],
        [((experts.size, rows), dtype)],
        T=x.dtype,
        OUT=dtype,
        M=0,
        C=each,
        GROUPED=True,
        GRID_SPLITS=1,
        K=matrix.width,
        O=rows,
        PAIRED=is_paired(x, matrix),
        **config,
        **matrix.constants(),
        **epilogue_constants(bias, activation, pair, None, None),
    )
    return y


def cpu_unsupported(x, matrix, dtype, bias=None, **rest) -> str | None:
    if dtype != mx.float32 or (bias is not None and bias.dtype != mx.float32):
        return f"results are {dtype}"
    return matrix.cpu_unsupported(x.dtype, stack=True)


def cpu_cases() -> Iterator[Case]:
    """Formats that only CPU kernels read."""
    for mode in K_QUANTS:
        width = 96 if mode in SHORT_BLOCKS else 512
        mx.random.seed(width)
        experts = mx.random.randint(0, 5, (7, 3)).astype(mx.uint32)
        order, bounds = moe_sort.reference(experts, 6)  # the last has no pair
        arrays = {"x": mx.random.normal((7, width)), "experts": experts, "order": order, "bounds": bounds}
        arrays["bias"] = mx.random.normal((6, 64))
        matrix = sample(mode, (6, 64, width), mx.float32)
        options = {"matrix": matrix, "each": 3, "pair": True, "activation": "silu", "dtype": mx.float32}
        yield Case(f"{mode} 3 of 6 [64, {width}], 7 tokens", arrays, options)


@moe_grouped.cpu_kernel(unsupported=cpu_unsupported, cases=cpu_cases)
def launch_grouped_cpu(cpu, x, experts, order, bounds, matrix, each, dtype, activation=None, pair=False, bias=None):
    return cpu.multiply_experts(x, matrix, order, bounds, each, activation, pair, bias)


def grouped_config(pairs: float, width: int, paired: bool) -> dict[str, int]:
    """Columns for what an expert is likely to have, by 8, and how its rows and k are shared (see qmm.tile_config), for as
    many `pairs` of token and expert to an expert.

    A layer on an H200, us for ups and downs, and with tiles of 16 rows and scales read at every step: Qwen3-30B-A3B, 32
    tokens 68.3, 40.9 (72.7, 46.3), 512 tokens 177.3, 108.3 (207.3, 112.3); gpt-oss-20b, 8 tokens 74.6, 41.6 (78.7, 44.3), 32
    tokens 112.7, 62.6 (120.1, 64.6); Gemma 4 26B-A4B, 32 tokens 86.0, 49.2 (92.4, 60.7).
    """
    splits = min(2, math.ceil(width / 128))
    if not paired or 5 < pairs <= 24:
        tiles = 1 if pairs <= 5 else 2 if pairs <= 24 else 4
        return make_config(tiles, 2, 4, splits if tiles < 4 else 1, 3 if paired else 1)
    if pairs <= 5:
        return make_config(1, 4, 2, 2, 4) if width >= 1024 else make_config(1, 2, 4, 1, 6)
    return make_config(8 if width >= 1024 else 4, 4, 4, 1)


def combine_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, k, outs, more in [(1, 1, 8, False), (3, 4, 100, True), (9, 8, 33, False), (8, 1, 40, True)]:
        mx.random.seed(outs)
        arrays = {"parts": mx.random.normal((rows * k, outs)), "weights": mx.random.uniform(0, 1, (rows, k))}
        if k == 1:
            arrays["parts"] = arrays["parts"].astype(dtype)
        if more:
            arrays["residual"] = mx.random.normal((rows, outs)).astype(dtype)
        yield Case(f"{rows} x {k} of {outs}", arrays, {"dtype": dtype})


@op(combine_cases)
def moe_combine(parts, weights, dtype, residual=None):
    """parts [N k, O] of any float dtype, weights [N, k] -> [N, O]: each token's sum; + residual."""
    y = (parts.reshape(*weights.shape, -1) * weights[..., None]).sum(axis=1)
    return (y if residual is None else residual.astype(mx.float32) + y).astype(dtype)


def combine_cpu_unsupported(parts, weights, dtype, residual=None) -> str | None:
    kinds = {a.dtype for a in (parts, weights, residual) if a is not None} | {dtype}
    return None if kinds == {mx.float32} else f"arrays of {(kinds - {mx.float32}).pop()}"


@moe_combine.cpu_kernel(unsupported=combine_cpu_unsupported, cases=lambda: iter(()))
def launch_combine_cpu(cpu, parts, weights, dtype, residual=None):
    return cpu.combine(parts, weights, residual)


@moe_combine.kernel(COMBINE)
def launch_combine(gpu, parts, weights, dtype, residual=None):
    (rows, k), outs = weights.shape, parts.shape[1]
    [y] = gpu(
        COMBINE,
        [parts, weights, residual],
        math.ceil(rows * outs / SIZE),
        SIZE,
        [((rows, outs), dtype)],
        T=dtype,
        N=rows,
        C=k,
        O=outs,
        SIZE=SIZE,
        RES=residual is not None,
    )
    return y
