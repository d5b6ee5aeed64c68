"""Tiny random models as a folder of the Hub would have them: what converters start from."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

BASE = {
    "vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "float16", "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


def qwen3(hidden=192, inner=320, head=48, tied=False, **more) -> dict:
    own = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden}
    return {**BASE, **own, "intermediate_size": inner, "head_dim": head, "tie_word_embeddings": tied, **more}


def llama(hidden=128, inner=256, tied=True, **more) -> dict:
    own = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden}
    return {**BASE, **own, "intermediate_size": inner, "tie_word_embeddings": tied, **more}


def qwen3_moe(hidden=128, inner=96, experts=6, used=2, **more) -> dict:
    own = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": hidden, "head_dim": 32}
    routed = {"num_experts": experts, "num_experts_per_tok": used, "moe_intermediate_size": inner}
    flags = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": 2 * inner}
    return {**BASE, **own, **routed, **flags, **more}


def minimax(hidden=160, inner=96, experts=8, used=3, **more) -> dict:
    own = {"model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "hidden_size": hidden}
    routed = {"num_local_experts": experts, "num_experts_per_tok": used, "intermediate_size": inner}
    flags = {"scoring_func": "sigmoid", "use_qk_norm": True, "shared_intermediate_size": 0}
    return {**BASE, **own, **routed, **flags, "head_dim": 40, "rotary_dim": 20, **more}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, in the original's names."""
    h, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or h // heads
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], h)}
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = (config["vocab_size"], h)
    made["model.norm.weight"] = (h,)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        made |= {f"{at}{name}_layernorm.weight": (h,) for name in ("input", "post_attention")}
        made |= {f"{at}self_attn.q_proj.weight": (heads * head, h), f"{at}self_attn.o_proj.weight": (h, heads * head)}
        made |= {f"{at}self_attn.{name}_proj.weight": (kv * head, h) for name in "kv"}
        made |= norms_of_heads(config, at, head) | mlp(config, at)
        if config.get("attention_bias"):
            rows = {
                name: shape[0] for name, shape in made.items() if name.startswith(f"{at}self_attn") and "proj" in name
            }
            made |= {name.replace("weight", "bias"): (n,) for name, n in rows.items()}
    return made


def norms_of_heads(config: dict, at: str, head: int) -> dict[str, tuple[int, ...]]:
    if config["model_type"] == "llama":
        return {}
    wide = config["model_type"] == "minimax_m2"
    counts = (config["num_attention_heads"], config["num_key_value_heads"]) if wide else (1, 1)
    return {f"{at}self_attn.{name}_norm.weight": (n * head,) for name, n in zip("qk", counts)}


def mlp(config: dict, at: str) -> dict[str, tuple[int, ...]]:
    h, kind = config["hidden_size"], config["model_type"]
    if kind not in ("qwen3_moe", "minimax_m2"):
        inner = config["intermediate_size"]
        sizes = {"gate_proj": (inner, h), "up_proj": (inner, h), "down_proj": (h, inner)}
        return {f"{at}mlp.{name}.weight": size for name, size in sizes.items()}
    moe = "block_sparse_moe" if kind == "minimax_m2" else "mlp"
    names = ("w1", "w3", "w2") if kind == "minimax_m2" else ("gate_proj", "up_proj", "down_proj")
    count = config.get("num_experts") or config["num_local_experts"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    made: dict[str, tuple[int, ...]] = {f"{at}{moe}.gate.weight": (count, h)}
    if kind == "minimax_m2":
        made[f"{at}{moe}.e_score_correction_bias"] = (count,)
    for e in range(count):
        sizes = [(inner, h), (inner, h), (h, inner)]
        made |= {f"{at}{moe}.experts.{e}.{name}.weight": size for name, size in zip(names, sizes)}
    return made


def weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1 and "norm" in name:
            array = 1 + 0.05 * random.standard_normal(shape)
        else:
            array = random.standard_normal(shape) * (1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.05)
        made[name] = np.ascontiguousarray(array.astype(np.float16))
    return made


def write_source(folder: Path, config: dict, seed: int) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    made = weights(config, seed)
    shard = "model-00001-of-00001.safetensors"  # converters look for a name like this
    save_file(made, folder / shard, metadata={"format": "pt"})
    mapped = dict.fromkeys(made, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    (folder / "config.json").write_text(json.dumps(config))
    return made
