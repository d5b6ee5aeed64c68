"""The random calls of fuzz.py still fit the ops: one of each, in the simulator."""

import random

import mlx.core as mx
import pytest

from mlxrt.kernels import OPS

from ..long.fuzz_kernels import DRAWS, look
from ..support.metal_sim import ASCENDING


@pytest.mark.parametrize("name", DRAWS)
def test_a_drawn_call_is_right(name):
    rng = random.Random(f"{name} 8")
    mx.random.seed(8)
    case = DRAWS[name](rng, mx.float32)
    assert OPS[name].unsupported(**case.arguments()) or look(name, case, "float32", ASCENDING) is None
