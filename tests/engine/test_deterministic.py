"""`deterministic`: a sequence takes the very steps it takes alone, so whatever a device rounds, it rounds alike."""

import random

import pytest

from mlxrt import BadRequest, Engine, EngineConfig, Request, SamplingParams
from tests.gpu.programs import DRAWN
from tests.support.oracle import truth
from tests.support.state_machine import kinds


def engine(kind: str, **options) -> tuple[Engine, dict[int, list[tuple]]]:
    """An engine, and every step it launches: request -> [(start, stop, tokens in the tail before it)]."""
    config = EngineConfig(deterministic=True, **{"chunk": 16, "kv_memory": kinds.memory_for(kind, 2000), **options})
    made = Engine(kinds.model(kind), config, kinds.tokenizer())
    steps: dict[int, list[tuple]] = {}
    launch = made.core.runner.launch

    def noted(step):
        [s] = step.slices  # one sequence a step
        steps.setdefault(s.seq.id, []).append((s.start, s.stop, made.core.runner.tail))
        return launch(step)

    made.core.runner.launch = noted  # type: ignore[method-assign]
    return made, steps


def requests(seed: int, count: int) -> list[Request]:
    chance = random.Random(seed)
    stem = tuple(chance.randrange(60) for _ in range(50))
    return [
        Request(
            tokens=stem[: chance.randrange(1, 50)] + tuple(chance.randrange(60) for _ in range(chance.randrange(30))),
            params=SamplingParams(
                max_tokens=chance.randrange(1, 20), seed=seed + i, ignore_eos=True, **chance.choice(({}, *DRAWN))
            ),
            priority=chance.choice((0, 0, 1)),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("kind", ["full", "gemma", "hybrid", "q4-rotating", "shared"])
def test_steps_and_tokens_are_those_of_a_run_alone(kind, ahead):
    asked = requests(len(kind), 5)
    alone = []
    for request in asked:
        single, steps = engine(kind, ahead=ahead)
        with single:
            alone.append((single.generate(request).tokens, *steps.values()))
    together, steps = engine(kind, ahead=ahead, max_running=3)
    with together:
        streams = [together.stream(r) for r in asked[:3]]
        for _ in range(9):
            together.step()
        streams += [together.stream(r) for r in asked[3:]]
        ids = [stream.ids[0] for stream in streams]
        for request, id, stream, (tokens, expected) in zip(asked, ids, streams, alone, strict=True):
            assert tuple(e.token for e in stream if e.token is not None) == tokens
            end = len(request.tokens) + len(tokens) - 1  # further ones were launched ahead of the end
            assert [s for s in steps[id] if s[1] <= end] == [s for s in expected if s[1] <= end]
            assert expected[-1][1] >= end and all(tail is None for *_, tail in expected)
        assert together.stats().longest_stall <= 16


def test_one_that_would_not_fit_to_its_end_waits_until_it_does():
    asked = [Request(tokens=tuple(range(1, 30)), params=SamplingParams(max_tokens=30, ignore_eos=True))] * 3
    tight, steps = engine("full", kv_memory=kinds.memory_for("full", 72), prefix_cache=False)
    with tight:
        expected = truth(kinds.model("full"), asked[0].tokens, 30)
        assert [list(r.tokens) for r in tight.generate(asked)] == [list(expected)] * 3
        assert tight.stats().preemptions == 0
    assert [s[:2] for s in steps[0]] == [s[:2] for s in steps[2]]


@pytest.mark.parametrize("kind", ["window", "narrow", "gemma", "recurrent", "q4-rotating"])
def test_none_fails_where_memory_is_tight(kind):
    """Two window sequences in steps of 5 tokens hold more than two windows at times: the second has to wait."""
    prompts = [tuple((7 * i + k) % 60 for i in range(58)) for k in range(3)]
    tight, _ = engine(kind, kv_memory=kinds.memory_for(kind, 96), chunk=5, max_running=2, ahead=1)
    with tight:
        done = tight.generate(
            [Request(tokens=p, params=SamplingParams(max_tokens=24, ignore_eos=True)) for p in prompts]
        )
        for prompt, result in zip(prompts, done):
            assert result.finish_reason == "length" and len(result.tokens) > 20
            assert result.tokens == truth(kinds.model(kind), prompt, len(result.tokens))


def test_conversations_are_those_of_any_engine():
    def converse(made: Engine) -> list[int | None]:
        with made:
            session = made.session()
            return [e.token for text in ("abc", "and then?") for e in session.say(text, max_tokens=9)]

    plain = Engine(kinds.model("gemma"), EngineConfig(chunk=16), kinds.tokenizer())
    assert converse(engine("gemma")[0]) == converse(plain)


@pytest.mark.parametrize("option", [{"max_stall": 4}, {"max_stall_ms": 5.0}, {"disk_cache": "somewhere"}])
def test_options_that_contradict_it_are_refused(option):
    with pytest.raises(BadRequest, match=f"{next(iter(option))} does not apply with deterministic"):
        EngineConfig(deterministic=True, **option)
