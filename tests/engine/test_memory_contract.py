"""The memory contract: what fits runs, what does not is refused with numbers, and the peak stays under the limit."""

import dataclasses
import gc

import mlx.core as mx
import pytest

import mlxrt
from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.memory import activation_bytes, weight_bytes
from tests.support import toy_models as toy
from tests.support.oracle import truth

VOCAB, LAYERS = 300, 4


def make(kinds: str):
    """Larger than the toys, so that keys and values weigh something."""
    config = dataclasses.replace(
        toy.CONFIG, vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=8, head_dim=32, windows=(None,) * LAYERS,
    )  # fmt: skip
    mx.random.seed(0)
    made = type("Toy", (toy.Toy,), {"kinds": kinds, "size": 8, "window": 48})(config)
    made.fuse()
    mx.eval(made.parameters())
    return made


def ask(k: int, length: int = 120, n: int = 30) -> Request:
    tokens = tuple((k * 37 + j * 11) % VOCAB for j in range(length))
    return Request(tokens=tokens, params=SamplingParams(max_tokens=n))


def played(model, requests, **config):
    """The answers, the stats, and the most memory taken beside what was there before."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    engine = Engine(model, EngineConfig(max_running=8, **config))
    done = engine.generate(requests)
    stats, peak = engine.stats(), mx.get_peak_memory() - before
    engine.close()
    return done, stats, peak


@pytest.mark.parametrize("kinds", ["f", "wf", "rf"])
def test_less_memory_than_the_load_wants(kinds):
    model, requests = make(kinds), [ask(k) for k in range(8)]
    want, free, _ = played(model, requests, prefix_cache=False)
    weights = weight_bytes(model)
    activations = activation_bytes(model, model.cache_specs(), 64, 8, 0)
    cap = weights + activations + int(0.6 * free.kv_allocated)
    done, stats, peak = played(model, requests, memory=cap, chunk=64)
    assert [d.tokens for d in done] == [w.tokens for w in want]
    assert want[0].tokens == truth(model, requests[0].tokens, 30, want[0].tokens)
    assert stats.memory_limit == cap and peak + weights <= 1.05 * cap
    assert kinds != "f" or stats.preemptions + stats.evictions > 0
    assert mx.get_memory_limit() != cap  # closing put back what was there before


def test_what_never_fits_is_refused_with_numbers():
    model = make("f")
    weights = weight_bytes(model)
    with pytest.raises(mlxrt.WontFit, match=rf"limited to {weights} bytes; the weights take {weights}"):
        Engine(model, EngineConfig(memory=weights))
    engine = Engine(model, EngineConfig(memory=weights + (2 << 20), max_running=2))
    assert engine.context < 4096 and engine.core.memory.total <= weights + (2 << 20)
    with pytest.raises(mlxrt.WontFit, match=r"has 2000 tokens, .* need \d+ bytes, there are \d+"):
        engine.generate(ask(1, 2000))
    assert engine.generate(ask(1, 50, 4)).finish_reason == "length"
    engine.close()


def test_a_tight_limit_shortens_the_step():
    model = make("f")
    weights = weight_bytes(model)
    loose = Engine(model, EngineConfig(memory=weights + (64 << 20), max_running=2))
    tight = Engine(model, EngineConfig(memory=weights + (1 << 20), max_running=2))
    assert tight.stats().chunk < loose.stats().chunk
    for engine in (tight, loose):
        assert engine.generate(ask(3, 20, 5)).tokens == truth(model, ask(3, 20).tokens, 5)
        engine.close()


def test_a_requests_cost_is_known_before_it_runs():
    model = make("wf")
    engine = Engine(model, EngineConfig(prefix_cache=False))
    cost = engine.cost(ask(1, 100, 28))
    full, window = (s.nbytes() for s in model.cache_specs()[1::-1])
    assert cost.weights == weight_bytes(model) and cost.total == cost.weights + cost.kv + cost.activations
    stream = engine.stream(ask(1, 100, 28))
    most = max(engine.stats().kv_live for _ in stream)
    assert full * 2 * 16 <= most <= cost.kv <= full * 2 * 16 + window * 2 * 16
    engine.close()


@pytest.mark.parametrize(
    "bad", [dict(memory="much"), dict(memory=0), dict(max_stall=0), dict(max_stall_ms=-1), dict(max_queue=0)]
)
def test_bad_limits_are_refused(bad):
    with pytest.raises(mlxrt.BadRequest):
        EngineConfig(**bad)
