"""Three to sixty-four rows of x times a packed matrix: dequantised in registers, multiplied by matrix units.

A lane takes 32 neighbours of a row of the matrix. x goes through threadgroup memory a slab at a time (metal/slab.h), in
the order of k that makes unpacking cheap: the sum over k may be taken in any order.
"""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..device import DeviceProfile
from ..registry import Case, Source, op
from .qmv import epilogue_constants, qmv, qmv_case
from .quantized import QuantizedMatrix

MIN_QMM_ROWS, MAX_QMM_ROWS = 3, 64  # rows of x for which this may be the faster way (linear.py)
TILE_ROWS = 8  # rows of x in a tile
CENTROID_BYTES = 1024  # of threadgroup memory, for the centroids of a LUT matrix

QMM = Source("qmm.metal", ("x", "packed", "scales", "biases", "lut", "bias", "other", "order", "bounds"), ("y",))


def qmm_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        ("affine", 4, 64, 40, 256, 8, {}),
        ("affine", 4, 64, 24, 128, 4, {"residual": True}),
        ("mxfp4", 4, 32, 24, 128, 3, {"activation": "silu", "pair": True}),
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
    return MIN_QMM_ROWS <= x.shape[0] <= MAX_QMM_ROWS and matrix.packed and x.dtype != mx.float32


@qmm.kernel(QMM, unsupported=unsupported, is_faster=is_faster)
def launch(gpu, x, matrix, bias=None, activation=None, pair=False, times=None, residual=None, softcap=None):
    rows, m = matrix.rows // 2 if pair else matrix.rows, x.shape[0]
    tiles = math.ceil(m / TILE_ROWS)
    column_tiles, row_tiles, row_groups, splits = tile_config(gpu.profile, matrix.rows, matrix.width, tiles)
    other = times if times is not None else residual
    [y] = gpu(
        QMM,
        [x, *matrix.inputs(), bias, other, None, None],
        (math.ceil(matrix.rows / (8 * row_tiles * row_groups)), math.ceil(tiles / column_tiles), 1),
        32 * row_groups * splits,
        [((m, rows), x.dtype)],
        T=x.dtype,
        OUT=x.dtype,
        M=m,
        C=1,
        GROUPED=False,
        MT=column_tiles,
        RT=row_tiles,
        K=matrix.width,
        O=rows,
        RG=row_groups,
        KS=splits,
        PAIRED=is_paired(x, matrix),
        **matrix.constants(),
        **epilogue_constants(bias, activation, pair, times, residual, softcap),
    )
    return y


def is_paired(x: mx.array, matrix: QuantizedMatrix) -> bool:
    """Whether two values are unpacked at once, in the arithmetic of x: where it holds the scales exactly."""
    if matrix.bits != 4 or matrix.scales is None:
        return False
    return (
        matrix.scales.dtype == x.dtype if matrix.mode == "affine" else matrix.mode == "mxfp4" and x.dtype == mx.bfloat16
    )


def tile_config(profile: DeviceProfile, rows: int, width: int, tiles: int) -> tuple[int, int, int, int]:
    """(tiles of columns and of 8 rows for a simdgroup, groups of rows and splits of k for a threadgroup) for `tiles` of 8
    rows of x.

    Splits so that the device is full and no fuller; groups of rows share what they read of x. On an H200, 4 bit, us with
    the groups and splits chosen, and with (2, 1) and (4, 1): 32 rows of x: 24576 x 4096 44.0 (4, 1), 52.7, 44.0; 4096 x 4096
    12.8 (2, 4), -, 27.5; 6144 x 4096 19.1 (2, 2), -, 28.0; 12288 x 1536 10.8 (2, 2), 16.4, 13.5; 8 rows of x: 24576 x 4096
    26.8 (2, 2), 34.4, 34.5; 6144 x 4096 10.1 (1, 4). MLX's own products: 97.9, 27.7, 33.5, 24.3; 60.1, 24.0.
    More than 32 rows of x are halved, unless the matrix alone fills the device.
    """
    if tiles > 4 and rows >= profile.scale(12288):
        return tiles, 4, 4, 1
    columns = tiles if tiles <= 4 else math.ceil(tiles / 2)
    groups, narrow = math.ceil(rows / 16), columns <= 2
    most, wanted = (8, profile.scale(2304)) if narrow else (4, profile.scale(1024))
    least = 2 if narrow or groups < wanted else 1
    splits = min(max(wanted // groups, least), most, math.ceil(width / 128))
    splits = 1 << (splits.bit_length() - 1)
    if narrow:
        row_groups = 2 if splits == 2 or groups * splits >= profile.scale(2048) else 1
    else:
        row_groups = 4 if splits == 1 else 2 if groups >= profile.scale(256) else 1
    while splits > 1 and qmm_memory(2, row_groups, splits, columns) > profile.threadgroup_memory:
        splits //= 2
    return columns, 2, row_groups, splits


def qmm_memory(row_tiles: int, row_groups: int, splits: int, tiles: int) -> int:
    """Bytes of threadgroup memory: slabs of x, partial sums of all splits but the first, centroids."""
    return splits * tiles * 2048 + row_groups * (splits - 1) * row_tiles * tiles * 256 + CENTROID_BYTES
