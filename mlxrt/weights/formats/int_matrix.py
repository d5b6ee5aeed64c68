"""A quantised matrix taken apart, whoever packed it: whole numbers, and a zero and a scale for every group of columns.

Knows MLX's affine layout and plain matrices. Refuses to know any other packing: gptq.py, awq.py and compressed.py do.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from ...errors import BadCheckpoint
from ...kernels.ops.bitpack import pack_bits
from .quantized import AFFINE_BITS, AFFINE_GROUPS, FLOATS, kind

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Codes:
    """A value is (q - zero) * scale. In float32 that is exact: at most 8 and 9 bits times the 11 of a half scale."""

    q: mx.array  # uint32 [out, in]
    zero: mx.array  # float32 [out, groups]
    scale: mx.array  # float32 [out, groups]
    bits: int
    group_of: mx.array | None = None  # [in] the group of every column; None: equal runs, in order

    def matrix(self) -> mx.array:
        """The values, float32 [out, in]."""
        columns = self.q.shape[1]
        group = self.group_of if self.group_of is not None else mx.arange(columns) // (columns // self.scale.shape[1])
        return (self.q.astype(mx.float32) - self.zero[:, group]) * self.scale[:, group]

    def affine(self) -> tuple[mx.array, mx.array, mx.array] | None:
        """MLX's words, scales and biases, or None where it has no such layout."""
        columns, groups = self.q.shape[1], self.scale.shape[1]
        run = next((g for g in sorted(AFFINE_GROUPS, reverse=True) if columns // groups % g == 0), None)
        if self.group_of is not None or run is None or self.bits not in AFFINE_BITS:
            return None
        times = columns // groups // run
        scale, zero = (mx.repeat(x, times, axis=1) for x in (self.scale, self.zero))
        return pack_bits(self.q, self.bits), scale, -zero * scale


def in_order(group_of: mx.array, groups: int) -> bool:
    """Whether columns lie in equal runs, one per group."""
    columns = group_of.shape[0]
    return columns % groups == 0 and bool(mx.array_equal(group_of, mx.arange(columns) // (columns // groups)))


def checked_groups(path: str, group_of: mx.array, groups: int) -> mx.array | None:
    """The group of every column, None for equal runs."""
    low, high = int(group_of.min()), int(group_of.max())
    if not 0 <= low <= high < groups:
        raise BadCheckpoint(f"{path}: its columns are in groups {low}..{high}, there are {groups} scales")
    return None if in_order(group_of, groups) else group_of.astype(mx.uint32)


def words_of(path: str, name: str, arrays: Mapping[str, mx.array]) -> mx.array:
    """A matrix of packed words."""
    found = arrays.get(f"{path}.{name}")
    if found is None or found.dtype not in (mx.int32, mx.uint32) or found.ndim != 2 or not found.size:
        raise BadCheckpoint(f"{path}.{name}: expected a matrix of 32-bit words, found {described(found)}")
    return found.view(mx.uint32)


def scales_of(path: str, name: str, arrays: Mapping[str, mx.array]) -> mx.array:
    found = arrays.get(f"{path}.{name}")
    if found is None or found.dtype not in FLOATS or found.ndim != 2 or not found.size:
        raise BadCheckpoint(f"{path}.{name}: expected a matrix of floats, found {described(found)}")
    return found.astype(mx.float32)


def described(array: mx.array | None) -> str:
    return "nothing" if array is None else f"{kind(array)} {list(array.shape)}"


def require(fits: bool, path: str, problem: str) -> None:
    if not fits:
        raise BadCheckpoint(f"{path}: {problem}; the file does not fit its quantization_config")
