"""A flush longer than a ring. 60 random programs on a CPU did not show the fault that this test does."""

import mlx.core as mx
import pytest

from mlxrt.cache.memory import PagedKV, PlainKV, RotatingKV


@pytest.mark.parametrize("keep", [0, 3])
def test_tokens_that_a_flush_overwrites_go_nowhere(keep):
    spec = RotatingKV.of(PagedKV(2, 32, PlainKV(), 4), window=8, keep=keep, slack=5)
    turn, end, place = spec.size - keep, 40, 7
    positions = list(range(end - turn - 3, end))
    index = {"end": mx.array([end]), "table": mx.array([[place]])}
    block, slot = spec.slots(mx.array(positions), mx.array([0] * len(positions)), index)
    assert block.tolist() == [0 if p < end - turn else place for p in positions]
    written = [s for b, s in zip(block.tolist(), slot.tolist()) if b]
    assert len(set(written)) == len(written) == turn and min(written) == keep
