"""Makes tests/parity/gemma* with Hugging Face transformers, in the format of check_parity.py.

    python tests/parity/make_gemma.py      # needs torch, transformers and ../shared/tools/parity

Smaller than the shared fixtures, and odd where those are even: biases, a head of its own, three query heads to a
key head, full attention first, capped logits in Gemma 3, and per-layer inputs inside the wrapper that also sees.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2] / "shared/tools/parity"))

import make_fixtures as tool  # noqa: E402

F, S = "full_attention", "sliding_attention"
TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 30, "intermediate_size": 40, "max_position_embeddings": 4096, "num_attention_heads": 6,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "sliding_window": 5, "use_cache": True, "vocab_size": 64,
}  # fmt: skip
EDGES = {"boi_token_index": 65, "eoi_token_index": 66, "image_token_index": 67, "mm_tokens_per_image": 4}
SIGLIP = {
    "hidden_size": 8, "image_size": 8, "intermediate_size": 8, "model_type": "siglip_vision_model",
    "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 2, "vision_use_head": False,
}  # fmt: skip
EYES = {
    "head_dim": 4, "hidden_size": 8, "intermediate_size": 8, "model_type": "gemma4_vision", "num_attention_heads": 2,
    "num_hidden_layers": 1, "num_key_value_heads": 2, "patch_size": 2, "pooling_kernel_size": 1,
    "position_embedding_size": 16,
}  # fmt: skip
FULL4 = {"partial_rotary_factor": 0.5, "rope_theta": 70000.0, "rope_type": "proportional"}
TEXT4 = TEXT | {
    "attention_k_eq_v": False, "enable_moe_block": False, "final_logit_softcapping": 15.0, "global_head_dim": 16,
    "hidden_size_per_layer_input": 0, "model_type": "gemma4_text", "num_experts": None,
    "num_global_key_value_heads": None, "num_kv_shared_layers": 0, "tie_word_embeddings": True,
    "rope_parameters": {F: FULL4, S: {"rope_theta": 3000.0, "rope_type": "default"}},
    "use_bidirectional_attention": None, "use_double_wide_mlp": False, "vocab_size_per_layer_input": 64,
}  # fmt: skip


def spec(config, cls, logit):
    return {"config": {"architectures": [cls]} | config, "cls": cls, "logit": logit, "features": []}


def layers(*kinds):
    return {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}


def gemma2(_):
    config = TEXT | {
        "attention_bias": True, "attn_logit_softcapping": 9.0, "final_logit_softcapping": 12.0, "model_type": "gemma2",
        "num_hidden_layers": 3, "query_pre_attn_scalar": 6, "rope_theta": 9000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    return spec(config, "Gemma2ForCausalLM", 4.0)


def gemma3_text(_):
    config = TEXT | {
        "final_logit_softcapping": 14.0, "model_type": "gemma3_text", "num_hidden_layers": 4,
        "query_pre_attn_scalar": 6, "rope_local_base_freq": 5000.0, "rope_theta": 80000.0,
        "sliding_window_pattern": 2,
    }  # fmt: skip
    return spec(config, "Gemma3ForCausalLM", 4.0)


def gemma3_mm(_):
    rope = {
        "rope_local_base_freq": 5000.0,
        "rope_theta": 80000.0,
        "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
    }
    text = TEXT | rope | layers(F, S, S) | {"model_type": "gemma3_text", "query_pre_attn_scalar": 10}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": SIGLIP} | EDGES
    return spec(config, "Gemma3ForConditionalGeneration", 4.0)


def gemma4_e2b(_):
    own = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 70}
    return spec(TEXT4 | layers(F, S, S, S, F) | own, "Gemma4ForCausalLM", 9.0)


def gemma4_mm(_):
    own = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    text = TEXT4 | layers(S, F, S, F) | own | {"use_bidirectional_attention": "vision"}
    tokens = {"boi_token_id": 65, "eoi_token_id": 66, "image_token_id": 67, "video_token_id": 68, "audio_token_id": 69}
    config = {"model_type": "gemma4", "text_config": text, "vision_config": EYES, "audio_config": None} | tokens
    return spec(config, "Gemma4ForConditionalGeneration", 9.0)


def gemma4_moe(_):
    moe = {"enable_moe_block": True, "moe_intermediate_size": 12, "num_experts": 5, "top_k_experts": 2}
    own = {"attention_bias": True, "attention_k_eq_v": True, "num_global_key_value_heads": 3}
    own["hidden_size"] = 36  # torch's experts want rows of whole 16 bytes
    return spec(TEXT4 | layers(S, F, S, F) | moe | own, "Gemma4ForCausalLM", 9.0)


tool.V = 64
tool.BUILDERS = {
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gemma3_mm": gemma3_mm,
    "gemma4_e2b": gemma4_e2b,
    "gemma4_mm": gemma4_mm,
    "gemma4_moe": gemma4_moe,
}
if __name__ == "__main__":
    for arch in sys.argv[1:] or tool.BUILDERS:
        meta = tool.build(arch, 3, HERE, False)
        print(arch, meta["bytes"], meta["stats"])
