"""Layers in MLX's affine layout whose rows were turned before they were quantised: their input turns first.

Where a divisor is stored with a layer, its input is divided by it before that. Refuses to know who writes such layers.
"""

import mlx.core as mx
import mlx.nn as nn

from .moe import ExpertLinear, PackedExpertLinear
from .rotation import Rotation, rotate


def divided(x: mx.array, divisor: mx.array | None, experts: mx.array | None = None) -> mx.array:
    """x by a divisor [in]; or x [..., 1, in] by the `experts` [...] of a divisor [E, in]."""
    if divisor is None:
        return x
    return x / (divisor if experts is None or divisor.ndim == 1 else divisor[experts][..., None, :])


class TurnedLinear(nn.QuantizedLinear):
    """`rotation` is None where only a divisor is needed; `divisor` is its shape."""

    def __init__(
        self, plain: nn.Module, group: int, bits: int, rotation: Rotation | None, divisor: tuple[int, ...] = ()
    ):
        outputs, inputs = plain["weight"].shape
        super().__init__(inputs, outputs, "bias" in plain, group, bits)
        self.rotation, self._signs = rotation, rotation.signs() if rotation else None
        if divisor:
            self.divisor = mx.ones(divisor)

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(turned(divided(x, self.get("divisor")), self.rotation, self._signs))


class TurnedExpertLinear(PackedExpertLinear):
    """The same for a stack of experts; the divisor is one for all or one per expert."""

    def __init__(
        self, plain: ExpertLinear, group: int, bits: int, rotation: Rotation | None, divisor: tuple[int, ...] = ()
    ):
        super().__init__(plain, group, bits, "affine")
        self.rotation, self._signs = rotation, rotation.signs() if rotation else None
        if divisor:
            self.divisor = mx.ones(divisor)

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        x = turned(divided(x, self.get("divisor"), experts), self.rotation, self._signs)
        return super().__call__(x, experts, ordered=ordered)


def turned(x: mx.array, rotation: Rotation | None, signs: mx.array | None) -> mx.array:
    return x if rotation is None else rotate(x, rotation.blocks, signs).astype(x.dtype)
