"""`mlxrt info` and `mlxrt pull`: figures that are counted another way here."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlxrt
from mlxrt.engine import load_plan
from mlxrt.kernels import device
from mlxrt.models import CausalLM
from mlxrt.weights.formats.checkpoint import TensorInfo

from .conftest import weights


def test_figures_of_a_folder(cli, folder):
    found = json.loads(cli("info", folder, "--json").out)
    model, arrays = found["model"], weights()
    assert model["parameters"] == sum(a.size for a in arrays.values())
    assert model["weight_bytes"] == sum(a.nbytes for a in arrays.values())
    assert {name: part["bits"] for name, part in model["bits"].items()} == dict.fromkeys(model["bits"], 32.0)
    assert model["bits"]["attention"]["parameters"] == 2 * (32 * 32 * 2 + 16 * 32 * 2)
    assert (model["layers"], model["context"], model["vocab_size"]) == (2, 4096, 258)
    assert model["tokenizer"] == {"source": "tokenizer.json", "tokens": 258, "chat_template": True}
    assert model["answers"] == {"reasoning_parser": "none", "tool_parser": "hermes", "tool_parser_guessed": True}
    with mlxrt.load(str(folder)) as engine:
        assert model["kv_bytes_per_token"] * engine.core.node_size == sum(g.nbytes(1) for g in engine.core.pools.groups)
        assert model["longest_context_by_default"] == engine.context == 4096
    assert found["machine"]["device"] == device.backend() and found["machine"]["memory_bytes"] > 0


def test_info_predicts_the_memory_in_use(cli, folder):
    expected = json.loads(cli("info", folder, "--json").out)["model"]["weight_bytes_in_memory"]
    with mlxrt.load(str(folder)) as engine:
        held = sum(a.nbytes for _, a in nn.utils.tree_flatten(engine.model.parameters()))
    assert expected == held


def quantize(arrays: dict[str, mx.array], bits: int) -> dict[str, mx.array]:
    out = {}
    for name, array in arrays.items():
        if array.ndim == 2:
            packed, scales, biases = mx.quantize(array, 32, bits)
            stem = name.removesuffix(".weight")
            out |= {name: packed, f"{stem}.scales": scales, f"{stem}.biases": biases}
        else:
            out[name] = array
    return out


@pytest.mark.parametrize("unpack", [True, False])
def test_figures_of_a_packed_folder(cli, folder, unpack):
    folder.store(quantize(weights(), 4))
    flag = "--dequantise" if unpack else "--no-dequantise"
    model = json.loads(cli("info", folder, "--json", flag).out)["model"]
    assert model["parameters"] == sum(a.size for a in weights().values())
    # 4 bits each, a float32 scale and a float32 bias for every 32
    assert model["bits"]["mlp"] == {
        "parameters": 2 * 3 * 64 * 32, "bytes": 2 * 3 * 64 * 32 * 6 // 8, "bits": 6.0,
        "kinds": {"affine 4 bit group 32": 6},
    }  # fmt: skip
    with mlxrt.load(str(folder), mlxrt.EngineConfig(dequantise=unpack)) as engine:
        held = sum(a.nbytes for _, a in nn.utils.tree_flatten(engine.model.parameters()))
    assert model["weight_bytes_in_memory"] == held


def test_half_the_precision_is_half_the_keys_and_values(cli, folder):
    whole = json.loads(cli("info", folder, "--json").out)["model"]
    half = json.loads(cli("info", folder, "--json", "--dtype", "float16").out)["model"]
    assert half["kv_bytes_per_token"] * 2 == whole["kv_bytes_per_token"]
    assert half["weight_bytes_in_memory"] * 2 == whole["weight_bytes_in_memory"]


def test_a_shape_is_measured_without_being_made(cli):
    before = mx.get_peak_memory()
    model = json.loads(cli("info", "shape:llama-3.1-8b@4bit", "--json", "--dtype", "bfloat16").out)["model"]
    assert model["parameters"] == 8_030_261_248  # as published
    assert model["bits"]["mlp"]["bits"] == 4.5  # a bfloat16 scale and a bfloat16 bias for every 64
    assert model["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert mx.get_peak_memory() - before < 1 << 20


def test_windows_are_shown(cli, folder):
    folder.configure(model_type="mistral", sliding_window=16)
    model = json.loads(cli("info", folder, "--json").out)["model"]
    assert model["windows"] == {"16": 2}
    assert "2 layers see 16 tokens" in cli("info", folder).out


def test_without_a_tokenizer_and_with_a_broken_one(cli, folder):
    path = folder.path / "tokenizer.json"
    path.write_text("{}")
    result = cli("info", folder)
    assert result.code == 0 and "tokenizer          broken: " in result.out
    path.unlink()
    assert "tokenizer          none" in cli("info", folder).out


def test_the_machine_alone(cli):
    result = cli("info")
    assert result.code == 0 and "this machine" in result.out and "MLX" in result.out
    assert "BLAS" in result.out or device.backend() != "cpu"
    assert set(json.loads(cli("info", "--json").out)) == {"machine"}


def test_pull_of_what_is_here_tells_where_it_is(cli, folder):
    total = sum(f.stat().st_size for f in folder.path.iterdir())
    result = cli("pull", folder)
    assert (result.code, result.out) == (0, f"{folder}\n") and f"{total} bytes" in result.err
    assert json.loads(cli("pull", folder, "--json").out) == {"model": str(folder), "path": str(folder), "bytes": total}


def test_pull_of_a_shape_is_refused(cli):
    assert "nothing to pull" in cli("pull", "shape:llama-3.1-8b").refused(2)


@pytest.mark.parametrize(
    "kinds, needs_bf16, expected",
    [
        ({"F32": 10, "Q4_K": 900}, False, mx.float16),
        ({"F32": 10, "Q8_0": 900}, True, mx.bfloat16),
        ({"BF16": 100, "MXFP4": 900}, True, mx.bfloat16),
        ({"F32": 100, "MXFP4": 900}, True, mx.float32),
        ({"I32": 900, "F16": 10}, False, mx.float16),
    ],
)
def test_dtype_chosen_on_a_gpu(monkeypatch, kinds, needs_bf16, expected):
    """As loading chooses it, from the headers alone."""
    monkeypatch.setattr(load_plan.device, "backend", lambda: "metal")
    family = type("Family", (CausalLM,), {"NEEDS_BF16": needs_bf16})
    infos = [TensorInfo((1,), kind, nbytes) for kind, nbytes in kinds.items()]
    assert load_plan.choose_dtype(mlxrt.EngineConfig(), infos, family) == expected
