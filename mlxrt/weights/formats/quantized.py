"""Packed matrices: which layout a module's tensors are in, and the module that computes with it.

The tensors decide; config.json is a hint that is compared and reported. Refuses to know where tensors come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import BadCheckpoint, UnsupportedModel, shown
from ...models.moe import ExpertLinear
from .weight_format import Stored

AFFINE_BITS, AFFINE_GROUPS = (1, 2, 3, 4, 5, 6, 8), (32, 64, 128)
BLOCK_MODES = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}  # (bits, group) of the layouts without biases
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
# Other than MLX's own: read by models/gpt_oss.py, fp8.py and converted.py.
METHODS = ("mxfp4", "fp8", "gptq", "awq", "compressed-tensors")


@dataclass(frozen=True)
class Layout(Stored):
    """One of MLX's own."""

    mode: str
    bits: int
    group: int

    def __str__(self) -> str:
        return f"{self.mode} {self.bits} bit group {self.group}"

    @property
    def parts(self) -> tuple[str, ...]:
        return ("weight", "scales", "biases") if self.mode == "affine" else ("weight", "scales")

    def module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        if isinstance(plain, ExpertLinear):
            return plain.to_quantized(self.group, self.bits, self.mode)
        rows, width = plain["weight"].shape
        if isinstance(plain, nn.Embedding):
            return PackedEmbedding(rows, width, self, dtype)
        return nn.QuantizedLinear(width, rows, "bias" in plain, self.group, self.bits, self.mode)

    def tensors(self, path: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {part: arrays[f"{path}.{part}"] for part in self.parts}

    def matrix(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        """Scales are widened first: products rounded in half precision would not be what was stored."""
        scales, biases = arrays[f"{path}.scales"], arrays.get(f"{path}.biases")
        if self.mode == "affine" and biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(
            arrays[f"{path}.weight"], scales, biases, self.group, self.bits, self.mode, dtype=mx.float32
        )


class PackedEmbedding(nn.QuantizedEmbedding):
    """An embedding that answers in the model's dtype: MLX's gives bfloat16 for every layout without biases."""

    def __init__(self, count: int, width: int, layout: Layout, dtype: mx.Dtype):
        super().__init__(count, width, layout.group, layout.bits, layout.mode)
        self.dtype = dtype

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x).astype(self.dtype)


def layout_of(path: str, width: int, arrays: Mapping[str, mx.array]) -> Layout:
    """The layout of the module at `path`, which takes `width` features, from the shapes of its tensors."""
    weight, scales, biases = (arrays.get(f"{path}.{part}") for part in ("weight", "scales", "biases"))
    fine = weight is not None and weight.dtype == mx.uint32 and weight.ndim in (2, 3)  # 3: a stack of experts
    if weight is None or not fine or scales is None or scales.ndim != weight.ndim:
        found = "nothing" if weight is None else f"{kind(weight)} {list(weight.shape)}"
        raise BadCheckpoint(f"{path}.scales is there, so {path}.weight must be packed: a uint32 matrix; found {found}")
    words, groups = weight.shape[-1], scales.shape[-1]
    if not words or not groups or 32 * words % width or width % groups:
        raise BadCheckpoint(
            f"{path}: {words} words and {groups} scales per row do not fit its {width} features in whole bits"
        )
    expected = [*weight.shape[:-1], groups]
    for part, array in (("scales", scales), ("biases", biases)):
        if array is not None and list(array.shape) != expected:
            raise BadCheckpoint(f"{path}.{part}: expected shape {expected}, found {list(array.shape)}")
    bits, group = 32 * words // width, width // groups
    return Layout(mode_of(path, bits, group, scales, biases), bits, group)


def mode_of(path: str, bits: int, group: int, scales: mx.array, biases: mx.array | None) -> str:
    if biases is not None and scales.dtype in FLOATS and biases.dtype in FLOATS:
        if bits in AFFINE_BITS and group in AFFINE_GROUPS:
            return "affine"
        have = f"affine layouts have {list(AFFINE_BITS)} bit in groups of {list(AFFINE_GROUPS)}"
    elif biases is None and scales.dtype == mx.uint8:
        if (bits, group) in BLOCK_MODES:
            return BLOCK_MODES[bits, group]
        have = "layouts without biases are 4 bit group 32, 8 bit group 32 and 4 bit group 16"
    else:
        raise BadCheckpoint(
            f"{path}: {kind(scales)} scales {'with' if biases is not None else 'without'} biases are no MLX layout: "
            "affine has float scales and biases, mxfp4, mxfp8 and nvfp4 have uint8 scales and none"
        )
    raise UnsupportedModel(f"{path} is packed in {bits} bit, group {group}, and MLX has no kernel for it: {have}")


def kind(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def refuse_methods(config: Mapping[str, Any]) -> None:
    """Quantised some other way than MLX's: named before anything is loaded."""
    for key in ("quantization", "quantization_config"):
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise BadCheckpoint(f"config.json: {key} must be an object, found {shown(config[key])}")
    if config.get("quantization") is not None:
        return  # converted to MLX's layouts; what quantization_config says of the original does not count
    given = config.get("quantization_config")
    if isinstance(given, Mapping) and given.get("quant_method") not in (None, *METHODS):
        raise UnsupportedModel(
            f"config.json: quantization_config.quant_method = {shown(given['quant_method'])} is not supported; "
            "take a checkpoint in MLX layout (affine, mxfp4, mxfp8, nvfp4) or an unquantised one"
        )


def hint(config: Mapping[str, Any], path: str) -> Layout | None:
    """What config.json says of a module, when it says something whole."""
    given = config.get("quantization", config.get("quantization_config"))
    if not isinstance(given, Mapping) or ("quantization" not in config and given.get("quant_method") is not None):
        return None  # what another quantiser's layout was says nothing of ours
    own = given.get(path)
    merged = {**given, **own} if isinstance(own, Mapping) else given
    mode, bits, group = merged.get("mode", "affine"), merged.get("bits"), merged.get("group_size")
    if isinstance(mode, str) and type(bits) is int and type(group) is int:
        return Layout(mode, bits, group)
    return None


def contradictions(config: Mapping[str, Any], layouts: Mapping[str, Layout]) -> str | None:
    """One line when config.json and the tensors disagree."""
    wrong = [(path, hint(config, path), layout) for path, layout in layouts.items()]
    wrong = [(path, said, layout) for path, said, layout in wrong if said not in (None, layout)]
    if not wrong:
        return None
    path, said, layout = wrong[0]
    return (
        f"config.json contradicts the tensors of {len(wrong)} modules (the tensors are used): "
        f"{path} is {layout}, config.json says {said}"
    )
