"""Matrices as kernels see them: their layout, and what kernels can read (metal/quantized.h).

32 elements of any width fill whole uint32 words: a lane reads that many at once. They lie in one quantisation group, or
in two of a K-quant's.
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from ..cpu.interleave import BLOCKS
from ..dtypes import FLOATS
from .k_quants import (
    GROUP_LUT,
    INTERLEAVED,
    K_LUT,
    K_MIN,
    K_NIBBLE,
    K_QUANTS,
    K_SIGNED,
    SPLIT_KINDS,
    SPLIT_MODES,
    dequantize_blocks,
    dequantize_split,
    interleave_matrix,
    iq4_lut,
    separate_matrix,
)
from .lut_matrix import LUTMatrix

AFFINE, MXFP4, DENSE, LUT = 0, 1, 2, 3
FORMS = {"affine": AFFINE, "mxfp4": MXFP4, "dense": DENSE, "lut": LUT, GROUP_LUT: LUT}
FORMS |= {K_MIN: 4, K_SIGNED: 5, K_NIBBLE: 6, K_LUT: 7}
SUM_WIDTHS = {"affine": 32, K_MIN: 32, K_SIGNED: 16, K_NIBBLE: 16}  # neighbours in x of which kernels need the sum
CPU_MODES = ("affine", "mxfp4")  # of MLX's, that CPU kernels read
CPU_BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [O, K], or a stack [E, O, K]: dense, packed as MLX packs it, indices of a lookup table, or K-quants.

    An element of a LUT matrix is its row's norm, kept as the scale, times the centroid its index points at. K-quants are
    uint8 rows of a file's blocks, which have their type as mode, some of them interleaved (q8_0_x4), or split (k_quants.py):
    then `scales` are the groups' integers and `biases` the blocks' float16.
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
        return self.weight.shape[-2] * self.together

    @property
    def width(self) -> int:
        if self.is_stored:
            return self.row_bytes * 256 // self.span_bytes
        return self.weight.shape[-1] * 32 // self.bits if self.packed else self.weight.shape[-1]

    @property
    def packed(self) -> bool:
        return self.scales is not None or self.is_stored

    @property
    def lut_matrix(self) -> LUTMatrix | None:
        """The same matrix as a LUTMatrix, if it is one."""
        if self.mode != "lut" or self.lut is None or self.scales is None:
            return None
        return LUTMatrix(self.weight, self.scales, self.lut, self.bits, self.width, aligned=False)

    @property
    def is_k_quant(self) -> bool:
        return self.is_stored or self.mode in SPLIT_MODES

    @property
    def is_stored(self) -> bool:
        """Whether it is blocks of a GGUF file, which may be interleaved."""
        return self.mode in K_QUANTS or self.mode in INTERLEAVED

    @property
    def kind(self) -> str:
        """The mode, without what says that rows are interleaved."""
        return INTERLEAVED[self.mode][0] if self.mode in INTERLEAVED else self.mode

    @property
    def together(self) -> int:
        """Rows that are interleaved."""
        return INTERLEAVED[self.mode][1] if self.mode in INTERLEAVED else 1

    @property
    def row_bytes(self) -> int:
        return self.weight.shape[-1] * self.weight.itemsize // self.together

    @property
    def span_bytes(self) -> int:
        """Of 256 weights of a row that is blocks of a GGUF file."""
        if self.mode not in INTERLEAVED:
            return K_QUANTS[self.mode]
        block = BLOCKS[self.kind]
        return block.interleaved_bytes * 256 // block.weights

    def interleave(self, together: int) -> "QuantizedMatrix":
        """With that many rows side by side; itself if rows do not come out even, in halves of a pair, too."""
        if self.mode not in BLOCKS or not together or self.rows % (2 * together):
            return self
        weight = interleave_matrix(self.mode, self.weight.flatten(0, -2), together)
        weight = weight.reshape(*self.weight.shape[:-2], self.rows // together, -1)
        return replace(self, weight=weight, mode=f"{self.mode}_x{together}")

    def separate(self) -> "QuantizedMatrix":
        """With rows as in the file."""
        if self.mode not in INTERLEAVED:
            return self
        weight = separate_matrix(self.kind, self.weight.flatten(0, -2), self.together)
        return replace(self, weight=weight.reshape(*self.weight.shape[:-2], self.rows, -1), mode=self.kind)

    def as_stack(self) -> "QuantizedMatrix":
        """A matrix alone as a stack of one; kernels, which count rows, make no difference."""
        if self.weight.ndim > 2:
            return self
        scales, biases = (None if a is None else a[None] for a in (self.scales, self.biases))
        return replace(self, weight=self.weight[None], scales=scales, biases=biases)

    def take(self, rows: mx.array) -> "QuantizedMatrix":
        """Some rows of it."""
        if self.mode in INTERLEAVED:
            return self.separate().take(rows)
        scales, biases = (None if a is None else a[rows] for a in (self.scales, self.biases))
        return replace(self, weight=self.weight[rows], scales=scales, biases=biases)

    def multiply(self, x: mx.array) -> mx.array:
        """x [..., K] -> [..., O]: the meaning of every product here."""
        if self.is_k_quant:
            return x @ self.plain().astype(x.dtype).swapaxes(-1, -2)
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
        if self.is_stored:
            return dequantize_blocks(self.separate().weight, self.kind)
        if self.scales is None:
            return self.weight.astype(mx.float32)
        if self.mode in SPLIT_MODES:
            return dequantize_split(self.mode, self.bits, self.weight, self.scales, self.biases, self.lut)
        if self.lut_matrix is not None:
            return self.lut_matrix.dequantize()
        scales, biases = self.scales, self.biases
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(self.weight, scales, biases, self.group, self.bits, self.mode, dtype=mx.float32)

    def unsupported(self, x: mx.array, norm: mx.array | None = None, plain: mx.Dtype | None = None) -> str | None:
        """Why no kernel of ours can read this matrix with such an x, and a norm's weight for it; `plain`: a dtype that
        plain weights may have beside that of x."""
        if x.dtype not in FLOATS:
            return f"activations are {x.dtype}"
        if norm is not None and norm.dtype != x.dtype:  # both are read eight at a time, as words
            return f"the norm is {norm.dtype}, activations {x.dtype}"
        if not self.packed:
            if self.weight.dtype not in (x.dtype, plain):
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

    def cpu_unsupported(self, dtype: mx.Dtype, stack: bool = False) -> str | None:
        """Why no CPU kernel can read this matrix, or stack of them, with activations of a dtype."""
        if dtype != mx.float32:
            return f"activations are {dtype}"
        if not self.packed and self.mode == "dense":
            if self.weight.dtype not in FLOATS or self.width % 16:
                return f"plain weights are {self.weight.dtype}, rows of {self.width} numbers"
        elif not self.is_stored and (self.mode not in CPU_MODES or self.bits not in CPU_BITS):
            return f"{self.mode} weights of {self.bits} bit"
        if (self.weight.ndim > 2) != stack:
            return "a matrix alone" if stack else "a stack of matrices"
        return None

    def inputs(self) -> list[mx.array | None]:
        """Packed weight, scales, biases and lookup table; None where the layout has none."""
        return [self.weight, self.scales, self.biases, self.lut]

    def constants(self) -> dict[str, int]:
        return {"FORM": FORMS[self.mode], "BITS": self.bits if self.packed else 1, "GROUP": self.group}


def split_matrix(kind: str, arrays: tuple[mx.array, ...]) -> QuantizedMatrix:
    """The matrix of a GGUF type that split_blocks made."""
    split, (weight, scales, *biases) = SPLIT_KINDS[kind], arrays
    lut = iq4_lut() if split.has_lut else None
    return QuantizedMatrix(weight, scales, biases[0] if biases else None, split.bits, 32, split.mode, lut)
