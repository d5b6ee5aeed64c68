"""Three to sixty-four rows of x times a packed matrix: dequantised in registers, multiplied by matrix units.

A lane takes 32 neighbours of a row of the matrix. x goes through threadgroup memory a slab at a time (metal/slab.h), in
the order of k that makes unpacking cheap: the sum over k may be taken in any order.
"""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..device import DeviceProfile
from ..registry import Case, KernelSource, op
from .qmv import epilogue_constants, qmv, qmv_case
from .quantized import QuantizedMatrix

MIN_QMM_ROWS, MAX_QMM_ROWS = 3, 64  # rows of x for which this may be the faster way (linear.py)
TILE_ROWS = 8  # rows of x in a tile
CENTROID_BYTES = 1024  # of threadgroup memory, for the centroids of a LUT matrix

QMM = KernelSource("qmm.metal", ("x", "packed", "scales", "biases", "lut", "bias", "other", "order", "bounds"), ("y",))
SUM_SPLITS = KernelSource("sum_splits.metal", ("parts", "bias", "residual"), ("y",))
SUM_SIZE = 256  # threads of a threadgroup that sums
MAX_SPLIT_TILES = 4  # of 8 rows of x in a threadgroup, where the grid splits k
MIN_SPLIT_WIDTHS = {1: 4096, 2: 2048, 3: 1024}  # by tiles: below, the second launch takes what the first saves


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
        ("affine", 4, 64, 24580, 128, 4, {"residual": True}),  # four tiles of rows for a simdgroup
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
        # Matrices whose k the grid splits: in whole parts, in parts of which the last is shorter, with all that may follow.
        ("affine", 4, 64, 70, 1280, 27, {"residual": True, "bias": True}),
        ("mxfp4", 4, 32, 66, 1120, 33, {"bias": True}),
        ("affine", 4, 32, 24, 2304, 13, {"residual": True}),
        ("affine", 4, 128, 37, 4224, 6, {}),
        ("q4_k_split", 4, 32, 40, 2048, 9, {"residual": True}),
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


@qmm.kernel(QMM, SUM_SPLITS, unsupported=unsupported, is_faster=is_faster)
def launch(gpu, x, matrix, bias=None, activation=None, pair=False, times=None, residual=None, softcap=None):
    rows, m = matrix.rows // 2 if pair else matrix.rows, x.shape[0]
    tiles, paired = math.ceil(m / TILE_ROWS), is_paired(x, matrix)
    splits = 1
    if not pair and activation is None and softcap is None:  # what can follow a sum of splits
        splits = num_grid_splits(gpu.profile, rows, matrix.width, tiles)
    if splits > 1:
        config = split_config(tiles, paired)
        outputs, product = [((splits * m, rows), mx.float32)], {}
    else:
        config = tile_config(gpu.profile, matrix.rows, matrix.width, tiles, paired)
        outputs, product = [((m, rows), x.dtype)], {"bias": bias, "times": times, "residual": residual}
    other = product.get("residual") if times is None else times
    [y] = gpu(
        QMM,
        [x, *matrix.inputs(), product.get("bias"), other, None, None],
        (math.ceil(matrix.rows / (8 * config["RT"] * config["RG"])), math.ceil(tiles / config["MT"]), splits),
        32 * config["RG"] * config["KS"],
        outputs,
        T=x.dtype,
        OUT=outputs[0][1],
        M=m,
        C=1,
        GROUPED=False,
        GRID_SPLITS=splits,
        K=matrix.width,
        O=rows,
        PAIRED=paired,
        **config,
        **matrix.constants(),
        **epilogue_constants(product.get("bias"), activation, pair, times, product.get("residual"), softcap),
    )
    return y if splits == 1 else sum_splits(gpu, y, splits, x.dtype, bias, residual)


def sum_splits(gpu, parts, splits, dtype, bias, residual):
    """parts [splits M, O] -> [M, O], plus the bias and the residual."""
    m, rows = parts.shape[0] // splits, parts.shape[1]
    groups, given = math.ceil(m * rows / SUM_SIZE), {"BIAS": bias is not None, "RES": residual is not None}
    outputs = [((m, rows), dtype)]
    constants = {"T": dtype, "M": m, "O": rows, "SPLITS": splits, "SIZE": SUM_SIZE, **given}
    return gpu(SUM_SPLITS, [parts, bias, residual], groups, SUM_SIZE, outputs, **constants)[0]


def is_paired(x: mx.array, matrix: QuantizedMatrix) -> bool:
    """Whether two values are unpacked at once, in the arithmetic of x: where it holds the scales exactly."""
    if matrix.bits != 4 or matrix.scales is None:
        return False
    return (
        matrix.scales.dtype == x.dtype if matrix.mode == "affine" else matrix.mode == "mxfp4" and x.dtype == mx.bfloat16
    )


def tile_config(profile: DeviceProfile, rows: int, width: int, tiles: int, paired: bool) -> dict[str, int]:
    """MT and RT, tiles of columns and of 8 rows for a simdgroup; RG and KS, groups of rows and splits of k for a threadgroup;
    and how many threadgroups shall be RESIDENT, for `tiles` of 8 rows of x.

    Splits so that the device is full and no fuller; groups of rows share what they read of x. Tall matrices have tiles of 32
    rows for a simdgroup, which then reads x half as often: threadgroup memory bounds them. More than 32 rows of x are
    halved, unless the matrix alone fills the device. On an H200, 4 bit, us with what is chosen and with tiles of 16 rows, 2
    groups and 2 splits: 8 rows of x: 24576 x 4096 23.4, 30.8, 12288 x 4096 13.7, 16.2; 16: 24576 x 4096 29.2, 34.6; 32: 6144 x
    4096 16.9, 18.4. MLX's own for 24576 x 4096: 60.1 with 8 rows, 97.9 with 32.
    """
    groups, steps = math.ceil(rows / 16), math.ceil(width / 128)
    columns = tiles if tiles <= 4 else math.ceil(tiles / 2)
    if tiles > 4 and groups >= profile.scale(4096 if paired else 768):
        return make_config(tiles, 4, 4, 1)
    if paired and groups >= profile.scale(768):
        taller = groups >= profile.scale(1536)
        if tiles > 4:
            return make_config(columns, 4, 4, 1) if taller else make_config(columns, 4, 2, min(2, steps), 3)
        if columns <= 2 and taller:
            return make_config(columns, 4, 2, min(2, steps), 4)
        if columns == 1 and steps >= 4:
            return make_config(columns, 4, 1, 4)
    parts = groups * math.ceil(tiles / columns)
    narrow = columns <= 2
    most, wanted = (8, profile.scale(2304)) if narrow else (4, profile.scale(1024))
    least = 2 if narrow or parts < wanted else 1
    splits = min(max(wanted // parts, least), most, steps)
    splits = 1 << (splits.bit_length() - 1)
    if narrow:
        row_groups = 2 if splits == 2 or groups * splits >= profile.scale(2048) else 1
    elif splits == 2 and groups >= profile.scale(256):
        row_groups = 4 if parts <= profile.scale(512) else 2
    else:
        row_groups = 4 if splits == 1 else 2 if groups >= profile.scale(256) else 1
    while splits > 1 and qmm_memory(2, row_groups, splits, columns) > profile.threadgroup_memory:
        splits //= 2
    return make_config(columns, 2, row_groups, splits)


def num_grid_splits(profile: DeviceProfile, rows: int, width: int, tiles: int) -> int:
    """Threadgroups that share k, for `tiles` of 8 rows of x: each makes a y, and a second launch adds them up.

    Threadgroups of 64 rows read x half as often as those of 32, which a matrix of few rows needs to fill the device;
    with k in several parts there are enough of them. On an H200, 4 bit, us with and without, both launches: 32 rows of x:
    4096 x 12288 22.7, 33.3, 6144 x 4096 13.5, 18.8, 4096 x 4096 10.6, 13.6, 1024 x 2048 4.7, 7.3; 64: 4096 x 12288 38.6,
    50.3, 6144 x 4096 22.2, 37.9; 16: 4096 x 12288 17.9, 20.6; 8: 16.0, 16.9, 10240 x 4096 13.1, 16.2.
    """
    columns = min(tiles, MAX_SPLIT_TILES)
    config = split_config(tiles, True)
    groups, steps = math.ceil(rows / (16 * config["RG"])), math.ceil(width / (128 * config["KS"]))
    if rows >= profile.scale(12288) or width < MIN_SPLIT_WIDTHS[min(columns, 3)]:
        return 1
    most = min(profile.scale(528 if columns > 2 else 656) // (groups * math.ceil(tiles / columns)), steps // 2)
    splits = max(n for n in (1, 2, 3, 4, 8) if n <= max(most, 1))
    return math.ceil(steps / math.ceil(steps / splits))  # none is empty


def split_config(tiles: int, paired: bool) -> dict[str, int]:
    """tile_config where the grid splits k."""
    groups, splits = (2, 2) if tiles == 1 else (4, 1)
    return make_config(min(tiles, MAX_SPLIT_TILES), 2, groups, splits, 4 if paired else 1)


def make_config(columns: int, row_tiles: int, row_groups: int, splits: int, resident: int = 1) -> dict[str, int]:
    return {"MT": columns, "RT": row_tiles, "RG": row_groups, "KS": splits, "RESIDENT": resident}


def qmm_memory(row_tiles: int, row_groups: int, splits: int, tiles: int) -> int:
    """Bytes of threadgroup memory: slabs of x, partial sums of all splits but the first, centroids."""
    return splits * tiles * 2048 + row_groups * (splits - 1) * row_tiles * tiles * 256 + CENTROID_BYTES
