"""The engine on a GPU: the right tokens for every cache kind, and no second KV cache from launching ahead."""

import mlx.core as mx
import pytest

from bench.gpu.shapes import make_request
from mlxrt import Engine, EngineConfig
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


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_decode_launched_ahead_allocates_no_second_cache(ahead):
    peak, pool = measure_peak(ahead)
    assert peak < pool / 4
