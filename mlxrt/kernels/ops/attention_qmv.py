"""Decode attention and its output projection: keys are split over threadgroups, and the product combines the splits.

One short row is few heads, and a threadgroup for each leaves most of a device idle, while a launch that combines splits
takes as long as they save. Each threadgroup of the output projection stages all of attention's result anyway; here it
reads the results of a few splits instead (metal/qmv.metal with SPLIT_X). On an H200 after 512 tokens: Qwen3-0.6B 1,418
tok/s instead of 1,358, 30B-A3B 501 instead of 488.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..device import DeviceProfile
from ..dispatch import Kernels
from ..registry import Case, KernelSource, op
from ..testing import sample
from .attention_layout import PackedKV, Pages, QuantizedPages
from .linear import linear
from .paged_attention import (
    QUANTIZED_SOURCES,
    SOURCES,
    attention_op,
    is_tiled,
    launch_attention,
    launch_config,
    max_partial_splits,
    paged_case,
    score_constants,
    table_and_ranges,
)
from .qkv_attention import LazyQKV, compute_qkv, qkv_attention
from .qmm import MIN_QMM_ROWS
from .qmv import QMV, launch_qmv, qmv
from .quantized import QuantizedMatrix

SPLIT_QMV = KernelSource("qmv.metal", (*QMV.inputs, "sinks"), QMV.outputs, {"SPLIT_X": 1}, "split")


@dataclass(frozen=True)
class OutputProjection:
    """The linear layer that reads attention: matrix, bias, and the residual that is added."""

    matrix: QuantizedMatrix
    bias: mx.array | None = None
    residual: mx.array | None = None


def decode_attention(
    kernels: Kernels,
    qkv: LazyQKV | mx.array,
    pages: Pages | QuantizedPages,
    output: OutputProjection | None = None,
    **attention: Any,
) -> tuple[mx.array, mx.array]:
    """Decode attention of one token per row over paged keys and values, with the output projection if one is given:
    (its result or out [R, heads * dim], the new tail).

    Attention is fused with the QKV projection where that saves the host a launch: not in a graph, where a launch costs
    nothing.
    """
    product: dict[str, Any] = {} if output is None else vars(output)
    fused = isinstance(qkv, LazyQKV) and not kernels.graph_mode
    if fused and (output is None or kernels.accepts(qkv_attention, **vars(qkv), pages=pages, **attention)):
        y, tail = kernels.run(qkv_attention, **vars(qkv), pages=pages, **attention)
        y = y if output is None else linear(kernels, y, **product)
    else:
        op = attention_qmv if output is not None else attention_op(pages)
        y, tail = kernels.run(op, qkv=compute_qkv(qkv, kernels), pages=pages, **product, **attention)
    return y, tail.words if isinstance(tail, PackedKV) else tail


def attention_qmv_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        # R, queries, keys, dim, block size, blocks a row, start, used, the matrix, options
        (1, 4, 2, 64, 32, 10, [290], 6, ("affine", 4, 64), {"norms": True, "rope_pairs": 32, "residual": True}),
        (1, 2, 1, 128, 32, 17, [530], 15, ("affine", 8, 32), {"rope_pairs": 64, "sinks": True, "bias": True}),
        (2, 6, 2, 64, 16, 20, [300, 3], 2, ("affine", 4, 32), {"rope_pairs": 32, "window": 270, "residual": True}),
        (1, 3, 1, 128, 16, 20, [310], 0, ("dense", 16, 32), {"v_norm": True, "tied": True, "sinks": True}),
        (1, 8, 8, 128, 32, 9, [270], 9, ("q4_k_split", 4, 32), {"read": True}),  # a whole tile
        (1, 10, 2, 128, 32, 9, [9], 3, ("mxfp4", 4, 32), {"rope_pairs": 64, "residual": True}),  # splits without keys
        (2, 20, 4, 64, 32, 9, [280, 140], 5, ("lut", 4, 0), {}),  # two tiles
        # Even scores: a split's sum of exponentials is as large as it has keys.
        (1, 2, 1, 64, 32, 29, [900], 4, ("affine", 4, 64), {"rope_pairs": 32, "softcap": 0.01}),
        (1, 32, 8, 128, 32, 32, [1000], 9, ("affine", 4, 64), {"norms": True, "rope_pairs": 64, "large": True}),
    ]
    for rows, h, kv, dim, size, blocks, start, used, (mode, bits, group), extra in shapes:
        mx.random.seed(dim + h)
        table, ranges = table_and_ranges(rows, size, blocks, start, used)
        pool = mx.random.normal((rows * blocks + 1, 2 * kv, size, dim)).astype(dtype)
        pages = Pages(pool, mx.random.normal((rows, 2 * kv, 16, dim)).astype(dtype), table, ranges)
        case = paged_case(f"{h}/{kv} heads of {dim}, {start}; {mode}{bits}", pages, dtype, rows, (h, kv, dim), extra)
        outputs = 40
        for name, shape in (("bias", (outputs,)), ("residual", (rows, outputs))):
            if extra.get(name):
                case.arrays[name] = mx.random.normal(shape).astype(dtype)
        case.options["matrix"] = sample(mode, (outputs, h * dim), dtype, bits, group)
        yield case


def unfused(kernels, qkv, matrix, pages, bias=None, residual=None, **attention):
    y, tail = kernels.run(attention_op(pages), qkv=qkv, pages=pages, **attention)
    return linear(kernels, y, matrix, bias=bias, residual=residual), tail


@op(attention_qmv_cases, unfused=unfused)
def attention_qmv(
    qkv, matrix, layout, pages, scale, bias=None, residual=None, window=None, keep=0, softcap=None, sinks=None
):
    """paged_attention or quantized_paged_attention, then qmv: (the product [R, O], the tail with the new token)."""
    y, tail = attention_op(pages).reference(qkv, layout, pages, scale, window, keep, softcap, sinks)
    return qmv.reference(y, matrix, bias=bias, residual=residual), tail


def unsupported(qkv, matrix, layout, pages, **rest) -> str | None:
    return attention_op(pages).unsupported(qkv, layout, pages) or matrix.unsupported(qkv, None)


def is_faster(qkv, matrix, layout, pages, **rest) -> bool:
    """Where keys are split, and reading a few splits' results in every threadgroup is cheaper than a launch. With heads of 256
    it is not: Gemma 4 E2B decodes 3 % slower."""
    rows = qkv.shape[0]
    if rows >= MIN_QMM_ROWS or layout.head_dim > 128:
        return False
    kind = {"tiled": is_tiled(qkv, layout, pages), "quantized": isinstance(pages, QuantizedPages), "partial": True}
    splits = launch_config(DeviceProfile(), rows, layout, pages.max_tokens, **kind).splits
    return 1 < splits <= max_partial_splits(rows * layout.num_heads, layout.head_dim)


@attention_qmv.kernel(
    *SOURCES.values(), *QUANTIZED_SOURCES.values(), QMV, SPLIT_QMV, unsupported=unsupported, is_faster=is_faster
)
def launch(
    gpu, qkv, matrix, layout, pages, scale, bias=None, residual=None, window=None, keep=0, softcap=None, sinks=None
):
    sources = QUANTIZED_SOURCES if isinstance(pages, QuantizedPages) else SOURCES
    constants = score_constants(scale, window, keep, softcap, sinks) | {"QKV_HEADS": qkv.shape[1] // layout.head_dim}
    y, tail = launch_attention(gpu, sources, [qkv], qkv, qkv.shape[1], layout, pages, sinks, constants, partial=True)
    product = {"matrix": matrix, "bias": bias, "residual": residual}
    if y.ndim == 2:  # one split
        return launch_qmv(gpu, QMV, y, **product)[0], tail
    sizes = {"HEAD_DIM": layout.head_dim, "SPLITS": y.shape[2] // (layout.head_dim + 2), "SINKS": sinks is not None}
    return launch_qmv(gpu, SPLIT_QMV, y, **product, dtype=qkv.dtype, more=[sinks], **sizes)[0], tail
