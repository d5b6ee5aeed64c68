"""A product of a sum in one launch: the numbers of the two launches it replaces, and Gemmas that decode by it."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxrt import EngineConfig
from mlxrt.engine.engine import Engine, Source
from mlxrt.errors import NoKernel
from mlxrt.kernels import Kernels, add_norm, add_norm_qmv, make_gpu, qmv
from mlxrt.kernels.dtypes import DTYPES
from mlxrt.kernels.ops.qmv import MAX_QMV_ROWS
from mlxrt.kernels.selftest import list_cases
from mlxrt.models import find
from mlxrt.models.fused_linear import add_norm_linear
from mlxrt.weights.random_models import random_weights
from tests.support.launch_count import launches_per_token, make_request, make_zeros

from ..support.kernels.cases import choose_cases
from ..support.log_lines import capture_log
from ..support.metal_sim import Simulator
from .test_constant_buffer import Counting

CONFIGS = Path(__file__).parents[1] / "parity"
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "sliding_window": 8,
}
AROUND = 3  # launches besides the layers': embedding, head, the best token
GEMMAS = {  # folder of a config, changes to it, launches a layer, launches besides
    # qkv and attention, o; gate and up of the sum, down; the sum that ends the block
    "gemma2": ("gemma2", {}, 5, AROUND),
    "gemma3": ("gemma3_text", {}, 5, AROUND),
    "gemma4": ("gemma4_e2b", {"global_head_dim": 128, "hidden_size_per_layer_input": 0}, 5, AROUND),
    "gemma4-e2b": ("gemma4_e2b", {"global_head_dim": 128, "hidden_size_per_layer_input": 64}, 7, AROUND + 3),
}  # the last one: and the gate of another sum, the projection; besides, three for the layers' own inputs
PROMPT = [3, 14, 15, 9, 2, 6, 5, 35]


def gemma(name, kernels):
    """A tiny one, packed, whose norms and scalars are no ones."""
    folder, changes, *_ = GEMMAS[name]
    raw = json.loads((CONFIGS / folder / "config.json").read_text()) | SIZES | changes
    family = find(raw)
    model = family(family.parse(raw))
    random_weights(model, 4, mx.float32)
    mx.random.seed(1)
    drawn = [
        (name, mx.random.uniform(0.5, 1.5, a.shape))
        for name, a in sorted(tree_flatten(model.parameters()))
        if "norm" in name or name.endswith("layer_scalar")
    ]
    model.load_weights(drawn, strict=False)
    model.fuse(kernels)
    mx.eval(model.parameters())
    return model


def simulated(sim=None):
    return Kernels("strict", make_gpu("metal", (sim or Simulator(portable=True)).metal_kernel))


def decoded(model, count=6):
    config = EngineConfig(max_context=128, chunk=64, compile=False, ahead=0, prefix_cache=False)
    with Engine(model, config, source=Source("tiny")) as engine:
        return engine.generate(make_request(PROMPT, count)).tokens


@pytest.mark.parametrize("name", GEMMAS)
def test_gemma_decodes_the_same_by_kernels(name):
    kernels = simulated(sim := Simulator(portable=True))
    tokens = decoded(gemma(name, kernels))
    assert tokens == decoded(gemma(name, Kernels("reference")))
    assert len(set(tokens)) > 2  # not one token over and over, whatever the blocks compute
    assert {"add_norm_qmv", "add_norm", "qmv"} <= set(kernels.used) and not sim.errors()


@pytest.mark.parametrize("name", GEMMAS)
def test_launches_a_token(name):
    model = gemma(name, Kernels("strict", make_gpu("metal", make_zeros)))
    layer, besides = GEMMAS[name][2:]
    assert launches_per_token(model, PROMPT) == model.config.num_hidden_layers * layer + besides


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_those_of_two_launches(dtype):
    gpu = make_gpu("metal", Simulator(portable=True).metal_kernel)
    for case in choose_cases(list_cases(add_norm_qmv, dtype), dtype):
        given = case.arguments()
        y, h = add_norm_qmv.launch(gpu, **given)
        sums = {name: given.pop(name) for name in ("residual", "post", "post_eps", "scalar") if name in given}
        alone = add_norm.launch(gpu, given["x"], sums["post"], sums["post_eps"], sums["residual"], sums.get("scalar"))
        # The squares are added in another order: a few numbers may round to a neighbour.
        assert mx.allclose(h, alone, rtol=2 * mx.finfo(DTYPES[dtype]).eps, atol=1e-5), case.name
        assert mx.array_equal(y, qmv.launch(gpu, **given | {"x": h})), case.name


def aloud() -> tuple[Kernels, list[str]]:
    """Kernels that may fall back, and what they say then."""
    said = capture_log()
    return Kernels("auto", make_gpu("metal", Simulator(portable=True).metal_kernel)), said


def layer(rows, bias=False):
    """(linear, x, what stands before it)."""
    mx.random.seed(rows)
    linear, norms = nn.Linear(64, 40, bias=bias), [nn.RMSNorm(64, eps=1e-6) for _ in range(2)]
    for norm in norms:
        norm.weight = mx.random.uniform(0.5, 1.5, (64,))
    x, residual = mx.random.normal((2, rows, 64))
    return linear, x, {"post": norms[0], "residual": residual, "norm": norms[1]}


def by_hand(linear, x, post, residual, norm):
    h = residual + post(x)
    return linear(norm(h)), h


@pytest.mark.parametrize("rows", [1, MAX_QMV_ROWS, MAX_QMV_ROWS + 1, 70])
def test_more_rows_take_two_launches(rows):
    kernels, (linear, x, around) = simulated(), layer(rows, bias=True)
    found = add_norm_linear(linear, x, kernels, **around)
    assert all(mx.allclose(a, b, atol=1e-4) for a, b in zip(found, by_hand(linear, x, **around), strict=True))
    assert ("add_norm_qmv" in kernels.used) == (rows <= MAX_QMV_ROWS)


def test_a_kernel_that_is_wrong_here_is_replaced_by_two():
    (kernels, said), (linear, x, around) = aloud(), layer(2)
    kernels.disabled["add_norm_qmv"] = "wrong on this machine"
    found = add_norm_linear(linear, x, kernels, **around)
    assert all(mx.allclose(a, b, atol=1e-4) for a, b in zip(found, by_hand(linear, x, **around), strict=True))
    assert kernels.used == {"add_norm": 1, "qmv": 1}
    assert said == ["add_norm_qmv runs as several launches: wrong on this machine"]
    kernels.mode = "strict"
    with pytest.raises(NoKernel, match="add_norm_qmv: wrong on this machine"):
        add_norm_linear(linear, x, kernels, **around)


def test_what_the_kernel_refuses_is_said():
    (kernels, said), (linear, x, around) = aloud(), layer(2)
    packed = nn.QuantizedLinear.from_linear(linear, 16, 4, mode="nvfp4")
    found = add_norm_linear(packed, x, kernels, **around)
    assert all(mx.allclose(a, b, atol=1e-4) for a, b in zip(found, by_hand(packed, x, **around), strict=True))
    several, plain = "add_norm_qmv runs as several launches", "qmv runs as plain MLX"
    assert said == [f"{several}: nvfp4 weights", f"{plain}: nvfp4 weights"] and kernels.used == {"add_norm": 1}


def test_other_dtypes_are_added_by_another_launch():
    (kernels, said), (linear, x, around) = aloud(), layer(1)
    linear.weight, around["norm"].weight = (a.astype(mx.bfloat16) for a in (linear.weight, around["norm"].weight))
    x, around["residual"] = x.astype(mx.bfloat16), around["residual"].astype(mx.bfloat16)
    _, h = add_norm_linear(linear, x, kernels, **around)  # the weight of `post` is still float32
    assert mx.allclose(h, by_hand(linear, x, **around)[1].astype(mx.bfloat16), rtol=0.02)
    assert kernels.used == {"add_norm": 1, "qmv": 1} and "the norm in mlx.core.float32" in said[0]


def test_a_layer_that_is_no_matrix_is_called():
    class Twice(nn.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    linear, x, around = layer(1)
    twice = Twice(64, 40, bias=False)
    twice.weight = linear.weight
    y, h = add_norm_linear(twice, x, simulated(), **around)
    assert mx.allclose(y, 2 * by_hand(linear, x, **around)[0], atol=1e-4)
    assert mx.allclose(h, by_hand(linear, x, **around)[1], atol=1e-5)


def test_branch_residual_and_one_buffer_are_the_inputs():
    kernels = simulated(sim := Counting())
    block = gemma("gemma4-e2b", kernels).model.layers[0]
    x, own = mx.random.normal((1, 128)), mx.random.normal((1, 64))
    sim.inputs.clear()
    block.feed(x, x)
    around = {"post": block.post_feedforward_layernorm, "residual": x, "activation": "gelu", "times": own}
    add_norm_linear(block.per_layer_input_gate, x, kernels, **around)
    assert sim.inputs == [3, 2, 4]  # gate and up, down; the gate also reads what it is a gate for
