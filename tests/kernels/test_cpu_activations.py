"""Activations rounded to 8 bits, by choice: products of exactly those numbers, the same tokens in any company, and a
typed error wherever the option would change nothing."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlxrt
from mlxrt.engine import cpu_kernels
from mlxrt.kernels import device
from mlxrt.kernels.cpu import build
from mlxrt.kernels.cpu.library import CpuKernels
from mlxrt.kernels.ops.k_quants import K_QUANTS, SHORT_BLOCKS
from mlxrt.kernels.testing import sample

from ..support.kernels.cpu_library import compiled_library
from ..support.log_lines import capture_log
from ..support.tiny_files import CONFIG, float_weights, pack_weights, write_folder

pytestmark = pytest.mark.xdist_group("cpu_kernels")  # one worker compiles the libraries

FORMATS = [("affine", 4, 32), ("affine", 4, 64), ("affine", 8, 32), ("affine", 6, 64), ("affine", 3, 128)]
FORMATS += [(mode, 0, 256) for mode in K_QUANTS] + [(mode, 0, 32) for mode in SHORT_BLOCKS]
GROUPS_OF_16 = ("q2_k", "q3_k", "q6_k")
PROMPTS = ([3, 14, 15, 9, 2, 6], [41, 5], [7, 7, 30, 1, 2, 3, 4, 8, 19, 22, 40], [11])


@pytest.fixture(scope="module")
def library() -> Path:
    if not build.can_round_activations():
        pytest.skip("there are no such kernels for this processor")
    path = compiled_library("int8")
    if CpuKernels(path, 1).activations != "int8":
        pytest.skip("this processor has no dot products of bytes")
    return path


def round_to_bytes(x: np.ndarray, size: int) -> np.ndarray:
    groups = x.reshape(*x.shape[:-1], -1, size)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(largest > 0, np.rint(groups * (np.float32(127) / largest)), 0)
    return (codes.astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS, ids=str)
def test_products_are_those_of_the_rounded_numbers(library, mode, bits, group):
    cpu = CpuKernels(library, threads=2)
    mx.random.seed(bits)
    matrix = sample(mode, (67, 6 * group), mx.float32, bits, group)
    x = mx.random.normal((21, matrix.width))
    x[3, :64] = 0
    seen = round_to_bytes(np.array(x), 16 if mode in GROUPS_OF_16 else 32)
    truth = seen @ np.array(matrix.plain(), np.float64).T
    together = np.array(cpu.matmul(x, matrix))
    assert together.dtype == np.float32
    assert np.abs(together - truth).max() <= 1e-5 * np.abs(truth).max()
    exact = np.array(x, np.float64) @ np.array(matrix.plain(), np.float64).T
    assert 1e-4 < np.abs(together - exact).max() / np.abs(exact).max() < 2e-2  # and not those of x itself
    for first, count in [(0, 1), (1, 2), (3, 3), (6, 4), (1, 16)]:
        assert np.array_equal(cpu.matmul(x[first : first + count], matrix), together[first : first + count])


def test_what_is_not_finite_makes_its_row_so(library):
    cpu, matrix = CpuKernels(library, threads=1), sample("affine", (9, 64), mx.float32, 8, 32)
    x = mx.ones((3, 64))
    x[0, 5], x[2, 40] = float("nan"), float("inf")
    found = np.isfinite(np.array(cpu.matmul(x, matrix)))
    assert found[1].all() and not found[0].any() and not found[2].any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    config = CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config |= {"max_position_embeddings": 256}
    arrays = pack_weights(float_weights(config, seed=5), 32, 4)
    return str(write_folder(tmp_path_factory.mktemp("int8"), arrays, config))


def ask(engine, prompt: list[int]) -> tuple[int, ...]:
    return engine.generate(prompt, max_tokens=30, temperature=0.0, ignore_eos=True).tokens


def test_tokens_do_not_depend_on_company_or_cache(folder, library):
    alone = []
    for prompt in PROMPTS:
        with mlxrt.load(folder, cpu_activations="int8", prefix_cache=False, chunk=3) as engine:
            alone.append(ask(engine, prompt))
    said = capture_log()
    with mlxrt.load(folder, cpu_activations="int8") as engine:
        assert any("activations rounded to 8 bits" in line for line in said)
        done = engine.generate([list(p) for p in PROMPTS], max_tokens=30, temperature=0.0, ignore_eos=True)
        assert [c.tokens for c in done] == alone
        longer = [*PROMPTS[2], *alone[2][:20]]  # most of it is in the prefix cache
        again = engine.generate(longer, max_tokens=10, temperature=0.0, ignore_eos=True)
        assert again.tokens == alone[2][20:30]
        rounded = np.array(engine.score(PROMPTS[2]))
    with mlxrt.load(folder) as engine:
        exact = np.array(engine.score(PROMPTS[2]))
    assert 0 < np.square(rounded - exact).mean() < 0.01 * np.square(exact).mean()


def test_states_of_other_activations_are_not_reused(folder, library, tmp_path):
    prompt = [i * 7 % 41 + 2 for i in range(70)]
    with mlxrt.load(folder, prefix_cache=False) as engine:
        truth = ask(engine, prompt)
    for activations, cached in (("int8", False), ("int8", True), ("float32", False), ("float32", True)):
        with mlxrt.load(folder, disk_cache=str(tmp_path), cpu_activations=activations) as engine:
            done = engine.generate(prompt, max_tokens=30, temperature=0.0, ignore_eos=True)
            assert bool(done.cached_tokens) is cached
            if activations == "float32":
                assert done.tokens == truth


@pytest.mark.parametrize(("options", "text"), [
    ({"cpu_activations": "int4"}, "must be float32 or int8, not 'int4'"),
    ({"cpu_activations": 8}, "must be float32 or int8, not 8"),
    ({"cpu_activations": "int8", "kernels": "reference"}, "does not apply with kernels reference"),
    ({"cpu_activations": "int8", "dequantise": True}, "does not apply with dequantise"),
    ({"cpu_activations": "int8", "compile": True}, "does not apply with compile"),
    ({"cpu_activations": "int8", "dtype": "bfloat16"}, "does not apply with dtype bfloat16"),
])  # fmt: skip
def test_where_it_does_not_apply(options, text):
    with pytest.raises(mlxrt.BadRequest, match=text):
        mlxrt.EngineConfig(**options)


def test_a_gpu_refuses_it_before_a_model_is_looked_for(monkeypatch):
    monkeypatch.setattr(device, "backend", lambda: "cuda")
    with pytest.raises(mlxrt.BadRequest, match="cpu_activations does not apply: this device is cuda"):
        mlxrt.load("/no/such/model", cpu_activations="int8")


def test_a_model_without_packed_matrices_refuses_it(library, tmp_path):
    plain = write_folder(tmp_path, float_weights(CONFIG, seed=5), CONFIG)
    with pytest.raises(mlxrt.BadRequest, match="no packed matrix of this model has a CPU kernel"):
        mlxrt.load(str(plain), cpu_activations="int8")


def test_another_processor_refuses_it_before_anything_is_compiled(folder, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "can_round_activations", lambda: False)
    monkeypatch.setattr(cpu_kernels, "locate", lambda *a: pytest.fail("a library was looked for"))
    with pytest.raises(mlxrt.BadRequest, match="int8 does not apply: this processor has no dot products"):
        mlxrt.load(folder, cpu_activations="int8")


def test_without_a_compiler_it_is_refused(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_kernels, "can_round_activations", lambda: True)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "find_compilers", lambda: iter(()))
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "cache"))
    cpu_kernels.locate.cache_clear()
    try:
        with pytest.raises(mlxrt.BadRequest, match=r"cpu_activations int8 does not apply: there are no CPU kernels"):
            mlxrt.load(folder, cpu_activations="int8")
    finally:
        cpu_kernels.locate.cache_clear()
