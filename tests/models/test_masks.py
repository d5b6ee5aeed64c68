"""GPUs get a mask for heads that MLX has no causal kernel for: it is what "causal" is, in chunks and reused prompts."""

import mlx.core as mx
import pytest

from mlxrt import EngineConfig, Request, SamplingParams
from mlxrt.cache.memory import paged
from mlxrt.engine.engine import Engine, Source
from mlxrt.kernels.ops import attention
from mlxrt.kernels.ops.attention import AttentionParams
from mlxrt.models import find
from mlxrt.weights.random_models import random_weights, shape_config
from tests.support.oracle import logits, truth
from tests.support.toy_models import KINDS

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "global_head_dim": 16,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
PROMPT = tuple(7 * i % 121 + 3 for i in range(90))


def scores(name: str) -> list[mx.array]:
    """Of a prompt in chunks, and of one that goes on from its first half."""
    raw = shape_config(name)
    raw |= {key: value for key, value in SMALL.items() if raw.get(key) is not None}
    family = find(raw)
    model = family(family.parse(raw))
    mx.random.seed(5)
    random_weights(model, None, mx.float32)
    config = EngineConfig(max_context=256, chunk=40)
    with Engine(model, config, source=Source(name)) as engine:
        first = engine.generate(Request(tokens=PROMPT, params=SamplingParams(max_tokens=6, ignore_eos=True)))
        again = Request(tokens=(*PROMPT[:70], 9, 8, 7), params=SamplingParams(max_tokens=6, ignore_eos=True))
        return [engine.score(list(PROMPT)), mx.array(first.tokens), mx.array(engine.generate(again).tokens)]


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma3-1b", "gemma4-e2b"])
def test_a_mask_is_what_causal_is(name, monkeypatch):
    expected = scores(name)
    monkeypatch.setattr(AttentionParams, "is_causal", lambda self, dim, start, stop, first: False)
    got = scores(name)
    assert mx.allclose(got[0], expected[0], atol=1e-4)
    assert all(mx.array_equal(a, b) for a, b in zip(got[1:], expected[1:]))


@pytest.mark.parametrize("name", ["gemma3-1b", "gpt-oss-20b"])
def test_a_mask_of_numbers_is_the_mask(name, monkeypatch):
    """As on CUDA, where heads of more than 128 numbers have one even without a window."""
    expected = scores(name)
    monkeypatch.setattr(attention, "backend", lambda: "cuda")
    monkeypatch.setattr(attention, "MAX_FUSED_DIM", 0)
    got = scores(name)
    assert got[0].dtype == expected[0].dtype and mx.allclose(got[0], expected[0], atol=1e-4)
    assert all(mx.array_equal(a, b) for a, b in zip(got[1:], expected[1:]))


@pytest.mark.parametrize("name", ["gemma3-1b", "gemma4-e2b", "gpt-oss-20b"])
def test_a_window_in_tiles_is_the_window(name, monkeypatch):
    """Tiles of 16 queries, some of whose keys begin with the prompt; with sinks, too."""
    expected = scores(name)
    monkeypatch.setattr(paged, "MIN_TILE", 1)
    bands: list[int] = []
    band = AttentionParams.mask_band
    monkeypatch.setattr(AttentionParams, "mask_band", lambda self, before, n: bands.append(n) or band(self, before, n))
    got = scores(name)
    assert mx.allclose(got[0], expected[0], atol=1e-4) and set(bands) == {16}
    assert all(mx.array_equal(a, b) for a, b in zip(got[1:], expected[1:]))


@pytest.mark.parametrize("kind", ["window", "narrow", "rotating", "rotating-keep", "q4-rotating"])
def test_a_prompt_in_tiles_equals_recomputation(kind, monkeypatch):
    monkeypatch.setattr(paged, "MIN_TILE", 1)
    model, prompt = KINDS[kind](), tuple(i * 7 % 90 for i in range(75))
    with Engine(model, EngineConfig(chunk=33)) as engine:
        rows = engine.score(list(prompt))
        assert mx.allclose(rows, logits(model, prompt), atol=1e-4)
        assert engine.generate(prompt, max_tokens=9).tokens == truth(model, prompt, 9)


@pytest.mark.parametrize(("window", "first", "stop", "fine"), [
    (None, 0, 90, True), (16, 0, 16, True), (16, 0, 17, False), (16, 64, 80, True),
])  # fmt: skip
def test_when_no_mask_is_needed(window, first, stop, fine):
    assert AttentionParams(1.0, window).is_causal(64, 3, stop, first) is fine
    assert not AttentionParams(1.0, window, softcap=3.0).is_causal(64, 3, stop, first)
