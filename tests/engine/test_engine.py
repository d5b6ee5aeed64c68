"""Requests in, events out: sampling, limits, ends, errors."""

import mlx.core as mx
import pytest

import mlxrt
from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.cache.memory import TAIL, PagedKV, QuantizedKV
from mlxrt.engine.engine import Source
from mlxrt.engine.model_runner import ModelRunner
from tests.support.oracle import logits, truth, truths
from tests.support.toy_models import KINDS, VOCAB, make

P = (5, 6, 7, 8, 9, 10, 11)


@pytest.fixture(scope="module")
def model():
    return make("wf")


def ask(tokens=P, **params):
    return Request(tokens=tokens, params=SamplingParams(**params))


@pytest.mark.parametrize("kind", ["full", "shared"])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_row_does_not_depend_on_its_batch(kind, ahead):
    model = KINDS[kind]()
    requests = [
        ask(max_tokens=5),
        ask((1, 2, 3), max_tokens=27, temperature=0.8, seed=3, top_k=20),
        ask((50, 51, 52, 53), max_tokens=24, temperature=1.1, seed=9, top_p=0.9, repetition_penalty=1.3),
        ask((7,), max_tokens=30, temperature=0.7, seed=2**63, min_p=0.05, frequency_penalty=0.4, presence_penalty=0.2),
    ]
    config = EngineConfig(ahead=ahead)
    together = [c.tokens for c in Engine(model, config).generate(requests)]
    assert together == [Engine(model).generate(r).tokens for r in requests]


@pytest.mark.parametrize("codec", [None, QuantizedKV(8, 4)])
@pytest.mark.parametrize("lengths", [(1,), (32,), (45,), (40, 8), (33, 34), (64, 32, 96)])
def test_tails_that_are_blocks_and_tails_that_are_not(lengths, codec, monkeypatch):
    """Rows that stand alike in their blocks write whole ones, the first time after a shorter tail."""
    model = make("wf", size=TAIL, window=40, codec=codec)
    wrote = []
    flush = PagedKV.flush
    monkeypatch.setattr(PagedKV, "flush", lambda self, *given: wrote.append(given[-1]) or flush(self, *given))
    prompts = [tuple((3 * i + 7 * n) % VOCAB for i in range(n)) for n in lengths]
    with Engine(model, EngineConfig(max_running=4)) as engine:
        done = engine.generate([ask(p, max_tokens=TAIL * 2 + 9, ignore_eos=True) for p in prompts])
    got = [c.tokens for c in done]
    assert got == truths(model, prompts, TAIL * 2 + 9, got)
    assert (True in wrote) == (len({n % TAIL for n in lengths}) == 1)


def test_a_prompt_of_single_tokens_goes_on_to_draw(model, monkeypatch):
    """Where steps sample for themselves, as on a GPU, the tail of such a prompt does not know how its row draws."""
    requests = [ask(P, max_tokens=20, temperature=0.9, seed=3, repetition_penalty=1.4), ask(P[:3], max_tokens=20)]
    answers = []
    for inside in (False, True):
        if inside:
            monkeypatch.setattr(ModelRunner, "_samples_inside", lambda _, step: samples_all(step))
        with Engine(model, EngineConfig(max_context=256, chunk=1), source=Source("toy")) as engine:
            answers.append([[engine.generate(one).tokens for one in requests], engine.generate(requests)])
    assert answers[0][0] == answers[1][0]
    assert [c.tokens for c in answers[0][1]] == [c.tokens for c in answers[1][1]]


def samples_all(step):
    return step.decode and all(s.samples for s in step.slices)


def test_a_drawn_seed_is_reported_and_repeats_the_answer(model):
    engine = Engine(model)
    first = engine.generate(P, max_tokens=12, temperature=1.0)
    assert engine.generate(P, max_tokens=12, temperature=1.0, seed=first.timings.seed).tokens == first.tokens
    assert engine.generate(P, max_tokens=2).timings.seed is None


def test_exact_hit_leaves_one_token(model):
    engine = Engine(model)
    engine.generate(P, max_tokens=1)
    done = engine.generate(P, max_tokens=2)
    assert done.cached_tokens == len(P) - 1 and done.tokens == truth(model, P, 2)


@pytest.mark.parametrize("steps", [0, 1, 3, 20])
def test_closing_a_stream_gives_all_blocks_back(model, steps):
    engine = Engine(model)
    stream = engine.stream(P, max_tokens=50)
    for _ in range(steps):
        next(stream)
    stream.close()
    while engine.step():
        continue
    engine.core.prefix_cache.clear()
    assert not engine.core.scheduler.running and not engine.core.scheduler.waiting
    assert [g.pool.used for g in engine.core.pools.groups] == [0, 0] and not engine.core.outputs.states


def test_a_stream_that_is_dropped_is_closed(model):
    engine = Engine(model)
    stream = engine.stream(P, max_tokens=50)
    next(stream)
    del stream
    assert not engine.core.scheduler.running


def test_streams_taken_in_turn_lose_nothing(model):
    engine = Engine(model)
    a, b = engine.stream(P, max_tokens=9), engine.stream((1, 2, 3), max_tokens=14)
    got = {a: [], b: []}
    for _ in range(3):
        got[a].append(next(a).token)
    got[b] += [e.token for e in b]
    got[a] += [e.token for e in a]
    assert [tuple(got[a]), tuple(got[b])] == [truth(model, P, 9), truth(model, (1, 2, 3), 14)]


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["full", "narrow", "shared"])
def test_a_stop_seen_late_leaves_a_prefix_that_can_be_used(kind, ahead):
    model = KINDS[kind]()
    all_ = truth(model, P, 20)
    stop = all_[9]
    engine = Engine(model, EngineConfig(ahead=ahead))
    done = engine.generate(P, max_tokens=30, stop_token_ids=[stop])
    assert done.tokens == all_[: all_.index(stop) + 1] and done.finish_reason == "stop"
    longer = (*P, *done.tokens, 3)
    again = engine.generate(longer, max_tokens=5)
    assert again.cached_tokens >= len(P) + len(done.tokens) - 1 and again.tokens == truth(model, longer, 5)


@pytest.mark.parametrize("kind", ["hybrid", "recurrent", "everything", "rotating"])
def test_a_checkpoint_made_while_decoding_can_be_taken_up(kind):
    model = KINDS[kind]()
    engine = Engine(model, EngineConfig(ahead=2))
    said = engine.generate(P, max_tokens=26).tokens
    for n in (3, 11, 14, 25):
        longer = (*P, *said[:n], 3)
        again = engine.generate(longer, max_tokens=4)
        assert again.cached_tokens >= 8 and again.tokens == truth(model, longer, 4)


def test_eos_stops_unless_ignored(model):
    end = truth(model, P, 4)[3]
    engine = Engine(model, source=Source(eos=frozenset([end])))
    assert engine.generate(P, max_tokens=9).finish_reason == "stop"
    free = engine.generate(P, max_tokens=9, ignore_eos=True)
    assert free.finish_reason == "length" and free.tokens == truth(model, P, 9)


def test_too_small_a_cache_preempts_and_loses_nothing():
    model = make("wf")
    block = sum(s.nbytes() for s in model.cache_specs())
    engine = Engine(model, EngineConfig(kv_memory=24 * block, max_running=4))
    requests = [ask(tuple(range(k, k + 20)), max_tokens=40) for k in range(4)]
    done = engine.generate(requests)
    assert engine.stats().preemptions > 0
    got = [c.tokens for c in done]
    assert got == truths(model, [r.tokens for r in requests], 40, got)


def test_a_lone_sequence_takes_smaller_steps_rather_than_none():
    """Recurrent layers want a place for every checkpoint of a step: few places must not refuse what small steps fit."""
    model = make("r")
    place = sum(s.nbytes() for s in model.cache_specs())
    engine = Engine(model, EngineConfig(kv_memory=9 * place, chunk=64, max_running=2))
    prompt = tuple(i * 5 % VOCAB for i in range(90))
    got = engine.generate(prompt, max_tokens=12).tokens
    assert got == truth(model, prompt, 12, got)


def test_score_is_the_same_in_any_chunks(model):
    tokens = [i * 7 % VOCAB for i in range(50)]
    want = logits(model, tokens)
    engine = Engine(model)
    for chunk in (None, 1, 3, 17, 50):
        got = engine.score(tokens, chunk)
        assert got.dtype == mx.float32 and got.shape == (50, VOCAB)
        assert mx.abs(got - want).max().item() < 1e-4
    assert engine.generate(P, max_tokens=3).tokens == truth(model, P, 3)


def test_logprobs_name_the_chosen_token_and_the_best(model):
    engine = Engine(model)
    done = engine.generate(P, max_tokens=12, temperature=1.5, seed=1, logprobs=3)
    assert len(done.logprobs) == 12
    tokens = list(P)
    for token, entry in zip(done.tokens, done.logprobs):
        row = logits(model, tokens)[-1]
        row = row - mx.logsumexp(row)
        best = mx.argsort(-row)[:3].tolist()
        assert entry[0][0] == token and set(best) <= set(dict(entry))
        assert all(abs(row[t].item() - p) < 1e-4 for t, p in entry)
        tokens.append(token)


def test_a_callback_sees_every_token_and_edits_its_row(model):
    seen = []

    def odd_only(row):
        seen.append(row.tokens)
        row.ban(range(0, VOCAB, 2))

    engine = Engine(model)
    other = engine.stream((1, 2, 3), max_tokens=15)
    done = engine.generate(P, max_tokens=6, on_logits=odd_only)
    assert all(t % 2 for t in done.tokens)
    assert seen == [P + done.tokens[:i] for i in range(6)]
    assert tuple(e.token for e in other) == truth(model, (1, 2, 3), 15)


def test_a_kept_row_is_stale(model):
    rows = []
    Engine(model).generate(P, max_tokens=1, on_logits=rows.append)
    with pytest.raises(mlxrt.StaleLogits):
        rows[0].logits  # noqa: B018


def test_a_raising_callback_ends_its_own_request_only(model):
    def fail(row):
        raise RuntimeError("mine")

    engine = Engine(model)
    other = engine.stream((1, 2, 3), max_tokens=15)
    with pytest.raises(RuntimeError, match="mine"):
        engine.generate(P, max_tokens=6, on_logits=fail)
    assert tuple(e.token for e in other) == truth(model, (1, 2, 3), 15)


def test_nothing_to_choose_from_is_an_error(model):
    with pytest.raises(mlxrt.BadLogits, match="every token"):
        Engine(model).generate(P, max_tokens=3, on_logits=lambda row: row.ban(range(VOCAB)))


def test_close_ends_everything(model):
    engine = Engine(model)
    stream = engine.stream(P, max_tokens=50)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(mlxrt.EngineClosed):
        next(stream)
    with pytest.raises(mlxrt.EngineClosed):
        engine.generate(P)


def test_without_a_prefix_cache_nothing_is_reused(model):
    engine = Engine(model, EngineConfig(prefix_cache=False))
    for _ in range(2):
        done = engine.generate(P, max_tokens=5)
        assert done.cached_tokens == 0 and done.tokens == truth(model, P, 5)
    assert engine.stats().kv_bytes == 0


def test_the_context_ends_an_answer(model):
    engine = Engine(model, EngineConfig(max_context=16))
    for most in (100, -1):
        done = engine.generate(P, max_tokens=most)
        assert done.finish_reason == "length" and len(P) + len(done.tokens) == 16


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(temperature=-0.1), "temperature must be in 0..1000000, not -0.1"),
        (dict(top_p=0), "top_p must be in"),
        (dict(top_p=1.5), "top_p must be in"),
        (dict(top_p=float("nan")), "top_p must be in"),
        (dict(top_k=-1), "top_k"),
        (dict(top_k=10**400), "top_k"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(min_p=2), "min_p"),
        (dict(repetition_penalty=0), "repetition_penalty"),
        (dict(stop=""), "stop"),
        (dict(seed=-1), "seed"),
        (dict(logit_bias={VOCAB: 1.0}), "vocabulary"),
        (dict(suppress=[VOCAB]), "vocabulary"),
        (dict(temprature=1), "unknown option temprature"),
        (dict(tools=[]), "messages"),
    ],
)
def test_bad_options_are_refused(model, options, words):
    with pytest.raises(mlxrt.BadRequest, match=words):
        Engine(model).generate(P, **options)


@pytest.mark.parametrize("prompt", [(), [], "", [VOCAB], [-1], [1.5], [True], 7, None])
def test_bad_prompts_are_refused(model, prompt):
    with pytest.raises(mlxrt.MlxrtError):
        Engine(model).generate(prompt)


def test_a_bad_request_in_a_list_leaves_nothing_behind(model):
    engine = Engine(model)
    with pytest.raises(mlxrt.BadRequest):
        engine.generate([ask(), ask((VOCAB,))])
    assert not engine.core.scheduler.waiting and not engine.core.outputs.states


def test_too_long_a_prompt_says_both_numbers(model):
    with pytest.raises(mlxrt.ContextOverflow, match=r"20 tokens.*16"):
        Engine(model, EngineConfig(max_context=16)).generate(range(20))


def test_text_without_a_tokenizer(model):
    with pytest.raises(mlxrt.NoTokenizer):
        Engine(model).generate("hello")
    with pytest.raises(mlxrt.NoTokenizer):
        Engine(model).generate(P, stop="x")


@pytest.mark.parametrize(
    "options", [dict(kv_memory=100), dict(max_context=1 << 20), dict(chunk=0), dict(kv_memory="x")]
)
def test_bad_configurations(model, options):
    with pytest.raises(mlxrt.MlxrtError):
        Engine(model, EngineConfig(**options))


def test_prefixes_are_shared_only_with_the_same_salt():
    """Stored ones and those that another request is just computing."""
    from tests.support.state_machine.kinds import model, tokenizer

    with Engine(model("full"), EngineConfig(chunk=16), tokenizer()) as engine:
        text = "a prefix that is long enough for some nodes " * 3
        ask = [
            Request(prompt=text, params=SamplingParams(max_tokens=2), cache_salt=salt) for salt in ("", "a", "b", "a")
        ]
        first = engine.generate(ask)
        assert [done.cached_tokens for done in first[:3]] == [0, 0, 0] and first[3].cached_tokens > 64
        assert {done.tokens for done in first} == {first[0].tokens}
        assert all(done.cached_tokens > 64 for done in engine.generate(ask))
        engine.clear_prefix_cache()
        assert engine.generate(ask[1]).cached_tokens == 0 and len(engine.core.prefix_cache) > 0
