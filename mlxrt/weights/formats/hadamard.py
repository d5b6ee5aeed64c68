"""MLX's affine layout of rows that were turned before they were quantised, or whose inputs are divided first.

JANG's `hadamard_rotation` and AWQ scales. Knows which tensors the first applies to; refuses to know files.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ...errors import BadCheckpoint
from ...models.moe import ExpertLinear
from ...models.quantized.hadamard_linear import TurnedExpertLinear, TurnedLinear
from ...models.quantized.rotation import Rotation, binary_blocks, unrotate
from .int_matrix import described
from .quantized import FLOATS, Layout
from .weight_format import Stored

DIVISORS = ("awq_scale", "awq_scales")  # the two spellings there are
UNTURNED = ("embed", "lm_head", "norm", ".gate.")
FEWEST_BITS = 3  # what is narrower was not turned
SEED = 42  # of hadamard_rotation; no file says another


@dataclass(frozen=True)
class Divisor:
    """A tensor that an input is divided by: [in], or [E, in] where experts were stored one by one."""

    name: str
    shape: tuple[int, ...]

    def undo(self, rows: mx.array, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        """The rows [..., out, in] that meet the undivided input."""
        by = arrays[f"{path}.{self.name}"].astype(mx.float32)
        return rows / (by if by.ndim == 1 else by[:, None, :])


def divisor_of(path: str, shape: tuple[int, ...], arrays: Mapping[str, mx.array]) -> Divisor | None:
    """The divisor stored with a matrix of this shape."""
    names = [name for name in DIVISORS if f"{path}.{name}" in arrays]
    if len(names) > 1:
        raise BadCheckpoint(f"{path} has both {names[0]} and {names[1]}; keep one")
    if not names:
        return None
    found, width = arrays[f"{path}.{names[0]}"], shape[-1]
    if found.dtype not in FLOATS or found.shape not in ((width,), (shape[0], width) if len(shape) == 3 else (width,)):
        raise BadCheckpoint(f"{path}.{names[0]}: expected {width} floats, found {described(found)}")
    if not bool((mx.isfinite(found) & (found != 0)).all()):
        raise BadCheckpoint(f"{path}.{names[0]} divides inputs and holds zeros, NaN or infinities")
    return Divisor(names[0], found.shape)


@dataclass(frozen=True)
class Turned(Stored):
    layout: Layout
    rotation: Rotation | None
    divisor: Divisor | None

    def __str__(self) -> str:
        return f"{self.layout}" + (" turned" if self.rotation else "") + (" with awq scales" if self.divisor else "")

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.layout.parts, self.divisor.name) if self.divisor else self.layout.parts

    def module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        shape = self.divisor.shape if self.divisor else ()
        if isinstance(plain, ExpertLinear):
            return TurnedExpertLinear(plain, self.layout.group, self.layout.bits, self.rotation, shape)
        return TurnedLinear(plain, self.layout.group, self.layout.bits, self.rotation, shape)

    def tensors(self, path: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        own = {f"inner.{part}": array for part, array in self.layout.tensors(path, arrays).items()}
        return own | {"divisor": arrays[f"{path}.{self.divisor.name}"]} if self.divisor else own

    def matrix(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        rows = self.layout.matrix(path, arrays)
        if self.rotation is not None:
            rows = unrotate(rows, self.rotation.blocks, self.rotation.signs())
        return self.divisor.undo(rows, path, arrays) if self.divisor else rows


def turned(
    path: str, shape: tuple[int, ...], layout: Layout, arrays: Mapping[str, mx.array], *, hadamard: bool
) -> Stored:
    """The layout, with what happens to its input before."""
    divisor = divisor_of(path, shape, arrays)
    narrow = layout.bits < FEWEST_BITS or any(word in f"{path}.weight".lower() for word in UNTURNED)
    turns = hadamard and not narrow
    if divisor is None and not turns:
        return layout
    if layout.mode != "affine":
        what = "hadamard_rotation is set" if turns else f"{path} has awq scales"
        raise BadCheckpoint(f"{what}, but {path} is {layout}, which is not written so; expected affine")
    return Turned(layout, Rotation(binary_blocks(shape[-1]), SEED) if turns else None, divisor)
