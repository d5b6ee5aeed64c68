"""Five to sixty-four rows of x times a packed matrix: dequantised in registers, multiplied by matrix units.

No threadgroup memory on the way in: the sum over k may be taken in any order, so a lane takes 32 neighbours of a row of
the matrix and the tiles of x are read in the order that follows from it.
"""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..registry import Case, InlineSource, op
from ..testing import sample
from .activation import ACTIVATE
from .qmv import FEW, after, matvec
from .quantized import READ
from .staging import ROOM

MANY = 64  # rows of x up to which this is the faster way
CUDA_ROOM = 49152  # bytes of threadgroup memory a CUDA kernel has without asking for more
LEVELS = 1024  # bytes of it for the levels of codes

# Simdgroups are RG groups of rows by KS parts of k. A simdgroup makes RT tiles of 8 rows; with PAIR gates and their ups.
# GROUPED: y is a row of the grid, an expert, whose part of `order` names the rows of y it makes, a few at a time; each
# reads a row of x, which C of them share.
BODY = r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x; uint expert = GROUPED ? threadgroup_position_in_grid.y : 0u;
    uint rg = sg / uint(KS); uint ks = sg % uint(KS); uint one = lift_of<BITS>(threadgroup_position_in_grid.z);
    uint tile = threadgroup_position_in_grid.x * uint(RG) + rg;
    const int OUTS = PAIR ? RT * 4 : RT * 8;
    threadgroup float part[RG][KS][RT * 8][MT * 8]; const int LEVELS = FORM == 3 ? 1 << BITS : 1; threadgroup float table[LEVELS];
    lay_levels<FORM, LEVELS, RG * KS * 32>(l, t, &table[0]);
    if (FORM == 3) threadgroup_barrier(mem_flags::mem_threadgroup);
    uint last = uint(PAIR ? 2 * O - 1 : O - 1); uint base = expert * (last + 1); uint row[RT];
    #pragma unroll
    for (int r = 0; r < RT; r++) {
        uint at = tile * OUTS + uint(r * 8 % OUTS) + left_row(lane, 0) + (r * 8 < OUTS ? 0u : uint(O));
        row[r] = base + metal::min(at, last);
    }
    uint quarter = left_col(lane, 0) / 2;
    uint begin = GROUPED ? uint(bounds[expert]) : 0u; uint count = GROUPED ? uint(bounds[expert + 1]) - begin : uint(M);
    for (uint c0 = 0; c0 < count; c0 += 8 * MT) {
        Tile<float> acc[RT][MT]; uint from[MT][2]; bool live[MT][2];
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            #pragma unroll
            for (uint i = 0; i < 2; i++) {
                uint c = c0 + 8 * m + right_col(lane, i); live[m][i] = c < count; c = metal::min(c, count - 1);
                from[m][i] = (GROUPED ? uint(order[begin + c]) / uint(C) : c) * uint(K);
            }
            #pragma unroll
            for (int r = 0; r < RT; r++) { set<float>(acc[r][m], 0, 0.0f); set<float>(acc[r][m], 1, 0.0f); }
        }
        for (uint k = ks * 128; k < uint(K); k += uint(KS) * 128) {
            uint mine = k + quarter * 32;
            Tile<T> left[RT][16];
            #pragma unroll
            for (int r = 0; r < RT; r++) {
                uint from = row[r] * uint(K / 32) + mine / 32; uint group = from / uint(GROUP / 32);
                uint p[BITS]; load_words<BITS>(w, from, p);
                float scale = scale_at<FORM>(s, group);
                float zero = zero_at<FORM, BITS>(z, group, scale);
                #pragma unroll
                for (int n = 0; n < 32; n++) {
                    set<T>(left[r][n / 2], n % 2, static_cast<T>(number<FORM, BITS>(p, n, one, &table[0]) * scale + zero));
                }
            }
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                Tile<T> right[16];
                right16<T>(x + k, from[m], live[m], lane, right);
                #pragma unroll
                for (int j = 0; j < 16; j += 2) {
                    #pragma unroll
                    for (int r = 0; r < RT; r += 2) {
                        multiply4(acc[r][m], acc[r + 1][m], left[r][j], left[r + 1][j], right[j], left[r][j + 1], left[r + 1][j + 1], right[j + 1]);
                    }
                }
            }
        }
        #pragma unroll
        for (int r = 0; r < RT; r++) {
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                #pragma unroll
                for (uint i = 0; i < 2; i++) {
                    part[rg][ks][r * 8 + sum_row(lane, i)][m * 8 + sum_col(lane, i)] = at<float>(acc[r][m], i);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint here = metal::min(count - c0, uint(8 * MT));
        for (uint i = t; i < uint(RG * OUTS) * here; i += uint(RG * KS * 32)) {
            uint r = i % OUTS; uint g = i / OUTS % RG; uint m = i / (OUTS * RG);
            uint o = (threadgroup_position_in_grid.x * RG + g) * OUTS + r;
            if (o < uint(O)) {
                float a = 0.0f; float u = 0.0f;
                for (int c = 0; c < KS; c++) { a += part[g][c][r][m]; if (PAIR) u += part[g][c][(r + OUTS) % (RT * 8)][m]; }
                if (BIAS) { a += float(bias[base + o]); if (PAIR) u += float(bias[base + O + o]); }
                uint to = GROUPED ? uint(order[begin + c0 + m]) : m;
                if (PAIR) { a = gated<ACT>(a, u); }
                else if (ACT > 0) { a = gated<ACT>(a, TIMES ? float(other[to * O + o]) : 1.0f); }
                if (RES) a += float(other[to * O + o]);
                y[to * O + o] = static_cast<OUT>(capped<CAP>(a));
            }
        }
        if (GROUPED) threadgroup_barrier(mem_flags::mem_threadgroup);
    }
"""
MATMUL = InlineSource(
    "mlxrt_matmul", ("x", "w", "s", "z", "l", "bias", "other", "order", "bounds"), ("y",), BODY, READ + ACTIVATE
)


def matmul_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        ("affine", 4, 64, 40, 256, 8, {}),
        ("affine", 4, 32, 37, 384, 13, {"residual": True}),
        ("affine", 8, 64, 24, 128, 5, {"activation": "silu", "pair": True}),
        ("affine", 3, 32, 9, 128, 33, {"bias": True}),
        ("affine", 6, 128, 20, 256, 64, {"bias": True, "activation": "clamped", "pair": True}),
        ("affine", 5, 64, 7, 128, 6, {"activation": "gelu", "times": True}),
        ("affine", 2, 32, 48, 512, 17, {"residual": True}),
        ("mxfp4", 4, 32, 11, 256, 9, {"softcap": 3.0}),
        ("codes", 2, 0, 37, 384, 9, {"residual": True}),
        ("codes", 3, 0, 24, 128, 17, {"activation": "silu", "pair": True}),
        ("codes", 4, 0, 9, 256, 33, {"bias": True}),
        ("codes", 8, 0, 20, 128, 5, {}),
        ("codes", 1, 0, 16, 128, 64, {}),
        ("affine", 4, 64, 4100, 128, 34, {"residual": True}),  # four tiles of rows for a simdgroup
        ("affine", 8, 32, 2056, 128, 33, {"activation": "silu", "pair": True}),
    ]
    for mode, bits, group, rows, width, m, extra in shapes:
        mx.random.seed(rows)
        total = rows * 2 if extra.get("pair") else rows
        matrix = sample(mode, (total, width), dtype, bits, group)
        arrays = {"x": mx.random.normal((m, width)).astype(dtype)}
        if extra.get("bias"):
            arrays["bias"] = mx.random.normal((total,)).astype(dtype)
        for name in ("residual", "times"):
            if extra.get(name):
                arrays[name] = mx.random.normal((m, rows)).astype(dtype)
        options = {"matrix": matrix, "activation": extra.get("activation"), "pair": bool(extra.get("pair"))}
        options["softcap"] = extra.get("softcap")
        yield Case(f"{mode}{bits} group {group} [{rows}, {width}] x{m}", arrays, options)


@op(matmul_cases)
def matmul(x, matrix, **after):
    """What `matvec` computes without its norm, for more rows."""
    return matvec.reference(x, matrix, **after)


def refuses(x, matrix, **rest) -> str | None:
    if x.dtype == mx.float32:
        return "float32 activations: matrix units take half precision"
    if not matrix.packed:
        return "plain weights"  # MLX's own matmul does those
    if matrix.width % 128:
        return f"rows of {matrix.width} numbers, not a multiple of 128"
    return matrix.refused(x)


def pays(x, matrix, **rest) -> bool:
    return FEW < x.shape[0] <= MANY and matrix.packed and x.dtype != mx.float32


@matmul.kernel(MATMUL, refuses=refuses, pays=pays)
def launch(gpu, x, matrix, bias=None, activation=None, pair=False, times=None, residual=None, softcap=None):
    rows, m = matrix.rows // 2 if pair else matrix.rows, x.shape[0]
    tiles = math.ceil(m / 8)
    high, parts = split(matrix.rows, matrix.width, tiles, CUDA_ROOM if gpu.name == "cuda" else ROOM)
    other = times if times is not None else residual
    [y] = gpu(
        MATMUL,
        [x, *matrix.inputs(), bias, other, None, None],
        math.ceil(matrix.rows / (8 * high)),
        32 * parts,
        [((m, rows), x.dtype)],
        T=x.dtype,
        OUT=x.dtype,
        M=m,
        C=1,
        GROUPED=False,
        MT=tiles,
        RT=high,
        K=matrix.width,
        O=rows,
        RG=1,
        KS=parts,
        **matrix.constants(),
        **after(bias, activation, pair, times, residual, softcap),
    )
    return y


def split(rows: int, width: int, tiles: int, room: int) -> tuple[int, int]:
    """(tiles of 8 rows for a simdgroup, parts of k for a threadgroup) where so many rows meet `tiles` of 8 rows of x.

    `room`: bytes of threadgroup memory.

    Four tiles read x half as often, where what is left still fills the device. On an H200, 4 bit, us with two and four:
    32 rows of x: 12288 x 4096 41.3 / 30.7 (MLX's own 56), 24576 x 4096 75.9 / 49.2, 4096 x 12288 39.0 / 31.9,
    5120 x 2048 13.0 / 14.2, 2048 x 4096 10.7 / 15.0; 64 rows of x: 4096 x 4096 26.1 / 22.3, 2048 x 4096 16.1 / 21.7.
    Parts so that the device is full and no fuller: 8 rows of x, 2048 x 4096, 4 parts 9.5, 8 6.7, 16 5.7; 32 rows of x,
    5120 x 2048, 2 parts 14.3, 4 12.4, 8 16.9.
    """
    enough = 4096 if tiles > 4 or (tiles > 1 and width >= 8192) else 12288
    high = 4 if rows >= enough else 2
    full = (4096 if tiles == 1 else 3072 if tiles == 2 else 1536) if high == 2 else 1024 if tiles > 4 else 1536
    most = 16 if tiles <= 2 else 8 if high == 2 or tiles <= 4 else 4
    fits = (room - LEVELS) // (high * tiles * 256)  # the partial sums of a part
    parts = min(max(full // math.ceil(rows / (8 * high)), 4 if high == 2 else 2), most, fits, width // 128)
    return high, 1 << (parts.bit_length() - 1)
