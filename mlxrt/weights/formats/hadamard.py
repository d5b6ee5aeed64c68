"""MLX's affine format behind an input transform: a Hadamard rotation (JANG's `hadamard_rotation`) or AWQ scales."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ...errors import BadCheckpoint
from ...kernels.dtypes import FLOATS
from ...models.moe import ExpertLinear
from ...models.quantized.hadamard_linear import HadamardExpertLinear, HadamardLinear
from ...models.quantized.rotation import Rotation, binary_blocks, unrotate
from .quantized import MLXFormat
from .weight_format import WeightFormat, describe

AWQ_SCALES = ("awq_scale", "awq_scales")  # both names occur
NOT_ROTATED = ("embed", "lm_head", "norm", ".gate.")
MIN_ROTATED_BITS = 3  # matrices of fewer bits are not rotated
SEED = 42  # of hadamard_rotation; no file gives another


@dataclass(frozen=True)
class AwqScale:
    """A tensor that divides the input: [in], or [E, in] where experts were stored one by one."""

    name: str
    shape: tuple[int, ...]

    def fold(self, rows: mx.array, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        """The rows [..., out, in] for the undivided input."""
        by = arrays[f"{path}.{self.name}"].astype(mx.float32)
        return rows / (by if by.ndim == 1 else by[:, None, :])


def find_awq_scale(path: str, shape: tuple[int, ...], arrays: Mapping[str, mx.array]) -> AwqScale | None:
    """The AWQ scale stored with a matrix of this shape."""
    names = [name for name in AWQ_SCALES if f"{path}.{name}" in arrays]
    if len(names) > 1:
        raise BadCheckpoint(f"{path} has both {names[0]} and {names[1]}; keep one")
    if not names:
        return None
    found, width = arrays[f"{path}.{names[0]}"], shape[-1]
    if found.dtype not in FLOATS or found.shape not in ((width,), (shape[0], width) if len(shape) == 3 else (width,)):
        raise BadCheckpoint(f"{path}.{names[0]}: expected {width} floats, found {describe(found)}")
    if not bool((mx.isfinite(found) & (found != 0)).all()):
        raise BadCheckpoint(f"{path}.{names[0]} divides the input and holds zeros, NaN or infinities")
    return AwqScale(names[0], found.shape)


@dataclass(frozen=True)
class HadamardFormat(WeightFormat):
    """Affine weights whose input is rotated, divided by an AWQ scale, or both."""

    affine: MLXFormat
    rotation: Rotation | None
    awq_scale: AwqScale | None

    def __str__(self) -> str:
        return f"{self.affine}" + (" rotated" if self.rotation else "") + (" with awq scales" if self.awq_scale else "")

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.affine.parts, self.awq_scale.name) if self.awq_scale else self.affine.parts

    def build_module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        shape = self.awq_scale.shape if self.awq_scale else ()
        if isinstance(plain, ExpertLinear):
            return HadamardExpertLinear(plain, self.affine.group_size, self.affine.bits, self.rotation, shape)
        return HadamardLinear(plain, self.affine.group_size, self.affine.bits, self.rotation, shape)

    def module_tensors(self, path: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        own = {f"inner.{part}": array for part, array in self.affine.module_tensors(path, arrays).items()}
        return own | {"divisor": arrays[f"{path}.{self.awq_scale.name}"]} if self.awq_scale else own

    def dequantize(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        rows = self.affine.dequantize(path, arrays)
        if self.rotation is not None:
            rows = unrotate(rows, self.rotation.blocks, self.rotation.signs())
        return self.awq_scale.fold(rows, path, arrays) if self.awq_scale else rows


def with_input_transform(
    path: str, shape: tuple[int, ...], fmt: MLXFormat, arrays: Mapping[str, mx.array], *, hadamard: bool
) -> WeightFormat:
    """The format, with the rotation and the AWQ scale of its input where there are any."""
    awq_scale = find_awq_scale(path, shape, arrays)
    rotated = hadamard and is_rotated(f"{path}.weight", fmt.bits)
    if awq_scale is None and not rotated:
        return fmt
    if fmt.mode != "affine":
        what = "hadamard_rotation is set" if rotated else f"{path} has awq scales"
        raise BadCheckpoint(f"{what}, but {path} is {fmt}; expected affine")
    return HadamardFormat(fmt, Rotation(binary_blocks(shape[-1]), SEED) if rotated else None, awq_scale)


def is_rotated(name: str, bits: int) -> bool:
    """Whether `hadamard_rotation` applies to the tensor."""
    return bits >= MIN_ROTATED_BITS and not any(word in name.lower() for word in NOT_ROTATED)
