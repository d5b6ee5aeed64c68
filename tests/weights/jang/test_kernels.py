"""Layers of codes and vectors through their kernels, run as text by the simulator, against plain MLX."""

import mlx.core as mx
import pytest

from mlxrt.errors import NoKernel
from mlxrt.kernels import PLAIN, Kernels, make_gpu
from mlxrt.models.base import FusedModule
from mlxrt.models.moe import Experts
from mlxrt.models.quantized.codebook_linear import CodebookExpertLinear, CodebookLinear
from mlxrt.models.quantized.hadamard_linear import HadamardLinear
from mlxrt.models.quantized.lut_linear import LUTEncoding, LUTExpertLinear, LUTLinear
from mlxrt.models.quantized.rotation import Rotation, binary_blocks

from ...support.log_lines import capture_log
from ...support.metal_sim import NoCompiler, Simulator
from ...support.metal_sim.toolchain import compiler

E, DIM, HIDDEN = 5, 96, 64


@pytest.fixture
def simulated():
    try:
        compiler()
    except NoCompiler as reason:
        pytest.skip(str(reason))
    return Kernels("strict", gpu())


def gpu():
    return make_gpu("metal", Simulator(portable=True).metal_kernel)


def filled(layer):
    """Random words and norms."""
    layer.words = mx.random.randint(0, 1 << 31, layer.words.shape).astype(mx.uint32)
    layer.norms = mx.random.uniform(0.5, 1.5, layer.norms.shape).astype(mx.float16)
    return layer


def jangtq_experts(bits: tuple[int, int, int], dim: int = DIM, hidden: int = HIDDEN) -> Experts:
    experts = Experts(E, dim, hidden)
    for name, width, outs, b in zip(
        ("gate_proj", "up_proj", "down_proj"), (dim, dim, hidden), (hidden, hidden, dim), bits
    ):
        experts[name] = filled(LUTExpertLinear(LUTEncoding.jangtq(b, width, 42), E, outs))
    return experts


def by(kernels: Kernels, module, *arguments, **named):
    for part in reversed(module.modules()):
        part.kernels = kernels
        if isinstance(part, FusedModule):
            part.fuse()
    y = module(*arguments, **named)
    mx.eval(y)
    return y


def agrees(module, kernels, *arguments, within=2e-5, **named) -> None:
    plain, ours = (by(k, module, *arguments, **named) for k in (PLAIN, kernels))
    assert ours.dtype == plain.dtype and ours.shape == plain.shape
    assert mx.abs(ours - plain).max().item() <= within * max(1.0, mx.abs(plain).max().item())


@pytest.mark.parametrize("bits", [(2, 2, 4), (3, 3, 3)])
def test_routed_experts_are_two_products_and_two_turnings(bits, simulated):
    mx.random.seed(1)
    module, x = jangtq_experts(bits), mx.random.normal((2, DIM))
    experts = mx.array([[4, 0, 2], [1, 1, 3]], mx.uint32)
    weights, residual = mx.random.uniform(shape=(2, 3)), mx.random.normal((2, DIM))
    agrees(module, simulated, x, experts, weights, residual=residual)
    assert simulated.used == {"hadamard": 2, "moe_gate_up": 1, "moe_down": 1}


@pytest.mark.parametrize("bits", [(2, 2, 4), (3, 3, 2)])
@pytest.mark.parametrize("tokens", [9, 70])
def test_many_tokens_read_each_expert_once(bits, tokens, simulated):
    mx.random.seed(6)
    module, x = jangtq_experts(bits, 128, 128), mx.random.normal((tokens, 128)).astype(mx.bfloat16)
    experts, weights = mx.random.randint(0, E, (tokens, 2)).astype(mx.uint32), mx.random.uniform(shape=(tokens, 2))
    agrees(module, simulated, x, experts, weights, residual=x, within=0.03)
    assert simulated.used == {"hadamard": 2, "moe_sort": 1, "moe_grouped": 2, "moe_combine": 1}


def test_more_pairs_than_a_threadgroup_sorts(simulated, monkeypatch):
    monkeypatch.setattr("mlxrt.kernels.ops.moe_grouped.MAX_SORT_PAIRS", 20)
    mx.random.seed(7)
    module, x = jangtq_experts((2, 2, 2), 128, 128), mx.random.normal((11, 128)).astype(mx.float16)
    experts, weights = mx.random.randint(0, E, (11, 2)).astype(mx.uint32), mx.random.uniform(shape=(11, 2))
    agrees(module, simulated, x, experts, weights, within=0.01)
    assert simulated.used == {"hadamard": 2, "moe_grouped": 2, "moe_combine": 1}


def test_experts_of_different_bits_are_not_fused(simulated):
    mx.random.seed(8)
    module, x = jangtq_experts((2, 3, 2)), mx.random.normal((2, DIM))
    experts, weights = mx.array([[4, 0], [1, 1]], mx.uint32), mx.random.uniform(shape=(2, 2))
    agrees(module, simulated, x, experts, weights)
    assert "gate_up_proj" not in module and simulated.used == {"hadamard": 3}


def test_rows_not_a_multiple_of_32_are_plain_and_logged(simulated):
    logged = capture_log()
    mx.random.seed(9)
    layer, x = filled(LUTLinear(LUTEncoding.jangtq(2, 40, 7), 24)), mx.random.normal((2, 40))
    kernels = Kernels("auto", gpu())
    agrees(layer, kernels, x)
    assert logged == ["qmv runs as plain MLX: rows of 40 indices"] and "qmv" not in kernels.used
    with pytest.raises(NoKernel, match="rows of 40 indices"):
        by(simulated, layer, x)


def test_indices_are_repacked_a_few_rows_at_a_time(simulated, monkeypatch):
    monkeypatch.setattr("mlxrt.models.quantized.lut_linear.PACKED_AT_ONCE", 3 * DIM)
    mx.random.seed(10)
    layer = filled(LUTExpertLinear(LUTEncoding.jangtq(3, DIM, 42), E, 7))
    before = layer.lut.dequantize()
    agrees(layer, simulated, mx.random.normal((2, 1, 1, DIM)), mx.array([[4, 0], [1, 1]], mx.uint32))
    assert layer.words.shape == (E, 7, DIM * 3 // 32) and mx.array_equal(layer.lut.dequantize(), before)


def test_many_tokens_of_other_shapes_unpack_each_expert_once(simulated):
    mx.random.seed(2)
    module, x = jangtq_experts((2, 2, 2)), mx.random.normal((70, DIM))
    experts, weights = mx.random.randint(0, E, (70, 2)).astype(mx.uint32), mx.random.uniform(shape=(70, 2))
    agrees(module, simulated, x, experts, weights)
    assert simulated.used == {"hadamard": 2, "dequantize": 2}


def test_so_many_outputs_at_a_time_that_they_fit(simulated, monkeypatch):
    monkeypatch.setattr("mlxrt.models.quantized.packed_linear.AT_ONCE", E * DIM * 4 * 15)
    mx.random.seed(2)
    module, x = jangtq_experts((2, 2, 2)), mx.random.normal((70, DIM))
    experts, weights = mx.random.randint(0, E, (70, 2)).astype(mx.uint32), mx.random.uniform(shape=(70, 2))
    agrees(module, simulated, x, experts, weights)
    assert simulated.used == {"hadamard": 2, "dequantize": 14}


@pytest.mark.parametrize("rows", [1, 9, 70])
def test_dense_layers(rows, simulated):
    mx.random.seed(3)
    agrees(filled(LUTLinear(LUTEncoding.jangtq(3, DIM, 7), 24)), simulated, mx.random.normal((rows, DIM)))
    agrees(filled(LUTLinear(LUTEncoding.jangtq2(4, DIM, rotated=True), 24)), simulated, mx.random.normal((rows, DIM)))


def test_rotated_affine(simulated):
    mx.random.seed(4)
    plain = mx.random.normal((24, DIM))
    layer = HadamardLinear({"weight": plain}, 32, 4, Rotation(binary_blocks(DIM), 42), ())
    layer.inner.weight, layer.inner.scales, layer.inner.biases = mx.quantize(plain, 32, 4)
    agrees(layer, simulated, mx.random.normal((3, DIM)))
    assert simulated.used == {"hadamard": 1}


def test_vectors(simulated):
    mx.random.seed(5)
    book = mx.random.normal((30, 8)).astype(mx.float16)
    indices = mx.random.randint(0, 30, (E, 24, DIM // 8)).astype(mx.uint16)
    one, many = CodebookLinear(indices[0], book), CodebookExpertLinear(indices, book)
    one.codes, one.codebook, many.codes, many.codebook = indices[0], book, indices, book
    agrees(one, simulated, mx.random.normal((3, DIM)))
    experts = mx.array([[4, 0], [2, 2]], mx.uint32)
    agrees(many, simulated, mx.random.normal((2, 1, 1, DIM)), experts)
    agrees(many, simulated, mx.random.normal((2, 2, 1, DIM)), experts)
    assert simulated.used == {"codebook_rows": 3}
