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
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_cut_and_update(rank, start, size, dynamic, compiled):
    a, x = made(rank)
    at = mx.array(start) if dynamic else start
    cut, update = getattr(slices, f"cut{rank}"), getattr(slices, f"update{rank}")
    value = -1 - a[window(rank, 0, size)]
    if compiled and dynamic:
        got = mx.compile(lambda x, at: cut(x, at, size))(x, at)
        new = mx.compile(update)(x, at, mx.array(value))
    else:
        got, new = cut(x, at, size), update(x, at, mx.array(value))
    np.testing.assert_array_equal(np.array(got), a[window(rank, start, size)])
    want = a.copy()
    want[window(rank, start, size)] = value
    np.testing.assert_array_equal(np.array(new), want)
    np.testing.assert_array_equal(np.array(x), a)  # the old holder sees nothing


@pytest.mark.parametrize("rank", SHAPES)
def test_dtypes_are_kept_and_checked(rank):
    _, x = made(rank, mx.bfloat16)
    cut, update = getattr(slices, f"cut{rank}"), getattr(slices, f"update{rank}")
    assert cut(x, 1, 2).dtype == update(x, 1, cut(x, 0, 2)).dtype == mx.bfloat16
    with pytest.raises(TypeError, match=r"bfloat16 cannot take .*float32"):
        update(x, 1, cut(x, 0, 2) * mx.array(2.5))


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("start, size", [(-1, 2), (8, 2), (0, 10), (0, 0)])
def test_nothing_outside(rank, start, size):
    with pytest.raises(ValueError):
        getattr(slices, f"cut{rank}")(made(rank)[1], start, size)


def test_ranks_and_shapes():
    with pytest.raises(ValueError, match="rank 4"):
        slices.cut4(mx.zeros((3, 4)), 0, 1)
    with pytest.raises(ValueError, match="rank"):
        slices.update4(mx.zeros((1, 2, 3, 4)), 0, mx.zeros((3, 4)))
    with pytest.raises(ValueError, match="does not fit"):
        slices.update4(mx.zeros((1, 2, 3, 4)), 0, mx.zeros((1, 1, 1, 4)))
    with pytest.raises(ValueError, match="one integer"):
        slices.cut1(mx.zeros(4), mx.array([1, 2]), 1)
    with pytest.raises(ValueError, match="one integer"):
        slices.cut1(mx.zeros(4), mx.array(1.0), 1)


def test_an_update_without_other_holders_reuses_the_buffer():
    x = mx.zeros((1, 4, 4096, 64))
    mx.eval(x)
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for i in range(8):
        x = slices.update4(x, mx.array(i), mx.ones((1, 4, 1, 64)))
        mx.eval(x)
    assert mx.get_peak_memory() - base < x.nbytes / 4
