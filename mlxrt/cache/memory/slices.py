"""The few ways arrays of a cache are cut and written, in one place: ranks fixed, shapes and dtypes checked.

A start is a Python int (free, but a constant in a compiled step) or an array (for steps whose shapes stay and whose
offsets move; on a GPU it costs a launch of its own, so the hot loop has none). Nothing here writes in place: a holder
of the old array never sees the new values, and MLX reuses the buffer when there is no holder.
"""

from collections.abc import Callable

import mlx.core as mx

Start = int | mx.array


def put(array: mx.array, where, value: mx.array) -> mx.array:
    """`array` with `value` at `where`. Assigning to `array` itself would show through all its holders."""
    same_dtype(array, value)
    fresh = array[...]
    fresh[where] = value
    return fresh


def cut1(array: mx.array, start: Start, size: int) -> mx.array:
    """array [T] -> [size] from start."""
    return cut(array, 1, 0, start, size)


def cut2(array: mx.array, start: Start, size: int) -> mx.array:
    """array [T, D] -> [size, D] from start."""
    return cut(array, 2, 0, start, size)


def cut4(array: mx.array, start: Start, size: int) -> mx.array:
    """array [B, H, T, D] -> [B, H, size, D] from start."""
    return cut(array, 4, 2, start, size)


def update1(array: mx.array, start: Start, value: mx.array) -> mx.array:
    """array [T] with value [n] from start."""
    return update(array, 1, 0, start, value)


def update2(array: mx.array, start: Start, value: mx.array) -> mx.array:
    """array [T, D] with value [n, D] from start."""
    return update(array, 2, 0, start, value)


def update4(array: mx.array, start: Start, value: mx.array) -> mx.array:
    """array [B, H, T, D] with value [B, H, n, D] from start."""
    return update(array, 4, 2, start, value)


def cut(array: mx.array, rank: int, axis: int, start: Start, size: int) -> mx.array:
    check(array, rank, axis, start, size)
    if isinstance(start, int):
        return array[(slice(None),) * axis + (slice(start, start + size),)]
    shape = list(array.shape)
    shape[axis] = size
    return mx.slice(array, start.reshape(1), (axis,), tuple(shape))


def update(array: mx.array, rank: int, axis: int, start: Start, value: mx.array) -> mx.array:
    same_dtype(array, value)
    if value.ndim != rank:
        raise ValueError(f"a cache of rank {rank} takes values of rank {rank}, not {value.ndim}")
    size = value.shape[axis]
    check(array, rank, axis, start, size)
    rest = [(a, b) for i, (a, b) in enumerate(zip(array.shape, value.shape)) if i != axis]
    if any(a != b for a, b in rest):
        raise ValueError(f"a value of shape {value.shape} does not fit a cache of shape {array.shape}")
    where = mx.array([start]) if isinstance(start, int) else start.reshape(1)
    return mx.slice_update(array, value, where, (axis,))


def check(array: mx.array, rank: int, axis: int, start: Start, size: int) -> None:
    if array.ndim != rank:
        raise ValueError(f"rank {rank} expected, the array has shape {array.shape}")
    if size < 1 or size > array.shape[axis]:
        raise ValueError(f"{size} of {array.shape[axis]} slots cannot be cut or written")
    if isinstance(start, int):
        if not 0 <= start <= array.shape[axis] - size:
            raise ValueError(f"slots {start}..{start + size} lie outside 0..{array.shape[axis]}")
    elif start.size != 1 or not mx.issubdtype(start.dtype, mx.integer):
        raise ValueError(f"a start is one integer, not {start.dtype} of shape {start.shape}")


def same_dtype(array: mx.array, value: mx.array) -> None:
    if value.dtype != array.dtype:
        raise TypeError(f"a cache of {array.dtype} cannot take {value.dtype}")


def widen(array: mx.array, size: int) -> mx.array:
    """`array` with its first axis grown to `size`, zeros behind."""
    more = mx.zeros((size - array.shape[0], *array.shape[1:]), array.dtype)
    return mx.concatenate([array, more])


class ArrayCache:
    """Numbers of the host as arrays, made anew only when they change: a decode step repeats most of them, and making an
    array of a few costs 60 us on CUDA."""

    def __init__(self):
        self._last: dict[object, tuple[list, mx.array]] = {}
        self._numbers: dict[int, mx.array] = {}

    def __call__(self, name: object, value: list, make: Callable[[list], mx.array] = mx.array) -> mx.array:
        last = self._last.get(name)
        if last is None or last[0] != value:
            self._last[name] = last = (value, make(value))
        return last[1]

    def number(self, n: int) -> mx.array:
        """[1]. For counts, of which there are few."""
        if n not in self._numbers:
            self._numbers[n] = mx.array([n])
        return self._numbers[n]

    def zeros(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """The same array for all layers alike, with as many rows as were asked for last: nobody writes into it."""
        return self(("zeros", shape[1:], dtype), list(shape), lambda shape: mx.zeros(shape, dtype))

    def counted(self, name: object, value: list[list[int]], at: int, most: int) -> tuple[mx.array, mx.array]:
        """value [R, k] with one more column: for all from 0 to most - 1, which are made at once, and for `at`."""

        def make(value: list) -> mx.array:
            return mx.array([[[*row, n] for row in value] for n in range(most)])

        every = self(name, value, make)
        return every, every[at : at + 1].reshape(every.shape[1:])  # a view; [at] would be a launch


def table(ids: list[list[int]], rows: int, width: int) -> list[list[int]]:
    """Ragged lists as [rows, width], padded with 0 (place 0 of a pool is nowhere)."""
    return [r + [0] * (width - len(r)) for r in ids] + [[0] * width] * (rows - len(ids))


def bucket(n: int) -> int:
    """The power of two at or above n: shapes that change seldom keep compiled steps few."""
    return 1 << (max(n, 1) - 1).bit_length()
