"""Experts against a loop over tokens in float64, in every layout MLX has, and routers against their definitions."""

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.errors import BadCheckpoint, UnsupportedModel
from mlxrt.models.moe import (
    MIN_SORTED_PAIRS,
    ExpertLinear,
    Experts,
    QuantizedExpertLinear,
    sigmoid_topk,
    softmax_topk,
    topk_softmax,
)
from mlxrt.models.sanitize_moe import rename_experts, stack_experts
from tests.support import mlx_format_truth

E, DIM, HIDDEN = 5, 64, 32
LAYOUTS = [("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)] + [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def silu(x):
    return x / (1 + np.exp(-x))


def matrices(module) -> np.ndarray:
    """What a stack stands for, [E, out, in] in float64."""
    if isinstance(module, ExpertLinear):
        return np.array(module.weight).astype(np.float64)
    names = [name for name in ("weight", "scales", "biases") if name in module]
    layout = (module.mode, module.bits, module.group_size)
    return np.stack([mlx_format_truth.matrix(*layout, *(np.array(module[n][e]) for n in names)) for e in range(E)])


def expected(stacks, biases, x, chosen, weights):
    out = np.zeros_like(x)
    for n, row in enumerate(x):
        for e, w in zip(chosen[n], weights[n]):
            gate, up = (stacks[i][e] @ row + biases[i][e] for i in (0, 1))
            out[n] += w * (stacks[2][e] @ (silu(gate) * up) + biases[2][e])
    return out


def drawn(n, k, seed=0):
    random = np.random.default_rng(seed)
    chosen = np.stack([random.permutation(E)[:k] for _ in range(n)])
    return random.standard_normal((n, DIM)), chosen, random.random((n, k))


def run(experts, x, chosen, weights):
    return np.array(experts(mx.array(x, mx.float32), mx.array(chosen), mx.array(weights, mx.float32)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("n, k", [(1, 3), (4, 2), (40, 3), (33, 5)], ids=str)
@pytest.mark.parametrize("layout", [None, *LAYOUTS], ids=str)
def test_experts(layout, n, k, fused):
    mx.random.seed(1)
    experts = Experts(E, DIM, HIDDEN, bias=True)
    names = ("gate_proj", "up_proj", "down_proj")
    for name in names:
        experts[name].bias = mx.random.normal(experts[name].bias.shape)
        if layout:
            mode, bits, group = layout
            experts[name] = experts[name].to_quantized(group, bits, mode)
            assert isinstance(experts[name], QuantizedExpertLinear) and experts[name].weight.dtype == mx.uint32
    stacks = [matrices(experts[name]) for name in names]
    biases = [np.array(experts[name].bias).astype(np.float64) for name in names]
    if fused:
        experts.fuse()
        assert set(experts.children()) == {"gate_up_proj", "down_proj"}
    x, chosen, weights = drawn(n, k)
    assert (n * k >= MIN_SORTED_PAIRS) == (n > 4)  # both ways of computing are in this test
    np.testing.assert_allclose(
        run(experts, x, chosen, weights), expected(stacks, biases, x, chosen, weights), atol=2e-4, rtol=1e-4
    )


def test_stacks_stored_differently_are_not_joined():
    experts = Experts(E, DIM, HIDDEN)
    experts.up_proj = experts.up_proj.to_quantized(32, 8)
    experts.gate_proj = experts.gate_proj.to_quantized(32, 4)
    stacks = [matrices(experts[name]) for name in ("gate_proj", "up_proj", "down_proj")]
    experts.fuse()
    assert "gate_up_proj" not in experts
    x, chosen, weights = drawn(6, 2)
    none = [np.zeros((E, 1))] * 3
    np.testing.assert_allclose(
        run(experts, x, chosen, weights), expected(stacks, none, x, chosen, weights), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("layout", [None, ("affine", 4, 32), ("mxfp4", 4, 32)], ids=str)
@pytest.mark.parametrize("n", [2, 40])
def test_half_precision_stays(n, layout):
    experts = Experts(E, DIM, HIDDEN)
    if layout:
        for name in ("gate_proj", "up_proj", "down_proj"):
            experts[name] = experts[name].to_quantized(layout[2], layout[1], layout[0])
    x, chosen, weights = drawn(n, 3)
    want = run(experts, x, chosen, weights)
    experts.set_dtype(mx.bfloat16)  # floats only: words and byte scales stay
    got = experts(mx.array(x, mx.bfloat16), mx.array(chosen), mx.array(weights, mx.float32))
    assert got.dtype == mx.bfloat16
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), want, atol=0.05)


# Routers


@pytest.mark.parametrize("k", [1, 3, E])
def test_routers(k):
    random = np.random.default_rng(2)
    logits, bias = random.standard_normal((20, E)), 3 * random.standard_normal(E)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    sigmoid = 1 / (1 + np.exp(-logits))
    x, b = mx.array(logits, mx.float32), mx.array(bias, mx.float32)
    cases = [
        (softmax_topk(x, k, normalise=False), shares, logits, False),
        (softmax_topk(x, k, normalise=True), shares, logits, True),
        (topk_softmax(x, k), np.exp(logits), logits, True),
        (sigmoid_topk(x, b, k, normalise=False), sigmoid, sigmoid + bias, False),
        (sigmoid_topk(x, b, k, normalise=True), sigmoid, sigmoid + bias, True),
    ]
    for (experts, weights), values, ranking, normalised in cases:
        assert weights.dtype == mx.float32 and experts.shape == weights.shape == (20, k)
        experts = np.array(experts)
        assert [set(row) for row in experts] == [set(row) for row in np.argsort(-ranking)[:, :k]]
        want = np.take_along_axis(values, experts, -1)
        want = want / want.sum(-1, keepdims=True) if normalised else want
        np.testing.assert_allclose(np.array(weights), want, atol=1e-6)


# Checkpoint layouts


def stacks():
    random = np.random.default_rng(3)
    return {
        "gate_proj": random.random((E, 4, 6)),
        "up_proj": random.random((E, 4, 6)),
        "down_proj": random.random((E, 6, 4)),
    }


def as_singles(s, names=("gate_proj", "up_proj", "down_proj")):
    return {f"a.mlp.experts.{e}.{new}.weight": mx.array(s[old][e]) for old, new in zip(s, names) for e in range(E)}


def as_fused(s, ending=""):
    both = mx.concatenate([mx.array(s["gate_proj"]), mx.array(s["up_proj"])], axis=1)
    return {f"a.mlp.experts.gate_up_proj{ending}": both, f"a.mlp.experts.down_proj{ending}": mx.array(s["down_proj"])}


@pytest.mark.parametrize(
    "layout",
    [
        as_singles,
        as_fused,
        lambda s: as_fused(s, ".weight"),
        lambda s: {f"a.mlp.experts.{name}": mx.array(array) for name, array in s.items()},
        lambda s: {rename_experts(f"a.mlp.switch_mlp.{n}.weight"): mx.array(array) for n, array in s.items()},
        lambda s: {
            rename_experts(n.replace("mlp", "block_sparse_moe")): a
            for n, a in as_singles(s, ("w1", "w3", "w2")).items()
        },
    ],
)
def test_layouts_of_experts(layout):
    arrays = layout(stacks()) | {"a.mlp.gate.weight": mx.ones((E, 6))}
    found = stack_experts(arrays, E)
    assert found.pop("a.mlp.gate.weight").shape == (E, 6)
    assert set(found) == {f"a.mlp.experts.{name}.weight" for name in stacks()}
    for name, array in stacks().items():
        assert np.array_equal(np.array(found[f"a.mlp.experts.{name}.weight"]), array.astype(np.float32))


def test_packed_experts_are_stacked():
    single = {f"experts.{e}.up_proj.{part}": mx.full((2, 3), e) for e in range(E) for part in ("weight", "scales")}
    found = stack_experts(single, E)
    assert set(found) == {"experts.up_proj.weight", "experts.up_proj.scales"}
    assert found["experts.up_proj.scales"].shape == (E, 2, 3) and found["experts.up_proj.scales"][3, 0, 0] == 3


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda a: a.pop("a.mlp.experts.2.up_proj.weight"), BadCheckpoint, "5 experts.*hold 4.*expert 2 is missing"),
        (lambda a: a.update({"a.mlp.experts.9.up_proj.weight": mx.ones((4, 6))}), BadCheckpoint, "expert 9"),
        (lambda a: a.update({"a.mlp.experts.03.up_proj.weight": mx.ones((4, 6))}), BadCheckpoint, "expert 3 twice"),
        (lambda a: a.update({"a.mlp.experts.1.up_proj.weight": mx.ones((4, 5))}), UnsupportedModel, "stored alike"),
        (lambda a: a.update({"a.mlp.experts.up_proj": mx.ones((E, 4, 6))}), BadCheckpoint, "twice"),
        (lambda a: a.update({"a.mlp.experts.gate_up_proj": mx.ones((E, 3, 6))}), BadCheckpoint, "gate rows then up"),
        (lambda a: a.update({"a.mlp.experts.gate_up_proj": mx.ones(4)}), BadCheckpoint, "gate rows then up"),
    ],
)
def test_damaged_experts(change, error, words):
    arrays = as_singles(stacks())
    change(arrays)
    with pytest.raises(error, match=words):
        stack_experts(arrays, E)
