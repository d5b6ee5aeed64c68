"""Decode attention with its QKV projection in one launch, for one short row.

A threadgroup multiplies the rows of its query head, its key and its value; heads that share a KV head make it again, each
for itself. The host has one launch less to do, which is what one row waits for; the device takes longer, and too long for
wide rows (docs/decisions/0009). The kernel is paged_attention.metal with FUSED_QKV.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..device import MIN_THREADGROUP_MEMORY, DeviceProfile
from ..dispatch import Kernels
from ..registry import Case, op
from ..testing import sample
from .attention_layout import Pages, QKVLayout, QuantizedPages
from .linear import linear
from .paged_attention import (
    MAX_SHORT_TOKENS,
    attention_cases,
    attention_op,
    launch_attention,
    launch_config,
    make_source,
    quantized_cases,
    score_constants,
)
from .qmv import bits_of, qmv
from .quantized import QuantizedMatrix
from .staging import padded_width

MAX_WIDTH = 4096  # elements of x: 16 KB of threadgroup memory
# Bytes of the matrix that a threadgroup multiplies by itself. On H200s in one launch and in two: with 200,000 (Qwen3-0.6B)
# 19.2 and 12.6 us of the device, 700 and 625 tok/s; with 390,000 (30B-A3B) 27.3 and 14.7 us, 323 and 278 tok/s; with 790,000
# (8B) 42.5 and 17.7 us, more than the host takes. A step that is one graph has two (Kernels.graph_mode).
MAX_MATRIX_BYTES = 400_000

PROJECTION = ("x", "w", "w_scales", "w_biases", "w_lut", "x_norm", "bias")
SOURCES = {
    quantized: {(new, False): make_source(new, False, quantized, PROJECTION) for new in (True, False)}
    for quantized in (False, True)
}


@dataclass(frozen=True)
class LazyQKV:
    """The arguments of a QKV projection, which attention may compute in its own launch."""

    x: mx.array
    matrix: QuantizedMatrix
    norm: mx.array | None = None
    eps: float = 0.0
    bias: mx.array | None = None


def compute_qkv(qkv: LazyQKV | mx.array, kernels: Kernels) -> mx.array:
    """[N, heads * dim]."""
    if isinstance(qkv, mx.array):
        return qkv
    return linear(kernels, qkv.x, qkv.matrix, norm=qkv.norm, eps=qkv.eps, bias=qkv.bias)


def qkv_cases(dtype: mx.Dtype) -> Iterator[Case]:
    kinds: list[tuple[Any, ...]] = [
        ("affine", 4, 64, 128, {"norm": True}),
        ("affine", 8, 32, 1056, {"norm": True, "bias": True}),
        ("mxfp4", 4, 32, 96, {}),
        ("dense", 16, 32, 1024, {"norm": True}),
        ("affine", 5, 32, 64, {"bias": True}),
        ("affine", 4, 32, 2080, {"norm": True}),
        ("lut", 3, 0, 160, {}),
        ("q4_k_split", 4, 32, 256, {"norm": True}),
        ("q6_k_split", 6, 32, 512, {}),
    ]
    # Four of the short ones: the others differ in how keys are read, which is attention's own matter.
    plain, quantized = short_cases(attention_cases(dtype))[:4], short_cases(quantized_cases(dtype))
    for i, (mode, bits, group, width, extra) in enumerate(kinds):
        case = plain[i % len(plain)]
        rows, outs = case.arrays["qkv"].shape
        mx.random.seed(outs + width)
        matrix = sample(mode, (outs, width), dtype, bits, group)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype)}
        if extra.get("norm"):
            arrays["norm"] = (1 + 0.1 * mx.random.normal((width,))).astype(dtype)
        if extra.get("bias"):
            arrays["bias"] = mx.random.normal((outs,)).astype(dtype)
        yield fuse_case(case, f"{mode}{bits} of {width}", arrays, matrix)
    for case in quantized:  # the same quantised values in any order of sums: products of few small integers
        rows, outs = case.arrays["qkv"].shape
        weight = (mx.random.randint(-64, 64, (outs, 96)) / 16).astype(dtype)
        x = mx.broadcast_to(mx.arange(96) % 61 == 7, (rows, 96)).astype(dtype)
        yield fuse_case(case, "whole numbers", {"x": x}, QuantizedMatrix(weight))


def short_cases(cases: Iterator[Case]) -> list[Case]:
    return [c for c in cases if c.arrays["qkv"].shape[0] <= 3 and c.options["pages"].max_tokens <= MAX_SHORT_TOKENS]


def fuse_case(case: Case, name: str, arrays: dict[str, mx.array], matrix: QuantizedMatrix) -> Case:
    """A case of attention, whose heads come from a projection."""
    rest = {name: a for name, a in case.arrays.items() if name != "qkv"}
    return Case(f"{case.name}; {name}", rest | arrays, case.options | {"matrix": matrix, "eps": 1e-6})


def unfused(kernels, x, matrix, pages, norm=None, eps=0.0, bias=None, **attention):
    qkv = linear(kernels, x, matrix, norm=norm, eps=eps, bias=bias)
    return kernels.run(attention_op(pages), qkv=qkv, pages=pages, **attention)


@op(qkv_cases, unfused=unfused)
def qkv_attention(
    x, matrix, layout, pages, scale, norm=None, eps=0.0, bias=None, window=None, keep=0, softcap=None, sinks=None
):
    """qmv, then paged_attention or quantized_paged_attention: (out [R, heads * dim], the tail with the new token)."""
    qkv = qmv.reference(x, matrix, norm, eps, bias)
    return attention_op(pages).reference(qkv, layout, pages, scale, window, keep, softcap, sinks)


def unsupported(x, matrix, layout, pages, norm=None, **rest) -> str | None:
    return matrix.unsupported(x, norm) or attention_op(pages).unsupported(x, layout, pages)


def threadgroup_bytes(x: mx.array, matrix: QuantizedMatrix, layout: QKVLayout, pages: Pages | QuantizedPages) -> int:
    """Threadgroup memory, nearly: what x, the heads and the simdgroups' results take, and the blocks."""
    quantized, blocks = isinstance(pages, QuantizedPages), pages.table.shape[1]
    rows, tokens = x.shape[0], pages.max_tokens
    c = launch_config(DeviceProfile(), rows, layout, tokens, tiled=False, quantized=quantized, fused=True)
    floats = padded_width(matrix.width) * 17 // 16 + (c.heads + 2 + c.simdgroups * c.heads) * layout.head_dim + blocks
    floats += 4 * layout.head_dim if quantized else 0
    padded_query = 272 if c.heads * layout.head_dim <= 256 else 0
    return 4 * (floats + padded_query + 256)


def is_faster(x, matrix, layout, pages, **rest) -> bool:
    """Not where several launches would be needed anyway, or rows of the matrix be read again for each of x."""
    short = x.shape[0] == 1 and pages.max_tokens <= MAX_SHORT_TOKENS and matrix.width <= MAX_WIDTH
    elements = (3 if matrix.rows > layout.num_heads * layout.head_dim else 1) * layout.head_dim * matrix.width
    fits = elements * matrix.bits // 8 <= MAX_MATRIX_BYTES
    return short and fits and threadgroup_bytes(x, matrix, layout, pages) <= MIN_THREADGROUP_MEMORY


@qkv_attention.kernel(
    *(s for kinds in SOURCES.values() for s in kinds.values()), unsupported=unsupported, is_faster=is_faster
)
def launch(
    gpu, x, matrix, layout, pages, scale, norm=None, eps=0.0, bias=None, window=None, keep=0, softcap=None, sinks=None
):
    weights = matrix.constants()
    constants = score_constants(scale, window, keep, softcap, sinks) | {
        "FORM": weights["FORM"],
        "BITS": weights["BITS"],
        "W_GROUP": weights["GROUP"],
        "K": matrix.width,
        "TILE": padded_width(matrix.width),
        "NORM": norm is not None,
        "X_EPS": bits_of(eps) if norm is not None else 0,
        "BIAS": bias is not None,
        "ROWS": (4 if matrix.bits <= 4 else 2) if matrix.packed else 1,  # a head's rows are a multiple of these
    }
    sources, inputs = SOURCES[isinstance(pages, QuantizedPages)], [x, *matrix.inputs(), norm, bias]
    return launch_attention(gpu, sources, inputs, x, matrix.rows, layout, pages, sinks, constants, fused=True)
