"""A linear layer by kernels: the matrix-vector kernel for few rows, else the norm and the matrix-matrix kernel."""

from typing import Any

import mlx.core as mx

from ..dispatch import Kernels
from .add_norm import add_norm
from .qmm import MIN_QMM_ROWS, TILE_ROWS, qmm
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
    """matrix @ RMSNorm(x) + bias; `epilogue` is the ops': activation, pair, times, residual, softcap.

    Rows come to whole tiles, of which there are eight numbers: a kernel for every number of rows, each compiled when a
    prompt's end first has it, took 1.3 s of such a prompt's first token.
    """
    rows = x.shape[0]
    if kernels.cpu is not None or rows <= max_qmv_rows(kernels, x, matrix):
        return kernels.run(qmv, x=x, matrix=matrix, norm=norm, eps=eps, bias=bias, **epilogue)
    h = pad_rows(x)
    h = h if norm is None else kernels.run(add_norm, x=h, weight=norm, eps=eps)
    for name in ("times", "residual"):
        if epilogue.get(name) is not None:
            epilogue[name] = pad_rows(epilogue[name])
    y = kernels.run(qmm, x=h, matrix=matrix, bias=bias, **epilogue)
    return y if y.shape[0] == rows else y[:rows]


def max_qmv_rows(kernels: Kernels, x: mx.array, matrix: QuantizedMatrix) -> int:
    """Rows up to which the matrix-vector kernel is used. NVIDIA's matrix units take eight in less time than it takes four,
    whose x it reads from threadgroup memory for each weight: Qwen3.5-9B, four rows 449 tok/s in all, eight 1,591."""
    units = kernels.gpu is not None and kernels.gpu.name == "cuda" and qmm.unsupported(x, matrix) is None
    return MIN_QMM_ROWS - 1 if units else MAX_QMV_ROWS


def pad_rows(x: mx.array) -> mx.array:
    """x with rows of zeros up to a whole number of tiles; so few that they are a batch's own stay as they are."""
    missing = -x.shape[0] % TILE_ROWS if x.shape[0] > MAX_QMV_ROWS else 0
    return mx.pad(x, [(0, missing), (0, 0)]) if missing else x
