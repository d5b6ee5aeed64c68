"""LUT-quantised linear layers: a row is a norm times the centroids its indices select, in a Hadamard-rotated basis.

y = norm * sum(rotated x * centroids[indices]). JANGTQ and its version 2 differ in centroids, rotation and packing only.
Tensor names of checkpoints are read in weights/formats/jang.
"""

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from ...kernels import LUTMatrix, QuantizedMatrix, dequantize, qmm, qmv
from ...kernels.ops.bitpack import WORD, aligned_words, pack_bits, unpack_aligned, unpack_bits
from ...kernels.ops.qmm import MAX_QMM_ROWS
from ...kernels.ops.qmv import MAX_QMV_ROWS
from ..base import FusedModule
from .centroids import lloyd_max, odd_cubic
from .packed_linear import gather_dequantized
from .rotation import Rotation, binary_blocks, divide_input, rotate, unrotate

HADAMARD32 = 32
PACKED_AT_ONCE = 1 << 23  # indices repacked at a time: each takes up to 32 bytes meanwhile


@dataclass(frozen=True)
class LUTEncoding:
    """How the rows of a matrix with `width` inputs are encoded."""

    name: str  # jangtq or jangtq2
    bits: int
    width: int
    rotation: Rotation | None

    @classmethod
    def jangtq(cls, bits: int, width: int, seed: int) -> "LUTEncoding":
        return cls("jangtq", bits, width, Rotation(binary_blocks(width), seed))

    @classmethod
    def jangtq2(cls, bits: int, width: int, *, rotated: bool) -> "LUTEncoding":
        blocks = (HADAMARD32,) * (width // HADAMARD32)
        return cls("jangtq2", bits, width, Rotation(blocks, None) if rotated else None)

    @property
    def words(self) -> int:
        """Packed uint32 in a row."""
        if self.name == "jangtq":
            return aligned_words(self.width, self.bits)
        return self.width * self.bits // WORD

    @cached_property
    def centroids(self) -> np.ndarray:
        return lloyd_max(self.width, self.bits) if self.name == "jangtq" else odd_cubic(self.bits)

    def unpack(self, words: mx.array) -> mx.array:
        """Packed uint32 [..., words] -> indices [..., width]."""
        if self.name == "jangtq":
            return unpack_aligned(words, self.bits, self.width)
        return unpack_bits(words, self.bits)

    def matrix(self, words: mx.array, norms: mx.array) -> mx.array:
        """The dequantised rows, float32 [..., out, width]."""
        rows = mx.array(self.centroids)[self.unpack(words)] * norms.astype(mx.float32)[..., None]
        return rows if self.rotation is None else unrotate(rows, self.rotation.blocks, self.rotation.signs())

    def __str__(self) -> str:
        return f"{self.name} {self.bits} bit" + ("" if self.rotation else " not rotated")


class LUTLayer(FusedModule):
    """Packed indices and norms as stored; centroids and signs follow from the encoding.

    Kernels read indices as one stream of bits. Other packings are repacked when the layer is fused.
    """

    def __init__(self, coding: LUTEncoding, rows: tuple[int, ...], bias: bool, divisor: tuple[int, ...]):
        super().__init__()
        self.coding = coding
        self.words = mx.zeros((*rows, coding.words), mx.uint32)
        self.norms = mx.zeros(rows, mx.float16)
        if bias:
            self.bias = mx.zeros(rows)
        if divisor:
            self.divisor = mx.ones(divisor)
        # Padded to eight: MLX passes smaller arrays to kernels in another address space.
        centroids = mx.array(coding.centroids)
        self._centroids = mx.pad(centroids, (0, max(0, 8 - centroids.size)))
        self._signs = coding.rotation.signs() if coding.rotation else None
        self._stream = coding.name != "jangtq" or (WORD % coding.bits == 0 and coding.width % WORD == 0)

    def fuse(self) -> None:
        if self.kernels.gpu is None or self._stream:
            return
        if self.coding.width % WORD:
            self.kernels.report_fallback(qmv, f"rows of {self.coding.width} indices")
        else:
            self.words, self._stream = repack(self.words, self.coding), True

    @property
    def lut(self) -> LUTMatrix:
        c = self.coding
        return LUTMatrix(self.words, self.norms, self._centroids, c.bits, c.width, not self._stream)

    @property
    def matrix(self) -> QuantizedMatrix | None:
        """The matrix as kernels read it; None without a GPU, or where the indices are not one stream of bits."""
        if self.kernels.gpu is None or not self._stream:
            return None
        return QuantizedMatrix(
            self.words, self.norms, None, self.coding.bits, self.coding.width, "lut", self._centroids
        )

    def rotate_input(self, x: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
        """x in the rotated basis of the rows."""
        rotation = self.coding.rotation
        return x.astype(dtype) if rotation is None else rotate(x, rotation.blocks, self._signs, self.kernels, dtype)


def repack(words: mx.array, coding: LUTEncoding) -> mx.array:
    """Indices that do not cross a uint32 -> the same indices as one stream of bits."""
    rows, each = words.reshape(-1, words.shape[-1]), max(1, PACKED_AT_ONCE // coding.width)
    made = []
    for i in range(0, rows.shape[0], each):
        made.append(pack_bits(coding.unpack(rows[i : i + each]), coding.bits))
        mx.eval(made[-1])
    return mx.concatenate(made).reshape(*words.shape[:-1], -1)


class LUTLinear(LUTLayer):
    """A LUT-quantised linear layer. `divisor` [in], if any, divides the input before it is rotated."""

    def __init__(self, coding: LUTEncoding, outputs: int, *, bias: bool = False, divisor: tuple[int, ...] = ()):
        super().__init__(coding, (outputs,), bias, divisor)

    def __call__(self, x: mx.array) -> mx.array:
        rows, matrix = divide_input(x, self.get("divisor")).reshape(-1, x.shape[-1]), self.matrix
        if matrix is None:
            y = self.lut.multiply(self.rotate_input(rows)).astype(x.dtype)
        elif rows.shape[0] > MAX_QMM_ROWS:
            y = self.rotate_input(rows, x.dtype) @ self.kernels.run(dequantize, matrix=matrix, dtype=x.dtype).T
        else:
            way = qmv if rows.shape[0] <= MAX_QMV_ROWS else qmm
            y = self.kernels.run(way, x=self.rotate_input(rows, x.dtype), matrix=matrix)
        y = y.reshape(*x.shape[:-1], -1)
        return y + self.bias if "bias" in self else y


class LUTExpertLinear(LUTLayer):
    """A LUT-quantised ExpertLinear. `divisor` is one for all, or one per expert."""

    def __init__(
        self, coding: LUTEncoding, count: int, outputs: int, *, bias: bool = False, divisor: tuple[int, ...] = ()
    ):
        super().__init__(coding, (count, outputs), bias, divisor)

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, in] through the matrices of `experts` [...]."""
        rows, matrix = divide_input(x, self.get("divisor"), experts), self.matrix
        if matrix is not None and experts.size >= self.words.shape[0]:
            y = gather_dequantized(self.kernels, self.rotate_input(rows, x.dtype), matrix, experts, ordered)
        else:
            y = self.lut.gather_multiply(self.rotate_input(rows), experts, ordered=ordered).astype(x.dtype)
        return y + self.bias[experts][..., None, :] if "bias" in self else y
