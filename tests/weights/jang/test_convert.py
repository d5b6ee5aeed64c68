"""Folders that `mlxrt convert` writes: every tensor as its format defines it, whole or not there at all."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

import mlxrt
from mlxrt.cli import main
from mlxrt.errors import BadRequest
from mlxrt.models.quantized.lut_linear import LUTEncoding
from mlxrt.weights import FolderCheckpoint
from mlxrt.weights.convert import convert
from mlxrt.weights.convert.recipe import Recipe
from mlxrt.weights.convert.tensors import open_source

from ...support.log_lines import capture_log
from . import definition as of
from . import sources
from .float_model import close
from .makers import MAKERS
from .test_checkpoints import logits

PARITY = Path(__file__).parents[2] / "parity"
TOKENS = np.random.default_rng(1).integers(3, 60, 24).tolist()


def written(source: Path, folder: Path, recipe: Recipe, **options) -> dict[str, np.ndarray]:
    convert.convert(FolderCheckpoint(source), folder, recipe, **options)
    made = {}
    for path in sorted(folder.glob("*.safetensors")):
        under = f"{path.stem}/" if path.name.startswith("codebook-") else ""
        made |= {under + name: array for name, array in load_file(path).items()}
    assert not list(folder.parent.glob("*.partial")) and not list(folder.glob(".*"))
    return made


def plain(folder: Path) -> dict[str, np.ndarray]:
    model = open_source(FolderCheckpoint(folder))
    return {name: np.array(model.tensor(name).astype(mx.float32)) for name in model.shapes}


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe") / "source"
    sources.write_source(folder, sources.qwen3_moe(hidden=96, inner=80, experts=4), 3)
    return folder


def test_affine_is_mlx_own(moe, tmp_path):
    made = written(moe, tmp_path / "out", Recipe("mlx", bits=3, group=32))
    true = plain(moe)
    for name, path in [
        ("model.layers.0.mlp.experts.up_proj", "model.layers.0.mlp.switch_mlp.up_proj"),
        ("lm_head",) * 2,
    ]:
        words, scales, biases = mx.quantize(mx.array(true[f"{name}.weight"]).astype(mx.float16), 32, 3)
        for part, array in (("weight", words), ("scales", scales), ("biases", biases)):
            assert np.array_equal(made[f"{path}.{part}"], np.array(array))
    assert made["model.layers.0.mlp.switch_mlp.down_proj.weight"].dtype == np.float16  # 80 inputs: no group of 32
    assert made["model.layers.0.mlp.gate.weight"].dtype == np.float16


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_floats_are_stored_as_asked(moe, tmp_path, dtype):
    """Of matrices that are packed now, and of those that were: their codes stay, their scales are rounded."""
    name = str(dtype).removeprefix("mlx.core.")
    path, true = "lm_head", plain(moe)
    written(moe, tmp_path / "as it was", Recipe("mlx", bits=4))
    for source in (moe, tmp_path / "as it was"):
        folder = tmp_path / f"of {source.name}"
        bits = 4 if source == moe else None
        convert.convert(FolderCheckpoint(source), folder, Recipe("mlx", bits=bits, dtype=name))
        made = {}
        for file in folder.glob("*.safetensors"):
            made |= mx.load(str(file))
        assert {a.dtype for a in made.values()} == {dtype, mx.uint32}
        assert json.loads((folder / "config.json").read_text())["torch_dtype"] == name
        given = mx.array(true[f"{path}.weight"]).astype(dtype if source == moe else mx.float16)
        words, scales, biases = mx.quantize(given, 64 if given.shape[-1] % 64 == 0 else 32, 4)
        for part, array in (("weight", words), ("scales", scales.astype(dtype)), ("biases", biases.astype(dtype))):
            assert mx.array_equal(made[f"{path}.{part}"], array), part
        with mlxrt.load(str(folder)) as engine:
            assert mx.isfinite(engine.score(TOKENS)).all()


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_indices_are_the_definitions(moe, tmp_path, bits):
    made = written(moe, tmp_path / "out", Recipe("jangtq", bits=bits))
    true = plain(moe)
    for proj in ("gate_proj", "down_proj"):
        at, w = f"model.layers.1.mlp.switch_mlp.{proj}", true[f"model.layers.1.mlp.experts.{proj}.weight"]
        tensors, _ = of.jangtq(w, bits)
        coding = LUTEncoding.jangtq(bits, w.shape[-1], 42)
        ours, theirs = (np.array(coding.unpack(mx.array(t))) for t in (made[f"{at}.tq_packed"], tensors["tq_packed"]))
        assert (ours != theirs).mean() < 1e-3 and np.abs(ours.astype(int) - theirs).max() <= 1  # float32 on a border
        assert np.allclose(made[f"{at}.tq_norms"].astype(float), tensors["tq_norms"].astype(float), rtol=1e-3)
        assert made[f"{at}.tq_bits"].tolist() == [bits]


def test_every_run_has_its_nearest_vector(moe, tmp_path):
    made = written(moe, tmp_path / "out", Recipe("codebook", codebook_size=64, length=4))
    w = plain(moe)["model.layers.0.mlp.experts.gate_proj.weight"]
    book, codes = (made[f"codebook-layer-000-gate_proj/{part}"] for part in ("codebook", "indices"))
    runs = w.reshape(-1, 4)
    far = ((runs[:, None] - book.astype(np.float32)) ** 2).sum(-1)
    assert np.allclose(np.take_along_axis(far, codes.reshape(-1, 1).astype(int), 1)[:, 0], far.min(1), atol=1e-5)
    random = ((runs[:, None] - runs[None, :64]) ** 2).sum(-1).min(1).mean()
    assert far.min(1).mean() < 0.8 * random  # learned, not drawn


FORMATS = [
    Recipe("mlx", bits=8, group=32),
    Recipe("jang", profile="JANG_6M"),
    Recipe("jang", profile="JANG_6M", hadamard=True),
    Recipe("jangtq", bits=4),
]


@pytest.mark.parametrize("recipe", FORMATS, ids=lambda r: r.name + ("-hadamard" if r.hadamard else ""))
@pytest.mark.parametrize("source", ["moe", "minimax", "tied", "qwen3_5_moe", "qwen3_next", "gemma3_text", "mixed"])
def test_converted_model_is_its_source_but_for_rounding(source, recipe, moe, tmp_path):
    folders = {"moe": lambda: moe, "mixed": lambda: MAKERS["mixed"](seed=6).write(tmp_path / "mixed")}
    own = {
        "minimax": sources.minimax(hidden=64, inner=48, experts=3, head_dim=16, rotary_dim=8),
        "tied": sources.llama(),
    }
    if source in own:
        sources.write_source(tmp_path / "source", own[source], 4)
        folder = tmp_path / "source"
    else:
        folder = folders[source]() if source in folders else PARITY / source
    if source == "gemma3_text" and recipe.format != "jangtq":  # no row is a whole group
        with pytest.raises(BadRequest, match="no matrix can be quantised"):
            written(folder, tmp_path / "out", recipe)
        return
    made = written(folder, tmp_path / "out", recipe)
    assert any(array.dtype == np.uint32 for array in made.values())
    before, after = plain(folder), plain(tmp_path / "out")
    assert set(before) == set(after)
    for name, w in before.items():
        assert np.linalg.norm(after[name] - w) <= 0.12 * np.linalg.norm(w) + 1e-6, name
    config = {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != "quantization"}
    true = logits(of.write(tmp_path / "true", config, after), True, TOKENS)
    for unpack in (True, False):
        assert close(logits(tmp_path / "out", unpack, TOKENS), true) < 1e-4


def test_matrices_that_no_group_divides_are_named(moe, tmp_path):
    warned = capture_log("2 of 16 matrices stay float: ")
    written(moe, tmp_path / "out", Recipe("mlx", bits=4, group=32))  # its downs have rows of 80 numbers
    assert len(warned) == 1 and "down_proj.weight has rows of 80 numbers, no multiple of 32" in warned[0]
    with pytest.raises(BadRequest, match=r"no matrix can be quantised: .* has rows of 36 numbers"):
        written(PARITY / "mixtral", tmp_path / "none", Recipe("mlx", bits=4, group=32))
    assert not (tmp_path / "none").exists()


def test_stopped_conversion_goes_on(moe, tmp_path, monkeypatch):
    full = written(moe, tmp_path / "full", Recipe("jang"), shard_bytes=20_000)
    write, done = convert.write_shard, []

    def stop_at_the_third(path, arrays):
        if len(done) == 2:
            raise KeyboardInterrupt
        write(path, arrays)
        done.append(path)

    monkeypatch.setattr(convert, "write_shard", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        convert.convert(FolderCheckpoint(moe), tmp_path / "out", Recipe("jang"), shard_bytes=20_000)
    monkeypatch.setattr(convert, "write_shard", write)
    assert not (tmp_path / "out").exists()
    before = {path: path.stat().st_mtime_ns for path in done}
    with pytest.raises(mlxrt.MlxrtError, match="another interrupted conversion"):
        convert.convert(FolderCheckpoint(moe), tmp_path / "out", Recipe("jang", profile="JANG_2L"))
    logged = capture_log()
    convert.convert(FolderCheckpoint(moe), tmp_path / "out", Recipe("jang"), shard_bytes=20_000)
    assert sum("exists already" in line for line in logged) == 2
    assert {(tmp_path / "out" / path.name).stat().st_mtime_ns for path in done} == set(before.values())
    files = sorted(path.name for path in (tmp_path / "full").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "out").iterdir()) and len(files) > 6
    for name in files:
        assert (tmp_path / "full" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert full


def test_stopped_as_the_folder_gets_its_name(moe, tmp_path, monkeypatch):
    """The same command completes it: the folder is still known as that conversion's."""
    folder, rename = tmp_path / "out", os.replace

    def stop(source, target):
        if target == folder:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(convert.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        convert.convert(FolderCheckpoint(moe), folder, Recipe("mlx"))
    monkeypatch.undo()
    made = written(moe, folder, Recipe("mlx"))
    assert made and not (folder / convert.JOURNAL).exists()


def test_a_source_that_changes_meanwhile_is_refused(moe, tmp_path, monkeypatch):
    source, write = shutil.copytree(moe, tmp_path / "source"), convert.write_shard

    def touch_and_write(path, arrays):
        os.utime(source / "config.json", (1e9, 1e9))
        write(path, arrays)

    monkeypatch.setattr(convert, "write_shard", touch_and_write)
    with pytest.raises(mlxrt.BadCheckpoint, match="changed while it was converted"):
        convert.convert(FolderCheckpoint(source), tmp_path / "out", Recipe("jang"))
    assert not (tmp_path / "out").exists()


def test_existing_folder_is_left_alone(moe, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(mlxrt.MlxrtError, match="exists"):
        convert.convert(FolderCheckpoint(moe), tmp_path / "out", Recipe("jang"))


@pytest.mark.parametrize("recipe", [Recipe("mlx", bits=4, group=32), Recipe("mlx"), Recipe("mlx", bits=16)])
def test_a_disk_without_space_for_every_tensor_is_refused_at_once(recipe, moe, tmp_path, monkeypatch):
    made = written(moe, tmp_path / "out", recipe)
    size = sum(array.nbytes for array in made.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size - 1))
    with pytest.raises(BadRequest, match=f"needs about {size} bytes, its disk has {size - 1} free"):
        convert.convert(FolderCheckpoint(moe), tmp_path / "again", recipe)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_tiers(moe):
    recipe = Recipe("jang", profile="JANG_2L", experts=4)
    bits = {
        "model.layers.0.self_attn.q_proj.weight": 8, "lm_head.weight": 8, "model.embed_tokens.weight": 6,
        "model.layers.0.mlp.experts.up_proj.weight": 2, "model.layers.0.mlp.down_proj.weight": 8,
        "model.layers.0.mlp.shared_expert.up_proj.weight": 8, "model.layers.0.mlp.gate.weight": 16,
        "model.layers.0.linear_attn.in_proj_qkv.weight": 6,
    }  # fmt: skip
    for name, width in bits.items():
        assert recipe.choose(name, (64, 64)).bits == width, name
    assert Recipe("jang", profile="JANG_2L").choose("model.layers.0.mlp.down_proj.weight", (64, 64)).bits == 2
    many = Recipe("jang", profile="JANG_2L", experts=256)
    found = [many.choose(f"model.layers.0.mlp.experts.{p}_proj.weight", (256, 64, 128)) for p in ("gate", "up", "down")]
    assert [(c.bits, c.group_size) for c in found] == [(4, 128), (2, 128), (3, 128)]


def test_command(moe, tmp_path, capsys):
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({r"self_attn": {"bits": 8}, r"embed": None, r".": {"bits": 4, "group_size": 32}}))
    call = ["convert", str(moe), str(tmp_path / "out"), "--format", "mlx", "--rules", str(rules), "--json"]
    assert main(call) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["folder"] == str(tmp_path / "out") and 4 < report["bits_per_weight"] < 10
    assert report["kl"] >= 0 and 0 <= report["same_choice"] <= 1 and report["tokens"] == 64
    stored = sum(a.nbytes for a in load_file(next((tmp_path / "out").glob("*.safetensors"))).values())
    assert report["bytes"] == stored and report["bits_per_weight"] == pytest.approx(
        8 * stored / report["parameters"], abs=1e-4
    )
    assert main(["convert", str(moe), str(tmp_path / "b"), "--format", "jang", "--no-check"]) == 0
    assert "bits per weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--format", "zip"], [], ["--format", "jang", "--bits", "4"], ["--format", "jang", "--profile", "JANG_9Z"],
        ["--format", "mlx", "--bits", "7"], ["--format", "mlx", "--hadamard"], ["--format", "jangtq", "--bits", "5"],
        ["--format", "jangtq", "--rules", "x.json"], ["--format", "codebook", "--length", "3"],
        ["--format", "codebook", "--codes", "1"], ["--format", "mlx", "--group-size", "48"],
        ["--format", "jang", "--shard-size", "0"], ["--format", "jang", "--dtype", "bfloat16"],
        ["--format", "mlx", "--dtype", "int8"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_flags_are_one_line(flags, moe, tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"a": null}')
    flags = [str(tmp_path / f) if f == "x.json" else f for f in flags]
    assert main(["convert", str(moe), str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert error and "\n" not in error and not (tmp_path / "out").exists()
