"""GGUF metadata of a model's config: architecture_configs.py backwards, as llama.cpp's converter writes it.

Keys are without the architecture's prefix. What llama.cpp has in its source is written where a model differs from that.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import UnsupportedModel
from ....models.config import ModelConfig
from ....models.rope import NO_ROTATION, RopeParams, default_periods
from .architecture_configs import LOCAL_ROPE_THETA, SIGMOID, default_attention_scalar

Keys = dict[str, Any]
Settings = Mapping[str, Any]  # of RoPE: those of config.json that periods do not tell


def expert_keys(c: Any) -> Keys:
    return {"expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok}


def sparse_keys(c: Any, settings: Settings, *, normalised: bool = True) -> Keys:
    """`normalised`: what llama.cpp does without a key."""
    keys = expert_keys(c) | {"expert_feed_forward_length": c.moe_intermediate_size}
    return keys if c.norm_topk_prob == normalised else keys | {"expert_weights_norm": c.norm_topk_prob}


def llama(c: Any, settings: Settings) -> Keys:
    return expert_keys(c) if hasattr(c, "num_experts") else {}


def qwen2_moe(c: Any, settings: Settings) -> Keys:
    shared = {"expert_shared_feed_forward_length": c.shared_expert_intermediate_size}
    return sparse_keys(c, settings, normalised=False) | shared


def minimax_m2(c: Any, settings: Settings) -> Keys:
    return expert_keys(c) | {"expert_feed_forward_length": c.intermediate_size, "expert_gating_func": SIGMOID}


def gpt_oss(c: Any, settings: Settings) -> Keys:
    if c.swiglu_alpha != 1.702:
        raise UnsupportedModel(f"GGUF has no key for swiglu_alpha = {c.swiglu_alpha}: gpt-oss files always mean 1.702")
    limits = {} if c.swiglu_limit == 7.0 else {"swiglu_clamp_exp": [c.swiglu_limit] * c.num_hidden_layers}
    return expert_keys(c) | {"expert_feed_forward_length": c.intermediate_size} | limits


def phi3(c: Any, settings: Settings) -> Keys:
    """llama.cpp needs the window's key, 0 without one, and the original context."""
    original = c.rope.limit or c.max_position_embeddings
    keys: Keys = {"rope.scaling.original_context_length": original}
    if not any(c.windows):
        keys["attention.sliding_window"] = 0
    if c.rope.kind == "longrope":
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": c.rope.magnitude}
    return keys


def qwen3_5(c: Any, settings: Settings) -> Keys:
    return qwen3_next_net(c) | {"rope.dimension_sections": [*settings.get("mrope_section", (11, 11, 10)), 0]}


def qwen3_5_moe(c: Any, settings: Settings) -> Keys:
    return qwen3_5(c, settings) | shared_sparse_keys(c, settings)


def qwen3_next(c: Any, settings: Settings) -> Keys:
    return qwen3_next_net(c) | shared_sparse_keys(c, settings)


def shared_sparse_keys(c: Any, settings: Settings) -> Keys:
    return sparse_keys(c, settings) | {"expert_shared_feed_forward_length": c.shared_expert_intermediate_size}


def qwen3_next_net(c: Any) -> Keys:
    """Of gated delta nets. Which layers are such llama.cpp takes from an interval; mlxrt from the tensors."""
    full = [kind == "full_attention" for kind in c.layer_types]
    every = full.index(True) + 1 if any(full) else len(full) + 1
    return {
        "ssm.conv_kernel": c.linear_conv_kernel_dim,
        "ssm.state_size": c.linear_key_head_dim,
        "ssm.group_count": c.linear_num_key_heads,
        "ssm.time_step_rank": c.linear_num_value_heads,
        "ssm.inner_size": c.linear_value_head_dim * c.linear_num_value_heads,
        "full_attention_interval": every,
    }


def gemma2(c: Any, settings: Settings) -> Keys:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return gemma_scale(c, layers_27b=46) | {key: getattr(c, key) or 0.0 for key in caps}


def gemma3(c: Any, settings: Settings) -> Keys:
    return gemma_scale(c, layers_27b=62) | final_softcap(c)


def gemma_scale(c: Any, layers_27b: int) -> Keys:
    known = default_attention_scalar(c.hidden_size, c.num_attention_heads, c.head_dim, c.num_hidden_layers, layers_27b)
    return {} if c.query_pre_attn_scalar == known else {"attention.scale": c.query_pre_attn_scalar**-0.5}


def final_softcap(c: Any) -> Keys:
    return {"final_logit_softcapping": c.final_logit_softcapping} if c.final_logit_softcapping else {}


def gemma4(c: Any, settings: Settings) -> Keys:
    """Sizes differ between full and sliding layers, and the MLPs of E2B's last layers are wider."""
    full, local = (next((s for s, w in zip(c.sizes, c.windows) if (w is None) == f), None) for f in (True, False))
    full, local = full or local, local or full
    assert full and local
    layers, shared, wide = c.num_hidden_layers, c.num_kv_shared_layers, c.use_double_wide_mlp
    keys: Keys = {
        "attention.head_count_kv": full[0] if full[0] == local[0] else [heads for heads, _ in c.sizes],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": c.hidden_size_per_layer_input or 0,
        "feed_forward_length": c.intermediate_size,
    }
    if wide:
        keys["feed_forward_length"] = [c.intermediate_size * (1 + (i >= layers - shared)) for i in range(layers)]
    for size, suffix in ((full[1], ""), (local[1], "_swa")):
        names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        keys |= {f"{name}{suffix}": size for name in names}
    if c.enable_moe_block:
        keys |= {"expert_count": c.num_experts, "expert_used_count": c.top_k_experts}
        keys["expert_feed_forward_length"] = c.moe_intermediate_size
    return keys | final_softcap(c)


def base_keys(c: ModelConfig, sizes_vary: bool) -> Keys:
    """What all architectures have."""
    keys: Keys = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "attention.head_count": c.num_attention_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "vocab_size": c.vocab_size,
    }
    if sizes_vary:
        return keys
    heads = {"attention.head_count_kv": c.num_key_value_heads, "rope.dimension_count": c.rope.dim}
    lengths = {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    return keys | heads | lengths | ({"feed_forward_length": c.intermediate_size} if c.intermediate_size else {})


def rope_keys(c: ModelConfig, settings: Settings) -> Keys:
    keys: Keys = {"rope.freq_base": c.rope.theta}
    local = {rope.theta for rope, window in zip(getattr(c, "ropes", ()), c.windows) if window is not None}
    if local - {LOCAL_ROPE_THETA}:
        keys["rope.freq_base_swa"] = local.pop()
    if c.rope.kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": 1 / c.rope.scale}
    if c.rope.kind == "yarn":
        keys |= yarn_keys(c, settings)
    if c.rope.kind == "dynamic":
        raise UnsupportedModel("RoPE scaling 'dynamic' has no form in GGUF; remove it to end at the trained context")
    return keys


def yarn_keys(c: ModelConfig, settings: Settings) -> Keys:
    factor = float(settings["factor"])
    keys: Keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
    if settings.get("original_max_position_embeddings") is not None:
        keys["rope.scaling.original_context_length"] = int(settings["original_max_position_embeddings"])
    for key in ("beta_fast", "beta_slow"):
        if settings.get(key) is not None:
            keys[f"rope.scaling.yarn_{key}"] = float(settings[key])
    if not math.isclose(c.rope.magnitude, usual := 1 + 0.1 * math.log(max(factor, 1.0)), rel_tol=1e-6):
        keys["rope.scaling.attn_factor"] = c.rope.magnitude / usual  # llama.cpp multiplies both
    return keys


def window_keys(c: ModelConfig, full_every: int | None, per_layer: bool) -> Keys:
    """A period where llama.cpp has none or another of its own; `per_layer` writes every layer."""
    slides = [window is not None for window in c.windows]
    if not any(slides):
        return {}
    keys: Keys = {"attention.sliding_window": next(window for window in c.windows if window is not None)}
    periods = [p for p in range(len(slides) + 2) if slides == [p == 0 or (i + 1) % p != 0 for i in range(len(slides))]]
    if per_layer or full_every not in periods:
        keys["attention.sliding_window_pattern"] = periods[0] if periods and not per_layer else slides
    return keys


def rope_tensors(c: ModelConfig, settings: Settings) -> dict[str, np.ndarray]:
    """RoPE's scaling that files have as tensors: a factor for each pair, or one for short and one for long contexts."""
    if c.rope.kind == "longrope":
        long = settings.get("long_factor", settings["short_factor"])
        found = {"rope_factors_long.weight": long, "rope_factors_short.weight": settings["short_factor"]}
        return {name: np.array(factors, np.float32) for name, factors in found.items()}
    if c.rope.kind not in ("llama3", "factors", "proportional"):
        return {}
    whole = next((r for r, w in zip(getattr(c, "ropes", ()), c.windows) if w is None), c.rope)
    return {"rope_freqs.weight": rope_factors(whole)}


def rope_factors(rope: RopeParams) -> np.ndarray:
    periods = rope.periods or ()
    pairs = zip(periods, default_periods(rope.theta, rope.dim), strict=True)
    return np.array([NO_ROTATION if p == NO_ROTATION else p / own for p, own in pairs], np.float32)
