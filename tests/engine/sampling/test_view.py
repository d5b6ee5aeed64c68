"""LogitsView and LogitsRow: what a callback sees, what it may do, and that nothing is readable after the step."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.engine.logits import LogitsView
from mlxrt.engine.sampler import sample
from mlxrt.errors import BadLogits, BadRequest, MlxrtError, StaleLogits

VOCAB = 30


@pytest.fixture
def x():
    return mx.array(np.random.default_rng(9).normal(size=(3, VOCAB)).astype(np.float32) * 2)


def test_reading_after_the_step_raises_through_every_door(x, sequence):
    with LogitsView(x, [sequence(id=i + 40) for i in range(3)]) as view:
        row, kept = view.row(1), view.logits
        assert row.logits.tolist() == x[1].tolist() and len(row.logprobs) == VOCAB
    assert kept.tolist() == x.tolist()  # an array is a value: only the view ends
    doors = [lambda: view.logits, lambda: view.latest, lambda: row.logits, lambda: row.logprobs, lambda: row.top(2)]
    doors += [lambda: row.tokens, lambda: row.ban([1]), lambda: row.edit(x[0]), lambda: view.row(0).logits]
    for door in doors:
        with pytest.raises(StaleLogits, match="requests 40, 41, 42"):
            door()


def test_zero_copy_and_memoised(x, sequence):
    with LogitsView(x, [sequence()] * 3) as view:
        assert view.latest is x and view.logits is view.logits
        row = view.row(2)
        assert row.logits is row.logits and row.logprobs is view.row(2).logprobs
        before = row.logprobs
        row.add({3: 5.0})
        assert row.logprobs is not before and view.row(0).logits.tolist() == x[0].tolist()


def test_half_precision_rows_read_as_float32(x, sequence):
    half = x.astype(mx.bfloat16)
    with LogitsView(half, [sequence()] * 3) as view:
        assert view.logits.dtype == view.row(0).logits.dtype == view.row(0).logprobs.dtype == mx.float32
        assert view.row(1).logits.tolist() == half[1].tolist() == view.logits[1].tolist()


def test_top_is_sorted_and_exact(x, sequence):
    with LogitsView(x, [sequence()] * 3) as view:
        got = view.row(0).top(5)
        y = np.array(x[0], np.float64)
        logprobs = y - np.log(np.exp(y).sum())
        order = np.argsort(-logprobs)[:5]
        assert [t for t, _ in got] == order.tolist()
        np.testing.assert_allclose([v for _, v in got], logprobs[order], rtol=1e-5)
        assert len(view.row(0).top(VOCAB)) == VOCAB
        for n in (0, VOCAB + 1, True, 2.0, "3"):
            with pytest.raises(BadRequest, match="top"):
                view.row(0).top(n)


def test_edits_of_several_rows_join_in_the_view(x, sequence):
    with LogitsView(x, [sequence()] * 3) as view:
        held = view.logits
        view.row(2).edit(mx.zeros((VOCAB,)))
        view.row(0).ban([4, 5])
        view.row(0).add({6: 1.0})
        want = np.array(x)
        want[2] = 0
        want[0, [4, 5]] = -np.inf
        want[0, 6] += 1
        np.testing.assert_array_equal(np.array(view.logits), want)
        view.row(1).allow([3])
        assert np.isfinite(np.array(view.row(1).logits)).nonzero()[0].tolist() == [3]
        view.row(1).add(mx.full((VOCAB,), 2.0))
        assert view.logits[1, 3].item() == x[1, 3].item() + 2
        assert held.tolist() == x.tolist()  # who read before the edits keeps what was read


@pytest.mark.parametrize(
    "misuse",
    [
        lambda row: row.edit(mx.zeros((VOCAB + 1,))),
        lambda row: row.edit(mx.zeros((1, VOCAB))),
        lambda row: row.edit(mx.zeros((VOCAB,), mx.int32)),
        lambda row: row.edit([0.0] * VOCAB),
        lambda row: row.add(mx.zeros((2,))),
        lambda row: row.add({VOCAB: 1.0}),
        lambda row: row.add({1: "2"}),
        lambda row: row.ban([-1]),
        lambda row: row.ban([True]),
        lambda row: row.allow([1.5]),
    ],
)
def test_misuse_is_a_typed_error_and_changes_nothing(x, sequence, misuse):
    with LogitsView(x, [sequence()] * 3) as view:
        with pytest.raises(BadRequest):
            misuse(view.row(0))
        assert view.logits.tolist() == x.tolist()


def test_rows_and_shapes_must_agree(x, sequence):
    with pytest.raises(MlxrtError, match="one row to each of 2"):
        LogitsView(x, [sequence()] * 2)
    with LogitsView(x, [sequence()] * 3) as view, pytest.raises(MlxrtError, match="row 3 of a view with 3"):
        view.row(3)


def test_the_callback_sees_adjusted_logits_and_decides(x, sequence):
    seen = {}

    def look(row):
        seen.update(tokens=row.tokens, prompt=row.prompt_tokens, output=row.output_tokens, logits=row.logits.tolist())
        row.allow([11, 12])

    hot = {"temperature": 1.0, "top_k": 3, "seed": 4}
    rows = [
        sequence(),
        sequence(prompt=(1, 2), output=(3,), suppress=(0,), logit_bias={12: 1.0}, on_logits=look, **hot),
        sequence(),
    ]
    with LogitsView(x, rows) as view:
        result = sample(view)
        tokens = result.tokens.tolist()
    want = x[1].tolist()
    want[0], want[12] = -math.inf, want[12] + 1
    assert seen["logits"] == pytest.approx(want)
    assert (seen["tokens"], seen["prompt"], seen["output"]) == ((1, 2, 3), (1, 2), (3,))
    assert tokens[1] in (11, 12) and tokens[0::2] == mx.argmax(x[0::2], axis=-1).tolist()
    assert result.failures() == {}


def test_what_a_callback_raises_stays_with_its_request(x, sequence):
    def fall(row):
        raise KeyError("mine")

    rows = [sequence(), sequence(id=1, on_logits=fall), sequence(id=2, on_logits=lambda row: row.logits)]
    with LogitsView(x, rows) as view:
        result = sample(view)
    failures = result.failures()
    assert failures.keys() == {1, 2} and isinstance(failures[1], KeyError)
    assert isinstance(failures[2], BadRequest) and "row.edit()" in str(failures[2])
    assert result.tokens.tolist()[0] == mx.argmax(x[0]).item()


def test_a_row_without_a_choice_is_marked_and_named_and_no_other(x, sequence):
    holes = [sequence(id=70 + i, **p) for i, p in enumerate(KINDS * 3)]
    n = len(KINDS)
    good = mx.broadcast_to(x[0], (n, VOCAB))
    nan = mx.where(mx.arange(VOCAB) == 8, mx.nan, good)
    logits = mx.concatenate([mx.full((n, VOCAB), -mx.inf), good, nan])
    with LogitsView(logits, holes) as view:
        result = sample(view)
        assert [bad for _, bad in result.result.tolist()] == [1] * n + [0] * n + [1] * n
        assert max(result.tokens.tolist()) < VOCAB and result.tokens.tolist()[:n] == [0] * n
    failures = result.failures()
    assert failures.keys() == {*range(n), *range(2 * n, 3 * n)}
    assert all(type(e) is BadLogits and f"request {70 + i}:" in str(e) for i, e in failures.items())


KINDS = [{}] + [
    {"temperature": 1.0} | p for p in ({}, {"top_k": 4}, {"top_p": 0.5}, {"top_k": 4, "top_p": 0.5}, {"min_p": 0.1})
]


def test_banning_all_in_a_callback_is_marked(x, sequence):
    with LogitsView(x, [sequence(), sequence(on_logits=lambda row: row.allow([])), sequence()]) as view:
        assert [bad for _, bad in sample(view).result.tolist()] == [0, 1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_the_models_own_with_the_chosen_first(x, sequence, temperature):
    p = {"temperature": temperature, "repetition_penalty": 3.0, "prompt": tuple(range(20)), "logit_bias": {29: 4.0}}
    rows = [sequence(logprobs=n, seed=3, **p) for n in (4, 0, VOCAB)]
    with LogitsView(x, rows) as view:
        result = sample(view)
        tokens = result.tokens.tolist()
    mx.async_eval(result.arrays)
    assert result.read(1, tokens[1]) == ()
    for i, n in ((0, 4), (2, VOCAB)):
        y = np.array(x[i], np.float64)
        want = y - np.log(np.exp(y).sum())
        got = result.read(i, tokens[i])
        top = np.argsort(-want)[:n].tolist()
        assert [t for t, _ in got] == [tokens[i]] + [t for t in top if t != tokens[i]]
        np.testing.assert_allclose([v for _, v in got], want[[t for t, _ in got]], rtol=1e-5)
