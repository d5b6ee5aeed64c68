"""Matrices kept as codes of a few bits: every row is a norm times levels that its codes point at, in a turned basis.

y = norm * sum(turned x * levels[codes]). JANGTQ and its version 2 differ in levels, turning and packing only, so they
are one module. Refuses to know tensor names of checkpoints: weights/jangtq.py and weights/jangh.py do.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kernels import Codes, coded_down, coded_gate_up, coded_rows, coded_unpack
from ..kernels.codes import MANY, gathered
from ..kernels.fields import WORD, unpack_fields, unpack_whole, words_for
from .base import Computing
from .levels import lloyd_max, odd_cubic
from .rotation import Rotation, binary_blocks, divided, rotate, unrotate

HADAMARD32 = 32
AT_ONCE = 1 << 30  # bytes of unpacked experts: a layer of 256 would take gigabytes


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
        rows = mx.array(self.levels)[self.unpack(words)] * norms.astype(mx.float32)[..., None]
        return rows if self.rotation is None else unrotate(rows, self.rotation.blocks, self.rotation.signs())

    def __str__(self) -> str:
        return f"{self.name} {self.bits} bit" + ("" if self.rotation else " not turned")


class CodedLayer(Computing):
    """Words and norms as stored; levels and signs, which follow from the coding, beside them."""

    def __init__(self, coding: Coding, rows: tuple[int, ...], bias: bool, divisor: tuple[int, ...]):
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

    @property
    def matrix(self) -> Codes:
        c = self.coding
        return Codes(self.words, self.norms, self._levels, c.bits, c.width, c.name == "jangtq")

    def turned(self, x: mx.array) -> mx.array:
        """x in the basis of the codes, float32."""
        turns = self.coding.rotation
        return x.astype(mx.float32) if turns is None else rotate(x, turns.blocks, self._signs, self.kernels)

    def unpacked(self, dtype: mx.Dtype) -> mx.array:
        return self.kernels.run(coded_unpack, matrix=self.matrix, dtype=dtype)


class CodedLinear(CodedLayer):
    """A linear layer whose matrix is coded. `divisor` [in], where there is one, divides the input before it turns."""

    def __init__(self, coding: Coding, outputs: int, *, bias: bool = False, divisor: tuple[int, ...] = ()):
        super().__init__(coding, (outputs,), bias, divisor)

    def __call__(self, x: mx.array) -> mx.array:
        rows = self.turned(divided(x, self.get("divisor")).reshape(-1, x.shape[-1]))
        if self.kernels.gpu is not None and rows.shape[0] > MANY:
            y = rows.astype(x.dtype) @ self.unpacked(x.dtype).T
        else:
            y = self.kernels.run(coded_rows, x=rows, matrix=self.matrix, dtype=x.dtype)
        y = y.reshape(*x.shape[:-1], -1)
        return y + self.bias if "bias" in self else y


class CodedExpertLinear(CodedLayer):
    """An ExpertLinear whose matrices are coded. `divisor` is one for all, or one per expert."""

    def __init__(self, coding: Coding, count: int, outputs: int, *, bias: bool = False, divisor: tuple[int, ...] = ()):
        super().__init__(coding, (count, outputs), bias, divisor)

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, in] through the matrices of `experts` [...]."""
        rows = self.turned(divided(x, self.get("divisor"), experts))
        if self.kernels.gpu is not None and experts.size >= self.words.shape[0]:
            y = self.unpacking(rows.astype(x.dtype), experts, ordered)
        else:
            y = gathered(rows, self.matrix, experts, ordered=ordered).astype(x.dtype)
        return y + self.bias[experts][..., None, :] if "bias" in self else y

    def unpacking(self, rows: mx.array, experts: mx.array, ordered: bool) -> mx.array:
        """Turned rows [..., 1, in] by matrices that are unpacked: so many outputs of all experts at a time that the
        numbers stay within `AT_ONCE` bytes."""
        count, outs, width = self.words.shape[0], self.words.shape[1], self.coding.width
        parts = math.ceil(count * outs * width * rows.dtype.size / AT_ONCE)
        each, made = math.ceil(outs / parts), []
        for i in range(0, outs, each):
            part = replace(self.matrix, words=self.words[:, i : i + each], norms=self.norms[:, i : i + each])
            stack = self.kernels.run(coded_unpack, matrix=part, dtype=rows.dtype).swapaxes(-1, -2)
            made.append(mx.gather_mm(rows, stack, rhs_indices=experts, sorted_indices=ordered))
        return mx.concatenate(made, axis=-1) if len(made) > 1 else made[0]


def launches(gate: nn.Module, up: nn.Module, down: nn.Module) -> bool:
    """Whether three stacks of experts can be computed by two kernels."""
    if not all(type(m) is CodedExpertLinear and not {"bias", "divisor"} & set(m) for m in (gate, up, down)):
        return False
    return gate.coding == up.coding


def launch(
    stacks: tuple[nn.Module, nn.Module, nn.Module],
    x: mx.array,
    experts: mx.array,
    weights: mx.array,
    activation: str | None,
    residual: mx.array | None,
) -> mx.array:
    """The weighted sum [N, dim] of what `experts` [N, k] make of x [N, dim]; + residual. `stacks`: gate, up, down."""
    gate, up, down = stacks
    assert isinstance(gate, CodedExpertLinear) and isinstance(up, CodedExpertLinear)
    assert isinstance(down, CodedExpertLinear)
    run = gate.kernels.run
    pair = {"gate": gate.matrix, "up": up.matrix, "activation": activation}
    h = down.turned(run(coded_gate_up, x=gate.turned(x), experts=experts, **pair))
    where = {"experts": experts, "weights": weights, "residual": residual}
    return run(coded_down, x=h, matrix=down.matrix, dtype=x.dtype, **where)
