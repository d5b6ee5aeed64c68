"""Reads compressed-tensors: integers packed along the input, or one value per byte (int8, float8), with float scales.

Packed integers are offset by half their range. Activations are not quantised here, which is closer to the original
model.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...errors import BadCheckpoint, UnsupportedModel, quote
from ...kernels.dtypes import FLOATS
from ...kernels.ops.bitpack import unpack_bits
from .int_matrix import Arrays, IntMatrix, check_groups, find_packed, find_scales, require
from .weight_format import describe

PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
PACKED_FORMATS, BYTE_FORMATS = ("pack-quantized",), ("float-quantized", "int-quantized", "naive-quantized")
BITS = (2, 3, 4, 5, 6, 8)


def read_packed(path: str, config: Mapping[str, Any], arrays: Arrays) -> IntMatrix:
    """A matrix of format pack-quantized."""
    packed, scale = find_packed(path, "weight_packed", arrays), find_scales(path, "weight_scale", arrays)
    shape = arrays.get(f"{path}.weight_shape")
    if shape is None or shape.shape != (2,) or not mx.issubdtype(shape.dtype, mx.integer):
        raise BadCheckpoint(f"{path}.weight_shape: expected two integers, found {describe(shape)}")
    out, columns = int(shape[0]), int(shape[1])
    bits = next(
        (b for b in BITS if b in configured_bits(config) and packed.shape == (out, -(-columns // (32 // b)))), None
    )
    if bits is None:
        raise BadCheckpoint(
            f"{path}: weight_packed {list(packed.shape)} does not hold {out} x {columns} values of config.json's bits"
        )
    if 32 % bits:
        raise UnsupportedModel(f"{path} is packed in {bits} bit; compressed-tensors is read with 2, 4 and 8")
    groups = scale.shape[1]
    require(scale.shape[0] == out and groups <= columns, path, f"scales are {list(scale.shape)} for {out} x {columns}")
    index = arrays.get(f"{path}.weight_g_idx")
    if index is not None:
        fits = index.shape == (columns,) and mx.issubdtype(index.dtype, mx.integer)
        require(fits, path, f"weight_g_idx is {describe(index)}")
        group_of = check_groups(path, index, groups)
    else:
        require(columns % groups == 0, path, f"{groups} groups for {columns} inputs")
        group_of = None
    q = unpack_bits(packed, bits)[:, :columns]
    return IntMatrix(q, read_zeros(path, arrays, (out, groups), bits), scale, bits, group_of)


def read_zeros(path: str, arrays: Arrays, shape: tuple[int, int], bits: int) -> mx.array:
    half = 1 << (bits - 1)
    found = arrays.get(f"{path}.weight_zero_point")
    if found is None:
        return mx.full(shape, half, mx.float32)
    if found.dtype == mx.int8:  # not packed, signed
        require(found.shape == shape, path, f"weight_zero_point is {describe(found)}")
        return found.astype(mx.float32) + half
    packed = find_packed(path, "weight_zero_point", arrays)
    out, groups = shape
    require(packed.shape == (-(-out // (32 // bits)), groups), path, f"weight_zero_point is {describe(found)}")
    return unpack_bits(packed.T, bits)[:, :out].T.astype(mx.float32)


def configured_bits(config: Mapping[str, Any]) -> set[int]:
    """The bits that config.json names, for any module."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise BadCheckpoint("config.json: quantization_config.config_groups must be an object with the groups' weights")
    found = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        if type(bits) is not int:
            raise BadCheckpoint(f"config.json: quantization_config.config_groups: num_bits is {quote(bits)}")
        found.add(bits)
    return found


def read_byte_matrix(path: str, arrays: Arrays) -> mx.array:
    """A matrix of one value per byte, float32: int8, or float8 (e4m3), which MLX loads as uint8."""
    stored, scale = arrays[f"{path}.weight"], arrays[f"{path}.weight_scale"]
    if stored.ndim != 2 or stored.dtype not in (mx.int8, mx.uint8) or scale.dtype not in FLOATS:
        raise BadCheckpoint(f"{path}.weight: expected a matrix of bytes with float scales, found {describe(stored)}")
    out, columns = stored.shape
    scale = scale.astype(mx.float32)
    scale = scale.reshape(1, 1) if scale.size == 1 else scale.reshape(-1, 1) if scale.ndim == 1 else scale
    rows, groups = scale.shape if scale.ndim == 2 else (0, 0)
    fits = rows > 0 and groups > 0 and out % rows == 0 and columns % groups == 0
    require(fits, path, f"weight_scale is {describe(scale)}")
    scale = mx.repeat(mx.repeat(scale, out // rows, axis=0), columns // groups, axis=1)
    zero = arrays.get(f"{path}.weight_zero_point")
    if zero is not None and zero.any().item():
        raise UnsupportedModel(f"{path}.weight_zero_point is not zero, which is not supported for {describe(stored)}")
    values = stored.astype(mx.float32) if stored.dtype == mx.int8 else mx.from_fp8(stored, dtype=mx.float32)
    return values * scale
