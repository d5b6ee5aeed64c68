"""How a product's rows and k are shared, for every shape: it fits the threadgroup memory, and it is all of k."""

from itertools import product

import pytest

from mlxrt.kernels import DeviceProfile
from mlxrt.kernels.ops.qmm import CENTROID_BYTES, MAX_QMM_ROWS, tile_config

ROWS = (1, 40, 1024, 4095, 4096, 6144, 12287, 12288, 24576, 151936, 262144)
WIDTHS = (128, 256, 384, 1024, 2048, 8064, 8192, 12288, 21504)


@pytest.mark.parametrize("memory", [32768, 49152])
def test_partial_results_fit(memory):
    for rows, width, tiles in product(ROWS, WIDTHS, range(1, MAX_QMM_ROWS // 8 + 1)):
        high, parts = tile_config(DeviceProfile(132, memory), rows, width, tiles)
        assert high in (2, 4) and parts in (1, 2, 4, 8, 16) and parts * 128 <= width
        assert parts * (8 * high) * (8 * tiles) * 4 + CENTROID_BYTES <= memory, (rows, width, tiles)
