"""A flush longer than a ring. 60 random programs on a CPU did not show the fault that this test does."""

import mlx.core as mx
import pytest

from mlxrt.cache.memory import PagedKV, PlainKV, RotatingKV


@pytest.mark.parametrize("keep", [0, 3])
def test_tokens_that_a_flush_overwrites_go_nowhere(keep):
    spec = RotatingKV.of(PagedKV(2, 32, PlainKV(), 4), window=8, keep=keep, slack=5)
    period, end, block_id = spec.size - keep, 40, 7
    positions = list(range(end - period - 3, end))
    index = {"end": mx.array([end]), "table": mx.array([[block_id]])}
    block, slot = spec.slot_mapping(mx.array(positions), mx.array([0] * len(positions)), index)
    assert block.tolist() == [0 if p < end - period else block_id for p in positions]
    written = [s for b, s in zip(block.tolist(), slot.tolist()) if b]
    assert len(set(written)) == len(written) == period and min(written) == keep
