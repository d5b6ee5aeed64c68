"""How sure a comparison is. Knows numbers only.

Rounds come in pairs (both engines ran next to each other), so the ratio of a pair is what is judged: what the machine
did to one it did to the other. The figure is the Hodges-Lehmann estimate of the log ratios, its interval the one of
Wilcoxon's signed ranks: a burst of noise that hits one half of a pair moves it as little as it moves a median, and it
needs a third fewer rounds than a median for the same width.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import NormalDist, quantiles
from typing import Any

import numpy as np

# Two processes of the same engine differ for as long as they live (where their memory lies, which core they prefer):
# standard deviation of the log of their ratio, measured (docs/decisions/benchmark-intervals.md).
PROCESSES = 0.008
SURE = 0.9
ALIKE = 12  # rounds from which on their likeness can be told
EXACT = 40  # rounds up to which the distribution of ranks is counted out; beyond, a normal one is as good


@dataclass(frozen=True)
class Ratio:
    """A ratio and the interval that holds it with probability `level`."""

    value: float
    low: float
    high: float
    level: float
    rounds: int

    @property
    def width(self) -> float:
        """Of the interval, as part of the ratio."""
        return (self.high - self.low) / self.value

    @property
    def verdict(self) -> str:
        """faster, slower, same: the interval holds 1, or unsure: too few rounds for an interval worth the name."""
        if self.level < SURE:
            return "unsure"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "same"

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def paired_ratio(a: Sequence[float], b: Sequence[float], level: float = 0.95, processes: int = 1) -> Ratio:
    """a[i] / b[i], which ran next to each other, in so many pairs of processes."""
    logs = np.log(np.asarray(a, float)) - np.log(np.asarray(b, float))
    if len(logs) == 0 or len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} rounds make no pairs")
    n = len(logs)
    rows, columns = np.triu_indices(n)
    averages = np.sort((logs[rows] + logs[columns]) / 2)
    cut, reached = signed_rank_cut(n, level)
    middle, more = float(np.median(averages)), persistence(logs)
    low = widened(middle, more * (averages[cut - 1] - middle), -1, level, processes)
    high = widened(middle, more * (averages[-cut] - middle), 1, level, processes)
    return Ratio(math.exp(middle), math.exp(low), math.exp(high), reached, n)


def widened(middle: float, away: float, sign: int, level: float, processes: int = 1) -> float:
    """An end of the interval, `away` from its middle, with what another pair of processes would have given."""
    other = NormalDist().inv_cdf((1 + level) / 2) * PROCESSES / math.sqrt(processes)
    return middle + sign * math.hypot(away, other)


def persistence(logs: np.ndarray) -> float:
    """How much wider the interval has to be since neighbouring rounds are alike: noise lasts longer than a round.

    From the ranks, so that a burst counts once; 1 where neighbours are independent or too few to tell.
    """
    n = len(logs)
    if n < ALIKE:
        return 1.0
    ranks = np.argsort(np.argsort(logs)) - (n - 1) / 2
    alike = float(np.dot(ranks[1:], ranks[:-1]) / np.dot(ranks, ranks)) + 1 / n
    return math.sqrt((1 + alike) / (1 - alike)) if 0 < alike < 0.9 else 1.0


def unpaired_ratio(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Ratio:
    """Of two runs that know nothing of each other: the shift between the logs, after Mann, Whitney, Hodges, Lehmann."""
    if not len(a) or not len(b):
        raise ValueError(f"{len(a)} and {len(b)} rounds give no ratio")
    n, m = len(a), len(b)
    shifts = np.sort(np.subtract.outer(np.log(np.asarray(a, float)), np.log(np.asarray(b, float))).ravel())
    cut, reached = rank_sum_cut(n, m, level)
    middle = float(np.median(shifts))
    low, high = (widened(middle, shifts[end] - middle, sign, level) for end, sign in ((cut - 1, -1), (-cut, 1)))
    return Ratio(math.exp(middle), math.exp(low), math.exp(high), reached, min(n, m))


@cache
def signed_rank_cut(n: int, level: float) -> tuple[int, float]:
    """Which ordered average, from either end, bounds the interval; the level it really has."""
    tail = (1 - level) / 2
    if n > EXACT:
        spread = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return max(1, int(n * (n + 1) / 4 - NormalDist().inv_cdf(1 - tail) * spread)), level
    ways = np.ones(1)
    for rank in range(1, n + 1):
        ways = np.concatenate([ways, np.zeros(rank)]) + np.concatenate([np.zeros(rank), ways])
    return counted_cut(np.cumsum(ways) / 2.0**n, tail)


@cache
def rank_sum_cut(n: int, m: int, level: float) -> tuple[int, float]:
    tail = (1 - level) / 2
    if n > EXACT or m > EXACT:
        spread = math.sqrt(n * m * (n + m + 1) / 12)
        return max(1, int(n * m / 2 - NormalDist().inv_cdf(1 - tail) * spread)), level
    # ways[k][u]: choices of k of the values seen so far whose Mann-Whitney count is u
    ways = np.zeros((n + 1, n * m + 1))
    ways[0, 0] = 1
    for seen in range(1, n + m + 1):
        for k in range(min(seen, n), 0, -1):
            below = seen - k  # of the other sample's values below this one
            if below <= m:
                ways[k, below:] += ways[k - 1, : n * m + 1 - below]
    return counted_cut(np.cumsum(ways[n]) / math.comb(n + m, n), tail)


def counted_cut(below: np.ndarray, tail: float) -> tuple[int, float]:
    """From P(count <= k) to the cut. Too few values for the level: the whole range, and the level that has."""
    cut = max(1, int(np.searchsorted(below, tail, side="right")))
    return cut, float(1 - 2 * below[cut - 1])


@dataclass(frozen=True)
class Spread:
    """One engine's rounds."""

    median: float
    low: float  # quartiles
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, median, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(median, low, high, tuple(values))


def percentiles(values: Sequence[float], which: Sequence[float] = (50, 90, 99)) -> dict[str, float]:
    return {f"p{p:g}": float(np.percentile(np.asarray(values, float), p)) for p in which}


@dataclass(frozen=True)
class Patience:
    """When a comparison has had rounds enough. The width decides, never the ratio: looking often is no bias then."""

    width: float = 0.05  # of the interval, as part of the ratio
    level: float = 0.95
    least: int = 6
    most: int = 400
    seconds: float = 30.0  # beyond them `hurried` rounds are enough
    hurried: int = 2

    def enough(self, ratios: Sequence[Ratio], rounds: int, spent: float) -> bool:
        if rounds >= self.most or (spent >= self.seconds and rounds >= self.hurried):
            return True
        return rounds >= self.least and bool(ratios) and all(r.width <= self.width for r in ratios)
