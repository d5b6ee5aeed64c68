"""Pearson's chi-square test: how probable it is that counts as odd as these come from a distribution."""

import math

import numpy as np


def p_value(counts: np.ndarray, probabilities: np.ndarray, fewest: float = 5.0) -> float:
    """Bins that expect fewer than `fewest` counts are joined; 0 if anything came that has no probability."""
    n, p = counts.sum(), np.asarray(probabilities, np.float64) / np.sum(probabilities)
    if counts[p == 0].any():
        return 0.0
    order = np.argsort(p, kind="stable")
    expected, got = n * p[order], counts[order].astype(np.float64)
    small = int(np.searchsorted(np.cumsum(expected), fewest)) + 1  # the least likely ones, as many as are needed
    while small < len(expected) and expected[small] < fewest:
        small += 1
    expected = np.concatenate([[expected[:small].sum()], expected[small:]])
    got = np.concatenate([[got[:small].sum()], got[small:]])
    if len(expected) < 2:
        return 1.0
    statistic = ((got - expected) ** 2 / expected).sum()
    return upper_gamma((len(expected) - 1) / 2, statistic / 2)


def upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function: by its series below a + 1, by its continued fraction above."""
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        i = a
        while term > total * 1e-15:
            i += 1
            term *= x / i
            total += term
        return max(0.0, 1 - scale * total)
    b, c = x + 1 - a, math.inf
    d = 1 / b
    h = d
    for i in range(1, 10_000):
        step = -i * (i - a)
        b += 2
        d = 1 / (step * d + b)
        c = b + step / c
        h *= d * c
        if abs(d * c - 1) < 1e-13:
            break
    return scale * h
