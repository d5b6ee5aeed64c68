"""Linear layers fused with the norm before and the activation, residual or softcap after them, where a kernel can.

Many rows use MLX's own matmul: there the arithmetic costs, not the launches.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels import Kernels, LazyQKV, QuantizedMatrix, add_norm, add_norm_qmv, concat_columns, embed_rows
from ..kernels import linear as kernel_linear
from ..kernels.ops.qmm import MAX_QMM_ROWS
from ..kernels.ops.qmv import MAX_QMV_ROWS, apply_epilogue
from .quantized.packed_linear import PackedEmbedding, PackedLinear


def matrix_of(linear: nn.Module) -> QuantizedMatrix | None:
    """The weights as kernels read them; None for a layer of another format, or one that transforms its input."""
    if isinstance(linear, PackedLinear | PackedEmbedding):
        return linear.matrix
    if type(linear) in (nn.Linear, nn.Embedding):
        return QuantizedMatrix(linear["weight"])
    if type(linear) is not nn.QuantizedLinear and not isinstance(linear, nn.QuantizedEmbedding):
        return None
    return packed_matrix(linear)


def packed_matrix(linear: nn.Module) -> QuantizedMatrix:
    """The weights of a module in one of MLX's quantised layouts."""
    packed = linear["weight"], linear["scales"], linear.get("biases")
    return QuantizedMatrix(*packed, linear.bits, linear.group_size, linear.mode)


def norm_arguments(norm: nn.RMSNorm | None) -> dict[str, Any]:
    """The norm before a product, as ops take it."""
    return {} if norm is None else {"norm": norm.weight, "eps": norm.eps}


def kernel_matrix(linear: nn.Module, x: mx.array, kernels: Kernels) -> QuantizedMatrix | None:
    """matrix_of(linear) if kernels may compute it for x: on a GPU if x has few rows, on a CPU if it is packed."""
    if kernels.gpu is None:
        return linear.matrix if isinstance(linear, PackedLinear | PackedEmbedding) else None
    return matrix_of(linear) if x.shape[0] <= MAX_QMM_ROWS else None


def fused_linear(
    linear: nn.Module,
    x: mx.array,
    kernels: Kernels,
    *,
    norm: nn.RMSNorm | None = None,
    activation: str | None = None,
    pair: bool = False,
    times: mx.array | None = None,
    residual: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """linear(norm(x)) + residual; with `activation`, its first half gates the second (`pair`) or it gates `times`.

    `softcap`: y = softcap * tanh(y / softcap).
    """
    after: Any = {"activation": activation, "pair": pair, "times": times, "residual": residual, "softcap": softcap}
    matrix = kernel_matrix(linear, x, kernels)
    if matrix is not None:
        return kernel_linear(kernels, x, matrix, bias=linear.get("bias"), **norm_arguments(norm), **after)
    h = x if norm is None else norm(x)
    return apply_epilogue(plain_linear(linear, h, dequantize=kernels.gpu is not None), **after)


def concat_products(linears: Sequence[nn.Module], x: mx.array, kernels: Kernels, norm: nn.RMSNorm | None) -> mx.array:
    """linear(norm(x)) of each, side by side: of those that are not one matrix because their formats differ."""
    if norm is not None and x.shape[0] > MAX_QMV_ROWS:
        x, norm = rms_norm(norm, x, kernels), None  # once for all of them
    parts = [fused_linear(linear, x, kernels, norm=norm) for linear in linears]
    return parts[0] if len(parts) == 1 else kernels.run(concat_columns, **dict(zip("abcd", parts)))


def lazy_qkv(linear: nn.Module, x: mx.array, kernels: Kernels, norm: nn.RMSNorm | None) -> LazyQKV | mx.array:
    """linear(norm(x)), left for attention to compute in its own launch where a kernel can fuse them."""
    if (matrix := kernel_matrix(linear, x, kernels)) is None:
        return fused_linear(linear, x, kernels, norm=norm)
    return LazyQKV(x, matrix, bias=linear.get("bias"), **norm_arguments(norm))


def add_norm_linear(
    linear: nn.Module,
    x: mx.array,
    kernels: Kernels,
    *,
    post: nn.RMSNorm,
    residual: mx.array,
    norm: nn.RMSNorm | None = None,
    activation: str | None = None,
    pair: bool = False,
    times: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """h = residual + post(x); (fused_linear of h, h)."""
    after: dict[str, Any] = {"activation": activation, "pair": pair, "times": times}
    if (matrix := kernel_matrix(linear, x, kernels)) is None:
        h = add_rms_norm(post, x, residual, kernels)
        return fused_linear(linear, h, kernels, norm=norm, **after), h
    given = {"x": x, "residual": residual, "post": post.weight, "post_eps": post.eps, "bias": linear.get("bias")}
    return kernels.run(add_norm_qmv, matrix=matrix, **norm_arguments(norm), **given, **after)


def plain_linear(linear: nn.Module, x: mx.array, *, dequantize: bool) -> mx.array:
    """linear(x). Many rows on a GPU: dequantised first, so that MLX's fast matmul runs (docs/decisions/0006)."""
    if isinstance(linear, (nn.Embedding, nn.QuantizedEmbedding, PackedEmbedding)):
        return linear.as_linear(x)  # a tied head: calling it would look rows up
    if not dequantize or not isinstance(linear, nn.QuantizedLinear):
        return linear(x)
    w = mx.dequantize(
        linear.weight, linear.scales, linear.get("biases"), linear.group_size, linear.bits, linear.mode, dtype=x.dtype
    )
    y = x @ w.T
    return y + linear.bias if "bias" in linear else y


def embed(table: nn.Module, tokens: mx.array, kernels: Kernels, dtype: mx.Dtype, scale: float = 1.0) -> mx.array:
    """Rows of an embedding table, times `scale`."""
    if isinstance(table, PackedEmbedding) or (kernels.gpu is not None and isinstance(table, nn.QuantizedEmbedding)):
        return kernels.run(embed_rows, tokens=tokens, matrix=matrix_of(table), dtype=dtype, scale=scale)
    y = table(tokens).astype(dtype)  # MLX unpacks mxfp4 to bfloat16, whatever the model computes in
    return y if scale == 1.0 else y * scale  # a Python float: rounded to the dtype of the weights


def rms_norm(norm: nn.RMSNorm, x: mx.array, kernels: Kernels) -> mx.array:
    """norm(x), by a kernel if possible: a step with other ops in it cannot be captured as a graph."""
    return kernels.run(add_norm, x=x, weight=norm.weight, eps=norm.eps)


def add_rms_norm(
    norm: nn.RMSNorm,
    x: mx.array,
    residual: mx.array,
    kernels: Kernels,
    scalar: mx.array | float | None = None,
    groups: int = 1,
) -> mx.array:
    """(residual + norm(x)) * scalar; `groups` is the op's."""
    around = {"residual": residual, "scalar": scalar} | ({"groups": groups} if groups > 1 else {})
    return kernels.run(add_norm, x=x, weight=norm.weight, eps=norm.eps, **around)
