"""The engine on a GPU: the right tokens for every cache kind, and no second KV cache from launching ahead."""

import mlx.core as mx
import pytest

from bench.gpu.shapes import make_request
from mlxrt import Engine, EngineConfig
from mlxrt.cache.memory import paged
from tests.support.ahead_memory import measure_peak
from tests.support.oracle import logits
from tests.support.toy_models import KINDS

PROMPTS = [tuple(range(5, 12)), (1, 2, 3), tuple(range(40, 63)), (9,)]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_recomputation(kind):
    """Where they differ, the gap must be a rounding difference."""
    model = KINDS[kind]()
    with Engine(model, EngineConfig(chunk=16)) as engine:
        done = engine.generate([make_request(p, 24) for p in PROMPTS])
    for prompt, answer in zip(PROMPTS, done):
        rows = logits(model, (*prompt, *answer.tokens))[len(prompt) - 1 : -1]
        chosen = mx.take_along_axis(rows, mx.array(answer.tokens)[:, None], axis=1)[:, 0]
        gap = (rows.max(axis=1) - chosen).max().item()
        assert gap < 2e-2, f"{kind}: a token is {gap} below the best"


@pytest.mark.parametrize("kind", ["window", "narrow", "rotating", "rotating-keep", "q4-rotating"])
@pytest.mark.parametrize("chunk", [33, 75])
def test_a_prompt_in_tiles_of_its_window_equals_recomputation(kind, chunk, monkeypatch):
    """Toy windows are far below a tile's queries otherwise."""
    monkeypatch.setattr(paged, "MIN_TILE", 1)
    model, prompt = KINDS[kind](), tuple(i * 7 % 90 for i in range(75))
    with Engine(model, EngineConfig(chunk=chunk)) as engine:
        rows = engine.score(list(prompt))
    truth = logits(model, prompt)
    assert rows.dtype == truth.dtype == mx.float32 and mx.allclose(rows, truth, atol=1e-3)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_decode_launched_ahead_allocates_no_second_cache(ahead):
    peak, pool = measure_peak(ahead)
    assert peak < pool / 4
