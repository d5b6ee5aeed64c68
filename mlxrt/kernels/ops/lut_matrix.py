"""Matrices quantised by a lookup table: an element is its row's scale times the centroid its index points at.

The plain-MLX meaning, for both ways indices are packed. x is Hadamard-rotated already (hadamard.py). Kernels read such
matrices as they read any quantised one (quantized.py).
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from ..mlx_defects import gather_mm
from .bitpack import unpack_aligned, unpack_bits


@dataclass(frozen=True)
class LUTMatrix:
    """A matrix [O, K], or a stack [E, O, K]: packed [.., O, W], scales [.., O] and a lut [2 ** bits or more]."""

    packed: mx.array
    scales: mx.array
    lut: mx.array
    bits: int
    width: int
    aligned: bool = True  # no index crosses a word

    def lookup(self) -> mx.array:
        """The centroids without scales, float32."""
        if self.aligned:
            return self.lut[unpack_aligned(self.packed, self.bits, self.width)]
        return self.lut[unpack_bits(self.packed, self.bits)]

    def dequantize(self) -> mx.array:
        """The dense matrix, float32."""
        return self.lookup() * self.scales.astype(mx.float32)[..., None]

    def multiply(self, x: mx.array) -> mx.array:
        """x [..., K] -> float32 [..., O]."""
        return (x.astype(mx.float32) @ self.lookup().swapaxes(-1, -2)) * self.scales.astype(mx.float32)

    def gather_multiply(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, K] by the matrices of `experts` [...], float32.

        Few pairs unpack the matrices they use; many would unpack most of them several times, so they unpack all once.
        """
        x = x.astype(mx.float32)
        if experts.size < self.packed.shape[0]:
            y = x @ replace(self, packed=self.packed[experts]).lookup().swapaxes(-1, -2)
        else:
            y = gather_mm(x, self.lookup().swapaxes(-1, -2), experts, ordered=ordered)
        return y * self.scales.astype(mx.float32)[experts][..., None, :]
