"""What a router's kernel takes and what it refuses, by the threadgroup memory that there is."""

import mlx.core as mx
import pytest

from mlxrt.kernels import gpu_of, route
from mlxrt.kernels.error_report import prove, truth
from mlxrt.kernels.registry import Case
from mlxrt.kernels.testing import sample

from ..support.metal_sim import Simulator


def call(count, width, mode):
    x = mx.random.normal((1, width)).astype(mx.float16)
    matrix = sample(mode, (count, width), mx.float16, 8)
    return Case(f"{count} of {width}", {"x": x}, {"matrix": matrix, "k": 2, "normalise": True})


@pytest.mark.parametrize("mode", ["affine", "codes"])
def test_the_widest_rows_that_are_taken_fit(mode):
    case, sim = call(40, 7168, mode), Simulator()
    assert route.refuses(**case.arguments()) is None
    assert prove(route, case, gpu_of("metal", sim.metal_kernel), truth(route, case)).holds(route.tolerance["float16"])


def test_what_does_not_fit_is_refused():
    assert "threadgroup memory" in (route.refuses(**call(512, 7168, "codes").arguments()) or "")
    assert "threadgroup memory" in (route.refuses(**call(8, 8192, "affine").arguments()) or "")
