"""A tiny Qwen2-MoE checkpoint with random weights: a dense layer, then experts beside a shared one."""

from pathlib import Path

from .random_folder import write_random_folder

CONFIG = {
    "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "hidden_act": "silu", "hidden_size": 32,
    "intermediate_size": 40, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "num_experts": 5,
    "num_experts_per_tok": 2, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [0],
    "rms_norm_eps": 1e-6, "rope_theta": 20000.0, "vocab_size": 64, "max_position_embeddings": 256,
    "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 3, "tie_word_embeddings": False,
}  # fmt: skip


def write_qwen2_moe(folder: Path, **changes) -> Path:
    config = CONFIG | changes
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv = hidden // heads * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (64, hidden),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        here = f"model.layers.{i}."
        shapes |= {f"{here}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        shapes[f"{here}self_attn.o_proj.weight"] = (hidden, hidden)
        for n, rows in (("q", hidden), ("k", kv), ("v", kv)):
            shapes |= {f"{here}self_attn.{n}_proj.weight": (rows, hidden), f"{here}self_attn.{n}_proj.bias": (rows,)}
        if i in config["mlp_only_layers"]:
            shapes |= gated_mlp(f"{here}mlp.", hidden, config["intermediate_size"])
            continue
        shapes |= {f"{here}mlp.gate.weight": (5, hidden), f"{here}mlp.shared_expert_gate.weight": (1, hidden)}
        shapes |= gated_mlp(f"{here}mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])
        for e in range(config["num_experts"]):
            shapes |= gated_mlp(f"{here}mlp.experts.{e}.", hidden, config["moe_intermediate_size"])
    return write_random_folder(folder, config, shapes, seed=8)


def gated_mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }
