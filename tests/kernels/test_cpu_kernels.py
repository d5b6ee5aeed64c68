"""The kernels in C: against float64, row by row and together, through the engine, and where they cannot be built."""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlxrt
from mlxrt.engine import cpu_kernels
from mlxrt.kernels import OPS, Kernels
from mlxrt.kernels.cpu import build
from mlxrt.kernels.cpu.interleave import BLOCKS, TOGETHER
from mlxrt.kernels.cpu.library import CpuKernels
from mlxrt.kernels.ops.k_quants import CPU_BLOCKS, INTERLEAVED, K_QUANTS, SHORT_BLOCKS
from mlxrt.kernels.selftest import verify_cpu
from mlxrt.kernels.testing import sample
from mlxrt.models.quantized.packed_linear import PackedEmbedding, PackedLinear

from ..support.kernels.cpu_library import compiled_library
from ..support.log_lines import capture_log
from ..support.tiny_files import CONFIG, float_weights, pack_weights, write_folder, write_gguf

# One worker compiles the library, if it is not there yet.
pytestmark = pytest.mark.xdist_group("cpu_kernels")

FORMATS = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS += [("dense", 16, 32)]
FORMATS += [(mode, 0, 256) for mode in K_QUANTS] + [(mode, 0, 32) for mode in SHORT_BLOCKS]
K_BLOCKS = [mode for mode in BLOCKS if mode not in SHORT_BLOCKS]
PROMPTS = ([3, 14, 15, 9, 2, 6], [41, 5], [7, 7, 30, 1, 2, 3, 4, 8, 19, 22, 40], [11])


@pytest.fixture(scope="module")
def library() -> Path:
    return compiled_library()


@pytest.fixture(scope="module")
def cpu(library) -> CpuKernels:
    return CpuKernels(library, threads=2)


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS, ids=str)
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (7, 3), (67, 18)])
def test_products_are_those_of_float64(cpu, mode, bits, group, rows, groups):
    mx.random.seed(rows + bits)
    matrix = sample(mode, (rows, groups * group), mx.bfloat16 if rows == 7 else mx.float32, bits, group)
    if rows == 67 and mode == "affine":
        matrix = type(matrix)(
            matrix.weight, matrix.scales.astype(mx.float16), matrix.biases.astype(mx.float16), bits, group, mode
        )
    x = mx.random.normal((77, matrix.width))
    truth = np.array(x, np.float64) @ np.array(matrix.plain(), np.float64).T
    together = np.array(cpu.matmul(x, matrix))
    assert together.dtype == np.float32 and together.shape == truth.shape
    assert np.abs(together - truth).max() <= 1e-5 * np.abs(truth).max()
    # Bit by bit: no row knows the others. Eight rows make a tile, eight tiles go together.
    for first, count in [(0, 1), (1, 2), (3, 3), (6, 4), (10, 5), (1, 16), (5, 71)]:
        assert np.array_equal(cpu.matmul(x[first : first + count], matrix), together[first : first + count])


@pytest.mark.parametrize("mode", BLOCKS)
@pytest.mark.parametrize("together", TOGETHER)
def test_interleaved_rows_are_separated_again(mode, together):
    mx.random.seed(together)
    apart = sample(mode, (4 * together, 768), mx.float32)
    made = apart.interleave(together)
    assert made.mode == f"{mode}_x{together}" and (made.rows, made.width, made.packed) == (4 * together, 768, True)
    assert made.weight.shape[0] == 4 and made.weight.nbytes <= 1.028 * apart.weight.nbytes
    assert mx.array_equal(made.separate().weight, apart.weight) and mx.array_equal(made.plain(), apart.plain())
    some = mx.array([4 * together - 1, 0, 5, 6])
    assert mx.array_equal(made.take(some).plain(), apart.take(some).plain())


@pytest.mark.parametrize("mode", BLOCKS)
@pytest.mark.parametrize(("sets", "blocks"), [(2, 1), (6, 3), (18, 18)])
def test_products_of_interleaved_rows_are_those_of_float64(cpu, mode, sets, blocks):
    if not (together := cpu.rows_together(mode)):
        pytest.skip("this library reads rows of this type apart only")
    mx.random.seed(sets)
    rows, width = sets * together, min(blocks, 6 if mode in K_BLOCKS else 18) * BLOCKS[mode].weights
    apart = sample(mode, (rows, width), mx.float32)
    matrix = apart.interleave(together)
    assert matrix.mode == f"{mode}_x{together}"
    some = mx.array([rows - 1, 0, 5, 6, rows + 9])  # the last is none: the library reads the last row for it
    assert mx.array_equal(cpu.embed(matrix, some, 1.5), cpu.embed(apart, some, 1.5))
    x = mx.random.normal((77, width)) * mx.exp(2 * mx.random.normal((1, width)))  # some of them much larger than others
    products = np.array(cpu.matmul(x, matrix))
    truth = np.array(x, np.float64) @ np.array(apart.plain(), np.float64).T
    assert products.dtype == np.float32 and products.shape == truth.shape
    assert np.abs(products - truth).max() <= 1e-5 * np.abs(truth).max()
    if (
        mode not in K_BLOCKS and together == 4
    ):  # dot.h reads both: sums of blocks are exact, and added in the same order
        assert np.array_equal(products, cpu.matmul(x, apart))
    for first, count in [(0, 1), (1, 2), (3, 3), (6, 4), (10, 5), (1, 16), (5, 71)]:
        assert np.array_equal(cpu.matmul(x[first : first + count], matrix), products[first : first + count])
    options = {
        "activation": "silu",
        "pair": True,
        "bias": mx.random.normal((rows,)),
        "norm": mx.random.normal((width,)),
    }
    pairs, right = (np.array(cpu.matmul(x, m, eps=1e-5, **options)) for m in (matrix, apart))
    assert np.abs(pairs - right).max() <= 1e-5 * np.abs(right).max()
    assert np.array_equal(CpuKernels(cpu.path, threads=3).matmul(x, matrix), products)


@pytest.mark.parametrize("mode", BLOCKS)
def test_interleaved_rows_keep_what_is_not_finite_and_what_vanishes(cpu, mode):
    if not (together := cpu.rows_together(mode)):
        pytest.skip("this library reads rows of this type apart only")
    matrix = sample(mode, (2 * together, 512), mx.float32).interleave(together)
    x = np.array(mx.random.normal((5, 512)))
    x[1, 300], x[2, 7], x[3], x[4] = np.nan, np.inf, 0, x[4] * 1e-35
    found = np.array(cpu.matmul(mx.array(x), matrix))
    assert np.isfinite(found[0]).all() and not np.isfinite(found[1:3]).any()
    assert (found[3] == 0).all() and np.abs(found[4]).max() <= 1e-30


def test_matrices_that_do_not_divide_stay_as_they_are():
    for shape in ((12, 64), (7, 64)):
        assert sample("q8_0", shape, mx.float32).interleave(4).mode == "q8_0"
    assert sample("q4_k", (16, 256), mx.float32).interleave(16).mode == "q4_k"
    assert sample("q4_k", (16, 256), mx.float32).interleave(0).mode == "q4_k"
    assert sample("q2_k", (32, 256), mx.float32).interleave(4).mode == "q2_k"


@pytest.mark.parametrize(("kind", "truth"), [
    ("silu", lambda gate, up: gate / (1 + np.exp(-gate)) * up),
    ("sigmoid", lambda gate, up: up / (1 + np.exp(-gate))),
])  # fmt: skip
def test_activations_of_any_gate_are_those_of_float64(cpu, kind, truth):
    """Their exponential is a polynomial: right from where it vanishes to where it overflows."""
    matrix = sample("affine", (67, 64), mx.float32, 8, 64)
    x = mx.random.normal((5, 64)) * mx.array([1e-3, 1.0, 10.0, 60.0, 1e4])[:, None]
    up = mx.random.normal((5, 67))
    gate = np.array(cpu.matmul(x, matrix)).astype(np.float64)
    with np.errstate(over="ignore"):
        right = truth(gate, np.array(up, np.float64))
    found = np.array(cpu.matmul(x, matrix, activation=kind, times=up))
    assert np.abs(gate).max() > 1000 and np.isfinite(found).all()
    np.testing.assert_allclose(found, right, rtol=2e-6, atol=1e-30)
    x[2, 5] = float("nan")
    assert np.isnan(np.array(cpu.matmul(x, matrix, activation=kind, times=up))[2]).all()


def test_threads_change_nothing(library):
    matrix = sample("affine", (531, 256), mx.float32, 4, 32)
    x = mx.random.normal((5, 256))
    one = np.array(CpuKernels(library, threads=1).matmul(x, matrix))
    assert all(np.array_equal(CpuKernels(library, threads=n).matmul(x, matrix), one) for n in (2, 3, 16))


def test_every_op_agrees_with_its_reference(library):
    kernels = Kernels("auto", cpu=CpuKernels(library, threads=2))
    found = verify_cpu(kernels)
    assert {result.op for result in found} == {name for name, op in OPS.items() if op.cpu_launch}
    assert all(result.passed and result.cases >= 4 for result in found), found


def test_a_wrong_kernel_is_disabled(library):
    kernels = Kernels("auto", cpu=CpuKernels(library, threads=1))
    kernels.cpu.matmul = lambda x, matrix, *rest, **more: mx.zeros((x.shape[0], matrix.rows))
    assert [result.op for result in verify_cpu(kernels) if not result.passed] == ["qmv"]
    assert "qmv" in kernels.disabled
    matrix, x = sample("affine", (8, 64), mx.float32, 4, 32), mx.ones((2, 64))
    assert mx.allclose(kernels.run(OPS["qmv"], x=x, matrix=matrix), matrix.multiply(x), atol=1e-5)


def test_reference_mode_has_no_cpu_kernels(cpu):
    assert Kernels("reference", cpu=cpu).cpu is None


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    """A model whose matrices have 4 and 8 bits, so that some layers are merged and others not."""
    config = CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    if request.param == "qwen3":
        config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    arrays = pack_weights(float_weights(config, seed=5), 32, 4, v_proj=8, embed=8)
    return str(write_folder(tmp_path_factory.mktemp(request.param), arrays, config))


def answer(folder, prompts, **options):
    with mlxrt.load(folder, **{"dequantise": False, "deterministic": True, **options}) as engine:
        done = engine.generate([list(p) for p in prompts], max_tokens=40, temperature=0.0, ignore_eos=True)
        layers = {type(m) for m in engine.model.modules()}
        return [c.tokens for c in done], layers, dict(engine.model.kernels.used)


def test_tokens_are_those_of_unpacked_weights(folder, library):
    packed, layers, used = answer(folder, PROMPTS)
    assert {PackedLinear, PackedEmbedding} <= layers
    assert {"qmv", "embed_rows", "paged_attention"} <= used.keys()
    plain, layers, used = answer(folder, PROMPTS, dequantise=True)
    assert PackedLinear not in layers and not used
    assert packed == plain
    alone = [answer(folder, [prompt])[0][0] for prompt in PROMPTS[:2]]
    assert alone == packed[:2]


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory):
    """A GGUF file of K-quants, values of another kind than keys, and a folder of the numbers they stand for."""
    config = CONFIG | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2}
    kinds = {"layers.1.self_attn.o_proj": "q4_1", "layers.1.mlp.down": "q8_0", "layers.0.mlp.down": "q4_0"}
    kinds |= {"v_proj": "q6_k", "o_proj": "q5_k", "gate": "q3_k", "up": "q3_k", "embed": "q2_k"}
    kinds |= {"k_proj": "iq2_xxs", "lm_head": "iq4_nl", "layers.1.self_attn.q_proj": "iq4_xs"}
    stored, plain, named = {}, {}, {}
    mx.random.seed(4)
    for name, array in float_weights(config, seed=5).items():
        stored[name] = plain[name] = array
        if array.ndim == 2:
            kind = next((k for part, k in kinds.items() if part in name), "q4_k")
            matrix = sample(kind, array.shape, mx.float32)
            stored[name], plain[name] = np.array(matrix.weight), np.array(matrix.plain())
            named[name] = kind.upper()
    folder = tmp_path_factory.mktemp("k_quants")
    return write_gguf(folder / "k.gguf", stored, config, kinds=named), write_folder(folder / "plain", plain, config)


def test_k_quants_of_a_file_stay_packed(k_quants, library):
    file, folder = k_quants
    with mlxrt.load(str(folder)) as engine:
        truth = np.array(engine.score(list(range(3, 40, 2))))
    with mlxrt.load(str(file), dequantise=False) as engine:
        found = np.array(engine.score(list(range(3, 40, 2))))
        arrays = engine.model.parameters()
        kinds = {m.mode for m in engine.model.modules() if isinstance(m, PackedLinear | PackedEmbedding)}
        held = sum(a.nbytes for _, a in tree_flatten(arrays))
    assert {INTERLEAVED.get(kind, (kind, 1))[0] for kind in kinds} - {"affine"} == set(CPU_BLOCKS)
    together = {kind: CpuKernels(library, threads=1).rows_together(kind) for kind in BLOCKS}
    assert {f"{kind}_x{n}" for kind, n in together.items() if n} == kinds & INTERLEAVED.keys()
    assert held <= 1.03 * file.stat().st_size
    assert np.abs(found - truth).max() < 1e-5 * np.abs(truth).max()
    packed, plain = answer(str(file), PROMPTS)[0], answer(str(folder), PROMPTS, dequantise=None)[0]
    assert packed == plain
    with mlxrt.load(str(file), dequantise=True) as engine:  # unpacked to float32, not by way of float16
        unpacked = np.array(engine.score(list(range(3, 40, 2))))
    assert np.abs(unpacked - truth).max() < 1e-5 * np.abs(truth).max()
    plan = mlxrt.engine.load.open_model(str(file), mlxrt.EngineConfig(dequantise=False)).plan
    assert held <= plan.weights <= 1.03 * held


def test_damaged_k_quants_are_refused(k_quants, library, tmp_path):
    from mlxrt.weights import GgufCheckpoint

    file, _ = k_quants
    tensor = GgufCheckpoint(file).file.tensors["blk.0.attn_q.weight"]
    data = bytearray(file.read_bytes())
    data[tensor.offset : tensor.offset + 2] = b"\x00\x7c"  # an infinite scale
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(mlxrt.BadCheckpoint, match="attn_q"):
        mlxrt.load(str(tmp_path / "bad.gguf"), dequantise=False)


def test_options_that_need_mlx_leave_the_kernels_out(folder, library):
    for options in ({"kernels": "reference"}, {"compile": True}, {"dtype": "bfloat16"}):
        assert not answer(folder, PROMPTS[1:2], **options)[2]


def test_without_a_compiler_mlx_computes_and_one_line_says_so(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "find_compilers", lambda: iter(()))
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "cache"))
    cpu_kernels.locate.cache_clear()
    said = capture_log()
    try:
        assert not answer(folder, PROMPTS[1:2])[2]
        answer(folder, PROMPTS[1:2])
    finally:
        cpu_kernels.locate.cache_clear()
    lines = [line for line in said if "CPU kernels" in line]
    assert len(lines) == 1 and "pip install ziglang" in lines[0]


def test_libraries_that_are_wrong_get_no_name(monkeypatch, tmp_path):
    """A compiler that fails, one whose library crashes, and nothing left behind."""
    crash = "import sys, pathlib; pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_bytes(b'')"
    commands = [(sys.executable, "-c", "import sys; sys.exit('no such flag')"), (sys.executable, "-c", crash)]
    monkeypatch.setattr(build, "find_compilers", lambda: iter(commands))
    with pytest.raises(build.BuildError, match=r"does not compile them: no such flag; .*its library is wrong"):
        build.build(tmp_path / "kernels.so")
    assert not list(tmp_path.iterdir())
