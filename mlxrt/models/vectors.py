"""Matrices kept as numbers of short vectors: W[row, j * g + i] = codebook[codes[row, j], i].

Refuses to know which files hold them: weights/codebook.py does.
"""

import mlx.core as mx
import mlx.nn as nn


def expand(codes: mx.array, codebook: mx.array) -> mx.array:
    """The rows [..., out, in] that codes [..., out, in / g] stand for."""
    return codebook[codes].flatten(-2)


def vector_matmul(x: mx.array, codes: mx.array, codebook: mx.array) -> mx.array:
    """x [..., in] by one matrix: codes [out, in / g], codebook [n, g]. float32."""
    return x.astype(mx.float32) @ expand(codes, codebook.astype(mx.float32)).T


def gather_vector_matmul(
    x: mx.array, codes: mx.array, codebook: mx.array, experts: mx.array, *, ordered: bool = False
) -> mx.array:
    """x [..., 1, in] by the matrices of `experts` [...]: codes [E, out, in / g], one codebook for all. float32."""
    x, codebook = x.astype(mx.float32), codebook.astype(mx.float32)
    if experts.size < codes.shape[0]:
        return x @ expand(codes[experts], codebook).swapaxes(-1, -2)
    stack = expand(codes, codebook).swapaxes(-1, -2)
    return mx.gather_mm(x, stack, rhs_indices=experts, sorted_indices=ordered)


class VectorLinear(nn.Module):
    """A linear layer of such a matrix. The shape and dtype of codes and codebook are as stored."""

    def __init__(self, codes: mx.array, codebook: mx.array, *, bias: bool = False):
        super().__init__()
        self.codes = mx.zeros(codes.shape, codes.dtype)
        self.codebook = mx.zeros(codebook.shape, codebook.dtype)
        if bias:
            self.bias = mx.zeros((codes.shape[-2],))

    def __call__(self, x: mx.array) -> mx.array:
        y = vector_matmul(x, self.codes, self.codebook).astype(x.dtype)
        return y + self.bias if "bias" in self else y


class VectorExpertLinear(nn.Module):
    """An ExpertLinear of such matrices, which share a codebook."""

    def __init__(self, codes: mx.array, codebook: mx.array, *, bias: bool = False):
        super().__init__()
        self.codes = mx.zeros(codes.shape, codes.dtype)
        self.codebook = mx.zeros(codebook.shape, codebook.dtype)
        if bias:
            self.bias = mx.zeros(codes.shape[:2])

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, in] through the matrices of `experts` [...]."""
        y = gather_vector_matmul(x, self.codes, self.codebook, experts, ordered=ordered).astype(x.dtype)
        return y + self.bias[experts][..., None, :] if "bias" in self else y
