"""A few rows of x times a matrix, packed or plain, in one launch: norm before; bias, activation, residual, cap after.

A matvec lives on bytes in flight and on few instructions a weight. x lies unpacked in threadgroup memory; a simdgroup
goes over many rows of the matrix, several at once, 16 bytes a lane, and the words of the next ones are on their way
while it multiplies those it has. RMSNorm costs no pass of its own, because its divisor is a factor of the result.
"""

import math
import struct
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..registry import Case, Source, op
from ..testing import sample
from .activation import ACTIVATE, ACTIVATIONS, activate
from .quantized import READ, Matrix
from .staging import DOT, tile

FEW = 4  # rows of x up to which this is the faster way

# A simdgroup makes LOOPS times R outputs of each row of x; with PAIR an output is a gate and the up that belongs to it.
BODY = r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x; uint one = lift_of<BITS>(threadgroup_position_in_grid.z);
    const int Q = PAIR ? 2 * R : R; const int PLACES = TILE / 4; const int N = FORM == 2 ? 8 * sizeof(T) : BITS;
    threadgroup float4 xs[M * PLACES]; threadgroup float sums[M * TILE / 16];
    threadgroup float part[M][SG * LOOPS * Q]; threadgroup float norms[M][SG];
    const int LEVELS = FORM == 3 ? 1 << BITS : 1; threadgroup float table[LEVELS];
    lay_levels<FORM, LEVELS, SG * 32>(l, t, &table[0]);
    uint first = (threadgroup_position_in_grid.x * uint(SG) + sg) * uint(LOOPS * R);
    uint row[Q]; uint p[Q][N]; float scale[Q]; float zero[Q]; float acc[M][Q]; float squares[M];
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = metal::min(first + uint(r), uint(O - 1));
        if (PAIR) row[Q - R + r] = row[r] + uint(O);
    }
    load_rows<FORM, BITS, GROUP, K>(w, s, z, row, lane * 32 < uint(K) ? lane * 32 : 0, p, scale, zero);
    #pragma unroll
    for (int m = 0; m < M; m++) {
        squares[m] = 0.0f;
        #pragma unroll
        for (int r = 0; r < Q; r++) acc[m][r] = 0.0f;
    }
    for (uint k0 = 0; k0 < uint(K); k0 += TILE) {
        if (k0 > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma unroll
        for (int m = 0; m < M; m++) {
            for (uint i = t; i < uint(TILE / 8); i += uint(SG * 32)) {
                squares[m] += stage8<T, FORM, NORM, K>(x, m * K, g, k0, i, &xs[m * PLACES], &sums[m * (TILE / 16)]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint end = metal::min(uint(TILE), uint(K) - k0);
        for (uint l = 0; l < uint(LOOPS); l++) {
            for (uint j = 0; j < end; j += 1024) {
                // The next words are asked for before these are multiplied; the barrier keeps compilers from waiting.
                uint p1[Q][N]; float scale1[Q]; float zero1[Q];
                bool turn = LOOPS > 1 && j + 1024 >= end;
                uint k = (turn ? 0 : k0 + j + 1024) + lane * 32;
                if (turn) {
                    #pragma unroll
                    for (int r = 0; r < R; r++) {
                        row[r] = metal::min(first + (l + 1) * uint(R) + uint(r), uint(O - 1));
                        if (PAIR) row[Q - R + r] = row[r] + uint(O);
                    }
                }
                load_rows<FORM, BITS, GROUP, K>(w, s, z, row, k < uint(K) ? k : 0, p1, scale1, zero1);
                simdgroup_barrier(mem_flags::mem_none);
                rows_meet<T, FORM, BITS, PLACES>(p, scale, zero, j + lane * 32, one, &table[0], &xs[0], &sums[0], acc);
                take_rows(p, scale, zero, p1, scale1, zero1);
            }
            if (k0 + TILE >= uint(K)) {
                #pragma unroll
                for (int m = 0; m < M; m++) {
                    #pragma unroll
                    for (int r = 0; r < Q; r++) {
                        float whole = simd_sum(acc[m][r]);
                        if (lane == 0) part[m][(sg * uint(LOOPS) + l) * uint(Q) + uint(r)] = whole;
                        acc[m][r] = 0.0f;
                    }
                }
            }
        }
    }
    if (NORM) {
        #pragma unroll
        for (int m = 0; m < M; m++) {
            float whole = simd_sum(squares[m]);
            if (lane == 0) norms[m][sg] = whole;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint MINE = SG * LOOPS * R;
    for (uint i = t; i < uint(M) * MINE; i += uint(SG * 32)) {
        uint m = i / MINE; uint j = i % MINE; uint o = threadgroup_position_in_grid.x * MINE + j;
        if (o < uint(O)) {
            uint at = j / uint(R) * uint(Q) + j % uint(R);
            float a = part[m][at]; float u = PAIR ? part[m][at + uint(Q - R)] : 0.0f;
            if (NORM) {
                float total = 0.0f;
                for (int c = 0; c < SG; c++) total += norms[m][c];
                float inv = metal::rsqrt(total / float(K) + as_type<float>(uint(EPS)));
                a *= inv; u *= inv;
            }
            if (BIAS) { a += float(bias[o]); if (PAIR) u += float(bias[O + o]); }
            if (PAIR) { a = gated<ACT>(a, u); }
            else if (ACT > 0) { a = gated<ACT>(a, TIMES ? float(other[m * O + o]) : 1.0f); }
            if (RES) a += float(other[m * O + o]);
            y[m * O + o] = static_cast<T>(capped<CAP>(a));
        }
    }
"""
MATVEC = Source("mlxrt_matvec", ("x", "w", "s", "z", "l", "g", "bias", "other"), ("y",), BODY, READ + ACTIVATE + DOT)


def bits_of(value: float) -> int:
    """A float as the integer with its bits: kernel constants are whole numbers."""
    return int.from_bytes(struct.pack("<f", value), "little", signed=True)


def matvec_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        ("affine", 4, 64, 40, 128, 1, {"norm": True, "eps": 1e-6}),
        ("affine", 4, 32, 37, 1056, 3, {"residual": True}),
        ("affine", 8, 64, 24, 1088, 2, {"norm": True, "eps": 1e-5, "activation": "silu", "pair": True}),
        ("affine", 3, 32, 9, 96, 4, {"bias": True}),
        ("affine", 5, 64, 7, 192, 1, {"activation": "gelu", "times": True}),
        ("affine", 4, 64, 9, 1024, 1, {"norm": True, "eps": 1e-6}),  # a whole tile
        ("affine", 6, 128, 5, 256, 1, {"bias": True, "activation": "clamped", "pair": True}),
        ("affine", 2, 32, 16, 64, 2, {"residual": True, "bias": True}),
        ("mxfp4", 4, 32, 11, 160, 1, {"norm": True, "eps": 1e-6}),
        ("affine", 4, 64, 21, 192, 2, {"norm": True, "eps": 1e-6, "softcap": 3.0}),
        ("dense", 16, 32, 13, 1184, 2, {"norm": True, "eps": 1e-6, "residual": True}),
        ("codes", 2, 0, 37, 1120, 3, {"residual": True}),
        ("codes", 3, 0, 9, 96, 1, {"activation": "silu", "pair": True}),
        ("codes", 4, 0, 16, 1056, 2, {"bias": True}),
        ("codes", 8, 0, 11, 64, 4, {}),
        ("codes", 1, 0, 20, 1024, 1, {}),
    ]
    for shape in shapes:
        yield product_case(dtype, *shape)


def product_case(dtype: mx.Dtype, mode, bits, group, rows, width, m, extra: dict[str, Any]) -> Case:
    """m rows of `width` numbers times a matrix; `extra` names what stands before and after."""
    mx.random.seed(rows)
    pair = bool(extra.get("pair"))
    total = rows * 2 if pair else rows
    matrix = sample(mode, (total, width), dtype, bits, group)
    arrays = {"x": mx.random.normal((m, width)).astype(dtype)}
    options = {"matrix": matrix, "activation": extra.get("activation"), "pair": pair, "eps": extra.get("eps", 0.0)}
    options["softcap"] = extra.get("softcap")
    if extra.get("norm"):
        arrays["norm"] = (1 + 0.1 * mx.random.normal((width,))).astype(dtype)
    if extra.get("bias"):
        arrays["bias"] = mx.random.normal((total,)).astype(dtype)
    for name in ("residual", "times"):
        if extra.get(name):
            arrays[name] = mx.random.normal((m, rows)).astype(dtype)
    return Case(f"{mode}{bits} group {group} [{rows}, {width}] x{m}", arrays, options)


@op(matvec_cases)
def matvec(
    x, matrix, norm=None, eps=0.0, bias=None, activation=None, pair=False, times=None, residual=None, softcap=None
):  # fmt: skip
    """x [N, K] -> [N, O]: normed first, then the matrix, bias, activation (of gate times up with `pair`), residual, cap."""
    h = x if norm is None else mx.fast.rms_norm(x, norm, eps)
    y = matrix.multiply(h)
    if bias is not None:
        y = y + bias
    if activation is not None:
        gate, up = mx.split(y, 2, axis=-1) if pair else (y, times)
        y = activate(activation, gate, up)
    if residual is not None:
        y = residual + y
    return y if softcap is None else mx.tanh(y / softcap) * softcap


def refuses(x, matrix, norm=None, **rest) -> str | None:
    return matrix.refused(x, norm)


def pays(x, **rest) -> bool:
    return x.shape[0] <= FEW


@matvec.kernel(MATVEC, refuses=refuses, pays=pays)
def launch(gpu, **arguments):
    return multiplied(gpu, MATVEC, **arguments)[0]


def multiplied(
    gpu, source, x, matrix, norm=None, eps=0.0, bias=None, activation=None, pair=False, times=None, residual=None,
    softcap=None, more=(), outputs=(), **constants,
):  # fmt: skip
    """`source` is the text above, or one made of it that has `more` inputs, `outputs` and constants."""
    rows, m = matrix.rows // 2 if pair else matrix.rows, x.shape[0]
    way = share(rows, matrix, m, pair)
    other = times if times is not None else residual
    return gpu(
        source,
        [x, *matrix.inputs(), norm, bias, other, *more],
        math.ceil(rows / (way["SG"] * way["LOOPS"] * way["R"])),
        32 * way["SG"],
        [((m, rows), x.dtype), *outputs],
        T=x.dtype,
        M=m,
        K=matrix.width,
        O=rows,
        **way,
        **matrix.constants(),
        NORM=norm is not None,
        EPS=bits_of(eps) if norm is not None else 0,
        **after(bias, activation, pair, times, residual, softcap),
        **constants,
    )


def share(rows: int, matrix: Matrix, m: int, pair: bool) -> dict[str, int]:
    """How simdgroups share the rows: several at once where there are enough, in as many threadgroups as run together.

    Four rows at once need half of the registers of an H200's 132 cores for a threadgroup. Left to itself the compiler takes
    all of them: 25.9 us instead of 18.8 for 24576 x 4096, 136 instead of 97 for 151936 x 4096.
    """
    size, deep = 8, tile(matrix.width, m)
    wide = (4 if matrix.rows >= 16384 else 2 if matrix.rows >= 2048 else 1) if matrix.packed else 1
    each = max(1, wide // m // (2 if pair else 1))
    together, resident = (264, 2) if wide == 4 else (512, 1)
    loops = max(1, math.ceil(rows / (size * each * together))) if matrix.width <= deep else 1
    loops = min(loops, 2048 // (m * size * each * (2 if pair else 1)))  # 8 KB of sums
    return {"SG": size, "R": each, "LOOPS": loops, "TILE": deep, "RESIDENT": resident}


def after(bias, activation, pair, times, residual, softcap=None) -> dict[str, int]:
    """What follows a product, as constants of its kernel."""
    given = {"BIAS": bias is not None, "TIMES": times is not None, "RES": residual is not None, "PAIR": pair}
    return {**given, "ACT": ACTIVATIONS[activation], "CAP": 0 if softcap is None else bits_of(softcap)}
