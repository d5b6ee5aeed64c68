"""Linear layers and embeddings whose matrices only our kernels read: on a CPU, where MLX's own products with packed
matrices crawl, and GGUF's K-quants, for which MLX has none.

Modules of their own, because everything that calls a linear layer must come to these kernels, not only what fuses it
with its neighbours.
"""

import math
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ...kernels import Kernels, QuantizedMatrix, dequantize, embed_rows, linear, moe_grouped, moe_sort
from ...kernels.mlx_defects import gather_mm
from ...kernels.ops.qmm import MAX_QMM_ROWS
from ..base import KernelModule

MATRIX_PARTS = ("weight", "scales", "biases")
AT_ONCE = 1 << 30  # bytes of dequantised experts: a layer of 256 would take gigabytes


class PackedLinear(KernelModule):
    """x [..., K] -> [..., O]."""

    def __init__(self, matrix: QuantizedMatrix, bias: mx.array | None = None):
        super().__init__()
        set_matrix(self, matrix)
        if bias is not None:
            self.bias = bias

    @property
    def matrix(self) -> QuantizedMatrix:
        return read_matrix(self)

    def __call__(self, x: mx.array) -> mx.array:
        return multiply(self.kernels, x, self.matrix, self.get("bias"))


class PackedEmbedding(KernelModule):
    def __init__(self, matrix: QuantizedMatrix, dtype: mx.Dtype = mx.float32):
        super().__init__()
        set_matrix(self, matrix)
        self.dtype = dtype  # of what it gives

    @property
    def matrix(self) -> QuantizedMatrix:
        return read_matrix(self)

    def __call__(self, tokens: mx.array) -> mx.array:
        y = self.kernels.run(embed_rows, tokens=tokens.reshape(-1), matrix=self.matrix, dtype=self.dtype)
        return y.reshape(*tokens.shape, -1)

    def as_linear(self, x: mx.array) -> mx.array:
        return multiply(self.kernels, x, self.matrix)


class PackedExpertLinear(KernelModule):
    """A stack of matrices, for MLX's products on a GPU dequantised; kernels read it as it is."""

    def __init__(self, matrix: QuantizedMatrix, bias: mx.array | None = None):
        super().__init__()
        set_matrix(self, matrix)
        if bias is not None:
            self.bias = bias

    @property
    def matrix(self) -> QuantizedMatrix:
        return read_matrix(self)

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, in] through the matrices of `experts` [...]."""
        if self.kernels.cpu is not None:
            return multiply_experts(self.kernels, x, self.matrix, experts, self.get("bias"))
        y = gather_dequantized(self.kernels, x, self.matrix, experts, ordered)
        return y + self.bias[experts][..., None, :] if "bias" in self else y


def multiply(kernels: Kernels, x: mx.array, matrix: QuantizedMatrix, bias: mx.array | None = None) -> mx.array:
    """x [..., K] -> [..., O]. Many rows on a GPU: dequantised first, so that MLX's fast matmul runs."""
    rows = x.reshape(-1, x.shape[-1])
    if kernels.gpu is not None and rows.shape[0] > MAX_QMM_ROWS:
        y = rows @ kernels.run(dequantize, matrix=matrix, dtype=x.dtype).T
        y = y if bias is None else y + bias
    else:
        y = linear(kernels, rows, matrix, bias=bias)
    return y.reshape(*x.shape[:-1], -1)


def multiply_experts(
    kernels: Kernels, x: mx.array, matrix: QuantizedMatrix, experts: mx.array, bias: mx.array | None
) -> mx.array:
    """x [..., 1, in] by CPU kernels, every matrix once for all of its rows. Neighbours in `experts` may share a row."""
    rows, chosen = x.reshape(-1, x.shape[-1]), experts.astype(mx.uint32)
    order, bounds = kernels.run(moe_sort, experts=chosen, count=matrix.weight.shape[0])
    where = {"experts": chosen, "order": order, "bounds": bounds, "each": experts.size // rows.shape[0]}
    y = kernels.run(moe_grouped, x=rows, matrix=matrix, dtype=x.dtype, bias=bias, **where)
    return y.reshape(*experts.shape, 1, -1)


def gather_dequantized(
    kernels: Kernels, x: mx.array, matrix: QuantizedMatrix, experts: mx.array, ordered: bool
) -> mx.array:
    """x [..., 1, in] by dequantised matrices: as many outputs of all experts at a time as fit into `AT_ONCE` bytes."""
    count, outs = matrix.weight.shape[:2]
    each = math.ceil(outs / math.ceil(count * outs * matrix.width * x.dtype.size / AT_ONCE))
    made = []
    for i in range(0, outs, each):
        parts = {n: a[:, i : i + each] for n in MATRIX_PARTS if (a := getattr(matrix, n)) is not None}
        stack = kernels.run(dequantize, matrix=replace(matrix, **parts), dtype=x.dtype).swapaxes(-1, -2)
        made.append(gather_mm(x, stack, experts, ordered=ordered))
    return mx.concatenate(made, axis=-1) if len(made) > 1 else made[0]


def set_matrix(module: nn.Module, matrix: QuantizedMatrix) -> None:
    for name in MATRIX_PARTS:
        if (array := getattr(matrix, name)) is not None:
            module[name] = array
    if matrix.lut is not None:
        module["_lut"] = matrix.lut  # no parameter: the format's own
    module.bits, module.group_size, module.mode = matrix.bits, matrix.group, matrix.mode


def read_matrix(module: nn.Module) -> QuantizedMatrix:
    """The arrays may have been replaced since."""
    parts = module["weight"], module.get("scales"), module.get("biases")
    return QuantizedMatrix(*parts, module.bits, module.group_size, module.mode, module.get("_lut"))
