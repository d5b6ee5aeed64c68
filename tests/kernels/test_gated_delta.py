"""The gated delta update in one launch: step after step, inside a Qwen3.5, and where it is refused."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxrt import EngineConfig
from mlxrt.engine.engine import Engine, Source
from mlxrt.kernels import Kernels, gated_delta_step, make_gpu
from mlxrt.kernels.selftest import list_cases
from mlxrt.models import find
from mlxrt.weights.random_models import random_weights
from tests.support.launch_count import launches_per_token, make_request, make_zeros
from tests.support.log_lines import capture_log

from ..support.metal_sim import Simulator
from .test_add_norm_qmv import AROUND, CONFIGS, PROMPT, decoded, simulated
from .test_constant_buffer import Counting

LINEAR, FULL = "linear_attention", "full_attention"
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 64,
    "num_attention_heads": 2,
    "layer_types": [LINEAR, FULL, LINEAR],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "tie_word_embeddings": False,  # a tied head says the last token again
}
A_LAYER = 5  # in, the update or attention, out; gate and up, down


def qwen(kernels, **changes):
    """A tiny one, packed, whose decays and norms differ; it forgets slowly."""
    raw = json.loads((CONFIGS / "qwen3_5" / "config.json").read_text())
    raw["text_config"] |= SIZES | changes
    raw["tie_word_embeddings"] = False
    family = find(raw)
    model = family(family.parse(raw))
    random_weights(model, 4, mx.float32)
    mx.random.seed(1)
    drawn = [
        (name, mx.random.uniform(0.5, 1.5, a.shape) - 4 * name.endswith("A_log"))
        for name, a in sorted(tree_flatten(model.parameters()))
        if name.endswith(("A_log", "dt_bias")) or "norm" in name
    ]
    model.load_weights(drawn, strict=False)
    model.fuse(kernels)
    mx.eval(model.parameters())
    return model


def test_qwen_decodes_the_same_by_kernels():
    kernels = simulated(sim := Simulator(portable=True))
    tokens = decoded(qwen(kernels), 7)
    assert tokens == decoded(qwen(Kernels("reference")), 7)
    assert len(set(tokens)) > 2  # not one token over and over, whatever the layers compute
    assert kernels.used["gated_delta_step"] == 2 * 6 and not sim.errors()  # the first comes from the prompt's chunk


def test_rows_of_different_lengths_decode_the_same():
    def together(kernels):
        config = EngineConfig(max_context=128, chunk=64, compile=False, prefix_cache=False)
        with Engine(qwen(kernels), config, source=Source("tiny")) as engine:
            return [c.tokens for c in engine.generate([make_request(PROMPT[:n], 6) for n in (8, 1, 3)])]

    kernels = simulated(sim := Simulator(portable=True))
    assert together(kernels) == together(Kernels("reference"))
    assert "gated_delta_step" in kernels.used and not sim.errors()


def test_launches_a_token():
    model = qwen(Kernels("strict", make_gpu("metal", make_zeros)))
    assert launches_per_token(model, PROMPT) == model.config.num_hidden_layers * A_LAYER + AROUND


def test_token_memory_and_one_buffer_are_the_inputs():
    layer = qwen(simulated(sim := Counting())).model.layers[0].linear_attn
    parts = tuple(mx.zeros((1, *shape), dtype) for shape, dtype in layer.spec(mx.float32).parts)
    projected = mx.random.normal((1, 1, sum(layer.widths)))
    sim.inputs.clear()
    layer.cell(parts, projected)
    assert sim.inputs == [4]  # the projection; what came before, the state; the layer's constants


def test_nothing_drifts():
    """Sixty tokens, each with the memory that the last one left."""
    gpu = make_gpu("metal", Simulator(portable=True).metal_kernel)
    given = list_cases(gated_delta_step, "float32")[1].arguments()
    ours = plain = {name: given.pop(name) for name in ("conv_state", "state")}
    mx.random.seed(2)
    for _ in range(60):
        given["projected"] = mx.random.normal(given["projected"].shape)
        both = ((launcher(gpu), ours), (gated_delta_step.reference, plain))
        (y, *a), (z, *b) = (f(**given, **had) for f, had in both)
        ours, plain = (dict(zip(("conv_state", "state"), kept)) for kept in (a, b))
        mx.eval(ours, plain)
        assert mx.allclose(y, z, atol=1e-5)
    assert mx.array_equal(ours["conv_state"], plain["conv_state"]) and mx.allclose(
        ours["state"], plain["state"], atol=1e-5
    )


def launcher(gpu):
    return lambda **given: gated_delta_step.launch(gpu, **given)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"linear_key_head_dim": 16}, "heads of 16 x 64: multiples of 32 up to 256"),
        ({"linear_value_head_dim": 40}, "heads of 32 x 40: multiples of 32 up to 256"),
        ({"linear_conv_kernel_dim": 9}, "a convolution 9 wide"),
    ],
)
def test_what_it_cannot_take_is_said_and_computed(changes, reason):
    said = capture_log()
    kernels = Kernels("auto", make_gpu("metal", Simulator(portable=True).metal_kernel))
    assert decoded(qwen(kernels, **changes)) == decoded(qwen(Kernels("reference"), **changes))
    assert f"gated_delta_step runs as plain MLX: {reason}" in said and "gated_delta_step" not in kernels.used


def test_other_types_are_refused():
    given = list_cases(gated_delta_step, "bfloat16")[0].arguments()
    assert gated_delta_step.unsupported(**given) is None
    for name, other in (("conv_state", mx.float32), ("projected", mx.float32), ("state", mx.bfloat16)):
        assert "a state of" in gated_delta_step.unsupported(**given | {name: given[name].astype(other)})
