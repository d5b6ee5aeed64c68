"""Bytes and FLOPs of one token, from the model's structure: nothing is loaded or allocated.

They give the roofline: decode is bound by reading these bytes from memory, prefill by these FLOPs.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache.memory import ExternalKV, Shared
from ..config import DTYPES, EngineConfig
from ..engine.load import open_checkpoint
from ..engine.load_plan import compute_dtype, is_packed, plan_checkpoint
from ..engine.weight_size import loaded_bytes, make_outline, make_shape_outline, parameters
from ..errors import BadRequest
from ..models import CausalLM, find
from ..weights.random_models import Shape
from ..weights.source.resolve import ResolvedModel

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "experts_per_token")


@dataclass(frozen=True)
class TokenCost:
    """Cost of one token of one sequence, alone in its batch."""

    weight_bytes: int  # bytes of weights in memory
    bytes_read: int  # of weights by one token: of experts only the active ones
    active_weights: int  # weights it is multiplied with
    kv_layers: tuple[tuple[float, int], ...]  # per KV layer: bytes a cached token, window (0: all)
    attention_width: int  # layers x query heads x head_dim: 4 FLOPs each a cached token

    def bytes_at(self, context: int) -> float:
        """Bytes a decode step reads with `context` tokens in the cache."""
        kv = sum(size * (min(context, window) if window else context) for size, window in self.kv_layers)
        return self.bytes_read + kv

    def flops_at(self, context: float) -> float:
        return 2 * self.active_weights + 4 * self.attention_width * context


def token_cost(resolved: ResolvedModel, dtype: str | None = None) -> TokenCost:
    """Cost of a token of the model as an engine here would hold it."""
    if dtype is not None and dtype not in DTYPES:
        raise BadRequest(f"dtype must be {', '.join(DTYPES)}, not {dtype!r}")
    if resolved.shape is not None:
        return shape_cost(resolved.shape, compute_dtype(dtype, mx.bfloat16))
    checkpoint = open_checkpoint(resolved)
    chosen = compute_dtype(dtype, mx.float16)
    model, stored = make_outline(checkpoint.config, chosen), {}
    if is_packed(checkpoint) and not plan_checkpoint(checkpoint, EngineConfig(dtype=dtype)).dequantise:
        rename = find(checkpoint.config).rename
        stored = {rename(name): loaded_bytes(info, chosen) for name, info in checkpoint.sizes().items()}
    return count_cost(model, checkpoint.config, stored)


def shape_cost(shape: Shape, dtype: mx.Dtype) -> TokenCost:
    stored = {name: array.nbytes for name, array in parameters(make_shape_outline(shape, dtype)).items()}
    return count_cost(make_outline(shape.config, dtype), shape.config, stored)


def count_cost(model: CausalLM, raw: dict[str, Any], stored: dict[str, int]) -> TokenCost:
    """`stored`: bytes of tensors by name; empty where the model's own arrays are those in memory."""
    arrays = parameters(model)
    stored = stored or {name: array.nbytes for name, array in arrays.items()}
    used = experts_per_token(raw)
    tied = not any(name.startswith("lm_head") for name in arrays)
    bytes_read, active_weights = 0.0, 0.0
    for name, array in arrays.items():
        if array.ndim < 2 or ("embed_tokens" in name and not (tied and name.endswith("embed_tokens.weight"))):
            continue  # norms are nothing beside matrices; of an embedding one row is read
        path = name.removesuffix(".weight")
        share = min(1.0, used / array.shape[0]) if array.ndim == 3 else 1.0
        bytes_read += share * sum(stored.get(f"{path}.{part}", 0) for part in ("weight", "scales", "biases"))
        active_weights += share * array.size
    return TokenCost(sum(stored.values()), int(bytes_read), int(active_weights), kv_layers(model), attention_width(raw))


def experts_per_token(raw: dict[str, Any]) -> int:
    text = raw.get("text_config")
    for section in (raw, text if isinstance(text, dict) else {}):
        for key in EXPERTS_PER_TOKEN:
            if isinstance(section.get(key), int):
                return section[key]
    return 1


def attention_width(raw: dict[str, Any]) -> int:
    text = raw.get("text_config")
    section = raw | text if isinstance(text, dict) else raw
    heads, layers = section.get("num_attention_heads") or 0, section.get("num_hidden_layers") or 0
    head_dim = section.get("head_dim") or (section.get("hidden_size") or 0) // max(heads, 1)
    return layers * heads * head_dim


def kv_layers(model: CausalLM) -> tuple[tuple[float, int], ...]:
    layers = []
    for spec in model.cache_specs():
        if not isinstance(spec, Shared) and grows(spec):
            window: Any = vars(spec).get("window")  # of sliding windows only
            layers.append((spec.nbytes() / spec.size, window or 0))
    return tuple(layers)


def grows(spec: Any) -> bool:
    """Whether a longer sequence takes more memory in this layer."""
    return spec.grows if isinstance(spec, ExternalKV) else spec.paged
