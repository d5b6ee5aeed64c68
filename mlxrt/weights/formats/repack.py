"""Repacks GPTQ, AWQ and compressed-tensors checkpoints into MLX's affine format at load, with the same values.

A matrix that MLX has no format for (act-order, other group sizes, float8 scales) is dequantised, and a line says so.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ...errors import BadCheckpoint, UnsupportedModel, quote
from . import compressed_tensors
from .gptq_awq import AWQ_PARTS, GPTQ_PARTS, read_awq, read_gptq
from .int_matrix import Arrays, IntMatrix
from .weight_format import describe

log = logging.getLogger("mlxrt")

Reader = Callable[[str, Mapping[str, Any], Arrays], IntMatrix]
READERS: dict[str, tuple[Reader, tuple[str, ...]]] = {
    "gptq": (read_gptq, GPTQ_PARTS),
    "awq": (read_awq, AWQ_PARTS),
    "compressed-tensors": (compressed_tensors.read_packed, compressed_tensors.PARTS),
}


def detect_method(config: Mapping[str, Any]) -> str | None:
    """The `quant_method` if it is one of these; `quantization` in config.json means MLX's own format."""
    quantization = config.get("quantization_config")
    if config.get("quantization") is not None or not isinstance(quantization, Mapping):
        return None
    method = quantization.get("quant_method")
    return method if isinstance(method, str) and method in READERS else None


def repack(arrays: Arrays, config: Mapping[str, Any], dtype: mx.Dtype) -> Arrays:
    """All tensors, the matrices as X.weight, X.scales and X.biases, or as plain X.weight."""
    method = detect_method(config)
    if method is None:
        return arrays
    quantization = config["quantization_config"]
    read, parts = READERS[method]
    if method == "compressed-tensors":
        check_format(quantization)
        arrays = dequantize_byte_matrices(arrays, dtype)
    first = f".{parts[0]}"
    made: Arrays = {}
    unpacked = []
    for path in [name.removesuffix(first) for name in arrays if name.endswith(first)]:
        if f"{path}.weight" in arrays:
            raise BadCheckpoint(f"{quote(path)} is in the checkpoint twice: as {parts[0]} and as weight")
        matrix = read(path, quantization, arrays)
        if (packed := matrix.to_affine()) is not None:
            made |= dict(zip((f"{path}.weight", f"{path}.scales", f"{path}.biases"), packed))
        else:
            made[f"{path}.weight"] = matrix.dequantize().astype(dtype)
            unpacked.append(path)
        mx.eval(made)  # one by one, to free the temporaries of unpacking
        for part in parts:
            arrays.pop(f"{path}.{part}", None)
    if unpacked:
        log.info(
            f"{method}: {len(unpacked)} matrices ({quote(unpacked[0])} ...) use act-order or group sizes "
            "that MLX has no format for; they are dequantised"
        )
    return arrays | made


def check_format(quantization: Mapping[str, Any]) -> None:
    known = compressed_tensors.PACKED_FORMATS + compressed_tensors.BYTE_FORMATS
    if quantization.get("format") not in known:
        raise UnsupportedModel(
            f"config.json: quantization_config.format = {quote(quantization.get('format'))}; "
            f"compressed-tensors is read in {', '.join(known)}"
        )


def dequantize_byte_matrices(arrays: Arrays, dtype: mx.Dtype) -> Arrays:
    """Dequantise int8 and float8 matrices: mxfp8 takes only powers of two as scales."""
    paths = [n.removesuffix(".weight_scale") for n in arrays if n.endswith(".weight_scale")]
    paths = [path for path in paths if f"{path}.weight" in arrays]
    for path in paths:
        matrix = compressed_tensors.read_byte_matrix(path, arrays).astype(dtype)
        mx.eval(matrix)
        arrays[f"{path}.weight"] = matrix
        for part in ("weight_scale", "weight_zero_point"):
            arrays.pop(f"{path}.{part}", None)
        if (scale := arrays.pop(f"{path}.input_scale", None)) is not None and scale.size != 1:
            raise BadCheckpoint(f"{path}.input_scale: expected one value, found {describe(scale)}")
    if paths:
        log.info(
            f"compressed-tensors: {len(paths)} int8 or float8 matrices are dequantised (MLX has no format for their "
            "scales); activations are not quantised"
        )
    return arrays
