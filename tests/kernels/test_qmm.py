"""How a product's rows and k are shared, for every shape: it fits the threadgroup memory, and it is all of k."""

from itertools import product

import pytest

from mlxrt.kernels.ops.qmm import CUDA_ROOM, LEVELS, MANY, split
from mlxrt.kernels.ops.staging import ROOM

ROWS = (1, 40, 1024, 4095, 4096, 6144, 12287, 12288, 24576, 151936, 262144)
WIDTHS = (128, 256, 384, 1024, 2048, 8064, 8192, 12288, 21504)


@pytest.mark.parametrize("room", [ROOM, CUDA_ROOM])
def test_partial_sums_fit(room):
    for rows, width, tiles in product(ROWS, WIDTHS, range(1, MANY // 8 + 1)):
        high, parts = split(rows, width, tiles, room)
        assert high in (2, 4) and parts in (1, 2, 4, 8, 16) and parts * 128 <= width
        assert parts * (8 * high) * (8 * tiles) * 4 + LEVELS <= room, (rows, width, tiles)
