"""Whatever the memory does, the tokens are those of a dense forward without memory."""

import random

import pytest

from mlxrt import Engine, EngineConfig, Request, SamplingParams
from tests.support.oracle import truth, truths
from tests.support.toy_models import KINDS, VOCAB

P = (5, 6, 7, 8, 9, 10, 11)


@pytest.fixture(params=KINDS, scope="module")
def model(request):
    return KINDS[request.param]()


def reusable(model, n):
    """How much of n known tokens must be found again: all, or up to the last checkpoint where layers keep those."""
    return n if all(getattr(spec, "paged", True) for spec in model.cache_specs()) else n // 8 * 8


def ask(prompt, n, **options):
    return Request(tokens=prompt, params=SamplingParams(max_tokens=n, **options))


def run(engine, *prompts, n=6):
    return [c.tokens for c in engine.generate([ask(p, n) for p in prompts])]


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_chunking(model, chunk):
    got = run(Engine(model, EngineConfig(chunk=chunk)), P, n=24)
    assert got == truths(model, [P], 24, got)


def test_the_truth_is_the_same_whatever_is_guessed(model):
    right = truth(model, P, 6)
    for guess in (right, right[:3], (*right[:3], (right[3] + 1) % VOCAB, *right[4:]), (right[0] + 1,)):
        assert truth(model, P, 6, guess) == right


def test_ragged_batch(model):
    prompts = [P, (1, 2, 3), tuple(range(40, 63)), (9,)]
    got = run(Engine(model, EngineConfig(chunk=16)), *prompts, n=20)
    assert got == truths(model, prompts, 20, got)


def test_decode_longer_than_many_tails(model):
    got = run(Engine(model), P, n=70)
    assert got == truths(model, [P], 70, got)


def test_prefix_is_reused(model):
    engine = Engine(model)
    prompt = tuple(range(3, 40))
    [first] = run(engine, prompt, n=5)
    longer = (*prompt, *first, 30, 31)
    done = engine.generate(ask(longer, 5))
    assert done.cached_tokens >= reusable(model, len(prompt) + 4)  # the last token of the first answer was never fed
    assert done.tokens == truth(model, longer, 5, done.tokens)


@pytest.mark.parametrize("at", [3, 9, 21, 36])
def test_divergent_prefix_resumes_where_it_parts(model, at):
    engine = Engine(model)
    run(engine, tuple(range(3, 40)), n=3)
    other = (*range(3, 3 + at), 90, 91, 92)
    done = engine.generate(ask(other, 5))
    assert reusable(model, at) <= done.cached_tokens <= at
    assert done.tokens == truth(model, other, 5, done.tokens)


def test_resume_inside_what_was_decoded(model):
    engine = Engine(model)
    [first] = run(engine, P, n=50)
    for n in (10, 18, 27, 51):
        other = (*(*P, *first)[:n], 96, 95)
        done = engine.generate(ask(other, 5))
        assert reusable(model, n) <= done.cached_tokens <= n
        assert done.tokens == truth(model, other, 5, done.tokens)


def test_the_prefix_of_a_running_sequence_is_not_disturbed(model):
    """Two go on from the same stored half block while the first still runs."""
    engine = Engine(model)
    run(engine, P, n=1)
    prompts = [(*P, 40), (*P, 41, 42), (*P[:5], 43), (*P, 40)]
    got = run(engine, *prompts, n=20)
    assert got == truths(model, prompts, 20, got)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks,ahead,chunk", [(60, 2, 7), (30, 0, 16)])
def test_fuzz(kind, blocks, ahead, chunk):
    """Random arrivals over shared stems, a pool too small for all: join, leave, share, evict, preempt, cancel."""
    rng, model = random.Random(f"{kind}{blocks}"), KINDS[kind]()
    per_block = sum(s.nbytes() for s in model.cache_specs() if hasattr(s, "nbytes"))
    config = EngineConfig(kv_memory=per_block * blocks, ahead=ahead, chunk=chunk, max_running=4)
    engine = Engine(model, config)
    stems = [tuple(rng.randrange(VOCAB) for _ in range(k)) for k in (6, 14, 21)]
    streams, want = {}, {}
    todo = 14
    while todo or streams:
        if todo and rng.random() < 0.3:
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(1, len(stem) + 1)] + tuple(
                rng.randrange(VOCAB) for _ in range(rng.randrange(1, 5))
            )
            n = rng.randrange(1, 22)
            stream = engine.stream(ask(prompt, n))
            streams[stream], want[stream] = [], (prompt, n)
            todo -= 1
        for stream in rng.sample(sorted(streams, key=id), len(streams)):
            if rng.random() < 0.01:
                stream.close()
                del streams[stream]
                continue
            event = next(stream)
            streams[stream].append(event.token)
            if event.finish_reason:
                prompt, n = want[stream]
                got = tuple(streams.pop(stream))
                assert got == truth(model, prompt, n, got)
    while engine.step():
        continue
    engine.core.prefix_cache.clear()
    assert [g.pool.used for g in engine.core.pools.groups] == [0 for _ in engine.core.pools.groups]  # nothing leaked
    assert not engine.core.outputs.states
