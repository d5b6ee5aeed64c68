"""Ratios of measurements with confidence intervals, and the rule that says when there are enough rounds.

Rounds are paired (two engines run back to back), so machine noise that hits both halves of a pair cancels in their
ratio. The estimate is Hodges-Lehmann of the log ratios, the interval comes from Wilcoxon's signed ranks: as robust to
outliers as a median, and a third fewer rounds for the same width.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import NormalDist, quantiles
from typing import Any

import numpy as np

# Two processes of the same engine differ for their lifetime (memory placement, preferred core): standard deviation of
# the log of their ratio, measured (docs/decisions/0014). Without it, an engine compared with itself
# is called faster or slower too often (tests/bench/test_harness_selftest.py).
PROCESS_SPREAD = 0.008
MIN_LEVEL = 0.9
MIN_ROUNDS_AUTOCORRELATION = 12
MAX_EXACT_ROUNDS = 40  # beyond that the normal approximation of the rank distribution is used


@dataclass(frozen=True)
class Ratio:
    """A ratio with its confidence interval at `level`."""

    value: float
    low: float
    high: float
    level: float
    rounds: int

    @property
    def width(self) -> float:
        """Width of the interval relative to the ratio."""
        return (self.high - self.low) / self.value

    @property
    def conclusion(self) -> str:
        """faster, slower, same (the interval contains 1) or unsure (too few rounds for the level)."""
        if self.level < MIN_LEVEL:
            return "unsure"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "same"

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.conclusion}


def paired_ratio(a: Sequence[float], b: Sequence[float], level: float = 0.95, processes: int = 1) -> Ratio:
    """Estimate a / b from rounds where a[i] and b[i] ran back to back, in `processes` pairs of processes."""
    logs = np.log(np.asarray(a, float)) - np.log(np.asarray(b, float))
    if len(logs) == 0 or len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} rounds make no pairs")
    n = len(logs)
    rows, columns = np.triu_indices(n)
    averages = np.sort((logs[rows] + logs[columns]) / 2)
    cut, actual_level = signed_rank_cut(n, level)
    center, factor = float(np.median(averages)), autocorrelation_factor(logs)
    low = widen(center, factor * (averages[cut - 1] - center), -1, level, processes)
    high = widen(center, factor * (averages[-cut] - center), 1, level, processes)
    return Ratio(math.exp(center), math.exp(low), math.exp(high), actual_level, n)


def widen(center: float, distance: float, sign: int, level: float, processes: int = 1) -> float:
    """One end of the interval, `distance` from its center, widened by the spread between processes."""
    between_processes = NormalDist().inv_cdf((1 + level) / 2) * PROCESS_SPREAD / math.sqrt(processes)
    return center + sign * math.hypot(distance, between_processes)


def autocorrelation_factor(logs: np.ndarray) -> float:
    """How much wider the interval must be because neighbouring rounds are correlated: noise outlasts a round.

    Computed from ranks, so that a burst counts once; 1 for independent rounds, or too few to know.
    """
    n = len(logs)
    if n < MIN_ROUNDS_AUTOCORRELATION:
        return 1.0
    ranks = np.argsort(np.argsort(logs)) - (n - 1) / 2
    correlation = float(np.dot(ranks[1:], ranks[:-1]) / np.dot(ranks, ranks)) + 1 / n
    return math.sqrt((1 + correlation) / (1 - correlation)) if 0 < correlation < 0.9 else 1.0


def unpaired_ratio(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Ratio:
    """Ratio of two independent runs: the Hodges-Lehmann shift between the logs, interval after Mann and Whitney."""
    if not len(a) or not len(b):
        raise ValueError(f"{len(a)} and {len(b)} rounds give no ratio")
    n, m = len(a), len(b)
    shifts = np.sort(np.subtract.outer(np.log(np.asarray(a, float)), np.log(np.asarray(b, float))).ravel())
    cut, actual_level = rank_sum_cut(n, m, level)
    center = float(np.median(shifts))
    low, high = (widen(center, shifts[end] - center, sign, level) for end, sign in ((cut - 1, -1), (-cut, 1)))
    return Ratio(math.exp(center), math.exp(low), math.exp(high), actual_level, min(n, m))


@cache
def signed_rank_cut(n: int, level: float) -> tuple[int, float]:
    """Which ordered pair average, from either end, bounds the interval, and the level it actually has."""
    tail = (1 - level) / 2
    if n > MAX_EXACT_ROUNDS:
        spread = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return max(1, int(n * (n + 1) / 4 - NormalDist().inv_cdf(1 - tail) * spread)), level
    ways = np.ones(1)
    for rank in range(1, n + 1):
        ways = np.concatenate([ways, np.zeros(rank)]) + np.concatenate([np.zeros(rank), ways])
    return exact_cut(np.cumsum(ways) / 2.0**n, tail)


@cache
def rank_sum_cut(n: int, m: int, level: float) -> tuple[int, float]:
    tail = (1 - level) / 2
    if n > MAX_EXACT_ROUNDS or m > MAX_EXACT_ROUNDS:
        spread = math.sqrt(n * m * (n + m + 1) / 12)
        return max(1, int(n * m / 2 - NormalDist().inv_cdf(1 - tail) * spread)), level
    # ways[k][u]: choices of k of the values so far whose Mann-Whitney count is u
    ways = np.zeros((n + 1, n * m + 1))
    ways[0, 0] = 1
    for seen in range(1, n + m + 1):
        for k in range(min(seen, n), 0, -1):
            below = seen - k  # of the other sample's values below this one
            if below <= m:
                ways[k, below:] += ways[k - 1, : n * m + 1 - below]
    return exact_cut(np.cumsum(ways[n]) / math.comb(n + m, n), tail)


def exact_cut(below: np.ndarray, tail: float) -> tuple[int, float]:
    """The cut for a tail probability, from P(count <= k). With too few values: the full range and its level."""
    cut = max(1, int(np.searchsorted(below, tail, side="right")))
    return cut, float(1 - 2 * below[cut - 1])


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and values of one engine's rounds."""

    median: float
    low: float  # quartiles
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, median, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(median, low, high, tuple(values))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(np.asarray(values, float), p)) for p in (50, 90, 99)}


@dataclass(frozen=True)
class StoppingRule:
    """When a comparison has enough rounds. Only the width of the interval decides, so looking often adds no bias."""

    width: float = 0.05  # of the interval, relative to the ratio
    level: float = 0.95
    min_rounds: int = 6
    max_rounds: int = 400
    seconds: float = 30.0  # after them `min_late_rounds` are enough
    min_late_rounds: int = 2

    def is_satisfied(self, ratios: Sequence[Ratio], rounds: int, spent: float) -> bool:
        if rounds >= self.max_rounds or (spent >= self.seconds and rounds >= self.min_late_rounds):
            return True
        return rounds >= self.min_rounds and bool(ratios) and all(r.width <= self.width for r in ratios)
