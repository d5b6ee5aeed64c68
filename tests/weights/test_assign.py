"""Nothing of a checkpoint is lost, nothing of a model is left unfilled."""

import io
import logging
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrt.errors import BadCheckpoint, UnsupportedModel
from mlxrt.weights import FolderCheckpoint, build
from mlxrt.weights.load import assign as assign_module
from tests.support.tiny_files import CONFIG, float_weights, write_folder

TIED = CONFIG | {"tie_word_embeddings": True}


def made(tmp_path, arrays, config=CONFIG, **options):
    return build(FolderCheckpoint(write_folder(tmp_path, arrays, config)), **options)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_tensor_arrives(tmp_path, family):
    config = CONFIG | {"model_type": family}
    weights = float_weights(config)
    filled = dict(tree_flatten(made(tmp_path, weights, config).parameters()))
    assert filled.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(np.array(filled[name]), value)


def test_missing_tensors_are_listed(tmp_path):
    weights = float_weights()
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        del weights[name]
    with pytest.raises(BadCheckpoint, match=r"no tensor for 2 tensors \(model.layers.1.mlp.up_proj.weight, model.norm"):
        made(tmp_path, weights)


def test_leftovers_are_listed_and_counted(tmp_path):
    extra = {f"model.layers.0.vision.{i}.weight": np.zeros(2, np.float32) for i in range(7)}
    with pytest.raises(BadCheckpoint, match=r"no parameter for 7 tensors \(model.layers.0.vision.0.* and 2 more\)"):
        made(tmp_path, float_weights() | extra)


def test_scales_without_a_module_are_leftovers(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"no parameter for 1 tensors \(model.nowhere.scales\)"):
        made(tmp_path, float_weights() | {"model.nowhere.scales": np.zeros((2, 2), np.float32)})


def test_named_drops(tmp_path):
    weights = float_weights()
    more = weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    found = dict(tree_flatten(made(tmp_path, more).parameters()))
    assert found.keys() == weights.keys()
    assert all(np.array_equal(np.array(found[name]), array) for name, array in weights.items())


def test_wrong_shape_names_tensor_expected_found(tmp_path):
    weights = float_weights() | {"model.layers.0.self_attn.k_proj.weight": np.zeros((64, 64), np.float32)}
    with pytest.raises(
        BadCheckpoint, match=r"layers.0.self_attn.k_proj.weight: expected shape \[64, 128\], found \[64, 64\]"
    ):
        made(tmp_path, weights)


def test_wrong_dtype_names_tensor_expected_found(tmp_path):
    weights = float_weights() | {"model.norm.weight": np.zeros(128, np.int32)}
    with pytest.raises(BadCheckpoint, match=r"model.norm.weight: expected float32, float16 or bfloat16, found int32"):
        made(tmp_path, weights)


def test_no_floats_at_all(tmp_path):
    weights = {name: value.astype(np.int32) for name, value in float_weights().items()}
    with pytest.raises(BadCheckpoint, match="no float tensors"):
        made(tmp_path, weights)


def test_fewer_layers_than_the_config_says(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"says 4000 layers, the weights hold 2"):
        made(tmp_path, float_weights(), CONFIG | {"num_hidden_layers": 4000})


def test_more_layers_than_the_config_says(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"no parameter for 9 tensors \(model.layers.1"):
        made(tmp_path, float_weights(), CONFIG | {"num_hidden_layers": 1})


def test_one_dtype_for_all(tmp_path):
    weights = {k: mx.array(v).astype(mx.bfloat16 if v.ndim == 2 else mx.float32) for k, v in float_weights().items()}
    for dtype in (None, mx.float16, mx.float32):
        model = made(tmp_path, weights, dtype=dtype)
        assert {p.dtype for _, p in tree_flatten(model.parameters())} == {dtype or mx.bfloat16}


def test_tied_head_that_equals_the_embedding_is_dropped(tmp_path):
    weights = float_weights(TIED)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    assert "lm_head" not in made(tmp_path, weights, TIED)


def test_tied_head_that_differs_is_not_used_and_said(tmp_path, caplog):
    """As other loaders do: two roundings of one matrix are common."""
    weights = float_weights(TIED)
    plain = made(tmp_path, weights, TIED)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + np.float32(1e-3)
    model = made(tmp_path, weights, TIED)
    assert "lm_head" not in model
    assert mx.array_equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    [line] = caplog.messages
    assert "lm_head.weight, which differs from model.embed_tokens, is not used" in line


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_tied_head(tmp_path, bits, caplog):
    weights = float_weights(TIED)
    table = mx.array(weights.pop("model.embed_tokens.weight"))
    arrays = {k: mx.array(v) for k, v in weights.items()}
    for path, width in (("model.embed_tokens", 4), ("lm_head", bits)):
        arrays |= {f"{path}.{p}": a for p, a in zip(("weight", "scales", "biases"), mx.quantize(table, 32, width))}
    assert "lm_head" not in made(tmp_path, arrays, TIED)
    lines = [line for line in caplog.messages if "which differs from model.embed_tokens, is not used" in line]
    assert len(lines) == (0 if bits == 4 else 1)


def test_unknown_architecture(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"mamba9 is not supported: .*llama"):
        made(tmp_path, float_weights(), CONFIG | {"model_type": "mamba9"})


@pytest.mark.parametrize("level, shown", [(logging.NOTSET, True), (logging.INFO, True), (logging.WARNING, False)])
def test_large_weights_are_read_in_parts_with_a_bar_on_a_terminal(level, shown, monkeypatch):
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    arrays = [mx.ones((n,)) * 2 for n in (3, 5, 100, 1, 1)]
    monkeypatch.setattr(assign_module, "BAR_BYTES", 0)
    monkeypatch.setattr(assign_module, "PART_BYTES", 30)
    assert [len(part) for part in assign_module.split_by_size(arrays)] == [2, 1, 2]
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setattr(logging.getLogger("mlxrt"), "level", level)
    assign_module.read_weights(arrays)
    assert ("loading" in screen.getvalue()) == shown
    assert all(array.sum().item() == 2 * array.size for array in arrays)
