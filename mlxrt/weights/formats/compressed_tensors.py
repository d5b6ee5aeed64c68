"""compressed-tensors: whole numbers packed along the input, or one number a byte (int8, float8), with float scales.

Packed numbers are stored above zero, by half their range. How activations would be quantised is not done here: they
stay as they are, which is closer to the original model.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...errors import BadCheckpoint, UnsupportedModel, shown
from ...kernels.ops.bitpack import unpack_bits
from .int_matrix import Arrays, Codes, checked_groups, described, require, scales_of, words_of
from .quantized import FLOATS

PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
PACKED, BYTES = ("pack-quantized",), ("float-quantized", "int-quantized", "naive-quantized")
BITS = (2, 3, 4, 5, 6, 8)


def read_packed(path: str, given: Mapping[str, Any], arrays: Arrays) -> Codes:
    """A matrix of format pack-quantized."""
    words, scale = words_of(path, "weight_packed", arrays), scales_of(path, "weight_scale", arrays)
    shape = arrays.get(f"{path}.weight_shape")
    if shape is None or shape.shape != (2,) or not mx.issubdtype(shape.dtype, mx.integer):
        raise BadCheckpoint(f"{path}.weight_shape: expected two whole numbers, found {described(shape)}")
    out, columns = int(shape[0]), int(shape[1])
    bits = next((b for b in BITS if b in stated_bits(given) and words.shape == (out, -(-columns // (32 // b)))), None)
    if bits is None:
        raise BadCheckpoint(
            f"{path}: words {list(words.shape)} do not hold {out} x {columns} numbers of the bits config.json names"
        )
    if 32 % bits:
        raise UnsupportedModel(f"{path} is packed in {bits} bit; compressed-tensors is read with 2, 4 and 8")
    groups = scale.shape[1]
    require(scale.shape[0] == out and groups <= columns, path, f"scales are {list(scale.shape)} for {out} x {columns}")
    index = arrays.get(f"{path}.weight_g_idx")
    if index is not None:
        require(
            index.shape == (columns,) and mx.issubdtype(index.dtype, mx.integer),
            path,
            f"weight_g_idx is {described(index)}",
        )
        group_of = checked_groups(path, index, groups)
    else:
        require(columns % groups == 0, path, f"{groups} groups for {columns} inputs")
        group_of = None
    q = unpack_bits(words, bits)[:, :columns]
    return Codes(q, zeros(path, arrays, (out, groups), bits), scale, bits, group_of)


def zeros(path: str, arrays: Arrays, shape: tuple[int, int], bits: int) -> mx.array:
    half = 1 << (bits - 1)
    found = arrays.get(f"{path}.weight_zero_point")
    if found is None:
        return mx.full(shape, half, mx.float32)
    if found.dtype == mx.int8:  # not packed: around zero
        require(found.shape == shape, path, f"weight_zero_point is {described(found)}")
        return found.astype(mx.float32) + half
    words = words_of(path, "weight_zero_point", arrays)
    out, groups = shape
    require(words.shape == (-(-out // (32 // bits)), groups), path, f"weight_zero_point is {described(found)}")
    return unpack_bits(words.T, bits)[:, :out].T.astype(mx.float32)


def stated_bits(given: Mapping[str, Any]) -> set[int]:
    """The widths that config.json names, for whichever modules."""
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise BadCheckpoint(
            "config.json: quantization_config.config_groups must be an object that says how weights are kept"
        )
    found = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        if type(bits) is not int:
            raise BadCheckpoint(
                f"config.json: quantization_config.config_groups has a group with num_bits {shown(bits)}"
            )
        found.add(bits)
    return found


def read_bytes(path: str, arrays: Arrays) -> mx.array:
    """A matrix of one number a byte, float32: int8, or float8 (e4m3), which MLX loads as bytes."""
    stored, scale = arrays[f"{path}.weight"], arrays[f"{path}.weight_scale"]
    if stored.ndim != 2 or stored.dtype not in (mx.int8, mx.uint8) or scale.dtype not in FLOATS:
        raise BadCheckpoint(f"{path}.weight: expected a matrix of bytes with float scales, found {described(stored)}")
    out, columns = stored.shape
    scale = scale.astype(mx.float32)
    scale = scale.reshape(1, 1) if scale.size == 1 else scale.reshape(-1, 1) if scale.ndim == 1 else scale
    rows, groups = scale.shape if scale.ndim == 2 else (0, 0)
    require(
        rows > 0 and groups > 0 and out % rows == 0 and columns % groups == 0,
        path,
        f"weight_scale is {described(scale)}",
    )
    scale = mx.repeat(mx.repeat(scale, out // rows, axis=0), columns // groups, axis=1)
    zero = arrays.get(f"{path}.weight_zero_point")
    if zero is not None and zero.any().item():
        raise UnsupportedModel(f"{path}.weight_zero_point is not zero, which is not supported for {described(stored)}")
    values = stored.astype(mx.float32) if stored.dtype == mx.int8 else mx.from_fp8(stored, dtype=mx.float32)
    return values * scale
