"""Layers of codes and vectors through their kernels, run as text by the simulator, against plain MLX."""

import mlx.core as mx
import pytest

from mlxrt.kernels import PLAIN, Kernels, gpu_of
from mlxrt.models.coded import CodedExpertLinear, CodedLinear, Coding
from mlxrt.models.moe import Experts
from mlxrt.models.rotation import Rotation, binary_blocks
from mlxrt.models.turned import TurnedLinear
from mlxrt.models.vectors import VectorExpertLinear, VectorLinear

from ..metal_sim import NoCompiler, Simulator
from ..metal_sim.toolchain import compiler

E, DIM, HIDDEN = 5, 96, 40


@pytest.fixture
def simulated():
    try:
        compiler()
    except NoCompiler as reason:
        pytest.skip(str(reason))
    return Kernels("strict", gpu_of("metal", Simulator(portable=True).metal_kernel))


def filled(layer):
    """Random words and norms."""
    layer.words = mx.random.randint(0, 1 << 31, layer.words.shape).astype(mx.uint32)
    layer.norms = mx.random.uniform(0.5, 1.5, layer.norms.shape).astype(mx.float16)
    return layer


def coded_experts(bits: tuple[int, int, int]) -> Experts:
    experts = Experts(E, DIM, HIDDEN)
    for name, width, outs, b in zip(
        ("gate_proj", "up_proj", "down_proj"), (DIM, DIM, HIDDEN), (HIDDEN, HIDDEN, DIM), bits
    ):
        experts[name] = filled(CodedExpertLinear(Coding.jangtq(b, width, 42), E, outs))
    return experts


def by(kernels: Kernels, module, *arguments, **named):
    for part in module.modules():
        part.kernels = kernels
    y = module(*arguments, **named)
    mx.eval(y)
    return y


def agrees(module, kernels, *arguments, **named) -> None:
    plain, ours = (by(k, module, *arguments, **named) for k in (PLAIN, kernels))
    assert ours.dtype == plain.dtype and ours.shape == plain.shape
    assert mx.abs(ours - plain).max().item() <= 2e-5 * max(1.0, mx.abs(plain).max().item())


@pytest.mark.parametrize("bits", [(2, 2, 4), (3, 3, 3)])
def test_routed_experts_are_two_products_and_two_turnings(bits, simulated):
    mx.random.seed(1)
    module, x = coded_experts(bits), mx.random.normal((2, DIM))
    experts = mx.array([[4, 0, 2], [1, 1, 3]], mx.uint32)
    weights, residual = mx.random.uniform(shape=(2, 3)), mx.random.normal((2, DIM))
    agrees(module, simulated, x, experts, weights, residual=residual)
    assert simulated.used == {"turn": 2, "coded_gate_up": 1, "coded_down": 1}


def test_many_tokens_unpack_each_expert_once(simulated):
    mx.random.seed(2)
    module, x = coded_experts((2, 2, 2)), mx.random.normal((70, DIM))
    experts, weights = mx.random.randint(0, E, (70, 2)).astype(mx.uint32), mx.random.uniform(shape=(70, 2))
    agrees(module, simulated, x, experts, weights)
    assert simulated.used == {"turn": 3, "coded_unpack": 3}


def test_so_many_outputs_at_a_time_that_they_fit(simulated, monkeypatch):
    monkeypatch.setattr("mlxrt.models.coded.AT_ONCE", E * DIM * 4 * 15)
    mx.random.seed(2)
    module, x = coded_experts((2, 2, 2)), mx.random.normal((70, DIM))
    experts, weights = mx.random.randint(0, E, (70, 2)).astype(mx.uint32), mx.random.uniform(shape=(70, 2))
    agrees(module, simulated, x, experts, weights)
    assert simulated.used == {"turn": 3, "coded_unpack": 9}


@pytest.mark.parametrize("rows", [1, 70])
def test_dense_layers(rows, simulated):
    mx.random.seed(3)
    agrees(filled(CodedLinear(Coding.jangtq(3, DIM, 7), 24)), simulated, mx.random.normal((rows, DIM)))
    agrees(filled(CodedLinear(Coding.jangtq2(4, DIM, turned=True), 24)), simulated, mx.random.normal((rows, DIM)))


def test_turned_affine(simulated):
    mx.random.seed(4)
    plain = mx.random.normal((24, DIM))
    layer = TurnedLinear({"weight": plain}, 32, 4, Rotation(binary_blocks(DIM), 42), ())
    layer.inner.weight, layer.inner.scales, layer.inner.biases = mx.quantize(plain, 32, 4)
    agrees(layer, simulated, mx.random.normal((3, DIM)))
    assert simulated.used == {"turn": 1}


def test_vectors(simulated):
    mx.random.seed(5)
    book = mx.random.normal((30, 8)).astype(mx.float16)
    codes = mx.random.randint(0, 30, (E, 24, DIM // 8)).astype(mx.uint16)
    one, many = VectorLinear(codes[0], book), VectorExpertLinear(codes, book)
    one.codes, one.codebook, many.codes, many.codebook = codes[0], book, codes, book
    agrees(one, simulated, mx.random.normal((3, DIM)))
    experts = mx.array([[4, 0], [2, 2]], mx.uint32)
    agrees(many, simulated, mx.random.normal((2, 1, 1, DIM)), experts)
    agrees(many, simulated, mx.random.normal((2, 2, 1, DIM)), experts)
    assert simulated.used == {"vector_rows": 3}
