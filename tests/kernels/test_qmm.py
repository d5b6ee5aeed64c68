"""How a product's rows and k are shared, for every shape: it fits the threadgroup memory, and it is all of k."""

from itertools import product

import mlx.core as mx
import pytest

from mlxrt.kernels import DeviceProfile, Kernels, linear, make_gpu
from mlxrt.kernels.ops.qmm import MAX_QMM_ROWS, qmm_memory, tile_config
from mlxrt.kernels.testing import sample

from ..support.metal_sim import Simulator

ROWS = (1, 40, 1024, 4095, 4096, 6144, 12287, 12288, 24576, 151936, 262144)
WIDTHS = (128, 256, 384, 1024, 2048, 8064, 8192, 12288, 21504)


@pytest.mark.parametrize("memory", [32768, 49152])
def test_partial_results_fit(memory):
    for rows, width, tiles, paired in product(ROWS, WIDTHS, range(1, MAX_QMM_ROWS // 8 + 1), (True, False)):
        config = tile_config(DeviceProfile(132, memory), rows, width, tiles, paired)
        wide, high, groups, parts, resident = config.values()
        assert high in (2, 4) and parts in (1, 2, 4, 8) and (parts - 1) * 128 < width
        assert wide * -(-tiles // wide) >= tiles and wide * 4 % groups == 0, (rows, width, tiles)
        assert qmm_memory(high, groups, parts, wide) <= memory and groups * parts <= 16, (rows, width, tiles)
        assert 32 * groups * parts * resident <= 1024, (rows, width, tiles)


def test_any_number_of_rows_takes_one_of_eight_kernels():
    """A prompt's last chunk has any number of tokens: each of its own kernel would have to be compiled first."""
    sim, compiled = Simulator(strict=False), set()

    def make(**definition):
        kernel = sim.metal_kernel(**definition)

        def launch(*, template, **rest):
            compiled.update({tuple(template)} if definition["name"].startswith("mlxrt_qmm") else ())
            return kernel(template=template, **rest)

        return launch

    kernels = Kernels("strict", make_gpu("metal", make))
    matrix = sample("affine", (16, 128), mx.bfloat16, 4)
    for rows in (5, 7, 11, 13, 16):
        mx.random.seed(rows)
        x, residual = (mx.random.normal((rows, n)).astype(mx.bfloat16) for n in (128, 16))
        y = linear(kernels, x, matrix, residual=residual)
        right = matrix.multiply(x) + residual
        assert y.shape == right.shape and y.dtype == mx.bfloat16
        assert mx.allclose(y.astype(mx.float32), right.astype(mx.float32), atol=0.1, rtol=0.02)
    assert not sim.errors() and len(compiled) == 2  # of 8 and of 16 rows


def test_few_rows_go_to_nvidia_s_matrix_units():
    """As many as a batch has, without rows of zeros: a step with a copy in it could not be captured."""
    for name, dtype, few in (("cuda", mx.bfloat16, 2), ("metal", mx.bfloat16, 4), ("cuda", mx.float32, 4)):
        kernels = Kernels("strict", make_gpu("metal", Simulator(strict=False).metal_kernel))
        kernels.gpu.name = name
        for rows in (few, few + 1) if few < 4 else (few,):
            kernels.used.clear()
            matrix = sample("affine", (16, 128), dtype, 4)
            x = mx.random.normal((rows, 128)).astype(dtype)
            y = linear(kernels, x, matrix)
            assert ("qmm" in kernels.used, "qmv" in kernels.used) == (rows > few, rows <= few)
            assert mx.allclose(y.astype(mx.float32), matrix.multiply(x).astype(mx.float32), atol=0.1, rtol=0.02)
