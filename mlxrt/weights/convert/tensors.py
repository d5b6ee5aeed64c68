"""A model's tensors as plain numbers, one by one and only when asked for: what a conversion starts from.

Experts are stacks, everything else lies as in the checkpoint: norms and convolutions keep the form their file had.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...errors import BadCheckpoint, UnsupportedModel, shown
from ...models import CausalLM, find
from ...models.config import ModelConfig, unreported
from ...models.moe import MoEConfig
from ...models.qwen3_next import HybridConfig
from ...models.sanitize_hybrid import gains_are_whole
from ...models.sanitize_moe import stack_experts
from ..formats.checkpoint import Checkpoint
from ..formats.fp8 import has_fp8, unpack_fp8
from ..formats.jang import labels as jang
from ..formats.quantized import FLOATS, refuse_methods
from ..formats.weight_format import Stored
from ..load.fill import in_our_names, load, main_dtype, others, select
from ..load.layouts import Hints, find_layouts, read_mlx

JOINED = re.compile(r".*\.linear_attn\.in_proj_(qkvz|ba)\.scales")  # in the file one matrix, in our model several
BRANCHES = ("minimax_m2", "mixtral")  # whose experts are in block_sparse_moe


@dataclass(frozen=True)
class PlainModel:
    """`arrays` are as stored; `tensor` unpacks one. Names are our models'."""

    family: type[CausalLM]
    config: ModelConfig
    raw: Mapping[str, Any]
    arrays: Mapping[str, mx.array]
    layouts: Mapping[str, Stored]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: mx.Dtype

    @property
    def experts(self) -> int:
        return self.config.num_experts if isinstance(self.config, MoEConfig) else 0

    def tensor(self, name: str) -> mx.array:
        """Floats come in the model's dtype, unpacked ones in float32."""
        layout = self.layouts.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        return self.arrays[name] if layout is None else layout.matrix(name.removesuffix(".weight"), self.arrays)

    def stored_name(self, name: str) -> str:
        """As others who read such folders expect it, where our loader finds it under that name too."""
        other = name.replace(".experts.", ".switch_mlp.")
        if self.raw.get("model_type") in BRANCHES:
            other = other.replace(".mlp.", ".block_sparse_moe.")
        return other if self.family.rename(other) == name else name

    def stamps(self) -> dict[str, Any]:
        """What the tensors alone do not tell."""
        if not isinstance(self.config, HybridConfig):
            return {}
        return {"jang_norms_pre_shifted": gains_are_whole(self.config, dict(self.arrays))}


def open_plain(checkpoint: Checkpoint) -> PlainModel:
    """Reads headers; tensors come when they are used."""
    family = find(checkpoint.config)
    if family.adapted:
        kind = shown(checkpoint.config.get("model_type"))
        raise UnsupportedModel(f"{kind} is computed by mlx-lm's module; convert it with mlx_lm.convert")
    refuse_methods(checkpoint.config)
    with unreported():
        config = family.parse(checkpoint.config)
    bundle = jang.jang_of(checkpoint.config)
    loaded, dtype = load(checkpoint, None)
    arrays = select(family, loaded, jang.DROPS if bundle else ())
    dtype = dtype or main_dtype(arrays)
    if has_fp8(arrays):
        arrays = unpack_fp8(arrays, checkpoint.config, dtype)
    if isinstance(config, MoEConfig):
        arrays = stack_experts(arrays, config.num_experts)
    hints = Hints(in_our_names(checkpoint.config, family.rename), bundle)
    model = family(config)  # type: ignore[call-arg]
    layouts = find_layouts(model, arrays, hints)
    wholes = {path: dict(model.named_modules())[path]["weight"].shape for path in layouts}
    for path in [n.removesuffix(".scales") for n in arrays if JOINED.fullmatch(n)]:
        wholes[path] = (arrays[f"{path}.scales"].shape[0], config.hidden_size)
        layouts[path] = read_mlx(path, wholes[path], arrays, hints)
    shapes = {name: array.shape for name, array in others(arrays, layouts).items()}
    if packed := [name for name in shapes if name.endswith((".scales", "_packed", ".codes"))]:
        raise UnsupportedModel(f"{shown(packed[0])} is packed in an order of its own; convert from the unpacked model")
    shapes |= {f"{path}.weight": shape for path, shape in wholes.items()}
    return PlainModel(family, config, checkpoint.config, arrays, layouts, shapes, dtype)


def check_finite(name: str, array: mx.array) -> mx.array:
    if array.dtype in FLOATS and not bool(mx.isfinite(array).all()):
        raise BadCheckpoint(
            f"{shown(name)} holds NaN, infinities or numbers beyond {array.dtype}; it cannot be stored so"
        )
    return array
