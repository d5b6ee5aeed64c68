"""A tiny Phi-3 checkpoint with random weights: fused matrices, RoPE on a part of each head, two sets of factors."""

from pathlib import Path

from .random_folder import write_random_folder

CONFIG = {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "hidden_size": 48,
    "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 20000.0, "vocab_size": 64, "max_position_embeddings": 256,
    "original_max_position_embeddings": 64, "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip


def long_rope(pairs: int) -> dict:
    short, long = ([round(1 + 0.1 * k * i, 2) for i in range(pairs)] for k in (1, 7))
    return {"rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": long}}


def write_phi3(folder: Path, **changes) -> Path:
    config = CONFIG | changes
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (64, hidden),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        here = f"model.layers.{i}."
        shapes |= {f"{here}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        shapes |= {f"{here}self_attn.qkv_proj.weight": (hidden + 32, hidden)}
        shapes |= {f"{here}self_attn.o_proj.weight": (hidden, hidden)}
        shapes |= {f"{here}mlp.gate_up_proj.weight": (2 * inner, hidden)}
        shapes |= {f"{here}mlp.down_proj.weight": (hidden, inner)}
    return write_random_folder(folder, config, shapes, seed=4)
