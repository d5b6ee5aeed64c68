"""Matrices kept as numbers of short vectors: W[row, j * g + i] = codebook[codes[row, j], i].

Refuses to know which files hold them: weights/codebook.py does.
"""

import mlx.core as mx

from ...kernels import codebook_rows
from ...kernels.ops.codebook import MAX_ROWS, dequantize_codebook
from ...kernels.ops.gather import gather_mm
from ..base import KernelModule


def gather_codebook_matmul(
    x: mx.array, codes: mx.array, codebook: mx.array, experts: mx.array, *, ordered: bool = False
) -> mx.array:
    """x [..., 1, in] by the matrices of `experts` [...]: codes [E, out, in / g], one codebook for all. float32."""
    x, codebook = x.astype(mx.float32), codebook.astype(mx.float32)
    if experts.size < codes.shape[0]:
        return x @ dequantize_codebook(codes[experts], codebook).swapaxes(-1, -2)
    stack = dequantize_codebook(codes, codebook).swapaxes(-1, -2)
    return gather_mm(x, stack, experts, ordered=ordered)


class CodebookLinear(KernelModule):
    """A linear layer of such a matrix. The shape and dtype of codes and codebook are as stored."""

    def __init__(self, codes: mx.array, codebook: mx.array, *, bias: bool = False):
        super().__init__()
        self.codes = mx.zeros(codes.shape, codes.dtype)
        self.codebook = mx.zeros(codebook.shape, codebook.dtype)
        if bias:
            self.bias = mx.zeros((codes.shape[-2],))

    def __call__(self, x: mx.array) -> mx.array:
        what = {"indices": self.codes, "codebook": self.codebook, "dtype": x.dtype}
        y = self.kernels.run(codebook_rows, x=x.reshape(-1, x.shape[-1]), **what).reshape(*x.shape[:-1], -1)
        return y + self.bias if "bias" in self else y


class CodebookExpertLinear(KernelModule):
    """An ExpertLinear of such matrices, which share a codebook."""

    def __init__(self, codes: mx.array, codebook: mx.array, *, bias: bool = False):
        super().__init__()
        self.codes = mx.zeros(codes.shape, codes.dtype)
        self.codebook = mx.zeros(codebook.shape, codebook.dtype)
        if bias:
            self.bias = mx.zeros(codes.shape[:2])

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, in] through the matrices of `experts` [...]."""
        if self.kernels.gpu is not None and experts.size <= MAX_ROWS:
            y = self.few(x, experts)
        else:
            y = gather_codebook_matmul(x, self.codes, self.codebook, experts, ordered=ordered).astype(x.dtype)
        return y + self.bias[experts][..., None, :] if "bias" in self else y

    def few(self, x: mx.array, experts: mx.array) -> mx.array:
        """One row of x for each expert: those that tokens share are repeated, which costs nothing beside a matrix."""
        rows = mx.broadcast_to(x, (*experts.shape, *x.shape[-2:])).reshape(-1, x.shape[-1])
        what = {"indices": self.codes, "codebook": self.codebook, "dtype": x.dtype}
        return self.kernels.run(codebook_rows, x=rows, experts=experts.reshape(-1, 1), **what).reshape(
            *experts.shape, 1, -1
        )
