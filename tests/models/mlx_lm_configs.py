"""Tiny configs for mlx-lm's architectures: what a ModelArgs asks for, small numbers by name, corrected by type."""

from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any

VOCAB = 96

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "d_model": 64, "n_embd": 64, "model_dim": 64, "dim": 64,
    "intermediate_size": 96, "ffn_hidden_size": 96, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5, "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_seq_len": 512,
    "rope_theta": 10000.0, "rotary_emb_base": 10000.0, "partial_rotary_factor": 0.5, "rotary_pct": 0.5,
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "n_shared_experts": 1, "shared_expert_intermediate_size": 32, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "state_size": 8, "conv_kernel": 4, "time_step_rank": 8, "expand": 2, "n_groups": 1, "tie_word_embeddings": False,
    "sliding_window": 8, "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_conv_bias": True,
    "attention_multiplier": 0.25, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
    "hidden_act": "silu", "rope_scaling": None, "logit_scale": 0.5, "layer_norm_bias": False,
}  # fmt: skip

# What the names alone do not say.
BY_TYPE: dict[str, dict[str, Any]] = {
    "apertus": {"post_norm": True, "qk_norm": True},
    "cohere2": {"num_hidden_layers": 4, "sliding_window_pattern": 4},
    "exaone4": {"num_hidden_layers": 4, "sliding_window_pattern": "LLLG"},
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_dt_rank": 8, "mamba_expand": 2,
    },
    "gpt_bigcode": {"n_inner": 96},
    "gptj": {"rotary_dim": 8},
    "lfm2": {
        "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"], "conv_bias": False,
        "conv_L_cache": 3, "block_dim": 64, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
        "block_ff_dim": 96,
    },
    "llama4_text": {
        "num_hidden_layers": 4, "attention_chunk_size": 8, "intermediate_size_mlp": 96, "use_qk_norm": True,
        "no_rope_layers": [1, 1, 1, 0],
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "time_step_limit": [0.001, 0.1]},
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2},
    "olmo3": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "rwkv7": {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "stablelm": {"use_qkv_bias": True, "num_key_value_heads": 4},
    "recurrent_gemma": {"conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": 8,
        "block_types": ["recurrent", "recurrent", "attention"], "num_hidden_layers": 3},
}  # fmt: skip


def tiny(kind: str) -> dict[str, Any]:
    """A config.json of this model_type with all that mlx-lm needs."""
    asked = fields(import_module(f"mlx_lm.models.{kind}").ModelArgs)
    config = {f.name: SIZES[f.name] for f in asked if f.name in SIZES}
    config |= {"model_type": kind, "vocab_size": VOCAB} | BY_TYPE.get(kind, {})
    lost = [f.name for f in asked if f.default is MISSING and f.default_factory is MISSING and f.name not in config]
    assert not lost, f"{kind} asks for {lost}"
    return {key: value for key, value in config.items() if value is not ...}
