"""Matrices kept as codes of a few bits: every row is a norm times levels that its codes point at, in a turned basis.

y = norm * sum(turned x * levels[codes]). JANGTQ and its version 2 differ in levels, turning and packing only, so they
are one module. Refuses to know tensor names of checkpoints: weights/jangtq.py and weights/jangh.py do.
"""

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .levels import lloyd_max, odd_cubic
from .packing import WORD, unpack_fields, unpack_whole, words_for
from .rotation import Rotation, binary_blocks, rotate, unrotate
from .turned import divided

HADAMARD32 = 32


@dataclass(frozen=True)
class Coding:
    """How the rows of a matrix with `width` inputs are coded."""

    name: str  # jangtq or jangtq2
    bits: int
    width: int
    rotation: Rotation | None

    @classmethod
    def jangtq(cls, bits: int, width: int, seed: int) -> "Coding":
        return cls("jangtq", bits, width, Rotation(binary_blocks(width), seed))

    @classmethod
    def jangtq2(cls, bits: int, width: int, *, turned: bool) -> "Coding":
        blocks = (HADAMARD32,) * (width // HADAMARD32)
        return cls("jangtq2", bits, width, Rotation(blocks, None) if turned else None)

    @property
    def words(self) -> int:
        """32-bit words in a row."""
        if self.name == "jangtq":
            return words_for(self.width, self.bits)
        return self.width * self.bits // WORD

    @cached_property
    def levels(self) -> np.ndarray:
        return lloyd_max(self.width, self.bits) if self.name == "jangtq" else odd_cubic(self.bits)

    def unpack(self, words: mx.array) -> mx.array:
        """uint32 [..., words] -> codes [..., width]."""
        if self.name == "jangtq":
            return unpack_whole(words, self.bits, self.width)
        return unpack_fields(words, self.bits)

    def matrix(self, words: mx.array, norms: mx.array) -> mx.array:
        """The rows themselves, float32 [..., out, width]."""
        rows = decode(words, mx.array(self.levels), self) * norms.astype(mx.float32)[..., None]
        return rows if self.rotation is None else unrotate(rows, self.rotation.blocks, self.rotation.signs())

    def __str__(self) -> str:
        return f"{self.name} {self.bits} bit" + ("" if self.rotation else " not turned")


def decode(words: mx.array, levels: mx.array, coding: Coding) -> mx.array:
    """Levels [..., out, width] of codes, before norms and in the turned basis."""
    return levels[coding.unpack(words)]


def turn(x: mx.array, coding: Coding, signs: mx.array | None) -> mx.array:
    """x in the basis of the codes, float32."""
    return x.astype(mx.float32) if coding.rotation is None else rotate(x, coding.rotation.blocks, signs)


def coded_matmul(x: mx.array, words: mx.array, norms: mx.array, levels: mx.array, coding: Coding) -> mx.array:
    """Turned x [..., width] by one matrix: words [out, W], norms [out]. float32."""
    return (x @ decode(words, levels, coding).T) * norms.astype(mx.float32)


def gather_coded_matmul(
    x: mx.array,
    words: mx.array,
    norms: mx.array,
    levels: mx.array,
    experts: mx.array,
    coding: Coding,
    *,
    ordered: bool = False,
) -> mx.array:
    """Turned x [..., 1, width] by the matrices of `experts` [...]: words [E, out, W], norms [E, out]. float32.

    Few pairs unpack the matrices they use; many would unpack most of them several times, so they unpack all once.
    """
    if experts.size < words.shape[0]:
        y = x @ decode(words[experts], levels, coding).swapaxes(-1, -2)
    else:
        stack = decode(words, levels, coding).swapaxes(-1, -2)
        y = mx.gather_mm(x, stack, rhs_indices=experts, sorted_indices=ordered)
    return y * norms.astype(mx.float32)[experts][..., None, :]


class CodedLinear(nn.Module):
    """A linear layer whose matrix is coded. `divisor` [in], where there is one, divides the input before it turns."""

    def __init__(self, coding: Coding, outputs: int, *, bias: bool = False, divisor: tuple[int, ...] = ()):
        super().__init__()
        self.coding = coding
        self.words = mx.zeros((outputs, coding.words), mx.uint32)
        self.norms = mx.zeros((outputs,), mx.float16)
        if bias:
            self.bias = mx.zeros((outputs,))
        if divisor:
            self.divisor = mx.ones(divisor)
        self._levels = mx.array(coding.levels)
        self._signs = coding.rotation.signs() if coding.rotation else None

    def __call__(self, x: mx.array) -> mx.array:
        turned = turn(divided(x, self.get("divisor")), self.coding, self._signs)
        y = coded_matmul(turned, self.words, self.norms, self._levels, self.coding).astype(x.dtype)
        return y + self.bias if "bias" in self else y


class CodedExpertLinear(nn.Module):
    """An ExpertLinear whose matrices are coded. `divisor` is one for all, or one per expert."""

    def __init__(self, coding: Coding, count: int, outputs: int, *, bias: bool = False, divisor: tuple[int, ...] = ()):
        super().__init__()
        self.coding = coding
        self.words = mx.zeros((count, outputs, coding.words), mx.uint32)
        self.norms = mx.zeros((count, outputs), mx.float16)
        if bias:
            self.bias = mx.zeros((count, outputs))
        if divisor:
            self.divisor = mx.ones(divisor)
        self._levels = mx.array(coding.levels)
        self._signs = coding.rotation.signs() if coding.rotation else None

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, in] through the matrices of `experts` [...]."""
        turned = turn(divided(x, self.get("divisor"), experts), self.coding, self._signs)
        y = gather_coded_matmul(
            turned, self.words, self.norms, self._levels, experts, self.coding, ordered=ordered
        ).astype(x.dtype)
        return y + self.bias[experts][..., None, :] if "bias" in self else y
