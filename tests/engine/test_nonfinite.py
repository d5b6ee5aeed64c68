"""One request overflows: it ends with BadLogits, and no other notices, whatever memory and prefixes they share."""

from collections import Counter

import mlx.core as mx
import pytest

from mlxrt import BadLogits, Engine, EngineConfig, Request, SamplingParams
from tests.support.poison import Poison
from tests.support.state_machine import invariants, kinds
from tests.support.state_machine.checker import Checker

KINDS = ("full", "shared", "wide-blocks", "rotating-keep", "everything", "k8v4", "q4-rotating")
STEM = kinds.stems()[1]
BAD = (*STEM, kinds.OVERFLOW, 5)


def make_engine(kind: str, **options) -> Engine:
    config = EngineConfig(**{"chunk": 32, "kv_memory": kinds.memory_for(kind, 144), **options})
    return Engine(kinds.model(kind), config, kinds.tokenizer())


def ask(tokens: tuple[int, ...], n: int = 5) -> Request:
    return Request(tokens=tokens, params=SamplingParams(max_tokens=n, ignore_eos=True, suppress=(kinds.OVERFLOW,)))


def check_right(engine: Engine, kind: str, *prompts: tuple[int, ...]) -> None:
    """All are answered at once, each as by recomputation."""
    checker = Checker(kind, Counter())
    streams = [engine.stream(ask(text)) for text in prompts]
    sequences = [engine.core.outputs.states[s.ids[0]].seq for s in streams]
    for seq, stream in zip(sequences, streams):
        events = list(stream)
        assert [e.error for e in events if e.error] == []
        assert len([e for e in events if e.token is not None]) == 5
        checker.check(seq, f"{seq.prompt}")


def check_nothing_left(engine: Engine) -> None:
    while engine.step():
        continue
    if engine.core.prefix_cache is not None:
        engine.core.prefix_cache.clear()
    engine.core.runner.flush()
    engine.core.pools.apply_pending()
    invariants.check_empty(engine)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_it_leaves_behind_harm_nobody(kind, reuse):
    """They are used again, and slots that are not written yet still hold its NaN."""
    kind += kinds.POISON + kinds.HALF
    assert mx.isfinite(kinds.model(kind).model.embed_tokens.weight).all()
    with make_engine(kind, prefix_cache=reuse) as engine:
        for k in range(3):
            with pytest.raises(BadLogits, match=r"tokens 0 to \d+ give hidden states that are NaN or infinite"):
                engine.generate(ask((kinds.OVERFLOW, *range(1, 40 + k))))
        check_right(engine, kind, (9,), (11, 12), STEM[:7])
        check_nothing_left(engine)


@pytest.mark.parametrize("kind", ["full", "gemma", "hybrid", "rotating-keep", "q8"])
def test_a_prompt_that_begins_alike_is_not_spoiled(kind):
    """In one step, attention spreads the NaN of a token over the tokens before it: those must not be cached."""
    kind += kinds.POISON
    with make_engine(kind) as engine:
        both = [engine.stream(ask(BAD)), engine.stream(ask((*STEM, 60, 61)))]  # the second waits for the first's prefix
        ends = [[e.error for e in stream if e.error] for stream in both]
        assert isinstance(ends[0][0], BadLogits) and ends[1] == []
        check_right(engine, kind, (*STEM, 62), STEM)
        with pytest.raises(BadLogits):
            engine.generate(ask(BAD))  # the same again is the same again
        check_nothing_left(engine)


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_nor_by_one_that_is_cancelled_or_only_scored(kind):
    kind += kinds.POISON
    with make_engine(kind, ahead=2) as engine:
        stream = engine.stream(ask(BAD))
        engine.step()  # its prompt is on the device
        stream.close()
        check_right(engine, kind, (*STEM, 60))
        engine.core.prefix_cache.clear()
        assert not mx.isfinite(engine.score(BAD)).all()
        check_right(engine, kind, (*STEM, 61))


def test_a_token_that_overflows_while_it_decodes():
    """Its neighbours in the batch go on; what came before it is reused."""
    kind = "gemma" + kinds.POISON
    with make_engine(kind, kv_memory=kinds.memory_for(kind, 600)) as engine:
        Poison(engine)

        wanted = SamplingParams(max_tokens=9, logit_bias={kinds.OVERFLOW: 100.0})
        forced = engine.stream(Request(tokens=STEM, params=wanted))
        other = engine.stream(ask((7, 8, 9)))
        events = list(forced)
        assert [e.token for e in events] == [kinds.OVERFLOW, None] and isinstance(events[-1].error, BadLogits)
        assert [e.error for e in other if e.error] == []
        check_right(engine, kind, (*STEM, 60))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("kind", ["full", "hybrid", "everything"])
def test_one_that_overflows_just_after_a_prefix_that_both_share(kind, ahead):
    """Its last chunk holds the end of that prefix: the other must not take it over before the chunk is checked."""
    kind += kinds.POISON
    stem = kinds.stems()[2][:19]
    with make_engine(kind, chunk=5, ahead=ahead, max_running=3, kv_memory="64M") as engine:
        bad = engine.stream([ask((*stem, kinds.OVERFLOW))])
        good = engine.stream([ask((*stem, *range(20, 40)))])
        assert "hidden states that are NaN" in str([e.error for e in bad][-1])
        assert [e.error for e in good if e.error] == []
        check_right(engine, kind, (*stem, 60))
        check_nothing_left(engine)


@pytest.mark.parametrize("kind", ["window", "full"])
def test_one_whose_only_token_ends_it_before_the_next_step(kind):
    """With no step ahead its token is read in the step that computed it; what was computed is cached right then."""
    kind += kinds.POISON
    with make_engine(kind, chunk=64, ahead=0) as engine:
        with pytest.raises(BadLogits, match="hidden states that are NaN"):
            engine.generate(ask((*STEM, kinds.OVERFLOW, *range(1, 30)), n=1))
        check_right(engine, kind, (*STEM, 60), STEM)
        check_nothing_left(engine)
