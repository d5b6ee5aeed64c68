"""The BLAS under MLX on a CPU: a row's product must not depend on how many rows there are."""

import sys

import mlx.core as mx
import pytest

from mlxrt import _openblas as blas


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="CPU only")
@pytest.mark.parametrize(
    "inner, outer", [(576, 1536), (1536, 576), (64, 96), (100, 37), (4096, 512), (14336, 64), (33, 1)]
)
def test_products_are_bit_equal_for_every_number_of_rows(inner, outer):
    mx.random.seed(0)
    x, w = mx.random.normal((70, inner)), mx.random.normal((outer, inner))
    whole = x @ w.T
    for n in (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64):
        assert mx.array_equal(x[:n] @ w.T, whole[:n]).item(), f"{n} rows differ"


def test_running_names_a_library():
    assert blas.running()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the preload is for Linux")
def test_an_openblas_is_preloaded():
    assert "OpenBLAS" in blas.running()
