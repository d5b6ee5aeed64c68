"""Folders as people have them: one file, shards, an index that is right, stale, wrong or hostile."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrt.errors import BadCheckpoint, ModelNotFound, NoTokenizer, UnsupportedModel
from mlxrt.weights import FolderCheckpoint, build
from mlxrt.weights.formats.folder import INDEX
from tests.support.tiny_files import CONFIG, float_weights, write_folder

DEEP = b'{"model_type":' + b"[" * 900 + b"]" * 900 + b"}"


def sharded(folder: Path, files=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")) -> dict:
    """Two shards; returns the weight_map."""
    write_folder(folder, {})
    (folder / "model.safetensors").unlink()
    weights = float_weights()
    mapped = {name: files[i % 2] for i, name in enumerate(weights)}
    for file in files:
        part = {name: mx.array(weights[name]) for name, where in mapped.items() if where == file}
        mx.save_safetensors(str(folder / file), part)
    return mapped


def write_index(folder: Path, mapped) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapped}))


@pytest.mark.parametrize(
    "files",
    [
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("weights.00.safetensors", "weights.01.safetensors"),
    ],
)
@pytest.mark.parametrize("index", [True, False])
def test_shards(tmp_path, files, index):
    mapped = sharded(tmp_path, files)
    if index:
        write_index(tmp_path, mapped)
    checkpoint = FolderCheckpoint(tmp_path)
    loaded, weights = checkpoint.load(), float_weights()
    assert loaded.keys() == weights.keys() == checkpoint.sizes().keys()
    assert all(np.array_equal(np.array(loaded[n]), w) for n, w in weights.items())
    assert {p.name for p in checkpoint.files()} >= {"config.json", *files}
    build(checkpoint)


def test_sizes_come_from_the_headers(tmp_path):
    sizes = FolderCheckpoint(write_folder(tmp_path, float_weights())).sizes()
    assert sizes["lm_head.weight"].shape == (48, 128) and sizes["lm_head.weight"].dtype == "F32"
    assert sizes["lm_head.weight"].nbytes == 48 * 128 * 4


def test_tensor_in_a_shard_but_not_in_the_index_is_loaded(tmp_path):
    mapped = sharded(tmp_path)
    del mapped["model.norm.weight"]
    write_index(tmp_path, mapped)
    assert "model.norm.weight" in FolderCheckpoint(tmp_path).load()


def test_missing_shard(tmp_path):
    write_index(tmp_path, sharded(tmp_path))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="1 of 2 shards are missing: model-00002-of-00002"):
        FolderCheckpoint(tmp_path).sizes()
    (tmp_path / INDEX).unlink()
    with pytest.raises(BadCheckpoint, match="1 of 2 shards are here"):
        FolderCheckpoint(tmp_path).sizes()


def test_mapped_tensor_that_its_shard_does_not_hold(tmp_path):
    mapped = sharded(tmp_path)
    write_index(tmp_path, mapped | {"model.ghost.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(BadCheckpoint, match=r"model.ghost.weight is not in model-00001-of-00002"):
        FolderCheckpoint(tmp_path).sizes()


def test_tensor_in_two_shards(tmp_path):
    mapped = sharded(tmp_path)
    write_index(tmp_path, mapped)
    first, second = sorted(set(mapped.values()))
    shard = mx.load(str(tmp_path / second))
    mx.save_safetensors(str(tmp_path / second), shard | mx.load(str(tmp_path / first)))
    with pytest.raises(BadCheckpoint, match="is in another shard too"):
        FolderCheckpoint(tmp_path).load()


def test_stale_index_beside_a_single_file(tmp_path):
    weights = float_weights()
    write_folder(tmp_path, weights)
    write_index(tmp_path, {"a": "model-00001-of-00009.safetensors"})
    found = dict(tree_flatten(build(FolderCheckpoint(tmp_path)).parameters()))
    assert all(np.array_equal(np.array(found[name]), array) for name, array in weights.items())


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "pytorch_model.bin",
        "",
        5,
        None,
        ["x"],
        "..safetensors",
        "x\0.safetensors",
    ],
)
def test_index_names_stay_in_the_folder(tmp_path, shard):
    mapped = sharded(tmp_path)
    write_index(tmp_path, mapped | {"a": shard})
    with pytest.raises(BadCheckpoint, match="not the name of a safetensors file"):
        FolderCheckpoint(tmp_path).sizes()


@pytest.mark.parametrize("mapped", [None, [], {}, "x", 3])
def test_index_without_a_map(tmp_path, mapped):
    sharded(tmp_path)
    write_index(tmp_path, mapped)
    with pytest.raises(BadCheckpoint, match="weight_map must be an object"):
        FolderCheckpoint(tmp_path).sizes()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"a": 1' * 3,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 5000,
        b'{"a":1,"a":2}',
        DEEP,
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
def test_bad_json(tmp_path, file, text):
    sharded(tmp_path)
    (tmp_path / file).write_bytes(text)
    with pytest.raises(BadCheckpoint, match=file):
        FolderCheckpoint(tmp_path).sizes()


def test_missing_pieces(tmp_path):
    with pytest.raises(ModelNotFound, match="no such folder"):
        FolderCheckpoint(tmp_path / "nowhere")
    with pytest.raises(BadCheckpoint, match=r"no config\.json"):
        FolderCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(BadCheckpoint, match="no weights"):
        FolderCheckpoint(tmp_path).load()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match="convert them to safetensors"):
        FolderCheckpoint(tmp_path).load()


def test_generation_config(tmp_path):
    write_folder(tmp_path, float_weights())
    assert FolderCheckpoint(tmp_path).generation == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert FolderCheckpoint(tmp_path).generation == {"temperature": 0.6}


def test_weights_without_a_tokenizer(tmp_path):
    checkpoint = FolderCheckpoint(write_folder(tmp_path, float_weights()))
    build(checkpoint)
    with pytest.raises(NoTokenizer):
        checkpoint.tokenizer()


def test_names_out_of_a_file_stay_on_one_line(tmp_path):
    extra = {"evil\nname": np.zeros(1, np.float32), "x" * 5000: np.zeros(1, np.float32)}
    with pytest.raises(BadCheckpoint, match="no parameter for 2 tensors") as raised:
        build(FolderCheckpoint(write_folder(tmp_path, float_weights() | extra)))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500
