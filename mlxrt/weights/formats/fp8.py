"""FP8 checkpoints: E4M3 bytes with a float scale per block of rows and columns (X_scale_inv beside X).

Which module a matrix belongs to is not known here.
"""

import logging
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import BadCheckpoint, UnsupportedModel, quote
from ...kernels.dtypes import FLOATS
from .weight_format import describe, dtype_name

log = logging.getLogger("mlxrt")

Arrays = dict[str, mx.array]

SCALE = "_scale_inv"
BLOCK = (128, 128)
GROUP = 32  # of MLX's mxfp8
FORMATS = ("e4m3", "float8_e4m3fn", None)


def has_fp8(arrays: Arrays) -> bool:
    return any(name.endswith(SCALE) for name in arrays)


def unpack_fp8(arrays: Arrays, config: Mapping[str, Any], dtype: mx.Dtype) -> Arrays:
    """FP8 matrices as mxfp8, exactly, where all scales are powers of two; else dequantised to `dtype`."""
    block = read_block_size(config)
    names = [name.removesuffix(SCALE) for name in arrays if name.endswith(SCALE)]
    for name in names:
        check_matrix(name, arrays.get(name), arrays[name + SCALE], block)
    stored = sum(arrays[name].size for name in names)
    fits = all(fits_mxfp8(name, arrays[name], arrays[name + SCALE], block) for name in names)
    for name in names:
        values, scale = arrays.pop(name), arrays.pop(name + SCALE).astype(mx.float32)
        if fits:
            arrays |= to_mxfp8(name, values, scale, block)
        else:
            arrays[name] = (mx.from_fp8(values, mx.float32) * expand_scale(scale, values.shape, block)).astype(dtype)
    fmt, size = ("mxfp8", 33 / 32) if fits else (str(dtype).removeprefix("mlx.core."), dtype.size)
    log.info(f"{len(names)} FP8 matrices, {stored / 1e9:.2f} GB, are kept as {fmt}, {stored * size / 1e9:.2f} GB")
    return arrays


def read_block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, Mapping) else {}
    if quantization.get("fmt") not in FORMATS:
        raise UnsupportedModel(f"config.json: quantization_config.fmt = {quote(quantization['fmt'])}; e4m3 is read")
    sizes = quantization.get("weight_block_size")
    if sizes is None:
        return BLOCK
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n <= 1 << 20 for n in sizes):
        raise BadCheckpoint(f"config.json: weight_block_size = {quote(sizes)}, expected [rows, columns]")
    return sizes[0], sizes[1]


def check_matrix(name: str, values: mx.array | None, scale: mx.array, block: tuple[int, int]) -> None:
    if values is None or values.dtype != mx.uint8 or values.ndim not in (2, 3):
        raise BadCheckpoint(f"{quote(name)} has FP8 scales: it must be an FP8 matrix; found {describe(values)}")
    if scale.dtype not in FLOATS:
        raise UnsupportedModel(f"{quote(name + SCALE)}: expected float scales, found {dtype_name(scale)}")
    expected = (*values.shape[:-2], *(-(-n // b) for n, b in zip(values.shape[-2:], block)))
    if scale.size != 1 and scale.shape != expected:
        raise BadCheckpoint(
            f"{quote(name + SCALE)}: expected {list(expected)} scales for {list(values.shape)} in blocks of "
            f"{list(block)}, or one for all; found {list(scale.shape)}"
        )


def fits_mxfp8(name: str, values: mx.array, scale: mx.array, block: tuple[int, int]) -> bool:
    """Whether mxfp8 (power-of-two scales for 32 columns of a row) holds the matrix exactly."""
    if not name.endswith(".weight") or values.shape[-1] % GROUP or block[1] % GROUP:
        return False
    fraction, exponent = np.frexp(np.array(scale.astype(mx.float32)))
    return bool(np.all(fraction == 0.5) and np.all(np.abs(exponent - 1) <= 126))


def to_mxfp8(name: str, values: mx.array, scale: mx.array, block: tuple[int, int]) -> Arrays:
    exponents = (mx.log2(scale).round() + 127).astype(mx.uint8)
    groups = expand_scale(exponents, (*values.shape[:-1], values.shape[-1] // GROUP), (block[0], block[1] // GROUP))
    return {name: values.view(mx.uint32), f"{name.removesuffix('.weight')}.scales": groups}


def expand_scale(scale: mx.array, shape: tuple[int, ...], block: tuple[int, int]) -> mx.array:
    """A scale for every element."""
    if scale.size == 1:
        return mx.broadcast_to(scale.reshape(()), shape)
    wide = mx.repeat(mx.repeat(scale, block[0], axis=-2), block[1], axis=-1)
    return wide[..., : shape[-2], : shape[-1]]
