"""Prompts by the gated delta kernels: the same bits however a text is cut and batched, and inside a Qwen3.5."""

import mlx.core as mx
import numpy as np
import pytest

from mlxrt import EngineConfig
from mlxrt.engine.engine import Engine, Source
from mlxrt.errors import NoKernel
from mlxrt.kernels import Kernels, PackedRows, gated_delta_prefill, make_gpu
from tests.support.launch_count import make_request
from tests.support.log_lines import capture_log

from ..support.metal_sim import Simulator
from .test_add_norm_qmv import PROMPT, simulated
from .test_gated_delta import qwen

LENGTH = 70
ONE_LAYER = {"layer_types": ["linear_attention"], "num_hidden_layers": 1}
AFTER = 12  # tokens after a cut: more than lie in threadgroup memory at a time


@pytest.fixture(scope="module")
def gpu():
    return make_gpu("metal", Simulator(portable=True).metal_kernel)


@pytest.fixture(scope="module")
def text():
    """The projection of a text for one head of 32 x 32, and the layer's constants."""
    mx.random.seed(4)
    weights = {"a_log": mx.array([-4.0]), "dt_bias": mx.array([0.5]), "norm": mx.random.normal((32,)), "eps": 1e-6}
    return mx.random.normal((LENGTH, 3 * 32 + 32 + 2)), weights | {"conv_weight": mx.random.normal((3 * 32, 4))}


def run(gpu, text, rows, states=None, pieces=None):
    """y and the states that are kept of rows (length, checkpoints): beginnings of the text, or these `pieces` of it."""
    projected, weights = text
    pieces = pieces or [slice(0, length) for length, _ in rows]
    heads, channels = weights["a_log"].size, weights["conv_weight"].shape[0]
    states = states or [mx.zeros((len(rows), 3, channels)), mx.zeros((len(rows), heads, 32, 32))]
    given = {"projected": mx.concatenate([projected[piece] for piece in pieces]), "rows": PackedRows.pack(rows)}
    found = gated_delta_prefill.launch(gpu, **given, **dict(zip(("conv_state", "state"), states)), **weights)
    mx.eval(found)
    return found


def equal(a, b):
    return all(x.dtype == y.dtype and mx.array_equal(x, y).item() for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def whole(gpu, text):
    """The text at once, with a checkpoint after every token but the last."""
    return run(gpu, text, [(LENGTH, range(1, LENGTH))])


def test_every_cut_gives_the_same_bits(gpu, text, whole):
    """The text goes on after each of its tokens, from the state at that token, all in one batch."""
    y, *states = whole
    states = [mx.concatenate([s[1:], s[:1]]) for s in states]  # by length, less one
    ends = [min(n + AFTER, LENGTH) for n in range(1, LENGTH)]
    rows = [(end - n, ()) for n, end in enumerate(ends, 1)]
    again, *reached = run(gpu, text, rows, [s[:-1] for s in states], [slice(n, end) for n, end in enumerate(ends, 1)])
    first = 0
    for n, end in enumerate(ends, 1):
        assert mx.array_equal(again[first : first + end - n], y[n:end]), n
        assert equal([s[n - 1] for s in reached], [s[end - 1] for s in states]), n
        first += end - n


def test_checkpoints_are_the_states_of_shorter_texts(gpu, text, whole):
    y, *states = whole
    for n in (1, 8, 9, 40):
        shorter, *ends = run(gpu, text, [(n, ())])
        assert mx.array_equal(shorter, y[:n]) and equal([s[0] for s in ends], [s[n] for s in states]), n


def test_rows_of_a_ragged_batch_are_the_rows_alone(gpu, text):
    rows = [(3, (2,)), (1, ()), (19, (8, 16)), (8, ())]
    y, *states = run(gpu, text, rows)
    first, slot = 0, len(rows)
    for r, (length, inner) in enumerate(rows):
        alone, *kept = run(gpu, text, [(length, inner)])
        assert mx.array_equal(y[first : first + length], alone)
        mine = [r, *range(slot, slot + len(inner))]
        assert equal([s[mx.array(mine)] for s in states], kept)
        first, slot = first + length, slot + len(inner)


def test_a_long_text_is_the_rule_in_float64(gpu):
    """The rule's own arithmetic, over more tokens than the op's cases have."""
    mx.random.seed(8)
    length, heads = 200, 2
    projected = mx.random.normal((length, 128 + heads * 34))
    weights = {"a_log": mx.array([-4.0, -7.0]), "dt_bias": mx.zeros(heads), "norm": mx.ones(32), "eps": 1e-6}
    text = projected, weights | {"conv_weight": mx.random.normal((128, 4))}
    _, _, state = run(gpu, text, [(length, ())])
    wide = [np.array(x).astype(np.float64) for x in (projected, text[1]["conv_weight"])]
    truth = scan_float64(*wide, np.array([-4.0, -7.0]))
    assert np.abs(np.array(state[0]) - truth).max() < 1e-4 * np.abs(truth).max()


def scan_float64(projected, conv_weight, a_log):
    """The state [2, 32, 32] after all tokens of one key head and two value heads that share it."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    x = np.concatenate([np.zeros((3, 128)), projected[:, :128]])
    mixed = sum(x[i : i + len(projected)] * conv_weight[:, i] for i in range(4))
    mixed = mixed * sigmoid(mixed)
    state = np.zeros((2, 32, 32))
    for t, row in enumerate(mixed):
        k = row[32:64] / np.sqrt((row[32:64] ** 2).sum() + 1e-6)
        b, a = projected[t, -4:-2], projected[t, -2:]
        state *= np.exp(-np.exp(a_log) * np.log1p(np.exp(a)))[:, None, None]
        u = sigmoid(b)[:, None] * (row[64:].reshape(2, 32) - np.einsum("k,hkv->hv", k, state))
        state += k[None, :, None] * u[:, None, :]
    return state


def answers(kernels):
    """Prompts of several chunks beside short ones, then one that begins where a checkpoint of the first is."""
    config = EngineConfig(max_context=160, chunk=96, compile=False, ahead=0)
    model = qwen(kernels, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
    with Engine(model, config, source=Source("tiny")) as engine:
        prompts = [PROMPT * 14, PROMPT[:1], PROMPT[:3] * 4]
        found = [c.tokens for c in engine.generate([make_request(p, 3) for p in prompts])]
        before = engine.stats().reused_tokens
        found.append(engine.generate(make_request(PROMPT * 9 + [5, 6], 3)).tokens)
        assert engine.stats().reused_tokens - before == 64
    return found


def test_qwen_answers_the_same_by_kernels():
    kernels = simulated(sim := Simulator(strict=False, portable=True))
    assert answers(kernels) == answers(Kernels("reference"))
    assert kernels.used["gated_delta_prefill"] and not kernels.fallbacks and not sim.errors()


def test_many_prompts_take_as_many_launches_as_one():
    def launches(prompts):
        kernels = simulated(Simulator(strict=False, portable=True))
        config = EngineConfig(max_context=64, chunk=64, compile=False, ahead=0, prefix_cache=False)
        with Engine(qwen(kernels, **ONE_LAYER), config, source=Source("tiny")) as engine:
            engine.generate([make_request(p, 1) for p in prompts])
        return kernels.gpu.launches, kernels.used["gated_delta_prefill"]

    one, several = launches([PROMPT[:6]]), launches([PROMPT[:n] for n in (2, 3, 6)])
    assert one == several and one[1] == 1


@pytest.mark.parametrize("changes", [{"linear_key_head_dim": 16}, {"linear_conv_kernel_dim": 9}])
def test_strict_refuses_a_prompt_that_falls_back(changes):
    said = capture_log()
    gpu = make_gpu("metal", Simulator(strict=False, portable=True).metal_kernel)
    config = EngineConfig(max_context=64, chunk=64, compile=False, ahead=0, prefix_cache=False)
    sizes = changes | ONE_LAYER
    with Engine(qwen(Kernels("auto", gpu), **sizes), config, source=Source("tiny")) as engine:
        engine.generate(make_request(PROMPT, 1))
    assert any(line.startswith("gated_delta_prefill runs as plain MLX: ") for line in said)
    strict = Engine(qwen(Kernels("strict", gpu), **sizes), config, source=Source("tiny"))
    with strict, pytest.raises(NoKernel, match="gated_delta_prefill: "):
        strict.generate(make_request(PROMPT, 1))
