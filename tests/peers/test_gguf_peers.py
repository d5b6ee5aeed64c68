"""GGUF files, opened by llama.cpp itself: our reader reads those of the tests' converter, llama.cpp those that
`mlxrt convert` writes, so that reader and writer cannot be wrong in the same way."""

import importlib.util
import json
import re
from pathlib import Path

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

import numpy as np
import pytest

from mlxrt.bench.backend import Backend
from mlxrt.weights import FolderCheckpoint, GgufCheckpoint, build
from mlxrt.weights.convert.gguf import plan_model
from mlxrt.weights.formats.gguf.writer import write_gguf
from tests.support.llama_cpp_files import convert, vocabulary_values
from tests.support.phi3_folder import long_rope, write_phi3
from tests.support.qwen2_moe_folder import write_qwen2_moe

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="pip install xllamacpp: llama.cpp is not here"
)
FIXTURES = Path(__file__).parents[1] / "parity"
# What llama.cpp has in its source and not in the file; and its GELU, which looks values up in a table of float16.
CASES = {
    "gemma3_text": ({"query_pre_attn_scalar": 8, "final_logit_softcapping": None}, 0.05),
    "qwen3_moe": ({"norm_topk_prob": True, "use_sliding_window": False, "attention_bias": False}, 1e-3),
    "mixtral": ({"sliding_window": None}, 1e-3),
    "gpt_oss": (
        {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "layer_types": ["sliding_attention", "full_attention"]},
        1e-3,
    ),
    "gemma2": ({"query_pre_attn_scalar": 8, "attention_bias": False, "tie_word_embeddings": True}, 0.05),
    "minimax_m2": ({}, 1e-3),
    "gemma4_mm": ({}, 0.05),  # E2B's parts: inputs per layer, shared keys and values, double width
    "gemma4_moe": ({"attention_bias": False}, 0.05),
    "phi3": (
        {"original_max_position_embeddings": 1024, "max_position_embeddings": 4096, **long_rope(8)},  # within the first
        1e-3,
    ),
    "qwen2_moe": ({"mlp_only_layers": []}, 1e-3),
    "qwen3_next": (
        {"linear_value_head_dim": 16, "mlp_only_layers": [], "num_hidden_layers": 2, "norm_topk_prob": True},
        1e-3,
    ),
    "qwen3_5": ({"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}, 1e-3),
    "qwen3_5_moe": ({"linear_value_head_dim": 16}, 1e-3),
}


def made(arch: str, folder: Path) -> Path:
    """A fixture without what llama.cpp does not have: dense layers among sparse ones, biases, packed experts."""
    if arch == "qwen2_moe":
        return write_qwen2_moe(folder, **CASES[arch][0])
    if arch == "phi3":
        return write_phi3(folder, **CASES[arch][0])
    config = json.loads((FIXTURES / arch / "config.json").read_text())
    text = config.get("text_config", config)
    text |= CASES[arch][0]
    arrays = mx.load(str(FIXTURES / arch / ("alt/dense.safetensors" if arch == "gpt_oss" else "model.safetensors")))
    if arch == "qwen3_moe":  # layers 1 and 3 have experts
        config |= {"num_hidden_layers": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
        arrays = {k.replace("layers.1.", "layers.0.").replace("layers.3.", "layers.1."): v for k, v in arrays.items()
                  if ".layers." not in k or "layers.1." in k or "layers.3." in k}  # fmt: skip
    if arch == "gpt_oss":
        config["num_hidden_layers"] = 2
        arrays = {k: v for k, v in arrays.items() if "layers.2." not in k}
    if "linear_value_head_dim" in text:
        arrays = with_square_heads(arch, text, arrays)
    if not config.get("attention_bias", True):
        arrays = {k: v for k, v in arrays.items() if not k.endswith("_proj.bias")}
    if arch == "gemma2":
        del arrays["lm_head.weight"]
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def with_square_heads(arch: str, text: dict, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Gated delta nets whose keys and values are of one size, as llama.cpp's are; other shapes drawn again."""
    size, keys, values = text["linear_key_head_dim"], text["linear_num_key_heads"], text["linear_num_value_heads"]
    shapes = {
        "in_proj_qkv.weight": (size * (2 * keys + values), text["hidden_size"]),
        "in_proj_qkvz.weight": (size * (2 * keys + 2 * values), text["hidden_size"]),
        "in_proj_z.weight": (size * values, text["hidden_size"]),
        "conv1d.weight": (size * (2 * keys + values), 1, text["linear_conv_kernel_dim"]),
        "linear_attn.norm.weight": (size,),
        "out_proj.weight": (text["hidden_size"], size * values),
    }
    random, made = np.random.default_rng(3), {}
    for name, array in arrays.items():
        shape = next((s for end, s in shapes.items() if name.endswith(end)), array.shape)
        drawn = random.standard_normal(shape) * np.std(np.array(array)) + np.mean(np.array(array))
        made[name] = array if shape == array.shape else mx.array(drawn.astype(np.float32))
    if arch == "qwen3_next":  # layer 1 has experts in the fixture's layer 3 alone
        made = {k: v for k, v in made.items() if "layers.1." not in k and "layers.2." not in k}
        made = {k.replace("layers.3.", "layers.1."): v for k, v in made.items()}
    if arch == "qwen3_5":  # the fixture begins with full attention and has no key to say so
        text["num_hidden_layers"], text["full_attention_interval"] = 2, 2
        swapped = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
        first = {k: v for k, v in made.items() if "layers.2." not in k}
        made = {re.sub(r"layers\.[01]\.", lambda m: swapped[m[0]], k): v for k, v in first.items()}
    return made


def log_shares(logits: np.ndarray) -> np.ndarray:
    far = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return far - np.log(np.exp(far).sum(-1, keepdims=True))


def ours(path: Path, arch: str, tokens: list[int]) -> np.ndarray:
    checkpoint = GgufCheckpoint(path)
    if arch == "gpt_oss":  # llama.cpp rounds where YaRN's ramp begins and ends; the published model does not
        checkpoint.config["rope_scaling"]["truncate"] = True
    engine = mlxrt.Engine(build(checkpoint, dtype=mx.float32), mlxrt.EngineConfig(kv_memory="64M"))
    with engine:
        return log_shares(np.array(engine.score(tokens)))


def metadata_rows(metadata: dict) -> int:
    return metadata[f"{metadata['general.architecture']}.vocab_size"]


@pytest.mark.parametrize("arch", CASES)
def test_log_probabilities_are_llama_cpps(tmp_path, arch):
    folder = made(arch, tmp_path)
    tokens = np.random.default_rng(5).integers(4, 64, 60).tolist()
    found = ours(convert(folder, tmp_path / "ours.gguf"), arch, tokens)
    metadata, tensors = plan_model(FolderCheckpoint(folder), "f32", tokenizer=False)
    write_gguf(tmp_path / "theirs.gguf", metadata | vocabulary_values(metadata_rows(metadata)), tensors)
    with Backend(
        "llama.cpp", {"gguf": str(tmp_path / "theirs.gguf"), "context": 128, "threads": 1, "exact": True}
    ) as peer:
        for n in (1, 9, 33, 60):
            theirs = np.array(peer.ask(do="scores", prompt=tokens[:n], vocab=64))
            likely = theirs > -15
            assert np.abs(found[n - 1] - theirs)[likely].max() < CASES[arch][1]
            assert theirs.std() > 1  # level shares would agree too
