"""GGUF files of the tests' converter, opened by llama.cpp itself: reader and writer cannot be wrong in the same way."""

import importlib.util
import json
from pathlib import Path

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

import numpy as np
import pytest

from mlxrt.bench.backend import Backend
from mlxrt.weights import GgufCheckpoint, build
from tests.support.llama_cpp_files import convert

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
}


def made(arch: str, folder: Path) -> Path:
    """A fixture without what llama.cpp does not have: dense layers among sparse ones, biases, packed experts."""
    config = json.loads((FIXTURES / arch / "config.json").read_text()) | CASES[arch][0]
    arrays = mx.load(str(FIXTURES / arch / ("alt/dense.safetensors" if arch == "gpt_oss" else "model.safetensors")))
    if arch == "qwen3_moe":  # layers 1 and 3 have experts
        config |= {"num_hidden_layers": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
        arrays = {k.replace("layers.1.", "layers.0.").replace("layers.3.", "layers.1."): v for k, v in arrays.items()
                  if ".layers." not in k or "layers.1." in k or "layers.3." in k}  # fmt: skip
    if arch == "gpt_oss":
        config["num_hidden_layers"] = 2
        arrays = {k: v for k, v in arrays.items() if "layers.2." not in k}
    if not config.get("attention_bias", True):
        arrays = {k: v for k, v in arrays.items() if not k.endswith("_proj.bias")}
    if arch == "gemma2":
        del arrays["lm_head.weight"]
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


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


@pytest.mark.parametrize("arch", CASES)
def test_log_probabilities_are_llama_cpps(tmp_path, arch):
    folder = made(arch, tmp_path)
    tokens = np.random.default_rng(5).integers(4, 64, 60).tolist()
    found = ours(convert(folder, tmp_path / "ours.gguf"), arch, tokens)
    gguf = str(convert(folder, tmp_path / "theirs.gguf", tokens=True))
    with Backend("llama.cpp", {"gguf": gguf, "context": 128, "threads": 1, "exact": True}) as peer:
        for n in (1, 9, 33, 60):
            theirs = np.array(peer.ask(do="scores", prompt=tokens[:n], vocab=64))
            likely = theirs > -15
            assert np.abs(found[n - 1] - theirs)[likely].max() < CASES[arch][1]
            assert theirs.std() > 1  # level shares would agree too
