"""Makes tests/parity/{qwen3_moe,mixtral,minimax_m2,gpt_oss} with Hugging Face transformers, for check_parity.py.

    python tests/parity/make_moe.py      # needs torch, transformers and ../shared/tools/parity

Smaller than the shared fixtures, and odd where those are even: windows on Qwen3-MoE and Mixtral, every other layer
dense, shares that are not normalised, yarn on a part of each head, FP8 blocks that the matrix does not fill, a clamp
that is reached.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2] / "shared/tools/parity"))

import make_fixtures as tool  # noqa: E402

F, S = "full_attention", "sliding_attention"
TEXT = {
    "attention_dropout": 0.0, "head_dim": 8, "hidden_act": "silu", "hidden_size": 36, "intermediate_size": 20,
    "max_position_embeddings": 4096, "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 20000.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 64,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "rope_type": "yarn"}


def spec(config, cls, **rest):
    return {"config": {"architectures": [cls]} | config, "cls": cls, "logit": 4.0, "features": [], **rest}


def qwen3_moe(_):
    config = TEXT | {
        "attention_bias": True, "decoder_sparse_step": 2, "max_window_layers": 3, "mlp_only_layers": [5],
        "model_type": "qwen3_moe", "moe_intermediate_size": 12, "norm_topk_prob": False, "num_experts": 5,
        "num_experts_per_tok": 3, "num_hidden_layers": 4, "sliding_window": 5, "tie_word_embeddings": True,
        "use_sliding_window": True,
    }  # fmt: skip
    return spec(config, "Qwen3MoeForCausalLM", config_variants={"yarn": config | {"rope_scaling": YARN}})


def mixtral(_):
    config = TEXT | {
        "model_type": "mixtral", "num_experts_per_tok": 3, "num_hidden_layers": 3, "num_local_experts": 5,
        "sliding_window": 7,
    }  # fmt: skip
    return spec(config, "MixtralForCausalLM", config_variants={"yarn": config | {"rope_scaling": YARN}})


def minimax_m2(_):
    config = TEXT | {
        "attn_type_list": [1, 1], "head_dim": 16, "hidden_size": 136, "intermediate_size": 16,
        "model_type": "minimax_m2", "num_attention_heads": 3, "num_experts_per_tok": 2, "num_hidden_layers": 2,
        "num_key_value_heads": 1, "num_local_experts": 5, "qk_norm_type": "per_layer", "rotary_dim": 12,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "sliding_window": None, "use_qk_norm": True,
        "use_routing_bias": True,
    }  # fmt: skip
    variants = {"yarn": config | {"rope_scaling": YARN}}
    return spec(config, "MiniMaxM2ForCausalLM", fp8=True, config_variants=variants)


def gpt_oss(_):
    config = TEXT | {
        "attention_bias": True, "hidden_size": 64, "intermediate_size": 32, "layer_types": [F, S, S],
        "model_type": "gpt_oss", "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_local_experts": 3,
        "quantization_config": {"quant_method": "mxfp4"},
        "rope_scaling": YARN | {"original_max_position_embeddings": 1024, "truncate": False},
        "sliding_window": 5, "swiglu_alpha": 1.3, "swiglu_limit": 0.75,
    }  # fmt: skip
    return spec(config, "GptOssForCausalLM", mxfp4=True)


tool.V = 64
tool.BUILDERS = {"qwen3_moe": qwen3_moe, "mixtral": mixtral, "minimax_m2": minimax_m2, "gpt_oss": gpt_oss}
if __name__ == "__main__":
    for arch in sys.argv[1:] or tool.BUILDERS:
        meta = tool.build(arch, 7, HERE, False)
        print(arch, meta["bytes"], meta["stats"])
