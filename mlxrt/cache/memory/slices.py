"""Slice and update helpers that all cache kinds share: ranks fixed, shapes checked once, dtypes kept.

Starts are Python ints: a start as an array would cost a launch of its own on a GPU. Nothing here writes in place: a
holder of the old array never sees the new values, and MLX reuses the buffer when there is no other holder.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import numpy as np


def slice1(array: mx.array, start: int, size: int) -> mx.array:
    """array [T] -> [size] from start."""
    check_slice(array, 1, 0, start, size)
    return array[start : start + size]


def slice2(array: mx.array, start: int, size: int) -> mx.array:
    """array [T, D] -> [size, D] from start."""
    check_slice(array, 2, 0, start, size)
    return array[start : start + size]


def slice4(array: mx.array, start: int, size: int) -> mx.array:
    """array [B, H, T, D] -> [B, H, size, D] from start."""
    check_slice(array, 4, 2, start, size)
    return array[:, :, start : start + size]


def check_slice(array: mx.array, rank: int, axis: int, start: int, size: int) -> None:
    if array.ndim != rank:
        raise ValueError(f"rank {rank} expected, the array has shape {array.shape}")
    if size < 1 or not 0 <= start <= array.shape[axis] - size:
        raise ValueError(f"slots {start}..{start + size} lie outside 0..{array.shape[axis]}")


def update(array: mx.array, indices, value: mx.array) -> mx.array:
    """`array` with `value` at `indices`. Assigning to `array` itself would show through all its holders."""
    if value.dtype != array.dtype:
        raise TypeError(f"a cache of {array.dtype} cannot take {value.dtype}")
    fresh = array[...]
    fresh[indices] = value
    return fresh


def extend(array: mx.array, size: int) -> mx.array:
    """`array` with its first axis grown to `size` by zeros."""
    more = mx.zeros((size - array.shape[0], *array.shape[1:]), array.dtype)
    return mx.concatenate([array, more])


class HostArray(NamedTuple):
    """Numbers as the host and the device have them: CUDA graphs take the host's, without MLX."""

    host: np.ndarray
    array: mx.array


class ArrayCache:
    """Host integers as arrays, made again only when they change: a decode step repeats most of them, and making a small
    array costs 60 us on CUDA."""

    def __init__(self):
        self._last: dict[object, tuple[list, mx.array]] = {}
        self._numbers: dict[int, mx.array] = {}
        self._host: dict[object, tuple[list, HostArray]] = {}

    def __call__(self, name: object, value: list, make: Callable[[list], mx.array] = mx.array) -> mx.array:
        last = self._last.get(name)
        if last is None or last[0] != value:
            self._last[name] = last = (value, make(value))
        return last[1]

    def number(self, n: int) -> mx.array:
        """[1], for small counts."""
        if n not in self._numbers:
            self._numbers[n] = mx.array([n])
        return self._numbers[n]

    def zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Zeros shared by all layers of this shape, for the last number of rows; never written."""
        return self(("zeros", shape[1:], dtype), list(shape), lambda shape: mx.zeros(shape, dtype))

    def with_host(self, name: object, value: list, make: Callable[[list], np.ndarray]) -> HostArray:
        """As the host and the device have it; the same object until the value changes."""
        last = self._host.get(name)
        if last is None or last[0] != value:
            numbers = make(value)
            self._host[name] = last = (value, HostArray(numbers, mx.array(numbers)))
        return last[1]


def pad_table(ids: list[list[int]], rows: int, width: int) -> np.ndarray:
    """Ragged lists as int32 [rows, width], padded with 0, the dummy block."""
    table = np.zeros((rows, width), np.int32)
    for row, own in zip(table, ids):
        row[: len(own)] = own
    return table


def repeat_with_step(rows: list[list[int]], steps: int) -> np.ndarray:
    """rows [R, k] as int32 [steps, R, k + 1]: for every step, with its number as one more column."""
    every = np.empty((steps, len(rows), len(rows[0]) + 1), np.int32)
    every[:, :, :-1], every[:, :, -1] = rows, np.arange(steps)[:, None]
    return every


def at_step(every: mx.array, step: int) -> mx.array:
    """every[step], as a view: an index would be a launch."""
    return every[step : step + 1].reshape(every.shape[1:])


def bucket(n: int) -> int:
    """The power of two at or above n: few shapes, so few compiled steps."""
    return 1 << (max(n, 1) - 1).bit_length()
