"""MLX's own quantised formats (affine, mxfp4, mxfp8, nvfp4), detected from the shapes of tensors.

The tensors decide; config.json is a hint, and a contradiction is reported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import BadCheckpoint, UnsupportedModel, quote
from ...kernels.dtypes import FLOATS
from ...models.moe import ExpertLinear
from .weight_format import WeightFormat, describe, dtype_name

AFFINE_BITS, AFFINE_GROUPS = (1, 2, 3, 4, 5, 6, 8), (32, 64, 128)
BLOCK_MODES = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}  # (bits, group size) of the formats without biases
# `quant_method`s other than MLX's that are read: by models/gpt_oss.py, fp8.py and repack.py.
METHODS = ("mxfp4", "fp8", "gptq", "awq", "compressed-tensors")


@dataclass(frozen=True)
class MLXFormat(WeightFormat):
    mode: str
    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.mode} {self.bits} bit group {self.group_size}"

    @property
    def parts(self) -> tuple[str, ...]:
        return ("weight", "scales", "biases") if self.mode == "affine" else ("weight", "scales")

    def build_module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        if isinstance(plain, ExpertLinear):
            return plain.to_quantized(self.group_size, self.bits, self.mode)
        rows, width = plain["weight"].shape
        if isinstance(plain, nn.Embedding):
            return QuantizedEmbedding(rows, width, self, dtype)
        return nn.QuantizedLinear(width, rows, "bias" in plain, self.group_size, self.bits, self.mode)

    def module_tensors(self, path: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {part: arrays[f"{path}.{part}"] for part in self.parts}

    def dequantize(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        """With scales in float32: products rounded to half precision would differ from the stored values."""
        scales, biases = arrays[f"{path}.scales"], arrays.get(f"{path}.biases")
        if self.mode == "affine" and biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(
            arrays[f"{path}.weight"], scales, biases, self.group_size, self.bits, self.mode, dtype=mx.float32
        )


class QuantizedEmbedding(nn.QuantizedEmbedding):
    """An embedding in the model's dtype: MLX's gives bfloat16 for every format without biases."""

    def __init__(self, count: int, width: int, fmt: MLXFormat, dtype: mx.Dtype):
        super().__init__(count, width, fmt.group_size, fmt.bits, fmt.mode)
        self.dtype = dtype

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x).astype(self.dtype)


def detect_mlx(path: str, width: int, arrays: Mapping[str, mx.array]) -> MLXFormat:
    """The format of the module at `path`, which takes `width` features, from the shapes of its tensors."""
    weight, scales, biases = (arrays.get(f"{path}.{part}") for part in ("weight", "scales", "biases"))
    fine = weight is not None and weight.dtype == mx.uint32 and weight.ndim in (2, 3)  # 3: a stack of experts
    if weight is None or not fine or scales is None or scales.ndim != weight.ndim:
        raise BadCheckpoint(f"{path} has scales: its weight must be a packed uint32 matrix; found {describe(weight)}")
    columns, groups = weight.shape[-1], scales.shape[-1]
    if not columns or not groups or 32 * columns % width or width % groups:
        raise BadCheckpoint(f"{path}: {columns} uint32 and {groups} scales per row do not fit its {width} features")
    expected = [*weight.shape[:-1], groups]
    for part, array in (("scales", scales), ("biases", biases)):
        if array is not None and list(array.shape) != expected:
            raise BadCheckpoint(f"{path}.{part}: expected shape {expected}, found {list(array.shape)}")
    bits, group = 32 * columns // width, width // groups
    return MLXFormat(detect_mode(path, bits, group, scales, biases), bits, group)


def detect_mode(path: str, bits: int, group: int, scales: mx.array, biases: mx.array | None) -> str:
    if biases is not None and scales.dtype in FLOATS and biases.dtype in FLOATS:
        if bits in AFFINE_BITS and group in AFFINE_GROUPS:
            return "affine"
        have = f"affine formats have {list(AFFINE_BITS)} bit in groups of {list(AFFINE_GROUPS)}"
    elif biases is None and scales.dtype == mx.uint8:
        if (bits, group) in BLOCK_MODES:
            return BLOCK_MODES[bits, group]
        have = "formats without biases are 4 bit group 32, 8 bit group 32 and 4 bit group 16"
    else:
        have = f"{dtype_name(scales)} scales {'with' if biases is not None else 'without'} biases"
        raise BadCheckpoint(
            f"{path}: {have} are no MLX format: "
            "affine has float scales and biases, mxfp4, mxfp8 and nvfp4 have uint8 scales and none"
        )
    raise UnsupportedModel(f"{path} is packed in {bits} bit, group {group}, for which MLX has no kernel: {have}")


def refuse_methods(config: Mapping[str, Any]) -> None:
    """Refuse unknown quantisation methods before anything is loaded."""
    for key in ("quantization", "quantization_config"):
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise BadCheckpoint(f"config.json: {key} must be an object, found {quote(config[key])}")
    if config.get("quantization") is not None:
        return  # converted to MLX's formats; quantization_config is of the original model
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") not in (None, *METHODS):
        raise UnsupportedModel(
            f"config.json: quantization_config.quant_method = {quote(quantization['quant_method'])} is not supported; "
            "take a checkpoint in MLX format (affine, mxfp4, mxfp8, nvfp4) or an unquantised one"
        )


def hint(config: Mapping[str, Any], path: str) -> MLXFormat | None:
    """The format that config.json gives for a module, if it gives a complete one."""
    quantization = config.get("quantization", config.get("quantization_config"))
    if not isinstance(quantization, Mapping) or (
        "quantization" not in config and quantization.get("quant_method") is not None
    ):
        return None  # another quantiser's
    own = quantization.get(path)
    merged = {**quantization, **own} if isinstance(own, Mapping) else quantization
    mode, bits, group = merged.get("mode", "affine"), merged.get("bits"), merged.get("group_size")
    if isinstance(mode, str) and type(bits) is int and type(group) is int:
        return MLXFormat(mode, bits, group)
    return None


def contradictions(config: Mapping[str, Any], formats: Mapping[str, MLXFormat]) -> str | None:
    """One line when config.json and the tensors disagree."""
    hints = [(path, hint(config, path), fmt) for path, fmt in formats.items()]
    wrong = [(path, claimed, fmt) for path, claimed, fmt in hints if claimed not in (None, fmt)]
    if not wrong:
        return None
    path, claimed, fmt = wrong[0]
    return (
        f"config.json contradicts the tensors of {len(wrong)} modules (the tensors are used): "
        f"{path} is {fmt}, config.json says {claimed}"
    )
