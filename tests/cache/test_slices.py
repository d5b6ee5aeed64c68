"""Rank-fixed slices and updates against numpy."""

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.cache.memory import slices

SHAPES = {1: (9,), 2: (9, 3), 4: (2, 3, 9, 4)}
AXIS = {1: 0, 2: 0, 4: 2}


def made(rank, dtype=mx.float32):
    a = np.arange(np.prod(SHAPES[rank]), dtype=np.float32).reshape(SHAPES[rank])
    return a, mx.array(a).astype(dtype)


def window(rank, start, size):
    return (slice(None),) * AXIS[rank] + (slice(start, start + size),)


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("start, size", [(0, 1), (0, 9), (4, 3), (8, 1)])
@pytest.mark.parametrize("compiled", [False, True])
def test_slice_and_update(rank, start, size, compiled):
    a, x = made(rank)
    cut, update = getattr(slices, f"slice{rank}"), slices.update
    value = -1 - a[window(rank, 0, size)]
    where = window(rank, start, size)
    if compiled:
        got = mx.compile(lambda x: cut(x, start, size))(x)
        new = mx.compile(lambda x, value: update(x, where, value))(x, mx.array(value))
    else:
        got, new = cut(x, start, size), update(x, where, mx.array(value))
    np.testing.assert_array_equal(np.array(got), a[where])
    want = a.copy()
    want[where] = value
    np.testing.assert_array_equal(np.array(new), want)
    np.testing.assert_array_equal(np.array(x), a)  # the old holder sees nothing


@pytest.mark.parametrize("rank", SHAPES)
def test_dtypes_are_kept_and_checked(rank):
    _, x = made(rank, mx.bfloat16)
    cut, where = getattr(slices, f"slice{rank}"), window(rank, 1, 2)
    assert cut(x, 1, 2).dtype == slices.update(x, where, cut(x, 0, 2)).dtype == mx.bfloat16
    with pytest.raises(TypeError, match=r"bfloat16 cannot take .*float32"):
        slices.update(x, where, cut(x, 0, 2) * mx.array(2.5))


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("start, size", [(-1, 2), (8, 2), (0, 10), (0, 0)])
def test_nothing_outside(rank, start, size):
    with pytest.raises(ValueError):
        getattr(slices, f"slice{rank}")(made(rank)[1], start, size)


def test_ranks_and_shapes():
    with pytest.raises(ValueError, match="rank 4"):
        slices.slice4(mx.zeros((3, 4)), 0, 1)
    with pytest.raises(ValueError):
        slices.update(mx.zeros((1, 2, 3, 4)), mx.array([0]), mx.zeros((1, 1, 2, 4)))


def test_an_update_without_other_holders_reuses_the_buffer():
    x = mx.zeros((64, 4, 64, 64))  # a pool of 64 blocks
    mx.eval(x)
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for i in range(8):
        x = slices.update(x, mx.array([i]), mx.ones((1, 4, 64, 64)))
        mx.eval(x)
    assert mx.get_peak_memory() - base < x.nbytes / 4
