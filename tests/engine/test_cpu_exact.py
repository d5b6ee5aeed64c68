"""Answers on a CPU bit for bit the same, log probabilities included: whatever is cached of a prompt, however it is cut
up, and whatever runs beside it. All that packed models compute there is done row by row."""

from pathlib import Path

import pytest

import mlxrt
from mlxrt.weights.random_models import published_configs

from ..kernels.test_families import SHAPES, SMALL, small_sizes
from ..support.kernels.cpu_library import compiled_library
from .test_cpu_families import HYBRID

pytestmark = pytest.mark.xdist_group("cpu_kernels")  # one worker compiles the library

PROMPTS = [tuple((7 * i + n) % 191 for i in range(n)) for n in (21, 5, 75, 1)]
PARAMS = (
    {"max_tokens": 40},
    {"max_tokens": 37, "temperature": 1.0, "seed": 3},
    {"max_tokens": 12, "temperature": 1.0, "top_k": 20, "seed": 4},
    {"max_tokens": 45, "temperature": 0.7, "repetition_penalty": 1.2, "seed": 5},
)
NAMES = sorted(set(SHAPES) - HYBRID)
SOME = ("gemma4-e2b", "gpt-oss-20b", "qwen3-0.6b")
WAYS = [(name, {"kv": "q8"}) for name in NAMES]
WAYS += [(name, cache) for name in SOME for cache in ({}, {"kv": "k8v4", "max_kv_size": 48})]


@pytest.fixture(scope="module", autouse=True)
def library() -> Path:
    return compiled_library()


def requests(prompts) -> list[mlxrt.Request]:
    return [
        mlxrt.Request(tokens=tokens, params=mlxrt.SamplingParams(ignore_eos=True, logprobs=3, **params))
        for tokens, params in zip(prompts, PARAMS)
    ]


def answers(done) -> list:
    return [(c.tokens, c.logprobs) for c in done]


@pytest.mark.parametrize(("name", "cache"), WAYS, ids=str)
def test_answers_depend_on_nothing_else(name, cache, monkeypatch):
    config = dict(published_configs()[name])
    inner = config["text_config"] = dict(config["text_config"]) if "text_config" in config else config
    inner |= {key: value for key, value in (SMALL | small_sizes(name)).items() if inner.get(key) is not None}
    if inner is config:
        del config["text_config"]
    monkeypatch.setitem(published_configs(), name, config)
    options = {"max_context": 256, "kv_memory": "64M", **cache}
    with mlxrt.load(f"shape:{name}@4bit", prefix_cache=False, **options) as engine:
        alone = answers(engine.generate(request) for request in requests(PROMPTS))
        longer = [prompt + tokens[:9] + prompt[:4] for prompt, (tokens, _) in zip(PROMPTS, alone)]
        second = answers(engine.generate(request) for request in requests(longer))
        assert answers(engine.generate(requests(PROMPTS))) == alone  # beside each other
    with mlxrt.load(f"shape:{name}@4bit", chunk=7, prefix_cache=False, **options) as engine:
        assert answers(engine.generate(requests(PROMPTS))) == alone
    with mlxrt.load(f"shape:{name}@4bit", **options) as engine:
        for _ in range(2):  # computed, then cached
            done = [engine.generate(request) for request in requests(PROMPTS)]
            assert answers(done) == alone
        assert sum(c.cached_tokens for c in done) > 0
        # Second turns: what decode steps wrote is read instead of a prompt's.
        done = engine.generate(requests(longer))
        assert answers(done) == second
        assert sum(c.cached_tokens for c in done) > sum(map(len, PROMPTS)) // 2
