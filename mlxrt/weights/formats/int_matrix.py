"""IntMatrix: an unpacked integer-quantised matrix, with a zero point and a scale for every group of columns.

GPTQ, AWQ and compressed-tensors are read into it; it converts to MLX's affine format or to a float matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from ...errors import BadCheckpoint
from ...kernels.dtypes import FLOATS
from ...kernels.ops.bitpack import pack_bits
from .quantized import AFFINE_BITS, AFFINE_GROUPS
from .weight_format import describe

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class IntMatrix:
    """w = (q - zero) * scale, exact in float32: at most 8 and 9 bits times the 11 of a half scale."""

    q: mx.array  # uint32 [out, in]
    zero: mx.array  # float32 [out, groups]
    scale: mx.array  # float32 [out, groups]
    bits: int
    group_of: mx.array | None = None  # [in] the group of every column; None: contiguous groups of equal size

    def dequantize(self) -> mx.array:
        """float32 [out, in]."""
        columns = self.q.shape[1]
        group = self.group_of if self.group_of is not None else mx.arange(columns) // (columns // self.scale.shape[1])
        return (self.q.astype(mx.float32) - self.zero[:, group]) * self.scale[:, group]

    def to_affine(self) -> tuple[mx.array, mx.array, mx.array] | None:
        """MLX's packed weight, scales and biases, or None where it has no such format."""
        columns, groups = self.q.shape[1], self.scale.shape[1]
        size = next((g for g in sorted(AFFINE_GROUPS, reverse=True) if columns // groups % g == 0), None)
        if self.group_of is not None or size is None or self.bits not in AFFINE_BITS:
            return None
        times = columns // groups // size
        scale, zero = (mx.repeat(x, times, axis=1) for x in (self.scale, self.zero))
        return pack_bits(self.q, self.bits), scale, -zero * scale


def check_groups(path: str, group_of: mx.array, groups: int) -> mx.array | None:
    """The group of every column, None for contiguous groups of equal size."""
    low, high = int(group_of.min()), int(group_of.max())
    if not 0 <= low <= high < groups:
        raise BadCheckpoint(f"{path}: its columns are in groups {low}..{high}, there are {groups} scales")
    columns = group_of.shape[0]
    if columns % groups == 0 and mx.array_equal(group_of, mx.arange(columns) // (columns // groups)):
        return None
    return group_of.astype(mx.uint32)


def find_packed(path: str, name: str, arrays: Mapping[str, mx.array]) -> mx.array:
    """A packed tensor, as uint32."""
    tensor = arrays.get(f"{path}.{name}")
    if tensor is None or tensor.dtype not in (mx.int32, mx.uint32) or tensor.ndim != 2 or not tensor.size:
        raise BadCheckpoint(f"{path}.{name}: expected a matrix of packed 32-bit integers, tensor {describe(tensor)}")
    return tensor.view(mx.uint32)


def find_scales(path: str, name: str, arrays: Mapping[str, mx.array]) -> mx.array:
    tensor = arrays.get(f"{path}.{name}")
    if tensor is None or tensor.dtype not in FLOATS or tensor.ndim != 2 or not tensor.size:
        raise BadCheckpoint(f"{path}.{name}: expected a matrix of floats, tensor {describe(tensor)}")
    return tensor.astype(mx.float32)


def require(fits: bool, path: str, problem: str) -> None:
    if not fits:
        raise BadCheckpoint(f"{path}: {problem}; the file does not fit its quantization_config")
