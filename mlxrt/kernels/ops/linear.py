"""A linear layer by kernels: the matrix-vector kernel for few rows, else the norm and the matrix-matrix kernel."""

from typing import Any

import mlx.core as mx

from ..dispatch import Kernels
from .add_norm import add_norm
from .qmm import qmm
from .qmv import MAX_QMV_ROWS, qmv
from .quantized import QuantizedMatrix


def linear(
    kernels: Kernels,
    x: mx.array,
    matrix: QuantizedMatrix,
    *,
    norm: mx.array | None = None,
    eps: float = 0.0,
    bias: mx.array | None = None,
    **epilogue: Any,
) -> mx.array:
    """matrix @ RMSNorm(x) + bias; `epilogue` is the ops': activation, pair, times, residual, softcap."""
    if x.shape[0] <= MAX_QMV_ROWS or kernels.cpu is not None:
        return kernels.run(qmv, x=x, matrix=matrix, norm=norm, eps=eps, bias=bias, **epilogue)
    h = x if norm is None else kernels.run(add_norm, x=x, weight=norm, eps=eps)
    return kernels.run(qmm, x=h, matrix=matrix, bias=bias, **epilogue)
