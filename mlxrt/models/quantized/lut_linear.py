"""Matrices kept as codes of a few bits: every row is a norm times levels that its codes point at, in a turned basis.

y = norm * sum(turned x * levels[codes]). JANGTQ and its version 2 differ in levels, turning and packing only, so they
are one module. Refuses to know tensor names of checkpoints: weights/jangtq.py and weights/jangh.py do.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx
import numpy as np

from ...kernels import LUTMatrix, QuantizedMatrix, lut_dequantize, qmm, qmv
from ...kernels.ops.bitpack import WORD, aligned_words, pack_bits, unpack_aligned, unpack_bits
from ...kernels.ops.gather import gather_mm
from ...kernels.ops.qmm import MANY
from ...kernels.ops.qmv import FEW
from ..base import FusedModule
from .centroids import lloyd_max, odd_cubic
from .rotation import Rotation, binary_blocks, divide_input, rotate, unrotate

HADAMARD32 = 32
AT_ONCE = 1 << 30  # bytes of unpacked experts: a layer of 256 would take gigabytes
PACKED_AT_ONCE = 1 << 23  # codes that are laid anew together: each takes up to 32 bytes on the way


@dataclass(frozen=True)
class LUTEncoding:
    """How the rows of a matrix with `width` inputs are coded."""

    name: str  # jangtq or jangtq2
    bits: int
    width: int
    rotation: Rotation | None

    @classmethod
    def jangtq(cls, bits: int, width: int, seed: int) -> "LUTEncoding":
        return cls("jangtq", bits, width, Rotation(binary_blocks(width), seed))

    @classmethod
    def jangtq2(cls, bits: int, width: int, *, turned: bool) -> "LUTEncoding":
        blocks = (HADAMARD32,) * (width // HADAMARD32)
        return cls("jangtq2", bits, width, Rotation(blocks, None) if turned else None)

    @property
    def words(self) -> int:
        """32-bit words in a row."""
        if self.name == "jangtq":
            return aligned_words(self.width, self.bits)
        return self.width * self.bits // WORD

    @cached_property
    def levels(self) -> np.ndarray:
        return lloyd_max(self.width, self.bits) if self.name == "jangtq" else odd_cubic(self.bits)

    def unpack(self, words: mx.array) -> mx.array:
        """uint32 [..., words] -> codes [..., width]."""
        if self.name == "jangtq":
            return unpack_aligned(words, self.bits, self.width)
        return unpack_bits(words, self.bits)

    def matrix(self, words: mx.array, norms: mx.array) -> mx.array:
        """The rows themselves, float32 [..., out, width]."""
        rows = mx.array(self.levels)[self.unpack(words)] * norms.astype(mx.float32)[..., None]
        return rows if self.rotation is None else unrotate(rows, self.rotation.blocks, self.rotation.signs())

    def __str__(self) -> str:
        return f"{self.name} {self.bits} bit" + ("" if self.rotation else " not turned")


class LUTLayer(FusedModule):
    """Words and norms as stored; levels and signs, which follow from the coding, beside them.

    Kernels read codes that lie as one stream of bits. Where a file's do not, they are laid so when the layer is fused.
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
        levels = mx.array(coding.levels)  # filled up to eight, below which kernels find arrays in another address space
        self._levels = mx.pad(levels, (0, max(0, 8 - levels.size)))
        self._signs = coding.rotation.signs() if coding.rotation else None
        self._stream = coding.name != "jangtq" or (WORD % coding.bits == 0 and coding.width % WORD == 0)

    def fuse(self) -> None:
        if self.kernels.gpu is None or self._stream:
            return
        if self.coding.width % WORD:
            self.kernels.report_fallback(qmv, f"rows of {self.coding.width} codes")
        else:
            self.words, self._stream = streamed(self.words, self.coding), True

    @property
    def codes(self) -> LUTMatrix:
        c = self.coding
        return LUTMatrix(self.words, self.norms, self._levels, c.bits, c.width, not self._stream)

    @property
    def matrix(self) -> QuantizedMatrix | None:
        """What kernels multiply by; None where there are none, or none that read these words."""
        if self.kernels.gpu is None or not self._stream:
            return None
        return QuantizedMatrix(self.words, self.norms, None, self.coding.bits, self.coding.width, "codes", self._levels)

    def turned(self, x: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
        """x in the basis of the codes."""
        turns = self.coding.rotation
        return x.astype(dtype) if turns is None else rotate(x, turns.blocks, self._signs, self.kernels, dtype)


def streamed(words: mx.array, coding: LUTEncoding) -> mx.array:
    """Words none of whose codes crosses a word -> the same codes as one stream of bits."""
    rows, each = words.reshape(-1, words.shape[-1]), max(1, PACKED_AT_ONCE // coding.width)
    made = []
    for i in range(0, rows.shape[0], each):
        made.append(pack_bits(coding.unpack(rows[i : i + each]), coding.bits))
        mx.eval(made[-1])
    return mx.concatenate(made).reshape(*words.shape[:-1], -1)


class LUTLinear(LUTLayer):
    """A linear layer whose matrix is coded. `divisor` [in], where there is one, divides the input before it turns."""

    def __init__(self, coding: LUTEncoding, outputs: int, *, bias: bool = False, divisor: tuple[int, ...] = ()):
        super().__init__(coding, (outputs,), bias, divisor)

    def __call__(self, x: mx.array) -> mx.array:
        rows, matrix = divide_input(x, self.get("divisor")).reshape(-1, x.shape[-1]), self.matrix
        if matrix is None:
            y = self.codes.multiply(self.turned(rows)).astype(x.dtype)
        elif rows.shape[0] > MANY:
            y = self.turned(rows, x.dtype) @ self.kernels.run(lut_dequantize, matrix=matrix, dtype=x.dtype).T
        else:
            way = qmv if rows.shape[0] <= FEW else qmm
            y = self.kernels.run(way, x=self.turned(rows, x.dtype), matrix=matrix)
        y = y.reshape(*x.shape[:-1], -1)
        return y + self.bias if "bias" in self else y


class LUTExpertLinear(LUTLayer):
    """An ExpertLinear whose matrices are coded. `divisor` is one for all, or one per expert."""

    def __init__(
        self, coding: LUTEncoding, count: int, outputs: int, *, bias: bool = False, divisor: tuple[int, ...] = ()
    ):
        super().__init__(coding, (count, outputs), bias, divisor)

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, in] through the matrices of `experts` [...]."""
        rows, matrix = divide_input(x, self.get("divisor"), experts), self.matrix
        if matrix is not None and experts.size >= self.words.shape[0]:
            y = self.unpacking(self.turned(rows, x.dtype), matrix, experts, ordered)
        else:
            y = self.codes.gather_multiply(self.turned(rows), experts, ordered=ordered).astype(x.dtype)
        return y + self.bias[experts][..., None, :] if "bias" in self else y

    def unpacking(self, rows: mx.array, matrix: QuantizedMatrix, experts: mx.array, ordered: bool) -> mx.array:
        """Turned rows [..., 1, in] by matrices that are unpacked: so many outputs of all experts at a time that the
        numbers stay within `AT_ONCE` bytes."""
        count, outs = self.norms.shape
        parts = math.ceil(count * outs * matrix.width * rows.dtype.size / AT_ONCE)
        each, made = math.ceil(outs / parts), []
        for i in range(0, outs, each):
            part = replace(matrix, weight=self.words[:, i : i + each], scales=self.norms[:, i : i + each])
            stack = self.kernels.run(lut_dequantize, matrix=part, dtype=rows.dtype).swapaxes(-1, -2)
            made.append(gather_mm(rows, stack, experts, ordered=ordered))
        return mx.concatenate(made, axis=-1) if len(made) > 1 else made[0]
