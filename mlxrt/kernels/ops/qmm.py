"""Five to sixty-four rows of x times a packed matrix: dequantised in registers, multiplied by matrix units.

No threadgroup memory on the way in: the sum over k may be taken in any order, so a lane takes 32 neighbours of a row of
the matrix and the tiles of x are read in the order that follows from it.
"""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..device import DeviceProfile
from ..registry import Case, Source, op
from .qmv import MAX_QMV_ROWS, epilogue_constants, qmv, qmv_case

MAX_QMM_ROWS = 64  # rows of x up to which this is the faster way
TILE_ROWS = 8  # rows of x in a tile
CENTROID_BYTES = 1024  # of threadgroup memory, for the centroids of a LUT matrix

QMM = Source("qmm.metal", ("x", "packed", "scales", "biases", "lut", "bias", "other", "order", "bounds"), ("y",))


def qmm_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        ("affine", 4, 64, 40, 256, 8, {}),
        ("affine", 4, 32, 37, 384, 13, {"residual": True}),
        ("affine", 8, 64, 24, 128, 5, {"activation": "silu", "pair": True}),
        ("affine", 3, 32, 9, 128, 33, {"bias": True}),
        ("affine", 6, 128, 20, 256, 64, {"bias": True, "activation": "clamped", "pair": True}),
        ("affine", 5, 64, 7, 128, 6, {"activation": "gelu", "times": True}),
        ("affine", 4, 64, 9, 128, 7, {"activation": "sigmoid", "times": True}),
        ("affine", 2, 32, 48, 512, 17, {"residual": True}),
        ("mxfp4", 4, 32, 11, 256, 9, {"softcap": 3.0}),
        ("lut", 2, 0, 37, 384, 9, {"residual": True}),
        ("lut", 3, 0, 24, 128, 17, {"activation": "silu", "pair": True}),
        ("lut", 4, 0, 9, 256, 33, {"bias": True}),
        ("lut", 8, 0, 20, 128, 5, {}),
        ("lut", 1, 0, 16, 128, 64, {}),
        ("affine", 4, 64, 4100, 128, 34, {"residual": True}),  # four tiles of rows for a simdgroup
        ("affine", 8, 32, 2056, 128, 33, {"activation": "silu", "pair": True}),
        # Rows that end within a part of 128: one, two and three quarters of it, and no whole part at all.
        ("affine", 4, 64, 40, 576, 13, {"residual": True}),
        ("mxfp4", 4, 32, 24, 352, 9, {"bias": True, "activation": "clamped", "pair": True}),
        ("lut", 4, 0, 9, 160, 33, {}),
        ("affine", 8, 32, 11, 32, 6, {}),
        ("q4_k_split", 4, 32, 40, 512, 8, {"residual": True}),
        ("q6_k_split", 6, 32, 21, 256, 13, {"bias": True}),
        ("q5_k_split", 5, 32, 12, 256, 5, {"activation": "silu", "pair": True}),
        ("q3_k_split", 3, 32, 17, 512, 33, {}),
        ("q2_k_split", 2, 32, 9, 256, 9, {"softcap": 3.0}),
        ("iq4_xs_split", 4, 32, 24, 256, 17, {"residual": True}),
        ("iq4_nl_split", 4, 32, 11, 96, 6, {}),
    ]
    for shape in shapes:
        case = qmv_case(dtype, *shape)
        del case.options["eps"]  # there is no norm
        yield case


@op(qmm_cases)
def qmm(x, matrix, **epilogue):
    """What `qmv` computes without its norm, for more rows."""
    return qmv.reference(x, matrix, **epilogue)


def unsupported(x, matrix, **rest) -> str | None:
    if x.dtype == mx.float32:
        return "float32 activations: matrix units take half precision"
    if not matrix.packed:
        return "plain weights"  # MLX's own matmul does those
    return matrix.unsupported(x)


def is_faster(x, matrix, **rest) -> bool:
    return MAX_QMV_ROWS < x.shape[0] <= MAX_QMM_ROWS and matrix.packed and x.dtype != mx.float32


@qmm.kernel(QMM, unsupported=unsupported, is_faster=is_faster)
def launch(gpu, x, matrix, bias=None, activation=None, pair=False, times=None, residual=None, softcap=None):
    rows, m = matrix.rows // 2 if pair else matrix.rows, x.shape[0]
    tiles = math.ceil(m / TILE_ROWS)
    row_tiles, splits = tile_config(gpu.profile, matrix.rows, matrix.width, tiles)
    other = times if times is not None else residual
    [y] = gpu(
        QMM,
        [x, *matrix.inputs(), bias, other, None, None],
        math.ceil(matrix.rows / (8 * row_tiles)),
        32 * splits,
        [((m, rows), x.dtype)],
        T=x.dtype,
        OUT=x.dtype,
        M=m,
        C=1,
        GROUPED=False,
        MT=tiles,
        RT=row_tiles,
        K=matrix.width,
        O=rows,
        RG=1,
        KS=splits,
        **matrix.constants(),
        **epilogue_constants(bias, activation, pair, times, residual, softcap),
    )
    return y


def tile_config(profile: DeviceProfile, rows: int, width: int, tiles: int) -> tuple[int, int]:
    """(tiles of 8 rows for a simdgroup, splits of k for a threadgroup) for `tiles` of 8 rows of x.

    Four tiles read x half as often, where what is left still fills the device. On an H200, 4 bit, us with two and four:
    32 rows of x: 12288 x 4096 41.3 / 30.7 (MLX's own 56), 24576 x 4096 75.9 / 49.2, 4096 x 12288 39.0 / 31.9,
    5120 x 2048 13.0 / 14.2, 2048 x 4096 10.7 / 15.0; 64 rows of x: 4096 x 4096 26.1 / 22.3, 2048 x 4096 16.1 / 21.7.
    Splits so that the device is full and no fuller: 8 rows of x, 2048 x 4096, 4 parts 9.5, 8 6.7, 16 5.7; 32 rows of x,
    5120 x 2048, 2 parts 14.3, 4 12.4, 8 16.9.
    """
    enough = 4096 if tiles > 4 or (tiles > 1 and width >= 8192) else 12288
    row_tiles = 4 if rows >= profile.scale(enough) else 2
    if row_tiles == 2:
        simdgroups, least = 4096 if tiles == 1 else 3072 if tiles == 2 else 1536, 4
    else:
        simdgroups, least = 1024 if tiles > 4 else 1536, 2
    most = 16 if tiles <= 2 else 8 if row_tiles == 2 or tiles <= 4 else 4
    fits = (profile.threadgroup_memory - CENTROID_BYTES) // (row_tiles * tiles * 256)  # the partial sums of a split
    splits = max(profile.scale(simdgroups) // math.ceil(rows / (8 * row_tiles)), least)
    splits = min(splits, most, fits, math.ceil(width / 128))
    return row_tiles, 1 << (splits.bit_length() - 1)
