"""Mixture-of-experts layers on a GPU against float32 references: plain weights through MLX's gather_mm, and JANGTQ.

MLX 0.32.4's gather_mm is wrong on CUDA in two cases that mlxrt/kernels/mlx_defects.py avoids.
"""

import mlx.core as mx
import pytest

from mlxrt.kernels import PLAIN, Kernels, moe_down, moe_gate_up
from mlxrt.kernels.mlx_defects import gather_mm
from mlxrt.models.base import FusedModule
from mlxrt.models.moe import Experts, expert_matrix, prepare_input
from mlxrt.models.quantized.lut_linear import LUTEncoding, LUTExpertLinear

MAX_ERROR = 0.02  # of the largest value
MAX_JANG_ERROR = 0.05
HIDDEN, INNER, USED = 3072, 1536, 8  # of MiniMax-M2's experts
PROJECTIONS = (("gate_proj", HIDDEN, INNER), ("up_proj", HIDDEN, INNER), ("down_proj", INNER, HIDDEN))


@pytest.fixture(autouse=True)
def seed():
    mx.random.seed(1)


def wrong_rows(name, got, expected):
    error, top = mx.abs(got.astype(mx.float32) - expected).max(axis=-1), mx.abs(expected).max().item()
    wrong = sum(not e < MAX_ERROR * top for e in error.tolist())
    print(f"{name}: {wrong} of {error.size} rows wrong, largest error {error.max().item():.3g} of {top:.3g}")
    return wrong


def choose_experts(tokens, count):
    return mx.argsort(mx.random.uniform(shape=(tokens, count)), axis=-1)[:, :USED].astype(mx.uint32)


@pytest.mark.parametrize("tokens", [65, 512])
def test_experts_of_plain_weights(gpu, tokens, count=128, dim=2048, hidden=768):
    layer = Experts(count, dim, hidden)
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer[name].weight = layer[name].weight.astype(mx.bfloat16)
    layer.kernels = Kernels("auto", gpu)
    layer.fuse()
    x, chosen = mx.random.normal((tokens, dim)).astype(mx.bfloat16), choose_experts(tokens, count)
    shares = mx.softmax(mx.random.normal(chosen.shape), axis=-1)
    expected, each = mx.zeros((tokens, dim)), chosen.tolist()
    for e in range(count):
        pairs = [(n, c) for n in range(tokens) for c in range(USED) if each[n][c] == e]
        if pairs:
            rows, columns = (mx.array(axis) for axis in zip(*pairs))
            y = x[rows].astype(mx.float32) @ layer.gate_up_proj.weight[e].astype(mx.float32).T
            gate, up = mx.split(y, 2, axis=-1)
            y = (gate * mx.sigmoid(gate) * up) @ layer.down_proj.weight[e].astype(mx.float32).T
            expected = expected.at[rows].add(y * shares[rows, columns][:, None])
    assert not wrong_rows(f"{tokens} tokens through {count} experts", layer(x, chosen, shares), expected)


@pytest.mark.parametrize(("count", "outs"), [(128, 1536), (256, 3072)])
def test_gather_mm(count, outs, dim=2048):
    """MLX's own may end the process here: mlx_defects has it, and test_mlx_defects tries it in one of its own."""
    weight = mx.random.uniform(-1, 1, (count, outs, dim)).astype(mx.bfloat16)
    x, chosen = mx.random.normal((65, dim)).astype(mx.bfloat16), choose_experts(65, count).flatten()
    order = mx.argsort(chosen)
    ids, rows, stack = chosen[order], x[order // USED], weight.swapaxes(-1, -2)
    each = ids.tolist()
    groups = [(e, each.index(e), each.count(e)) for e in sorted(set(each))]
    expected = mx.concatenate(
        [rows[a : a + n].astype(mx.float32) @ weight[e].astype(mx.float32).T for e, a, n in groups]
    )
    name = f"a stack of {weight.nbytes / 1e9:.1f} GB"
    assert not wrong_rows(name, gather_mm(rows[:, None], stack, ids, ordered=True)[:, 0], expected)


@pytest.fixture
def jang_layer(gpu):
    """256 experts of MiniMax-M2's shape in JANGTQ2, fused and packed as a model's layers are."""
    layer = Experts(256, 32, 32)
    for name, width, outs in PROJECTIONS:
        linear = LUTExpertLinear(LUTEncoding.jangtq(2, width, 42), 256, outs)
        linear.words = mx.random.randint(-(1 << 31), (1 << 31) - 1, linear.words.shape).view(mx.uint32)
        linear.norms = mx.random.uniform(0.5, 1.5, linear.norms.shape).astype(mx.float16)
        mx.eval(linear.words, linear.norms)
        layer[name] = linear
    set_kernels(layer, Kernels("strict", gpu))
    for part in reversed(layer.modules()):
        if isinstance(part, FusedModule):
            part.fuse()
            mx.eval(part.parameters())
    for part in layer.modules():
        if not part.children():
            layer.pack_constants(part)
    return layer


def set_kernels(layer, kernels):
    for part in layer.modules():
        part.kernels = kernels


def reference(layer, x, experts, weights):
    """A few rows in float32, by plain MLX on the CPU."""
    kernels = layer.kernels
    set_kernels(layer, PLAIN)
    with mx.stream(mx.cpu):
        y = layer(x.astype(mx.float32), experts, weights)
        mx.eval(y)
    set_kernels(layer, kernels)
    return y


def relative_error(got, expected):
    return (mx.abs(got.astype(mx.float32) - expected).max() / mx.abs(expected).max()).item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 512])
def test_jang_experts(gpu, jang_layer, tokens, dtype):
    """One token as in decode; 512 by reading an expert once for all its tokens, and by a matvec per row."""
    experts, x = choose_experts(tokens, 256), mx.random.normal((tokens, HIDDEN)).astype(dtype)
    weights = mx.softmax(mx.random.normal((tokens, USED)), axis=-1)
    few = slice(0, 3)
    expected = reference(jang_layer, x[few], experts[few], weights[few])
    assert relative_error(jang_layer(x, experts, weights)[few], expected) < MAX_JANG_ERROR
    if tokens > 1:
        first, last = jang_layer.gate_up_proj, jang_layer.down_proj
        h = moe_gate_up.launch(gpu, prepare_input(first, x), experts, expert_matrix(first), "silu")
        by_rows = moe_down.launch(gpu, prepare_input(last, h), experts, weights, expert_matrix(last))
        assert relative_error(by_rows[few], expected) < MAX_JANG_ERROR
