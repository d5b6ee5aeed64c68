"""Penalties, bias, suppression and filters against HF transformers (expected.npz) and against numpy in float64."""

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.engine.logits import LogitsView
from mlxrt.engine.sampler import sample
from mlxrt.kernels import DrawPlan, DrawRow, pack_rows
from mlxrt.kernels.ops.draw import sort_key, weigh_kept

from ...support.chi_square import p_value

EXPECTED = Path(__file__).with_name("expected.npz")


@pytest.fixture(scope="module")
def hf():
    with np.load(EXPECTED) as data:
        return dict(data) | {"params": json.loads(str(data["params"]))}


def options(p: dict) -> dict:
    return p | {"logit_bias": {int(t): v for t, v in p.get("logit_bias", {}).items()}}


def kept_ids(x: np.ndarray, p: dict) -> set[int]:
    """The ids that the draw op may draw."""
    k = p["top_k"] if p["top_k"] < len(x) else 0
    row = DrawRow(p["temperature"], k, p["top_p"], p["min_p"])
    y, rows = mx.array(x)[None], pack_rows([row])
    key = sort_key(y)
    sharpness = mx.array([[math.log2(math.e) / p["temperature"]]])
    weight = weigh_kept(y, key, mx.max(key, axis=-1, keepdims=True), rows, sharpness, DrawPlan.of([row], len(x)))
    return set(np.flatnonzero(np.array(weight)[0]))


def test_penalties_bias_and_suppression_equal_hf(hf, sequence):
    history = hf["history"].tolist()
    for at, adjusted in zip(hf["edited"], hf["adjusted"]):
        seq = sequence(prompt=history[:3], output=history[3:], **options(hf["params"][at]))
        with LogitsView(mx.array(hf["rows"][hf["row"][at]])[None], [seq]) as view:
            sample(view)
            np.testing.assert_allclose(np.array(view.logits)[0], adjusted, rtol=1e-6, atol=0)
            assert view.logits.dtype == mx.float32


def test_kept_sets_equal_hf(hf):
    """As values: HF leaves open which of equal logits top-p drops (its sort is not stable); we drop the higher ids."""
    edited = {int(at): adjusted for at, adjusted in zip(hf["edited"], hf["adjusted"])}
    vocab = hf["rows"].shape[1]
    for at, p in enumerate(hf["params"]):
        x = edited.get(at, hf["rows"][hf["row"][at]])
        p = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | p
        possible = (x.max() - x) / p["temperature"] < 40 * math.log(2)  # less likely ones have no weight
        want = set(np.flatnonzero(np.unpackbits(hf["kept"][at])[:vocab] & possible))
        got = kept_ids(x, p)
        assert sorted(x[list(got)]) == sorted(x[list(want)]), (at, p)
        assert all(i in got for g in got for i in np.flatnonzero(x[:g] == x[g])), (at, p)


def test_draws_follow_the_hf_distribution(hf, sequence, tokens_of):
    """600 seeds per case as rows of one batch: nothing outside HF's set, and chi-square inside its range."""
    n, edited = 600, set(hf["edited"].tolist())
    for at, scores in list(zip(range(0, len(hf["params"]), 7), hf["scores"]))[::4]:
        if at in edited:
            continue
        row = hf["rows"][hf["row"][at]]
        seqs = [sequence(seed=s * 977 + at, **options(hf["params"][at])) for s in range(n)]
        drawn = tokens_of(np.tile(row, (n, 1)), seqs)
        prob = np.exp(scores - scores.max(), dtype=np.float64)
        values, which = np.unique(row, return_inverse=True)  # equal logits as one: HF may keep others of them than we
        got = np.bincount(which[drawn], minlength=len(values))
        prob = np.bincount(which, prob / prob.sum())
        assert p_value(got, prob) > 1e-4, (at, hf["params"][at])


def reference(x: np.ndarray, p: dict) -> tuple[set[int], float]:
    """The same definition written the other way round, from the best token down, in float64; and the closest call."""
    y = x.astype(np.float64) / p["temperature"]
    order = np.argsort(-y, kind="stable")
    order = [i for i in order if not p["top_k"] or y[i] >= y[order[min(p["top_k"], len(y)) - 1]]]
    prob = np.exp(y[order] - y[order[0]])
    prob /= prob.sum()
    before = np.cumsum(prob) - prob
    doubt = 1.0
    if p["top_p"] < 1:
        doubt = np.abs(before - p["top_p"])[1:].min(initial=1.0)
        order = [i for i, b in zip(order, before) if b < p["top_p"]]
    ratio = np.exp(y[order] - y[order[0]])
    doubt = min(doubt, np.abs(ratio / p["min_p"] - 1).min() if p["min_p"] else 1.0)
    return {i for i, r in zip(order, ratio) if r >= p["min_p"]}, doubt


def test_kept_sets_equal_a_float64_reference():
    rng, sure = np.random.default_rng(11), 0
    for _ in range(150):
        x = (rng.normal(size=int(rng.integers(2, 3000))) * rng.uniform(0.5, 6)).astype(np.float32)
        p = {
            "temperature": float(rng.uniform(0.2, 3)),
            "top_k": int(rng.choice([0, 1, 5, 50, 4000])),
            "top_p": float(rng.choice([1.0, 0.999, 0.9, 0.3, 0.001])),
            "min_p": float(rng.choice([0.0, 0.02, 0.5, 1.0])),
        }
        want, doubt = reference(x, p)
        if doubt > 1e-5 or p["min_p"] == 1.0:  # a cut closer than float32 can tell has two right answers
            sure += 1
            assert kept_ids(x, p) == want, p
    assert sure > 120


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.25, 0.01])
def test_every_id_equal_to_the_kth_is_in_top_k_and_top_p_counts_them(top_p):
    x = np.float32([5, 1, 3, 3, 3, 3, 3, 3, 0, -np.inf])
    prob = np.exp(x.astype(np.float64) - 5) * (x >= 3)
    prob /= prob.sum()
    ids = kept_ids(x, {"temperature": 1.0, "top_k": 3, "top_p": top_p, "min_p": 0.0})
    mass = prob[list(ids)].sum()
    assert ids <= {0, 2, 3, 4, 5, 6, 7} and 0 in ids
    assert mass >= top_p - 1e-6 and (mass - prob[list(ids)].min() < top_p or len(ids) == 1)
    assert len(ids) == 7 or top_p < 1


@pytest.mark.parametrize(("top_p", "want"), [(1.0, 6), (0.9, 6), (0.6, 4), (0.5, 3), (0.3, 2), (0.05, 1)])
def test_equal_logits_are_drawn_equally_and_those_that_top_p_drops_never(sequence, tokens_of, top_p, want):
    """Six are equal where top-k asks for two: six stay. top-p then keeps the fewest that reach it, low ids first."""
    n, x = 900, np.float32([-4, 2, 2, -9, 2, 2, 0, 2, 2])
    seqs = [sequence(seed=s, temperature=1.0, top_k=2, top_p=top_p) for s in range(n)]
    got = np.bincount(tokens_of(np.tile(x, (n, 1)), seqs), minlength=len(x))
    assert got.nonzero()[0].tolist() == [1, 2, 4, 5, 7, 8][:want]
    assert np.abs(got[got > 0] - n / want).max() < 5 * math.sqrt(n / want)


def test_ties_at_the_kth_place_share_the_mass_with_the_better_ones(sequence, tokens_of):
    n, x = 2000, np.float32([0, 1, 0, 0, -5, 0, 0])
    for top_p, ids in ((1.0, [0, 1, 2, 3, 5, 6]), (0.7, [0, 1, 2, 3])):
        seqs = [sequence(seed=s, temperature=1.0, top_k=2, top_p=top_p) for s in range(n)]
        got = np.bincount(tokens_of(np.tile(x, (n, 1)), seqs), minlength=len(x))
        want = n * np.exp(x[ids]) / np.exp(x[ids]).sum()
        assert got.nonzero()[0].tolist() == ids
        assert (np.abs(got[ids] - want) < 5 * np.sqrt(want)).all()


@pytest.mark.parametrize("top_k", [0, 4])
def test_top_p_stops_exactly_where_it_is_reached_and_keeps_one_at_least(top_k):
    p = {"temperature": 1.0, "top_k": top_k, "min_p": 0.0}
    flat = np.zeros(4, np.float32)
    for top_p, want in ((0.5, {0, 1}), (0.25, {0}), (0.75, {0, 1, 2}), (1e-20, {0}), (5e-324, {0})):
        assert kept_ids(flat, p | {"top_p": top_p}) == want
    assert kept_ids(np.float32([1, 3, 2, 0]), p | {"top_p": 1e-20}) == {1}


def test_min_p_keeps_what_equals_it():
    p = {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 1.0}
    assert kept_ids(np.float32([2, 1, 2, 0]), p) == {0, 2}


def test_top_k_as_large_as_the_vocabulary_is_off(sequence, tokens_of):
    x = np.random.default_rng(3).normal(size=(40, 30)).astype(np.float32)
    rows = [tokens_of(x, [sequence(seed=s, temperature=1.0, top_k=k) for s in range(40)]) for k in (0, 30, 99)]
    assert rows[0] == rows[1] == rows[2] and len(set(rows[0])) > 5


def test_presence_and_frequency_count_the_output_only(sequence):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(3, 40)).astype(np.float32)
    prompt, output = (7, 7, 8), (8, 9, 9, 9)
    p = [{"presence_penalty": 0.75}, {"frequency_penalty": 0.5}, {"presence_penalty": -1.5, "frequency_penalty": 0.25}]
    want = x.astype(np.float64)
    for i, q in enumerate(p):
        for token, n in {8: 1, 9: 3}.items():
            want[i, token] -= q.get("presence_penalty", 0) + n * q.get("frequency_penalty", 0)
    with LogitsView(mx.array(x), [sequence(prompt=prompt, output=output, **q) for q in p]) as view:
        held = view.logits
        tokens = sample(view).tokens
        assert held.tolist() == view.given.tolist() == x.tolist()
        np.testing.assert_allclose(np.array(view.logits), want, rtol=1e-6, atol=1e-6)
        assert tokens.tolist() == want.argmax(-1).tolist()


def test_penalties_come_before_bias_and_bias_before_suppression(sequence):
    x = mx.array([[2.0, 2.0, 2.0, -1.0]])
    seq = sequence(
        prompt=(0, 3),
        repetition_penalty=2.0,
        logit_bias={0: 1.0, 1: -1.0, 2: 50.0},
        suppress=(2,),
        output=(3,),
        presence_penalty=0.5,
    )
    with LogitsView(x, [seq]) as view:
        sample(view)
        assert view.logits.tolist() == [[2.0, 1.0, -math.inf, -2.5]]


def test_tokens_still_on_the_device_count_like_those_read(sequence):
    x = mx.array(np.random.default_rng(4).normal(size=(2, 50)).astype(np.float32))
    p = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    known = [sequence(prompt=(3, 4), output=(6, 6), **p), sequence(prompt=(9,), output=(10,), **p)]
    late = [sequence(prompt=(3, 4), output=(6,), **p), sequence(prompt=(9,), **p)]
    step = mx.array([10, 6], mx.uint32) + 0
    late[0].pending, late[1].pending = [(step, 1)], [(step, 0)]
    read = []
    for seqs in (known, late):
        with LogitsView(x, seqs) as view:
            tokens = sample(view).tokens
            read.append((view.logits.tolist(), tokens.tolist()))
    assert read[0] == read[1]
    assert read[0][0] != x.tolist()


def test_nothing_is_computed_before_the_tokens_are_read(sequence):
    """The pending token hangs on an array of 32 MB: sampling with every option on must not have made it."""
    size = 1 << 23
    late = (mx.sum(mx.arange(size, dtype=mx.float32) * 0) + 6).astype(mx.uint32)[None]
    x = mx.zeros((2, 50)) + late
    every = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {1: 1.0}}
    every |= {"suppress": (2,), "logprobs": 3, "min_p": 0.1, "top_k": 5, "top_p": 0.9}
    seqs = [sequence(temperature=1.0, on_logits=lambda row: row.ban([3]), **every), sequence(**every)]
    for seq in seqs:
        seq.pending = [(late, 0)]
    mx.clear_cache()
    mx.reset_peak_memory()
    start = mx.get_active_memory()
    with LogitsView(x, seqs) as view:
        result = sample(view)
    assert mx.get_peak_memory() - start < size
    mx.eval(result.arrays)
    assert mx.get_peak_memory() - start >= 4 * size


def test_prompt_ids_without_a_logit_are_left_alone(sequence, tokens_of):
    x = np.float32([[0.0, 3.0, 1.0]])
    assert tokens_of(x, [sequence(prompt=(1, 900), repetition_penalty=4.0)]) == [2]
    assert tokens_of(x, [sequence(prompt=(900,), repetition_penalty=4.0)]) == [1]
