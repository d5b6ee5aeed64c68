"""Matrices as kernels see them: their layout, and what kernels can read (metal/quantized.h).

32 elements of any width fill whole uint32 words and lie in one quantisation group: a lane reads that many at once.
"""

from dataclasses import dataclass

import mlx.core as mx

from .lut_matrix import LUTMatrix

AFFINE, MXFP4, DENSE, LUT = 0, 1, 2, 3
FORMS = {"affine": AFFINE, "mxfp4": MXFP4, "dense": DENSE, "lut": LUT}
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
# GGUF's K-quants, and IQ2_XXS with the same kind of blocks: bytes of a block of 256 weights, which lie in uint8 rows as
# in the file. CPU kernels read them.
K_QUANTS = {"q2_k": 84, "q3_k": 110, "q4_k": 144, "q5_k": 176, "q6_k": 210, "iq2_xxs": 66}
K_QUANT_HALVES = {
    "q2_k": (80, 2),
    "q3_k": (108, 1),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208, 1),
    "iq2_xxs": (0, 1),
}  # float16: where, how many
CPU_BITS = (2, 3, 4, 5, 6, 8)  # of affine matrices that CPU kernels read


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [O, K], or a stack [E, O, K]: dense, packed as MLX packs it, or indices of a lookup table.

    An element of a LUT matrix is its row's norm, kept as the scale, times the centroid its index points at.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 16
    group: int = 32
    mode: str = "dense"
    lut: mx.array | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[-2]

    @property
    def width(self) -> int:
        if self.mode in K_QUANTS:
            return self.weight.shape[-1] // K_QUANTS[self.mode] * 256
        return self.weight.shape[-1] * 32 // self.bits if self.packed else self.weight.shape[-1]

    @property
    def packed(self) -> bool:
        return self.scales is not None or self.mode in K_QUANTS

    @property
    def lut_matrix(self) -> LUTMatrix | None:
        """The same matrix as a LUTMatrix, if it is one."""
        if self.lut is None or self.scales is None:
            return None
        return LUTMatrix(self.weight, self.scales, self.lut, self.bits, self.width, aligned=False)

    def multiply(self, x: mx.array) -> mx.array:
        """x [..., K] -> [..., O]: the meaning of every product here."""
        if self.mode in K_QUANTS:
            return x @ self.plain().astype(x.dtype).T
        if self.scales is None:
            return x @ self.weight.swapaxes(-1, -2)
        if self.lut_matrix is not None:
            return self.lut_matrix.multiply(x).astype(x.dtype)
        scales, biases = self.scales, self.biases
        if biases is not None and scales.dtype != x.dtype:  # MLX wants one dtype
            scales, biases = scales.astype(x.dtype), biases.astype(x.dtype)
        return mx.quantized_matmul(x, self.weight, scales, biases, True, self.group, self.bits, self.mode)

    def plain(self) -> mx.array:
        """The dense matrix, float32."""
        if self.mode in K_QUANTS:
            return dequantize_k_quant(self.weight, self.mode)
        if self.scales is None:
            return self.weight.astype(mx.float32)
        if self.lut_matrix is not None:
            return self.lut_matrix.dequantize()
        scales, biases = self.scales, self.biases
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(self.weight, scales, biases, self.group, self.bits, self.mode, dtype=mx.float32)

    def unsupported(self, x: mx.array, norm: mx.array | None = None) -> str | None:
        """Why no kernel of ours can read this matrix with such an x, and a norm's weight for it."""
        if x.dtype not in FLOATS:
            return f"activations are {x.dtype}"
        if norm is not None and norm.dtype != x.dtype:  # both are read eight at a time, as words
            return f"the norm is {norm.dtype}, activations {x.dtype}"
        if not self.packed:
            if self.weight.dtype != x.dtype:
                return f"plain weights are {self.weight.dtype}, activations {x.dtype}"
        elif self.mode not in FORMS:
            return f"{self.mode} weights"
        elif self.group % 32:
            return f"groups of {self.group}"
        if self.weight.nbytes >= 1 << 34:
            return "2^32 words or more"  # they are counted in 32 bits
        if self.width % 32 or self.weight.size < 8:
            return f"rows of {self.width} numbers"
        return None

    def cpu_unsupported(self, dtype: mx.Dtype) -> str | None:
        """Why no CPU kernel can read this matrix with activations of a dtype."""
        if dtype != mx.float32:
            return f"activations are {dtype}"
        if self.mode not in K_QUANTS and (self.mode != "affine" or self.bits not in CPU_BITS):
            return f"{self.mode} weights of {self.bits} bit"
        return None if self.weight.ndim == 2 else "a stack of matrices"

    def inputs(self) -> list[mx.array | None]:
        """Packed weight, scales, biases and lookup table; None where the layout has none."""
        return [self.weight, self.scales, self.biases, self.lut]

    def constants(self) -> dict[str, int]:
        return {"FORM": FORMS[self.mode], "BITS": self.bits if self.packed else 1, "GROUP": self.group}


def dequantize_k_quant(rows: mx.array, kind: str) -> mx.array:
    """The float32 values of rows of K-quant blocks, by PyPI's gguf."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(np.array(rows), GGMLQuantizationType[kind.upper()])
    return mx.array(values.astype(np.float32, copy=False))
