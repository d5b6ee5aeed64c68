"""Whole answers with the kernels in the path, run by the simulator, and with one of them wrong."""

import json
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

import mlxrt
from mlxrt.cli import doctor, main
from mlxrt.engine import load as loader
from mlxrt.engine.cpu_kernels import open_cpu_kernels
from mlxrt.kernels import OPS, make_gpu

from ..support.log_lines import capture_log
from ..support.metal_sim import Simulator
from ..support.tiny_files import CONFIG, float_weights, pack_weights, write_folder

QWEN = CONFIG | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "quantization": {"group_size": 64, "bits": 4},
}
PROMPT = [3, 14, 15, 9, 2, 6]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A packed Qwen3, and an empty cache folder."""
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path / "model", pack_weights(float_weights(QWEN, seed=5), 64, 4), QWEN)


def spoiling(sim: Simulator, kernel: str | None):
    """The simulator as a GPU whose compiler gets one kernel wrong: sums become maxima."""

    def make(name, source, **rest):
        return sim.metal_kernel(
            name, source=source.replace("simd_sum", "simd_max") if name.split("_of_")[0] == kernel else source, **rest
        )

    return make


@pytest.fixture
def on_gpu(monkeypatch):
    def stand_in(kernel: str | None = None) -> Simulator:
        sim = Simulator(strict=False, portable=True)
        monkeypatch.setattr(loader, "backend", lambda: "metal")
        monkeypatch.setattr(loader, "make_gpu", lambda name, **_: make_gpu(name, spoiling(sim, kernel)))
        return sim

    return stand_in


def answer(folder, rows=1, tokens=6, **config):
    """`rows` requests at once, all the same."""
    options = mlxrt.EngineConfig(dequantise=False, **config)
    with mlxrt.load(str(folder), options) as engine:
        request = mlxrt.Request(tokens=tuple(PROMPT), params=mlxrt.SamplingParams(max_tokens=tokens))
        [answered] = {c.tokens for c in engine.generate([request] * rows)}
        return answered, engine


def test_generation_by_kernels_is_generation_by_plain_mlx(folder, on_gpu):
    plain, _ = answer(folder, kernels="reference")
    sim = on_gpu()
    tokens, engine = answer(folder)
    assert tokens == plain
    assert not sim.errors()
    kernels = engine.core.runner.model.kernels
    assert {"qmv", "qkv_attention", "embed_rows"} <= set(kernels.used) and "paged_attention" not in kernels.used
    assert not kernels.disabled and not kernels.fallbacks


def test_a_window_with_kept_tokens_by_kernels_alone(folder, on_gpu):
    plain, _ = answer(folder, tokens=20, kernels="reference", max_kv_size=12)
    sim = on_gpu()
    tokens, engine = answer(folder, tokens=20, kernels="strict", max_kv_size=12)
    assert tokens == plain and not sim.errors()
    assert "qkv_attention" in engine.core.runner.model.kernels.used


def test_a_short_request_beside_a_long_one(folder, on_gpu):
    """Their keys are split over threadgroups as the long one wants it."""
    params = mlxrt.SamplingParams(max_tokens=6, ignore_eos=True)
    asked = [mlxrt.Request(tokens=tuple(t), params=params) for t in ([7 * i % 47 for i in range(1100)], PROMPT)]
    options = dict(dequantise=False, max_context=1200)

    def both(**config):
        with mlxrt.load(str(folder), mlxrt.EngineConfig(**options, **config)) as engine:
            return [c.tokens for c in engine.generate(asked)], engine.core.runner.model.kernels

    plain, _ = both(kernels="reference")
    sim = on_gpu()
    tokens, kernels = both()
    assert tokens == plain and not sim.errors()
    assert "attention_qmv" in kernels.used and not kernels.fallbacks


def test_cpu_kernels_compute_on_another_thread_than_the_one_that_loaded(folder):
    """As AsyncEngine and the server do; with frequencies of a scaled RoPE, which are computed when it loads."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    here, engine = answer(folder)
    assert engine.core.runner.model.kernels.cpu is None or "paged_attention" in engine.core.runner.model.kernels.used
    with mlxrt.load(str(folder), dequantise=False) as engine, ThreadPoolExecutor(1) as pool:
        assert pool.submit(engine.generate, PROMPT, max_tokens=6).result().tokens == here


WRONG = [
    ("qmv", "mlxrt_qmv", 1),
    ("qkv_attention", "mlxrt_paged_attention_fused_qkv", 1),
    ("paged_attention", "mlxrt_paged_attention", 2),
]


@pytest.mark.parametrize(("op", "text", "rows"), WRONG)
def test_a_wrong_kernel_is_disabled_named_and_generation_stays_right(folder, on_gpu, op, text, rows):
    plain, _ = answer(folder, kernels="reference")
    on_gpu(text)
    for load in ("first", "second"):  # tried, then remembered
        said = capture_log()
        tokens, engine = answer(folder, rows)
        kernels = engine.core.runner.model.kernels
        assert tokens == plain, load
        assert list(kernels.disabled) == [op]
        assert op not in kernels.used and kernels.used
        assert [line for line in said if line.startswith(f"{op}: kernel disabled")]
        assert bool([line for line in said if line.startswith("checking ")]) == (load == "first")


def test_strict_refuses_to_run_without_a_kernel(folder, on_gpu):
    on_gpu("mlxrt_qmv")
    with pytest.raises(mlxrt.MlxrtError, match="qmv: its kernel is wrong on this machine"):
        answer(folder, kernels="strict")


def test_doctor_names_the_wrong_one(on_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path))
    monkeypatch.setattr("mlxrt.kernels.selftest.QUICK_CASES", 1)
    monkeypatch.setattr("mlxrt.kernels.dtypes.DTYPES", {"float32": mx.float32})
    on_gpu("mlxrt_qmv")
    for name in ("backend", "make_gpu"):
        monkeypatch.setattr("mlxrt.kernels." + name, getattr(loader, name))
    assert main(["doctor", "--quick"]) == doctor.MISMATCH
    out = capsys.readouterr().out
    assert "disabled here: qmv" in out.splitlines()
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert "plain MLX  disagrees" in rows["qmv"] and "off by" in rows["qmv"]
    assert all("kernel     agrees" in rows[name] for name in OPS if name != "qmv" and OPS[name].launch)


def test_doctor_on_a_machine_without_a_gpu(capsys):
    assert main(["doctor"]) == doctor.OK
    out = capsys.readouterr().out
    if open_cpu_kernels(mlxrt.EngineConfig()) is None:
        assert f"no kernel was tried: this device has no GPU that MLX can use; {len(OPS)} ops run as plain MLX" in out
        assert "disagrees" not in out
    else:
        rows = {line.split()[0]: line for line in out.splitlines() if line}
        tried = [name for name, op in OPS.items() if op.cpu_launch]
        assert all("kernel     agrees" in rows[name] for name in tried)
        assert not rows.keys() & (OPS.keys() - set(tried)) and "cpu kernels" in out
        assert "mlxrt's own for packed weights" in rows["kernels"]
        assert f"none of the {len(tried)} tried disagrees" in out
        assert f"not tried, run as plain MLX: {len(OPS) - len(tried)} ops (this device has no GPU" in out
