"""Hybrids with room for few recurrent states: checkpoints are given up before a request is."""

import dataclasses
import random

import mlx.core as mx
import pytest

from mlxrt import Engine, EngineConfig, Request, SamplingParams, WontFit
from mlxrt.cache.memory import Recurrent
from tests.support import toy_models as toy
from tests.support.oracle import truth
from tests.support.state_machine import invariants

IDLE = 1000  # numbers that make a state large beside keys and values, as those of real hybrids are


class WideDecay(toy.Decay):
    def __call__(self, x, memory, *, norm, residual):
        h = norm(x)
        return residual + memory.scan(wide_decay, self.proj(h), mx.sigmoid(self.gate(h)))


def wide_decay(parts, x, g):
    (state,), y = toy.decay(parts[:1], x, g)
    return (state, parts[1]), y


class WideHybrid(toy.Toy):
    kinds = "rf"

    def block(self, c, i):
        made = super().block(c, i)
        if self.kind(i) == "r":
            made.self_attn = WideDecay(c)
        return made

    def cache_specs(self):
        return [
            dataclasses.replace(s, parts=(*s.parts, ((IDLE,), mx.float32))) if isinstance(s, Recurrent) else s
            for s in super().cache_specs()
        ]


@pytest.fixture(scope="module")
def model():
    mx.random.seed(0)
    made = WideHybrid(dataclasses.replace(toy.CONFIG, num_hidden_layers=2, windows=(None,) * 2))
    made.fuse()
    mx.eval(made.parameters())
    return made


def tight_engine(model, **options) -> Engine:
    """Four states, and keys and values of 96 tokens: three times as many checkpoints as there is room for."""
    engine = Engine(model, EngineConfig(kv_memory=70_000, **options))
    [states] = [g.pool.limit - 1 for g in engine.core.pools.groups if not g.spec.paged]
    assert states == 4 and engine.context >= 88
    return engine


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"chunk": 9}, {"deterministic": True}], ids=str)
def test_a_request_alone_has_the_reported_context(model, options):
    chance = random.Random(len(options))
    with tight_engine(model, **options) as engine:
        for n in (engine.context - 3, *(chance.randrange(1, engine.context - 3) for _ in range(5))):
            prompt = tuple(chance.randrange(toy.VOCAB) for _ in range(n))
            done = engine.generate(Request(tokens=prompt, params=SamplingParams(max_tokens=3)))
            assert done.tokens == truth(model, prompt, 3)
        if engine.core.prefix_cache is not None:
            engine.core.prefix_cache.clear()
        engine.core.runner.flush()
        invariants.check_empty(engine)


def test_several_share_the_states_there_are(model):
    chance = random.Random(5)
    prompts = [tuple(chance.randrange(toy.VOCAB) for _ in range(chance.randrange(1, 40))) for _ in range(6)]
    with tight_engine(model, max_running=4) as engine:
        done = engine.generate([Request(tokens=p, params=SamplingParams(max_tokens=5)) for p in prompts])
        assert [r.tokens for r in done] == [truth(model, p, 5) for p in prompts]


def test_the_message_says_what_is_missing(model):
    """States that somebody holds leave no room: the message has the blocks wanted and those that were free."""
    with tight_engine(model) as engine:
        [pool] = [g.pool for g in engine.core.pools.groups if not g.spec.paged]
        held = pool.allocate(pool.available)
        with pytest.raises(WontFit, match=r"no room for its next step \(1 blocks wanted, 0 of 4 free\)"):
            engine.generate(Request(tokens=(1, 2, 3), params=SamplingParams(max_tokens=1)))
        del held
        assert engine.generate(Request(tokens=(1, 2, 3), params=SamplingParams(max_tokens=1))).finish_reason == "length"


def test_the_least_that_is_asked_for_is_enough(model):
    with pytest.raises(WontFit, match=r"need (\d+) bytes at least, there are 20000") as refused:
        Engine(model, EngineConfig(kv_memory=20_000))
    least = int(str(refused.value).split("need ")[1].split()[0])
    with pytest.raises(WontFit, match=f"need {least} bytes"):
        Engine(model, EngineConfig(kv_memory=least - 1))
    with Engine(model, EngineConfig(kv_memory=least)) as engine:
        assert engine.generate(Request(tokens=(1, 2, 3), params=SamplingParams(max_tokens=1))).finish_reason == "length"
