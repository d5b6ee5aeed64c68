"""GGUF files of K-quants on this device: what the same numbers give as plain weights, in the memory of the file."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlxrt
from mlxrt.kernels.ops.k_quants import SPLIT_KINDS
from mlxrt.weights import GgufCheckpoint
from tests.support.k_quant_files import write_pair
from tests.support.parity import HERE, list_rows
from tests.support.qwen2_moe_folder import write_qwen2_moe

MOST_MEMORY = 1.06  # of the file's tensors
SWIGLU_ALPHA = 1.702  # of every gpt-oss
TOKENS = [(7 * i + i * i % 5) % 250 for i in range(90)]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "max_window_layers": 2}
WIDE |= {"shared_expert_intermediate_size": 256, "num_hidden_layers": 2}
ROWS = [row for row in list_rows(Path(os.environ.get("MLXRT_PARITY") or HERE)) if not row.variant]


def run(path, **options):
    """Log probabilities of a long text and of a short one, and greedy tokens of two prompts at once."""
    with mlxrt.load(str(path), kv_memory="64M", **options) as engine:
        vocabulary = engine.model.config.vocab_size
        texts = [[t % vocabulary for t in TOKENS[:n]] for n in (90, 21, 3)]
        scores = [np.array(engine.score(text)) for text in texts]
        done = engine.generate(texts[1:], max_tokens=24, temperature=0.0, ignore_eos=True)
        held = sum(a.nbytes for _, a in tree_flatten(engine.model.parameters()))
        return scores, [list(c.tokens) for c in done], held, dict(engine.model.kernels.used)


def compare(packed, plain, report, name, kernels="strict", allowed=1e-3):
    truth, tokens, _, _ = run(plain, dtype="float32")
    found, same, held, used = run(packed, dtype="float32", kernels=kernels)
    errors = [np.abs(f - t).max() / np.abs(t).max() for f, t in zip(found, truth)]
    infos = GgufCheckpoint(packed).sizes()
    # Rows of a tiny model's embedding may be shorter than a block; of its other matrices some are not.
    embedding = any("embed" in path and info.dtype.lower() in SPLIT_KINDS for path, info in infos.items())
    assert max(errors) < allowed and ("embed_rows" if embedding else "dequantize") in used
    assert kernels == "auto" or same == tokens
    half, _, _, used = run(packed, dtype="bfloat16", kernels=kernels)
    rounded = [np.abs(f - t).max() / np.abs(t).max() for f, t in zip(half, truth)]
    stored = sum(info.nbytes for info in infos.values())
    report(f"{name}: off by {max(errors):.1e}, bfloat16 {max(rounded):.1e}, {held / stored:.3f} of the file; {used}")
    return held / stored


@pytest.mark.parametrize("kind", SPLIT_KINDS)
def test_every_kind_with_experts(kind, tmp_path, report):
    folder = write_qwen2_moe(tmp_path / "moe", **WIDE)
    share = compare(*write_pair(folder, tmp_path / "k.gguf", [kind]), report, kind)
    assert share <= MOST_MEMORY


def test_a_mixture_of_kinds(tmp_path, report):
    folder = write_qwen2_moe(tmp_path / "moe", **WIDE)
    assert compare(*write_pair(folder, tmp_path / "k.gguf", [*SPLIT_KINDS]), report, "mixture") <= MOST_MEMORY


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_architecture(row, tmp_path, report):
    """Their tiny models are too narrow for other kinds than IQ4_NL, some for that. Gemma 2's and MiniMax-M2's
    enlarge rounding differences a hundredfold."""
    row.make_checkpoint(tmp_path)
    if json.loads((tmp_path / "config.json").read_text()).get("swiglu_alpha", SWIGLU_ALPHA) != SWIGLU_ALPHA:
        pytest.skip("GGUF has no key for its activation; MLXRT_PARITY=DIR takes other fixtures")
    packed, plain = write_pair(tmp_path, tmp_path / "k.gguf", ["iq4_nl"])
    if "IQ4_NL" not in {info.dtype for info in GgufCheckpoint(packed).sizes().values()}:
        pytest.skip("all rows are shorter than a block; MLXRT_PARITY=DIR takes wider fixtures")
    compare(packed, plain, report, str(row), kernels="auto", allowed=5e-3)
