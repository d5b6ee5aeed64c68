"""The source of a conversion: a model's tensors, dequantised one by one on demand.

Experts are stacked; everything else (norms, convolutions) stays as in the checkpoint.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...errors import BadCheckpoint, UnsupportedModel, quote
from ...kernels.dtypes import FLOATS
from ...models import CausalLM, find
from ...models.config import ModelConfig, suppress_reports
from ...models.moe import MoEConfig
from ...models.qwen3_next import HybridConfig
from ...models.sanitize_hybrid import norms_include_one
from ...models.sanitize_moe import stack_experts
from ..formats.checkpoint import Checkpoint
from ..formats.fp8 import has_fp8, unpack_fp8
from ..formats.jang import labels as jang
from ..formats.quantized import MLXFormat, refuse_methods
from ..formats.weight_format import WeightFormat
from ..load.assign import load_tensors, main_dtype, rename_quantized_modules, select_tensors, without_formats
from ..load.detect import Hints, detect_formats, read_mlx

FUSED = re.compile(r".*\.linear_attn\.in_proj_(qkvz|ba)\.scales")  # one matrix in the file, several in our model
BLOCK_SPARSE = ("minimax_m2", "mixtral")  # model types with experts in block_sparse_moe


@dataclass(frozen=True)
class SourceModel:
    """`arrays` are as stored, `tensor` dequantises one. Names are those of our models."""

    family: type[CausalLM]
    config: ModelConfig
    raw: Mapping[str, Any]
    arrays: Mapping[str, mx.array]
    formats: Mapping[str, WeightFormat]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: mx.Dtype

    @property
    def experts(self) -> int:
        return self.config.num_experts if isinstance(self.config, MoEConfig) else 0

    def mlx_format(self, name: str) -> MLXFormat | None:
        """The format of a matrix, where it is one of MLX's own."""
        fmt = self.formats.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        return fmt if isinstance(fmt, MLXFormat) else None

    def tensor(self, name: str) -> mx.array:
        """A plain tensor as it is, a quantised one dequantised to float32."""
        path = name.removesuffix(".weight")
        fmt = self.formats.get(path) if name.endswith(".weight") else None
        return self.arrays[name] if fmt is None else fmt.dequantize(path, self.arrays)

    def stored_name(self, name: str) -> str:
        """The name that other readers expect, if our loader accepts it too."""
        other = name.replace(".experts.", ".switch_mlp.")
        if self.raw.get("model_type") in BLOCK_SPARSE:
            other = other.replace(".mlp.", ".block_sparse_moe.")
        return other if self.family.rename(other) == name else name

    def norm_flag(self) -> dict[str, Any]:
        """Whether norm weights include the added one, which tensors alone do not tell."""
        if not isinstance(self.config, HybridConfig):
            return {}
        return {"jang_norms_pre_shifted": norms_include_one(self.config, dict(self.arrays))}


def open_source(checkpoint: Checkpoint) -> SourceModel:
    """Lazy: tensors are read when they are used."""
    family = find(checkpoint.config)
    if family.is_adapter:
        kind = quote(checkpoint.config.get("model_type"))
        raise UnsupportedModel(f"{kind} is computed by mlx-lm's module; convert it with mlx_lm.convert")
    refuse_methods(checkpoint.config)
    with suppress_reports():
        config = family.parse(checkpoint.config)
    labels = jang.read_labels(checkpoint.config)
    loaded, dtype = load_tensors(checkpoint, None)
    arrays = select_tensors(family, loaded, jang.IGNORED_TENSORS if labels else ())
    dtype = dtype or main_dtype(arrays)
    if has_fp8(arrays):
        arrays = unpack_fp8(arrays, checkpoint.config, dtype)
    if isinstance(config, MoEConfig):
        arrays = stack_experts(arrays, config.num_experts)
    hints = Hints(rename_quantized_modules(checkpoint.config, family.rename), labels)
    model = family(config)  # type: ignore[call-arg]
    formats = detect_formats(model, arrays, hints)
    quantized = {path: dict(model.named_modules())[path]["weight"].shape for path in formats}
    for path in [n.removesuffix(".scales") for n in arrays if FUSED.fullmatch(n)]:
        quantized[path] = (arrays[f"{path}.scales"].shape[0], config.hidden_size)
        formats[path] = read_mlx(path, quantized[path], arrays, hints)
    shapes = {name: array.shape for name, array in without_formats(arrays, formats).items()}
    if packed := [name for name in shapes if name.endswith((".scales", "_packed", ".codes"))]:
        raise UnsupportedModel(f"{quote(packed[0])} is packed in an unknown order; convert from the unquantised model")
    shapes |= {f"{path}.weight": shape for path, shape in quantized.items()}
    return SourceModel(family, config, checkpoint.config, arrays, formats, shapes, dtype)


def check_finite(name: str, array: mx.array) -> mx.array:
    if array.dtype in FLOATS and not bool(mx.isfinite(array).all()):
        raise BadCheckpoint(f"{quote(name)} holds NaN, infinities or values beyond {array.dtype}; it cannot be stored")
    return array
