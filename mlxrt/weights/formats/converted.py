"""Checkpoints that GPTQ, AWQ and compressed-tensors wrote, as MLX's affine layout: the same values, at load.

A matrix MLX has no layout for (columns out of order, odd groups, float8 with any scale) becomes a plain one, and that
is said. Refuses to know architectures: whatever has such tensors is read.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ...errors import BadCheckpoint, UnsupportedModel, shown
from . import awq, gptq
from . import compressed_tensors as compressed
from .int_matrix import Arrays, Codes, described

log = logging.getLogger("mlxrt")

Reader = Callable[[str, Mapping[str, Any], Arrays], Codes]
READERS: dict[str, tuple[Reader, tuple[str, ...]]] = {
    "gptq": (gptq.read_gptq, gptq.PARTS),
    "awq": (awq.read_awq, awq.PARTS),
    "compressed-tensors": (compressed.read_packed, compressed.PARTS),
}


def method_of(config: Mapping[str, Any]) -> str | None:
    """Which of these a checkpoint was written by; config.json's own `quantization` says it is MLX's already."""
    given = config.get("quantization_config")
    if config.get("quantization") is not None or not isinstance(given, Mapping):
        return None
    method = given.get("quant_method")
    return method if isinstance(method, str) and method in READERS else None


def convert(arrays: Arrays, config: Mapping[str, Any], dtype: mx.Dtype) -> Arrays:
    """Every tensor of a checkpoint, its matrices as X.weight, X.scales and X.biases, or as plain X.weight."""
    method = method_of(config)
    if method is None:
        return arrays
    given = config["quantization_config"]
    read, parts = READERS[method]
    if method == "compressed-tensors":
        check_format(given)
        arrays = plain_bytes(arrays, dtype)
    first = f".{parts[0]}"
    made: Arrays = {}
    whole = []
    for path in [name.removesuffix(first) for name in arrays if name.endswith(first)]:
        if f"{path}.weight" in arrays:
            raise BadCheckpoint(f"{shown(path)} is in the checkpoint twice: as {parts[0]} and as weight")
        codes = read(path, given, arrays)
        if (packed := codes.affine()) is not None:
            made |= dict(zip((f"{path}.weight", f"{path}.scales", f"{path}.biases"), packed))
        else:
            made[f"{path}.weight"] = codes.matrix().astype(dtype)
            whole.append(path)
        mx.eval(made)  # one by one: what unpacking needs in between is freed before the next
        for part in parts:
            arrays.pop(f"{path}.{part}", None)
    if whole:
        log.info(
            f"{method}: {len(whole)} matrices ({shown(whole[0])} ...) have columns out of order or groups "
            "that MLX has no layout for; they are kept unpacked"
        )
    return arrays | made


def check_format(given: Mapping[str, Any]) -> None:
    known = compressed.PACKED + compressed.BYTES
    if given.get("format") not in known:
        raise UnsupportedModel(
            f"config.json: quantization_config.format = {shown(given.get('format'))}; "
            f"compressed-tensors is read in {', '.join(known)}"
        )


def plain_bytes(arrays: Arrays, dtype: mx.Dtype) -> Arrays:
    """The matrices of one number a byte, unpacked: their scales are no powers of two, which is all mxfp8 has."""
    paths = [n.removesuffix(".weight_scale") for n in arrays if n.endswith(".weight_scale")]
    paths = [path for path in paths if f"{path}.weight" in arrays]
    for path in paths:
        matrix = compressed.read_bytes(path, arrays).astype(dtype)
        mx.eval(matrix)
        arrays[f"{path}.weight"] = matrix
        for part in ("weight_scale", "weight_zero_point"):
            arrays.pop(f"{path}.{part}", None)
        if (given := arrays.pop(f"{path}.input_scale", None)) is not None and given.size != 1:
            raise BadCheckpoint(f"{path}.input_scale: expected one number, found {described(given)}")
    if paths:
        log.info(
            f"compressed-tensors: {len(paths)} matrices of bytes are unpacked (MLX has no layout for their scales); "
            "activations are not quantised"
        )
    return arrays
