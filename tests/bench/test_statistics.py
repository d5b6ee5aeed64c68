"""Intervals must hold what they say they hold: against tables, and against noise whose truth is known."""

import math
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest

from mlxrt.bench import statistics
from mlxrt.bench.statistics import (
    Ratio,
    Spread,
    StoppingRule,
    autocorrelation_factor,
    paired_ratio,
    rank_sum_cut,
    signed_rank_cut,
    unpaired_ratio,
)


@pytest.fixture
def bare(monkeypatch):
    """Without what processes differ by: simulated rounds come from none."""
    monkeypatch.setattr(statistics, "PROCESS_SPREAD", 0.0)


@pytest.mark.parametrize("n", [5, 8, 11])
@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_signed_rank_cut_is_that_of_counting_every_sign(n, level):
    counts = Counter(sum(r for r, sign in zip(range(1, n + 1), signs) if sign) for signs in product((0, 1), repeat=n))
    below = np.cumsum([counts[k] for k in range(n * (n + 1) // 2 + 1)]) / 2**n
    cut, reached = signed_rank_cut(n, level)
    assert reached == pytest.approx(1 - 2 * below[cut - 1])
    if reached >= level:
        assert 1 - 2 * below[cut] < level  # one further in would not be enough
    else:
        assert cut == 1  # too few rounds: the whole range, and its true level is told


@pytest.mark.parametrize(("n", "m"), [(3, 4), (5, 5), (2, 6)])
def test_rank_sum_cut_is_that_of_counting_every_choice(n, m):
    counts = Counter(sum(c) - n * (n - 1) // 2 for c in combinations(range(n + m), n))
    below = np.cumsum([counts[k] for k in range(n * m + 1)]) / math.comb(n + m, n)
    cut, reached = rank_sum_cut(n, m, 0.9)
    assert reached == pytest.approx(1 - 2 * below[cut - 1])


@pytest.mark.parametrize("n", [7, 20, 60])
@pytest.mark.parametrize("truth", [1.0, 1.1])
def test_paired_interval_holds_the_truth_as_often_as_it_says(bare, n, truth):
    chance = np.random.default_rng(n)
    held = 0
    for _ in range(400):
        shared = np.exp(chance.normal(0, 0.5, n))  # what the machine does to both
        a, b = (shared * np.exp(0.05 * chance.standard_t(3, n)) for _ in range(2))
        r = paired_ratio(truth * a, b, 0.95)
        held += r.low <= truth <= r.high
    assert 0.92 <= held / 400 <= 1.0


def test_unpaired_interval_holds_the_truth_as_often_as_it_says(bare):
    chance = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        r = unpaired_ratio(1.3 * np.exp(chance.normal(0, 0.1, 9)), np.exp(chance.normal(0, 0.1, 12)), 0.95)
        held += r.low <= 1.3 <= r.high
    assert held / 400 >= 0.92


def test_a_burst_in_one_half_of_a_pair_moves_little():
    a = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 50.0]
    r = paired_ratio(a, [1.0] * 10)
    assert 0.98 < r.value < 1.02


def test_noise_that_lasts_makes_the_interval_wider(bare):
    chance = np.random.default_rng(0)
    free = chance.normal(0, 0.05, 100)
    lasting = np.convolve(free, np.ones(6) / math.sqrt(6), "same")
    assert autocorrelation_factor(free) < 1.25 < autocorrelation_factor(lasting)
    assert autocorrelation_factor(free[:5]) == 1.0


def test_processes_differ_so_no_interval_is_narrower_than_that():
    r = paired_ratio([1.0] * 30, [1.0] * 30, 0.99)
    assert r.low < 0.99 and r.high > 1.01 and r.value == 1.0
    assert r.conclusion == "same"


@pytest.mark.parametrize(
    ("low", "high", "level", "conclusion"),
    [(1.01, 1.2, 0.95, "faster"), (0.8, 0.99, 0.95, "slower"), (0.9, 1.1, 0.95, "same"), (1.1, 1.2, 0.75, "unsure")],
)
def test_conclusion(low, high, level, conclusion):
    assert Ratio((low + high) / 2, low, high, level, 9).conclusion == conclusion


def test_rule_ends_by_width_or_time_never_by_the_ratio():
    rule = StoppingRule(width=0.05, min_rounds=6, max_rounds=50, seconds=10, min_late_rounds=2)
    narrow, wide = Ratio(2.0, 1.98, 2.02, 0.95, 6), Ratio(2.0, 1.5, 2.5, 0.95, 6)
    assert rule.is_satisfied([narrow], 6, 1.0)
    assert not rule.is_satisfied([narrow], 5, 1.0)
    assert not rule.is_satisfied([narrow, wide], 20, 1.0)
    assert rule.is_satisfied([wide], 2, 10.0)
    assert not rule.is_satisfied([wide], 1, 99.0)
    assert rule.is_satisfied([wide], 50, 1.0)


def test_pairs_need_partners():
    with pytest.raises(ValueError, match="no pairs"):
        paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no pairs"):
        paired_ratio([], [])


def test_spread_has_quartiles():
    s = Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (s.low, s.median, s.high) == (2.0, 3.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, (7.0,))
