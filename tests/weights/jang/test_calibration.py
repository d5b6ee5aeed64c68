"""What a converter counts an error with: the mean squares of inputs, seen as the model runs."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mlxrt
from mlxrt.cli import main
from mlxrt.cli.convert import sample_tokens
from mlxrt.weights import FolderCheckpoint
from mlxrt.weights.convert import convert as module
from mlxrt.weights.convert import encode
from mlxrt.weights.convert.calibration import ActivationRecorder, Importance, calibrate
from mlxrt.weights.convert.recipe import Recipe
from mlxrt.weights.convert.tensors import open_source

from ...support.log_lines import capture_log
from . import sources

TOKENS = np.random.default_rng(1).integers(3, 90, 24).tolist()
PARITY = Path(__file__).parents[2] / "parity"


def opened(folder: Path, **config) -> mlxrt.Engine:
    return mlxrt.load(str(folder), mlxrt.EngineConfig(dtype="float32", kernels="reference", **config))


def model(folder: Path, config: dict) -> Path:
    sources.write_source(folder, config, 5)
    return folder


@pytest.mark.parametrize("config", [sources.qwen3(), sources.llama(), sources.qwen3_moe(), sources.minimax()])
def test_every_codebook_matrix_has_its_inputs(config, tmp_path):
    folder = model(tmp_path / "m", config)
    source = open_source(FolderCheckpoint(folder))
    recipe = Recipe("codebook", codebook_size=16, length=4, experts=source.experts)
    encoded = {n: s[-1] for n, s in source.shapes.items() if recipe.choose(n, s).kind == "codebook"}
    with opened(folder) as engine:
        before = engine.score(TOKENS)
        found = calibrate(engine.model, engine.score, TOKENS)
        assert mx.array_equal(engine.score(TOKENS), before)
        assert not any(isinstance(m, ActivationRecorder) for _, m in engine.model.named_modules())
    assert len(encoded) == 6 and {n: found.squares[n].shape[0] for n in encoded} == encoded
    assert all(bool((found.squares[n] > 0).all()) for n in encoded)


@pytest.mark.parametrize("name", sorted(p.parent.name for p in PARITY.glob("*/config.json")))
def test_every_family_is_seen(name):
    """Whatever the names of a family's MLPs, no codebook matrix is missed."""
    try:
        source = open_source(FolderCheckpoint(PARITY / name))
    except mlxrt.UnsupportedModel:
        pytest.skip("this family is not converted")
    recipe = Recipe("codebook", codebook_size=16, length=2, experts=source.experts)
    encoded = {n: s[-1] for n, s in source.shapes.items() if recipe.choose(n, s).kind == "codebook"}
    with opened(PARITY / name) as engine:
        found = calibrate(engine.model, engine.score, [1 + i % 20 for i in range(16)])
    assert {n: found.squares[n].shape[0] for n in encoded if n in found.squares} == encoded


def test_they_are_the_mean_squares(tmp_path):
    """One layer whose attention adds nothing: what its MLP reads is the normed embedding."""
    folder = model(tmp_path / "m", sources.llama(num_hidden_layers=1))
    [file] = folder.glob("*.safetensors")
    arrays = load_file(file)
    arrays["model.layers.0.self_attn.o_proj.weight"] *= 0
    save_file(arrays, file)
    w = {n.removeprefix("model.layers.0."): a.astype(np.float64) for n, a in arrays.items()}
    x = w["model.embed_tokens.weight"][TOKENS]
    x = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * w["post_attention_layernorm.weight"]
    gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
    inner = gate / (1 + np.exp(-gate)) * up
    with opened(folder) as engine:
        found = calibrate(engine.model, engine.score, TOKENS).squares
    for name, inputs in (("gate", x), ("up", x), ("down", inner)):
        true = (inputs * inputs).mean(0)
        assert np.allclose(np.array(found[f"model.layers.0.mlp.{name}_proj.weight"]), true, rtol=1e-4, atol=1e-9)


def test_errors_are_put_where_they_cost_little():
    mx.random.seed(3)
    w, x = mx.random.normal((64, 64)), mx.random.normal((200, 64)) * mx.where(mx.arange(64) % 8 == 0, 8.0, 0.2)
    counts = Importance("", {"w": (x * x).mean(axis=0)})("w", 64)
    lost = []
    for weighing in (mx.ones(64), counts):
        made = encode.codebook(w, 4, 32, weighing)
        again = made["codebook"].astype(mx.float32)[made["indices"]].reshape(w.shape)
        lost.append(float(((x @ (again - w).T) ** 2).mean()))
    assert lost[1] < 0.7 * lost[0]


def test_an_input_that_was_never_used_still_counts():
    assert Importance("", {"w": mx.array([0.0, 2.0])})("w", 2).tolist() == pytest.approx([0.01, 2.01])
    assert Importance()("w", 2).tolist() == [1, 1]


def test_kernels_would_hide_the_layers(tmp_path):
    with opened(model(tmp_path / "m", sources.llama())) as engine:
        engine.model.kernels = type("Fused", (), {"gpu": "some"})()
        with pytest.raises(ValueError, match="reference"):
            calibrate(engine.model, engine.score, TOKENS)


def converted(source: Path, folder: Path, *more: str) -> int:
    shape = ("--format", "codebook", "--codes", "64", "--length", "4")
    return main(["convert", str(source), str(folder), *shape, "--json", *more])


def test_the_command_weighs_and_says_when_it_does_not(tmp_path, capsys):
    folder = model(tmp_path / "m", sources.qwen3_moe())
    assert converted(folder, tmp_path / "a") == 0
    weighed = json.loads(capsys.readouterr().out)
    assert converted(folder, tmp_path / "b", "--no-check") == 0
    output = capsys.readouterr()
    assert "all inputs count equally" in output.err and "kl" not in json.loads(output.out)
    with opened(folder) as engine:
        counts = calibrate(engine.model, engine.score, sample_tokens(engine, "any"))
    name = "codebook-layer-001-down_proj.safetensors"
    made = [load_file(tmp_path / at / name)["indices"] for at in "ab"]
    w = open_source(FolderCheckpoint(folder)).tensor("model.layers.1.mlp.experts.down_proj.weight")
    true = encode.codebook(w, 4, 64, counts("model.layers.1.mlp.experts.down_proj.weight", w.shape[-1]))["indices"]
    assert np.array_equal(made[0], np.array(true)) and not np.array_equal(made[1], made[0]) and weighed["kl"] > 0


def test_a_conversion_with_another_sample_does_not_go_on(tmp_path, monkeypatch, capsys):
    """Half of its matrices would be weighed by one text, half by another."""
    folder = model(tmp_path / "m", sources.qwen3())
    squares = {"model.layers.0.mlp.up_proj.weight": mx.ones(192)}
    recipe = Recipe("codebook", codebook_size=16, length=4)

    def go(token: int) -> None:
        counts = Importance.from_squares([token], squares)
        module.convert(FolderCheckpoint(folder), tmp_path / "out", recipe, calibrate=lambda: counts)

    written = module.write_shard

    def stopped(path, arrays):
        written(path, arrays)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_shard", stopped)
    with pytest.raises(KeyboardInterrupt):
        go(1)
    monkeypatch.setattr(module, "write_shard", written)
    with pytest.raises(mlxrt.BadRequest, match="another interrupted conversion"):
        go(2)
    go(1)


def test_a_matrix_that_the_sample_did_not_reach_is_named(tmp_path):
    folder, logged = model(tmp_path / "m", sources.qwen3()), capture_log()
    counts = Importance.from_squares([1], {"model.layers.0.mlp.up_proj.weight": mx.ones(192)})
    recipe = Recipe("codebook", codebook_size=16, length=4)
    module.convert(FolderCheckpoint(folder), tmp_path / "out", recipe, calibrate=lambda: counts)
    assert any("did not reach 5 matrices" in line for line in logged)


def test_nothing_is_weighed_for_a_folder_that_is_there_or_a_format_that_does_not_ask(tmp_path):
    folder, calls = model(tmp_path / "m", sources.qwen3()), []

    def weigh() -> Importance:
        calls.append(1)
        return Importance()

    with pytest.raises(mlxrt.BadRequest, match="exists"):
        module.convert(FolderCheckpoint(folder), folder, Recipe("codebook"), calibrate=weigh)
    module.convert(FolderCheckpoint(folder), tmp_path / "out", Recipe("mlx"), calibrate=weigh)
    assert not calls


def test_recording_changes_nothing():
    layer = nn.Linear(8, 4)
    watched, x = ActivationRecorder(layer), mx.random.normal((3, 8))
    assert mx.array_equal(watched(x), layer(x)) and mx.allclose(watched.mean_squares(), (x * x).mean(axis=0))
