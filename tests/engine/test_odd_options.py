"""Options of the wrong type are typed errors; None is the default."""

import math

import pytest

from mlxrt import BadRequest, Engine, EngineConfig, Request, SamplingParams
from tests.support import toy_models as toy


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "suppress", "logit_bias"])
def test_none_is_the_default(name):
    assert SamplingParams(**{name: None}) == SamplingParams()


@pytest.mark.parametrize(
    "options", [{"stop": 5}, {"stop_token_ids": 5}, {"stop_token_ids": "ab"}, {"suppress": b"a"}, {"logit_bias": [1]}]
)
def test_wrong_types_are_named(options):
    with pytest.raises(BadRequest, match=next(iter(options))):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [{"deterministic": "no"}, {"compile": "x"}, {"kv": 5}, {"prefix_cache": 1}, {"dequantise": 0}, {"revision": 3}],
)
def test_engine_options_of_the_wrong_type(options):
    with pytest.raises(BadRequest, match=next(iter(options))):
        EngineConfig(**options)


def test_numbers_of_numpy_are_numbers():
    np = pytest.importorskip("numpy")
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), stop_token_ids=np.array([1, 2]))
    assert params == SamplingParams(max_tokens=3, temperature=0.5, stop_token_ids=(1, 2))
    assert type(params.max_tokens) is int and type(params.temperature) is float
    assert SamplingParams(logit_bias={np.int32(4): np.float64(2)}).logit_bias == {4: 2.0}
    assert EngineConfig(chunk=np.int16(32), kv_memory=np.int64(4096)) == EngineConfig(chunk=32, kv_memory=4096)
    engine = Engine(toy.make("f"))
    told = engine.generate([1, 2, 3], max_tokens=3).tokens
    assert engine.generate(np.array([1, 2, 3]), max_tokens=np.int64(3)).tokens == told
    assert engine.generate(tuple(np.array([1, 2, 3])), max_tokens=3).tokens == told
    for wrong in (np.bool_(True), np.float32("nan"), np.array([3])):
        with pytest.raises(BadRequest):
            SamplingParams(max_tokens=wrong)


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_p", "min_p", "logprobs", "repetition_penalty"])
def test_what_is_no_usable_number_is_named(name):
    for value in (True, math.nan, math.inf, -2, 10**5000, "5", None, [1]):
        with pytest.raises(BadRequest, match=name) as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["response_format", "parallel_tool_calls", "tool_choice", "tools", "thinking"])
def test_what_cannot_be_printed_is_refused_by_name(name):
    """Python prints no integer of more than 4,300 digits."""
    for value in (10**5000, [10**5000], {"a": 10**5000}):
        with pytest.raises(BadRequest, match=name.removesuffix("s")) as caught:
            Request(prompt="a", **{name: value})
        assert len(str(caught.value)) < 300


def test_odd_calls_leave_the_engine_answering():
    engine = Engine(toy.make("f"))
    for call in (
        lambda: engine.generate(b"text"),
        lambda: engine.generate({"role": "user"}),
        lambda: engine.take(999),
        lambda: engine.take(None),
        lambda: engine.cancel([1]),
        lambda: next(engine.stream_of([999])),
        lambda: engine.stream_of([[1]]),
        lambda: engine.submit("text"),
        lambda: engine.submit(Request(tokens=(1,)), listener=5),
        lambda: engine.score(5),
        lambda: engine.score([1, 2], chunk=True),
        lambda: engine.session(system=5),
        lambda: engine.session().rewind(True),
        lambda: engine.session().save(5),
    ):
        with pytest.raises(BadRequest):
            call()
    assert len(engine.generate([1, 2, 3], max_tokens=2).tokens) == 2
