"""Centroids of LUT quantisation, computed exactly as the formats define them.

Lloyd-Max centroids of one coordinate of a random unit vector (JANGTQ), and odd cubics (JANGTQ version 2).
"""

from functools import lru_cache
from itertools import pairwise

import numpy as np

GRID, ROUNDS = 10_000, 200
CUBIC = {
    2: (0.893, 0.05065),
    3: (0.47125, 0.0116),
    4: (0.2405, 0.0021),
    6: (0.10413533834586466, 0.0),
    8: (0.030780075187969925, 0.0),
}


def trapezoids(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The areas of the trapezoids between neighbours."""
    return np.diff(x) * (y[1:] + y[:-1]) / 2.0


@lru_cache(maxsize=64)
def lloyd_max(width: int, bits: int) -> np.ndarray:
    """float32 [2 ** bits], ascending.

    The density is that of one coordinate among `width`, on a grid. The grid is coarse and its error is part of the
    format: centroids in closed form differ in the third digit.
    """
    x = np.linspace(-1.0, 1.0, GRID)
    density = (1.0 - x * x) ** ((width - 3) / 2.0)
    density = density / trapezoids(density, x).sum()
    mass, moment = trapezoids(density, x), trapezoids(x * density, x)
    reach = 3.0 / np.sqrt(width)
    centroids = np.linspace(-reach, reach, 1 << bits)
    for _ in range(ROUNDS):
        better = cell_means(x, mass, moment, centroids)
        if np.allclose(centroids, better, atol=1e-10):
            break
        centroids = better
    return np.sort(centroids).astype(np.float32)


def cell_means(x: np.ndarray, mass: np.ndarray, moment: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The mean of each centroid's cell, which reaches halfway to its neighbours; an empty cell keeps its centroid."""
    edges = np.concatenate([[-1.0], (centroids[:-1] + centroids[1:]) / 2.0, [1.0]])
    cuts = np.searchsorted(x, edges, side="left")
    cuts[-1] = len(x)  # the last cell has both its ends
    better = centroids.copy()
    for i, (low, high) in enumerate(pairwise(cuts.tolist())):
        if high - low > 1:
            better[i] = moment[low : high - 1].sum() / max(mass[low : high - 1].sum(), 1e-10)
    return better


@lru_cache(maxsize=8)
def odd_cubic(bits: int) -> np.ndarray:
    """float32 [2 ** bits], ascending."""
    alpha, beta = CUBIC[bits]
    u = np.arange(1 << bits) - ((1 << bits) - 1) / 2.0
    return (u * (alpha + beta * u * u)).astype(np.float32)
