"""What a router's kernel takes and what it refuses, by the threadgroup memory that there is."""

import mlx.core as mx
import pytest

from mlxrt.kernels import make_gpu, moe_router
from mlxrt.kernels.registry import Case
from mlxrt.kernels.selftest import check_case, compute_reference
from mlxrt.kernels.testing import sample

from ..support.metal_sim import Simulator


def call(count, width, mode):
    x = mx.random.normal((1, width)).astype(mx.float16)
    matrix = sample(mode, (count, width), mx.float16, 8)
    return Case(f"{count} of {width}", {"x": x}, {"matrix": matrix, "k": 2, "normalise": True})


@pytest.mark.parametrize("mode", ["affine", "lut"])
def test_the_widest_rows_that_are_taken_fit(mode):
    case, sim = call(40, 7168, mode), Simulator()
    assert moe_router.unsupported(**case.arguments()) is None
    assert check_case(
        moe_router, case, make_gpu("metal", sim.metal_kernel), compute_reference(moe_router, case)
    ).within(moe_router.tolerance["float16"])


def test_what_does_not_fit_is_refused():
    assert "shared memory" in (moe_router.unsupported(**call(512, 7168, "lut").arguments()) or "")
    assert "shared memory" in (moe_router.unsupported(**call(8, 8192, "affine").arguments()) or "")
