"""What the user asks of the cache: applied exactly, log_lines in one line, or refused before the first token."""

import pytest

import mlxrt
from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.cache.memory import PagedKV, QuantizedKV, RotatingKV, WindowKV
from tests.support.oracle import truth
from tests.support.toy_models import KINDS, make

from ..support.log_lines import capture_log

P = tuple(range(5, 45))


class AsChosen:
    """A model as the oracle must see it: with the specs the engine chose."""

    def __init__(self, engine):
        self.engine = engine

    def cache_specs(self):
        return self.engine.core.specs

    def __call__(self, tokens, views):
        return self.engine.model(tokens, views)

    def logits(self, hidden):
        return self.engine.model.logits(hidden)


@pytest.mark.parametrize("kv", ["q8", "q6", "q4", "q3", "q2", "k8v4"])
def test_quantised_kinds_equal_recomputation_with_the_same_bits(kv):
    log_lines = capture_log()
    engine = Engine(make("wfs"), EngineConfig(kv=kv, chunk=7))
    assert len(log_lines) == 1 and log_lines[0].startswith(f"kv {kv}: ")
    assert ("k8v4 differs far less" in log_lines[0]) == (kv in ("q4", "q3", "q2"))
    codecs = [s.codec for s in engine.core.specs if isinstance(s, PagedKV)]
    assert codecs and all(isinstance(codec, QuantizedKV) for codec in codecs)
    assert engine.generate(P, max_tokens=30).tokens == truth(AsChosen(engine), P, 30)
    again = engine.generate((*P, 1), max_tokens=5)
    assert again.cached_tokens == len(P) and again.tokens == truth(AsChosen(engine), (*P, 1), 5)


def test_a_window_on_full_attention_equals_recomputation_under_that_mask():
    log_lines = capture_log()
    engine = Engine(make("wf"), EngineConfig(max_kv_size=16))
    assert len(log_lines) == 1 and "max_kv_size 16" in log_lines[0]
    assert [type(s) for s in engine.core.specs] == [WindowKV, RotatingKV]
    assert (engine.core.specs[1].window, engine.core.specs[1].keep) == (12, 4)
    want = truth(AsChosen(engine), P, 40)
    assert engine.generate(P, max_tokens=40).tokens == want
    assert want != truth(engine.model, P, 40)  # the mask matters


@pytest.mark.parametrize("kinds", ["f", "rf", "wf", "rwf"])
def test_a_window_reuses_prefixes_of_any_length(kinds):
    """Beside recurrent layers only their checkpoints are reused."""
    text = tuple(i * 7 % 90 for i in range(150))
    engine = Engine(make(kinds), EngineConfig(max_kv_size=40, chunk=32))
    engine.generate(text, max_tokens=2)
    for n in (150, 91, 30):
        prompt = (*text[:n], 1)
        again = engine.generate(prompt, max_tokens=6)
        assert again.cached_tokens == (n // 8 * 8 if "r" in kinds else n)
        assert again.tokens == truth(AsChosen(engine), prompt, 6)


def test_a_window_bounds_a_sequence_and_the_pool():
    """Blocks of 4 tokens, one sequence: 4 that stay, a window of 36, its slack and two steps of 16 tokens."""
    config = EngineConfig(max_kv_size=40, chunk=16, max_running=1, kv_memory="4M")
    engine, text = Engine(make("f"), config), tuple(i * 7 % 90 for i in range(400))
    [group] = engine.core.pools.groups
    most = group.spec.empty(group.pool).num_blocks(400, 16)
    assert most * 4 <= 40 + 36 + 32 + 4 and engine.core.context == engine.model.config.context
    with engine.stream(text, max_tokens=90) as stream:
        said = []
        for event in stream:
            said.append(event.token)
            assert all(len(seq.parts[0].blocks) <= most for seq in engine.core.scheduler.running)
    assert tuple(said) == truth(AsChosen(engine), text, 90, said)
    assert group.pool.size == group.pool.limit == most + 3
    again = engine.generate((*text, *said[:80], 5), max_tokens=4)
    assert again.cached_tokens == 480 and again.tokens == truth(AsChosen(engine), (*text, *said[:80], 5), 4)


def test_memory_really_shrinks():
    """Bytes of 8 and 4 bit keys and values, scales included, against bfloat16."""
    import mlx.core as mx

    model = make("f", size=32)
    model.set_dtype(mx.bfloat16)
    sizes = {}
    for kv in ("full", "q8", "q4"):
        engine = Engine(model, EngineConfig(kv=kv))
        engine.generate(tuple(i % 90 for i in range(1000)), max_tokens=2)
        sizes[kv] = sum(p.nbytes for pool in engine.core.pools.arrays.values() for p in pool)
    assert sizes["q8"] <= 0.57 * sizes["full"] and sizes["q4"] <= 0.32 * sizes["full"]


@pytest.mark.parametrize(
    "kinds, options, words",
    [
        ("f", dict(kv="q5"), "kv must be one of"),
        ("r", dict(kv="q8"), "does not apply"),
        ("w", dict(max_kv_size=64), "does not apply"),
        ("f", dict(max_kv_size=8), "above 8"),
    ],
)
def test_what_does_not_apply_is_refused(kinds, options, words):
    with pytest.raises(mlxrt.BadRequest, match=words):
        Engine(make(kinds), EngineConfig(**options))


def test_heads_that_cannot_be_quantised_are_refused():
    class Odd(type(make("f"))):
        def cache_specs(self):
            return [PagedKV(2, 24) for _ in range(4)]

    with pytest.raises(mlxrt.UnsupportedModel, match="head_dim 24"):
        Engine(Odd(make("f").config), EngineConfig(kv="q8"))


def test_a_batch_of_very_different_lengths_holds_what_it_must():
    """One long and seven short sequences: bytes within 5 % of the sum of their lengths, rounded up to blocks."""
    engine = Engine(make("f", size=4))
    lengths = [600, *[32] * 7]
    requests = [
        Request(tokens=tuple((i * 7 + j) % 90 for j in range(n)), params=SamplingParams(max_tokens=4))
        for i, n in enumerate(lengths)
    ]
    with engine.stream(requests) as stream:
        for _ in stream:
            if (
                all(s.length > len(s.prompt) for s in engine.core.scheduler.running)
                and len(engine.core.scheduler.running) == 8
            ):
                total = sum(s.length for s in engine.core.scheduler.running)
                per_token = sum(s.nbytes() / s.size for s in engine.core.specs)
                assert engine.stats().kv_bytes <= 1.05 * total * per_token
                break
        else:
            raise AssertionError("the eight never ran together")


@pytest.mark.parametrize(
    "kind, signatures",
    [
        ("full", ["FullKV(heads=2, dim=32, codec=Plain(dtype=mlx.core.float32), size=4)"] * 2),
        (
            "rotating-keep",
            [
                "RotatingKV(heads=2, dim=32, codec=Plain(dtype=mlx.core.float32), size=4, window=8, keep=5)",
                "FullKV(heads=2, dim=32, codec=Plain(dtype=mlx.core.float32), size=4)",
            ],
        ),
        (
            "everything",
            [
                "Recurrent(parts=(((64,), mlx.core.float32),), stride=8)",
                "FullKV(heads=2, dim=32, codec=Plain(dtype=mlx.core.float32), size=4)",
                "WindowKV(heads=2, dim=32, codec=Plain(dtype=mlx.core.float32), size=4, window=8)",
                "Shared(layer=1)",
            ],
        ),
        (
            "q3",
            ["FullKV(heads=2, dim=32, codec=Quantised(key=6, value=3, group=32, dtype=mlx.core.float32), size=4)"] * 2,
        ),
    ],
)
def test_signatures_in_saved_files_outlive_the_names_in_the_code(kind, signatures):
    """Files of format 4 hold these strings: another one would make every saved state unusable."""
    assert [spec.signature for spec in KINDS[kind]().cache_specs()] == signatures
