"""Codebook-quantised linear layers: W[row, j * g + i] = codebook[codes[row, j], i].

Files with them are read in weights/formats/codebook.py.
"""

import mlx.core as mx

from ...kernels import codebook_rows
from ...kernels.mlx_defects import gather_mm
from ...kernels.ops.codebook import MAX_ROWS, dequantize_codebook
from ..base import KernelModule


def gather_codebook_matmul(
    x: mx.array, indices: mx.array, codebook: mx.array, experts: mx.array, *, ordered: bool = False
) -> mx.array:
    """x [..., 1, in] by the matrices of `experts` [...]: indices [E, out, in / g], one codebook for all. float32."""
    x, codebook = x.astype(mx.float32), codebook.astype(mx.float32)
    if experts.size < indices.shape[0]:
        return x @ dequantize_codebook(indices[experts], codebook).swapaxes(-1, -2)
    stack = dequantize_codebook(indices, codebook).swapaxes(-1, -2)
    return gather_mm(x, stack, experts, ordered=ordered)


class CodebookModule(KernelModule):
    """Indices [..., out, in / g], called `codes` as in checkpoints, and their codebook."""

    def __init__(self, indices: mx.array, codebook: mx.array, *, bias: bool = False):
        super().__init__()
        self.codes = mx.zeros(indices.shape, indices.dtype)
        self.codebook = mx.zeros(codebook.shape, codebook.dtype)
        if bias:
            self.bias = mx.zeros(indices.shape[:-1])


class CodebookLinear(CodebookModule):
    def __call__(self, x: mx.array) -> mx.array:
        what = {"indices": self.codes, "codebook": self.codebook, "dtype": x.dtype}
        y = self.kernels.run(codebook_rows, x=x.reshape(-1, x.shape[-1]), **what).reshape(*x.shape[:-1], -1)
        return y + self.bias if "bias" in self else y


class CodebookExpertLinear(CodebookModule):
    """An ExpertLinear whose matrices share a codebook."""

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, in] through the matrices of `experts` [...]."""
        if self.kernels.gpu is not None and experts.size <= MAX_ROWS:
            y = self.run_few(x, experts)
        else:
            y = gather_codebook_matmul(x, self.codes, self.codebook, experts, ordered=ordered).astype(x.dtype)
        return y + self.bias[experts][..., None, :] if "bias" in self else y

    def run_few(self, x: mx.array, experts: mx.array) -> mx.array:
        """One row of x per (token, expert) pair: repeating rows costs nothing beside reading a matrix."""
        rows = mx.broadcast_to(x, (*experts.shape, *x.shape[-2:])).reshape(-1, x.shape[-1])
        what = {"indices": self.codes, "codebook": self.codebook, "dtype": x.dtype}
        return self.kernels.run(codebook_rows, x=rows, experts=experts.reshape(-1, 1), **what).reshape(
            *experts.shape, 1, -1
        )
