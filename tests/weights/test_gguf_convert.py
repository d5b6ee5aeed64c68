"""GGUF files that `mlxrt convert` writes: tensor by tensor llama.cpp's converter's, complete or not there."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import mlx.core as mx
import numpy as np
import pytest

from mlxrt.errors import BadCheckpoint, BadRequest, UnsupportedModel
from mlxrt.weights import FolderCheckpoint, GgufCheckpoint
from mlxrt.weights.convert import convert as converter
from mlxrt.weights.convert.gguf import ARCHITECTURE_OF, convert_to_gguf
from mlxrt.weights.convert.gguf_types import FILE_TYPES, TypeMix
from mlxrt.weights.formats.gguf.writer import TensorPlan, write_gguf
from tests.parity_adapter import logits
from tests.support.llama_cpp_files import convert
from tests.support.phi3_folder import long_rope, write_phi3
from tests.support.qwen2_moe_folder import write_qwen2_moe
from tests.support.tiny_files import CONFIG, float_weights, write_folder

FIXTURES = Path(__file__).parents[1] / "parity"
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 16, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "original_max_position_embeddings": 32}
TINY = {
    "llama": {},
    "llama3": {"rope_scaling": LLAMA_3, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "rope_scaling": YARN},
}
TOKENS = [3, 9, 4, 1, 30, 22, 8]


def source(name: str, folder: Path) -> Path:
    """A model of every architecture, by the name of a fixture or of a tiny model."""
    if name in TINY:
        config = CONFIG | TINY[name]
        return write_folder(folder, float_weights(config), config)
    if name.startswith("phi3"):
        return write_phi3(folder, **(long_rope(8) if "long" in name else {}))
    if name == "qwen2_moe":
        return write_qwen2_moe(folder)
    folder.mkdir()
    config = json.loads((FIXTURES / name / "config.json").read_text())
    change = {"swiglu_alpha": 1.702} if name == "gpt_oss" else {}  # GGUF has no key for another
    (folder / "config.json").write_text(json.dumps(config | change))
    shutil.copy(FIXTURES / name / "model.safetensors", folder / "model.safetensors")
    return folder


NAMES = [*TINY, "phi3", "phi3_long", "qwen2_moe", *sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())]
# The oracle keeps what our models do not use, and a shape that the reader takes both ways.
UNUSED = ("attn_k.", "attn_k_norm.", "attn_v.")


def written(folder: Path, path: Path, kind: str, **options) -> GgufCheckpoint:
    convert_to_gguf(FolderCheckpoint(folder), path, kind, tokenizer=False, **options)
    assert [p for p in path.parent.iterdir() if p.suffix == ".writing"] == []
    return GgufCheckpoint(path)


def values(checkpoint: GgufCheckpoint, name: str) -> np.ndarray:
    tensor = checkpoint.file.tensors[name]
    rows = checkpoint.file.tensor_bytes(tensor).reshape(tensor.shape[0], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.ggml_type]).reshape(tensor.shape)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_file_as_llama_cpps_converter(name, tmp_path):
    folder = source(name, tmp_path / "source")
    ours = written(folder, tmp_path / "ours.gguf", "f32")
    theirs = GgufCheckpoint(convert(folder, tmp_path / "theirs.gguf"))
    extra = theirs.file.tensors.keys() - ours.file.tensors.keys()
    assert not ours.file.tensors.keys() - theirs.file.tensors.keys()
    assert all(part.split(".", 2)[2].startswith(UNUSED) for part in extra) and (not extra or name == "gemma4_e2b")
    for part in ours.file.tensors:
        np.testing.assert_allclose(values(ours, part).squeeze(), values(theirs, part).squeeze(), rtol=1e-6, atol=1e-7)
    assert ours.config.keys() == theirs.config.keys()
    for key, value in theirs.config.items():
        assert ours.config[key] == value or np.allclose(ours.config[key], value, rtol=1e-6), key
    assert np.abs(logits(tmp_path / "ours.gguf", TOKENS) - logits(folder, TOKENS)).max() < 1e-4


def test_every_family_has_an_architecture():
    from mlxrt.models import FAMILIES

    assert set(ARCHITECTURE_OF) == set(FAMILIES)


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_matrices_are_near_the_source(kind, tmp_path):
    """Rows of 256 in the MLP, of 128 elsewhere: the fall-backs are in use."""
    folder = source("llama", tmp_path / "source")
    plain, made = written(folder, tmp_path / "plain.gguf", "f32"), written(folder, tmp_path / "made.gguf", kind)
    assert made.metadata["general.file_type"] == FILE_TYPES[kind][0]
    limit = {"Q2_K": 0.35, "Q3_K": 0.2, "Q4_0": 0.12}.get(FILE_TYPES[kind][1], 0.1)
    for name in plain.file.tensors:
        expected, found = values(plain, name), values(made, name)
        assert np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()) < limit, name
        assert "norm" not in name or np.array_equal(found, expected)
    down = made.file.tensors["blk.1.ffn_down.weight"]
    assert down.ggml_type == TypeMix(kind, 2, 2).choose(down.name, down.shape)


def test_floats_are_exact(tmp_path):
    folder = source("qwen3", tmp_path / "source")
    arrays = {k: v.astype(mx.bfloat16) for k, v in mx.load(str(folder / "model.safetensors")).items()}
    for kind, dtype in (("f32", mx.float32), ("bf16", mx.bfloat16)):
        same = shutil.copytree(folder, tmp_path / kind)
        mx.save_safetensors(str(same / "model.safetensors"), {k: v.astype(dtype) for k, v in arrays.items()})
        mx.save_safetensors(str(folder / "model.safetensors"), arrays)
        written(folder, tmp_path / f"{kind}.gguf", kind)
        np.testing.assert_array_equal(logits(tmp_path / f"{kind}.gguf", TOKENS), logits(same, TOKENS))


def test_packed_sources(tmp_path):
    """MLX's affine matrices are unpacked; mxfp4 is copied, or unpacked where floats are asked for."""
    folder = source("llama", tmp_path / "source")
    converter.convert(FolderCheckpoint(folder), tmp_path / "mlx", converter.Recipe("mlx", bits=4, group=32))
    written(tmp_path / "mlx", tmp_path / "mlx.gguf", "f32")
    assert np.abs(logits(tmp_path / "mlx.gguf", TOKENS) - logits(tmp_path / "mlx", TOKENS)).max() < 0.01
    experts = source("gpt_oss", tmp_path / "experts")
    theirs = GgufCheckpoint(convert(experts, tmp_path / "theirs.gguf"))
    for kind, stored in (("q8_0", "MXFP4"), ("f32", "F32")):
        ours = written(experts, tmp_path / f"{kind}.gguf", kind)
        name = "blk.1.ffn_gate_exps.weight"
        assert ours.file.tensors[name].ggml_type == stored
        np.testing.assert_array_equal(values(ours, name), values(theirs, name))


def test_a_gguf_source_keeps_what_it_has(tmp_path):
    """Metadata byte for byte, tensors of the wanted type bit for bit, others unpacked first."""
    folder = source("llama", tmp_path / "source")

    def extra(writer):
        writer.add_uint64("general.parameter_count", 2**40)
        writer.add_string("tokenizer.ggml.model", "llama")
        writer.add_array("llama.of_its_own", [1.5, 2.5])

    old = GgufCheckpoint(convert(folder, tmp_path / "old.gguf", kind="Q8_0", extra=extra))
    convert_to_gguf(old, tmp_path / "same.gguf", "q8_0")
    convert_to_gguf(old, tmp_path / "floats.gguf", "f32", tokenizer=False)
    same, floats = GgufCheckpoint(tmp_path / "same.gguf"), GgufCheckpoint(tmp_path / "floats.gguf")
    for key in old.metadata.keys() - {"general.file_type"}:
        assert same.file.files[0].value_bytes(key) == old.file.files[0].value_bytes(key), key
    assert "tokenizer.ggml.model" in same.metadata and "tokenizer.ggml.model" not in floats.metadata
    assert old.file.tensors.keys() == same.file.tensors.keys() == floats.file.tensors.keys()
    for name, tensor in old.file.tensors.items():
        other = same.file.tensors[name]
        assert (other.shape, other.ggml_type) == (tensor.shape, tensor.ggml_type)
        np.testing.assert_array_equal(same.file.tensor_bytes(other), old.file.tensor_bytes(tensor))
        np.testing.assert_array_equal(values(floats, name), values(old, name))


MIXES = [
    # llama.cpp's Q4_K_M of 32 layers: more bits in these
    ("q4_k_m", 32, "ffn_down", "Q6_K", [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]),
    ("q4_k_m", 32, "attn_v", "Q6_K", [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]),
    ("q5_k_m", 16, "ffn_down_exps", "Q6_K", [0, 1, 4, 7, 10, 13, 14, 15]),
    ("q4_k_s", 16, "ffn_down", "Q5_K", [0, 1]),
    ("q4_k_s", 16, "attn_v", "Q5_K", [0, 1, 2, 3]),
    ("q3_k_m", 32, "ffn_down", "Q5_K", [0, 1]),
    ("q6_k", 4, "ffn_down", "Q6_K", [0, 1, 2, 3]),
    ("q4_0", 4, "attn_v", "Q4_0", [0, 1, 2, 3]),
]


@pytest.mark.parametrize("kind, layers, stem, more, expected", MIXES)
def test_mixes(kind, layers, stem, more, expected):
    mix = TypeMix(kind, layers)
    types = [mix.choose(f"blk.{i}.{stem}.weight", (64, 256)) for i in range(layers)]
    assert [i for i, chosen in enumerate(types) if chosen == more] == expected
    assert len(set(types)) <= 2


def test_heads_and_narrow_rows():
    mix = TypeMix("q4_k_m", 30, tied=True)
    assert mix.choose("token_embd.weight", (64, 256)) == "Q6_K" and mix.choose("token_embd.weight", (64, 576)) == "Q8_0"
    assert (
        mix.choose("blk.9.ffn_up.weight", (64, 576)) == "Q5_0" and mix.choose("blk.9.ffn_up.weight", (64, 48)) == "F16"
    )
    untied = TypeMix("q4_0", 30)
    assert (
        untied.choose("output.weight", (64, 256)) == "Q6_K" and untied.choose("token_embd.weight", (64, 256)) == "Q4_0"
    )
    assert TypeMix("q2_k", 30).choose("blk.0.ffn_up.weight", (64, 96)) == "IQ4_NL"
    for name in ("blk.0.ffn_gate_inp.weight", "blk.0.attn_norm.weight", "blk.0.attn_q.bias", "blk.0.ssm_conv1d.weight"):
        assert mix.choose(name, (64, 256)) == "F32"
    with pytest.raises(BadRequest, match="--type must be one of f32, f16"):
        TypeMix("q9", 3)


REFUSED = [
    ({"model_type": "gemma"}, "gemma cannot be written as GGUF; these can: gemma2, "),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' has no form in GGUF"),
    (
        {"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
        "qwen3 files of GGUF cannot hold rope = ",
    ),
]


@pytest.mark.parametrize("changes, said", REFUSED)
def test_what_gguf_cannot_hold_is_refused_by_name(changes, said, tmp_path):
    folder = write_folder(tmp_path / "source", float_weights(CONFIG | changes), CONFIG | changes)
    with pytest.raises(UnsupportedModel, match=said):
        written(folder, tmp_path / "x.gguf", "f32")
    assert not (tmp_path / "x.gguf").exists()


def test_values_that_a_type_cannot_hold(tmp_path):
    weights = float_weights()
    weights["lm_head.weight"][3, 4] = 1e6
    folder = write_folder(tmp_path / "source", weights)
    written(folder, tmp_path / "fine.gguf", "bf16")
    for kind, wrong in (("q8_0", 1e6), ("f32", np.nan)):
        weights["lm_head.weight"][3, 4] = wrong
        write_folder(folder, weights)
        with pytest.raises(BadCheckpoint, match=r"output\.weight holds"):
            written(folder, tmp_path / "x.gguf", kind)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["fine.gguf", "source"]


def test_what_goes_wrong_halfway_leaves_nothing(tmp_path):
    def fail():
        yield np.zeros(4, np.float32)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_gguf(tmp_path / "x.gguf", {}, [TensorPlan("a", (8,), "F32", fail)])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    folder = source("llama", tmp_path / "source")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
    with pytest.raises(BadRequest, match="its disk has 5 free"):
        written(folder, tmp_path / "x.gguf", "f16")
