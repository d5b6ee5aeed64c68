"""Tiny models in every format, written for one test and thrown away. Values are random; shapes are a real llama's."""

import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

from mlxrt.kernels.ops.k_quants import K_QUANTS

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "vocab_size": 48,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MATRICES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def float_weights(config: dict = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a config, float32, by Hugging Face name."""
    random = np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = dict(zip(MATRICES, [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]))
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    weights = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        here = f"model.layers.{i}."
        weights |= {f"{here}{name}.weight": shape for name, shape in shapes.items()}
        weights |= {f"{here}{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
        if config["model_type"] == "qwen3":
            weights |= {f"{here}self_attn.{n}_norm.weight": (head,) for n in "qk"}
        if config["model_type"] == "qwen2":
            weights |= {f"{here}self_attn.{n}_proj.bias": (q if n == "q" else kv,) for n in "qkv"}
    return {name: random.standard_normal(shape, np.float32) for name, shape in weights.items()}


def pack_weights(weights: dict[str, np.ndarray], group_size: int, bits: int, **other_bits: int) -> dict[str, mx.array]:
    """Matrices as MLX quantises them, small enough for moderate logits; `other_bits`: of those so named."""
    arrays = {name: mx.array(array) for name, array in weights.items() if array.ndim == 1}
    for name in [name for name, array in weights.items() if array.ndim > 1]:
        own = next((count for part, count in other_bits.items() if part in name), bits)
        parts = mx.quantize(mx.array(weights[name]) * 0.3, group_size=group_size, bits=own)
        arrays |= dict(zip((name, name.replace("weight", "scales"), name.replace("weight", "biases")), parts))
    return arrays


def write_folder(folder: Path, arrays: dict, config: dict = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    made = {k: v if isinstance(v, mx.array) else mx.array(v) for k, v in arrays.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), made, {"format": "mlx"})
    return folder


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, inner = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{GGUF_NAMES[inner]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Where llama.cpp's converter puts each row: of a head's rows, half j and half j + D/2 become neighbours."""
    out, size = np.empty_like(rows), len(rows) // heads
    for h in range(heads):
        for j in range(size // 2):
            out[h * size + 2 * j] = rows[h * size + j]
            out[h * size + 2 * j + 1] = rows[h * size + size // 2 + j]
    return out


def write_gguf(
    path: Path, weights: dict[str, np.ndarray], config: dict = CONFIG, kind: str = "F32", extra=None, kinds=None
) -> Path:
    """`extra(writer)` adds keys and tensors. Matrices are stored as `kind`, the rest as F32; rows of bytes are
    K-quants: of those that `kinds` names, else one block each."""
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_context_length(config["max_position_embeddings"])
    if extra:
        extra(writer)
    for name, array in weights.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            array = permuted(array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        own = (kinds or {}).get(name, kind)
        add_tensor(writer, gguf_name(name), array, own if array.ndim > 1 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer, name: str, array: np.ndarray, kind: str) -> None:
    if array.dtype == np.uint8:
        if kind == "F32":
            kind = next(name.upper() for name, size in K_QUANTS.items() if size == array.shape[1])  # IQ4_NL is named
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
        return
    type_ = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
