"""Affine-quantised layers whose rows were Hadamard-rotated before quantisation: their input is rotated first.

A stored divisor divides the input before that. They are no nn.QuantizedLinear: multiplying by the rows alone would be
wrong.
"""

import mlx.core as mx
import mlx.nn as nn

from ..base import KernelModule
from ..moe import ExpertLinear, QuantizedExpertLinear
from .rotation import Rotation, divide_input, rotate


class HadamardLayer(KernelModule):
    """Divides and rotates the input: `rotation` is None where only a divisor is needed; `divisor` is its shape."""

    def __init__(self, inner: nn.Module, rotation: Rotation | None, divisor: tuple[int, ...]):
        super().__init__()
        self.inner, self.rotation = inner, rotation
        if (bias := inner.pop("bias", None)) is not None:
            self.bias = bias  # its place in a checkpoint is beside the matrix
        self._signs = rotation.signs() if rotation else None
        if divisor:
            self.divisor = mx.ones(divisor)

    def rotate_input(self, x: mx.array, experts: mx.array | None = None) -> mx.array:
        y = divide_input(x, self.get("divisor"), experts)
        return y if self.rotation is None else rotate(y, self.rotation.blocks, self._signs, self.kernels, x.dtype)


class HadamardLinear(HadamardLayer):
    def __init__(self, plain: nn.Module, group: int, bits: int, rotation: Rotation | None, divisor: tuple[int, ...]):
        outputs, inputs = plain["weight"].shape
        super().__init__(nn.QuantizedLinear(inputs, outputs, "bias" in plain, group, bits), rotation, divisor)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.inner(self.rotate_input(x))
        return y + self.bias if "bias" in self else y


class HadamardExpertLinear(HadamardLayer):
    """The same for a stack of experts; the divisor is one for all or one per expert."""

    def __init__(self, plain: ExpertLinear, group: int, bits: int, rotation: Rotation | None, divisor: tuple[int, ...]):
        super().__init__(QuantizedExpertLinear(plain, group, bits, "affine"), rotation, divisor)

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        y = self.inner(self.rotate_input(x, experts), experts, ordered=ordered)
        return y + self.bias[experts][..., None, :] if "bias" in self else y
