"""The few ways arrays of a cache are cut and written, in one place, with shapes checked."""

import mlx.core as mx


def put(array: mx.array, where, value: mx.array) -> mx.array:
    """`array` with `value` at `where`, as a new array. Assigning to `array` itself would show through all its holders."""
    if value.dtype != array.dtype:
        raise TypeError(f"a cache of {array.dtype} cannot take {value.dtype}")
    fresh = array[...]
    fresh[where] = value
    return fresh


def widen(array: mx.array, size: int) -> mx.array:
    """`array` with its first axis grown to `size`, zeros behind."""
    more = mx.zeros((size - array.shape[0], *array.shape[1:]), array.dtype)
    return mx.concatenate([array, more])


def table(ids: list[list[int]], rows: int, width: int) -> mx.array:
    """Ragged lists as [rows, width], padded with 0 (place 0 of a pool is nowhere)."""
    return mx.array([r + [0] * (width - len(r)) for r in ids] + [[0] * width] * (rows - len(ids)))


def bucket(n: int) -> int:
    """The power of two at or above n: shapes that change seldom keep compiled steps few."""
    return 1 << (max(n, 1) - 1).bit_length()
