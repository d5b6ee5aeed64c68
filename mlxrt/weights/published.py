"""Configs of published models as in the hub's config.json, for `shape:NAME`.

Only what decides the shape and the arithmetic of the text model; no image or audio towers.
"""

from typing import Any

Config = dict[str, Any]


def pattern(layers: int, every: int, others: str) -> list[str]:
    """Full attention in every `every`-th layer."""
    return ["full_attention" if (i + 1) % every == 0 else others for i in range(layers)]


def body(model_type: str, architecture: str, layers: int, hidden: int, inner: int, heads: str, vocab: int) -> Config:
    """`heads` as the tables of such models write them: query/kv x dim."""
    counts, dim = heads.split("x")
    queries, keys = counts.split("/")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": int(queries),
        "num_key_value_heads": int(keys),
        "head_dim": int(dim),
        "vocab_size": vocab,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def llama(*sizes: Any, **rest: Any) -> Config:
    shared = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "mlp_bias": False}
    return body("llama", "LlamaForCausalLM", *sizes) | shared | rest


QWEN = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None}
QWEN |= {"use_sliding_window": False, "sliding_window": None}
QWEN |= {"max_position_embeddings": 40960, "bos_token_id": 151643, "eos_token_id": 151645}


def qwen3(*sizes: Any, **rest: Any) -> Config:
    return body("qwen3", "Qwen3ForCausalLM", *sizes) | QWEN | {"max_window_layers": sizes[0]} | rest


def qwen35(kind: str, *sizes: Any, **rest: Any) -> Config:
    """The hub keeps the text model inside a config that could have an image tower beside it."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    shared = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": rope | {"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        "full_attention_interval": 4,
        "layer_types": pattern(sizes[0], 4, "linear_attention"),
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "eos_token_id": 248044,
    }
    text = body(f"{kind}_text", "", *sizes) | shared | rest
    del text["architectures"]
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    outer = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "tie_word_embeddings": False}
    return outer | {"text_config": text}


GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
GEMMA |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": [1, 106]}


def gemma4(*sizes: Any, every: int, window: int, wide_heads: int | None = None, **rest: Any) -> Config:
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    shared = {
        "max_position_embeddings": 131072,
        "global_head_dim": 512,
        "num_global_key_value_heads": wide_heads,
        "sliding_window": window,
        "layer_types": pattern(sizes[0], every, "sliding_attention"),
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": True,
        "enable_moe_block": False,
    }
    return body("gemma4_text", "Gemma4ForCausalLM", *sizes) | GEMMA | shared | rest


def gpt_oss(layers: int, experts: int) -> Config:
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    # Published with mxfp4 experts: that is shape:gpt-oss-20b@mxfp4, not a key of this config.
    return body("gpt_oss", "GptOssForCausalLM", layers, 2880, 2880, "64/8x64", 201088) | {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": yarn | {"original_max_position_embeddings": 4096},
        "sliding_window": 128,
        "layer_types": pattern(layers, 2, "sliding_attention"),
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
    }


SMOLLM2 = {"max_position_embeddings": 8192, "rope_theta": 1e5, "rope_scaling": None, "tie_word_embeddings": True}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 = {"max_position_embeddings": 131072, "rope_theta": 5e5, "bos_token_id": 128000}
GEMMA3 = {"max_position_embeddings": 32768, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}
GEMMA3 |= {"sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256}
GEMMA3 |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
SHARING = {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256}
MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True}
MINIMAX = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 196608, "rope_theta": 5e6}
MINIMAX |= {"num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_routing_bias": True}
MINIMAX |= {"use_qk_norm": True, "qk_norm_type": "per_layer", "rotary_dim": 64}
MINIMAX |= {"shared_intermediate_size": 0, "eos_token_id": 200020}
MIXTRAL = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "rope_theta": 1e6}
MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
MIXTRAL |= {"bos_token_id": 1, "eos_token_id": 2}
EXPERTS35 = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
EXPERTS35 |= {"shared_expert_intermediate_size": 512}
EXPERTS4 = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}

SHAPES: dict[str, Config] = {
    "smollm2-135m": llama(30, 576, 1536, "9/3x64", 49152, bos_token_id=1, eos_token_id=2, **SMOLLM2),
    "llama-3.1-8b": llama(32, 4096, 14336, "32/8x128", 128256, eos_token_id=[128001, 128008, 128009], **LLAMA31)
    | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}},
    "qwen3-0.6b": qwen3(28, 1024, 3072, "16/8x128", 151936, tie_word_embeddings=True),
    "qwen3-8b": qwen3(36, 4096, 12288, "32/8x128", 151936),
    "qwen3-30b-a3b": body("qwen3_moe", "Qwen3MoeForCausalLM", 48, 2048, 6144, "32/4x128", 151936)
    | QWEN
    | MOE
    | {"num_experts": 128, "num_experts_per_tok": 8},
    "qwen3.5-9b": qwen35("qwen3_5", 32, 4096, 12288, "16/4x256", 248320),
    "qwen3.5-35b-a3b": qwen35("qwen3_5_moe", 40, 2048, 512, "16/2x256", 248320, **EXPERTS35),
    "gemma3-1b": body("gemma3_text", "Gemma3ForCausalLM", 26, 1152, 6912, "4/1x256", 262144) | GEMMA | GEMMA3,
    "gemma4-e2b": gemma4(35, 1536, 6144, "8/1x256", 262144, every=5, window=512, attention_k_eq_v=False, **SHARING),
    "gemma4-26b-a4b": gemma4(30, 2816, 2112, "16/8x256", 262144, every=6, window=1024, wide_heads=2, **EXPERTS4),
    "gemma4-31b": gemma4(60, 5376, 21504, "32/16x256", 262144, every=6, window=1024, wide_heads=4),
    "minimax-m2": body("minimax_m2", "MiniMaxM2ForCausalLM", 62, 3072, 1536, "48/8x128", 200064) | MINIMAX,
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
    "mixtral-8x7b": body("mixtral", "MixtralForCausalLM", 32, 4096, 14336, "32/8x128", 32000) | MIXTRAL,
}
