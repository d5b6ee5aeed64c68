"""Makes tests/parity/{qwen3_next,qwen3_5,qwen3_5_moe} with Hugging Face transformers, in the format of check_parity.py.

    python tests/parity/make_hybrid.py      # needs torch, transformers and ../shared/tools/parity

Smaller than the shared fixtures, and odd where those are even: keys and values of different widths, three value heads
to a key head or just one, another convolution, full attention first or last, layers without experts, experts whose
weights do not add up to one, yarn on part of a head.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2] / "shared/tools/parity"))

import make_fixtures as tool  # noqa: E402
import torch  # noqa: E402

F, L = "full_attention", "linear_attention"
TEXT = {
    "attention_bias": False, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 40,
    "max_position_embeddings": 4096, "num_attention_heads": 4, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
    "use_cache": True, "vocab_size": 64,
}  # fmt: skip
LINEAR = {
    "linear_conv_kernel_dim": 3, "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 24,
}
VISION = {
    "depth": 1, "hidden_size": 8, "in_channels": 3, "intermediate_size": 8, "num_heads": 2,
    "num_position_embeddings": 4, "out_hidden_size": 32, "patch_size": 2, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip


def drafts(config, tensors, seed, arch):
    return {"mtp.fc.weight": torch.ones(4, 8), "mtp.norm.weight": torch.ones(4)}


def spec(config, cls, **rest):
    return {"config": config, "cls": cls, "logit": 4.0, "extra": drafts, "features": [], **rest}


def qwen3_next(_):
    config = TEXT | LINEAR | EXPERTS | {
        "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "full_attention_interval": 2,
        "mlp_only_layers": [1], "model_type": "qwen3_next", "norm_topk_prob": False, "num_hidden_layers": 4,
        "partial_rotary_factor": 0.5, "rope_theta": 50000, "tie_word_embeddings": False,
    }  # fmt: skip
    yarn = config | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 64, "rope_type": "yarn"}}
    return spec(config, "Qwen3NextForCausalLM", config_variants={"yarn": yarn})


def wrapped(kind, text, tied):
    rope = {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5, "rope_theta": 30000.0}
    text = TEXT | LINEAR | {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1} | text
    text |= {
        "model_type": f"{kind}_text",
        "rope_parameters": rope | {"rope_type": "default"},
        "tie_word_embeddings": tied,
    }
    tokens = {"image_token_id": 65, "video_token_id": 66, "vision_start_token_id": 67, "vision_end_token_id": 68}
    towers = {"text_config": text, "vision_config": VISION | {"model_type": kind}}
    return {"model_type": kind, "tie_word_embeddings": tied} | tokens | towers


def qwen3_5(_):
    kinds = {"layer_types": [F, L, L], "num_hidden_layers": 3, "linear_num_key_heads": 3, "linear_num_value_heads": 3}
    return spec(wrapped("qwen3_5", kinds, True), "Qwen3_5ForConditionalGeneration")


def qwen3_5_moe(_):
    kinds = EXPERTS | {"full_attention_interval": 3, "layer_types": [L, L, F], "num_hidden_layers": 3}
    config = wrapped("qwen3_5_moe", kinds, False)
    del config["text_config"]["intermediate_size"]
    return spec(config, "Qwen3_5MoeForConditionalGeneration", raw_layout=True)


tool.V = 64
tool.BUILDERS = {"qwen3_next": qwen3_next, "qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe}
if __name__ == "__main__":
    for arch in tool.BUILDERS:
        meta = tool.build(arch, 5, HERE, False)
        print(arch, meta["bytes"], meta["stats"])
