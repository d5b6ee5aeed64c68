"""A row or two of x times a matrix, packed or plain, in one launch: norm before, bias, activation and residual after.

A matvec lives on bytes in flight. A lane keeps its numbers of x in registers and sees row after row of the matrix: the
words of the next rows are on their way while it multiplies those it has, and no barrier stands between. RMSNorm costs
no pass of its own, because its divisor is a factor of the result.
"""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .op import Case, Source, op
from .packing import READ, Matrix

FEW = 2  # rows of x up to which this is the faster way
WIDEST = 32768  # numbers of a row
TOGETHER = 256  # threadgroups that run at once; an H200 has room for two in each of its 132 cores
NONE, SILU, GELU, CLAMPED = 0, 1, 2, 3
ACTIVATIONS = {None: NONE, "silu": SILU, "gelu": GELU, "clamped": CLAMPED}

ACTIVATE = r"""
// 1: SiLU, 2: GELU by tanh; 3: gpt-oss' SwiGLU, which clamps both sides and adds one to up.
template <int ACT> FN float gated(float g, float u) {
    if (ACT == 1) return g / (1.0f + metal::exp(-g)) * u;
    if (ACT == 2) {
        float t = metal::min(metal::max(0.7978845608f * (g + 0.044715f * g * g * g), -15.0f), 15.0f);
        float e = metal::exp(2.0f * t);
        return 0.5f * g * (1.0f + (e - 1.0f) / (e + 1.0f)) * u;
    }
    g = metal::min(g, 7.0f); u = metal::max(metal::min(u, 7.0f), -7.0f);
    return g / (1.0f + metal::exp(-1.702f * g)) * (u + 1.0f);
}
"""

ROWS = r"""
// N words: numbers k ... k + 31 of a row, which begins at number `from`.
template <typename T, int FORM, int BITS, int N, typename P> FN void load_words(P w, uint from, thread uint (&p)[N]) {
    const int B = FORM == 2 ? 8 * sizeof(T) : BITS;
    uint i = from / 32 * B;
    if (N % 4 == 0) {
        #pragma unroll
        for (int c = 0; c < N / 4; c++) {
            auto v = ((const device uint4*)(w))[i / 4 + c];
            p[4 * c] = v.x; p[(4 * c + 1) % N] = v.y; p[(4 * c + 2) % N] = v.z; p[(4 * c + 3) % N] = v.w;
        }
    } else {
        #pragma unroll
        for (int c = 0; c < N; c++) p[c] = ((const device uint*)(w))[i + c];
    }
}
// Q rows from the words of a piece on: their codes, scales and zeros.
template <typename T, int FORM, int BITS, int GROUP, int K, int Q, int N, typename W, typename S, typename Z>
FN void load_rows(W w, S s, Z z, const thread uint (&row)[Q], uint k, thread uint (&p)[Q][N], thread float (&scale)[Q], thread float (&zero)[Q]) {
    #pragma unroll
    for (int r = 0; r < Q; r++) {
        uint from = row[r] * K + k;
        load_words<T, FORM, BITS>(w, from, p[r]);
        scale[r] = FORM == 2 ? 1.0f : scale_at<FORM>(s, from / GROUP);
        zero[r] = zero_at<FORM, BITS>(z, from / GROUP, scale[r]);
    }
}
// Numbers 4 c ... 4 c + 3 of a piece.
template <typename T, int FORM, int BITS, int N> FN void numbers4(const thread uint (&p)[N], int c, thread float* y) {
    const int U = 4 / sizeof(T);
    if (FORM == 2) {
        #pragma unroll
        for (int i = 0; i < 4 / U; i++) unpack2<T>(p[(4 / U * c + i) % N], y + U * i);
    } else {
        #pragma unroll
        for (int n = 0; n < 4; n++) y[n] = number<FORM, BITS>(p, 4 * c + n);
    }
}
"""

# KW simdgroups share a row, NP pieces of 32 numbers in each lane; SG / KW of those have LOOPS times R rows each. With
# PAIR a row is a gate and the up that belongs to it.
BODY = r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x;
    uint kw = sg % uint(KW); uint rg = sg / uint(KW);
    const int Q = PAIR ? 2 * R : R; const int N = FORM == 2 ? 8 * sizeof(T) : BITS; const int MINE = LOOPS * R;
    threadgroup float part[M][SG / KW * LOOPS * Q][KW]; threadgroup float norms[M][KW];
    uint first = (threadgroup_position_in_grid.x * uint(SG / KW) + rg) * uint(MINE);
    uint k[NP]; uint row[Q]; uint p[NP][Q][N]; float scale[NP][Q]; float zero[NP][Q];
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = metal::min(first + uint(r), uint(O - 1));
        if (PAIR) row[Q - R + r] = row[r] + uint(O);
    }
    #pragma unroll
    for (int n = 0; n < NP; n++) {
        k[n] = ((uint(n) * uint(KW) + kw) * 32 + lane) * 32;
        load_rows<T, FORM, BITS, GROUP, K, Q, N>(w, s, z, row, k[n] < uint(K) ? k[n] : 0, p[n], scale[n], zero[n]);
    }
    float v[M][NP][32]; float sums[M][NP];
    #pragma unroll
    for (int m = 0; m < M; m++) {
        float squares = 0.0f;
        #pragma unroll
        for (int n = 0; n < NP; n++) {
            bool live = k[n] < uint(K); uint at = live ? k[n] / 8 : 0;
            sums[m][n] = 0.0f;
            #pragma unroll
            for (int c = 0; c < 4; c++) {
                float a[8]; float b[8];
                load8<T>(x, m * (K / 8) + at + c, a);
                if (NORM) load8<T>(g, at + c, b);
                #pragma unroll
                for (int i = 0; i < 8; i++) {
                    float e = live ? a[i] : 0.0f;
                    squares += e * e;
                    if (NORM) e *= b[i];
                    v[m][n][8 * c + i] = e; sums[m][n] += e;
                }
            }
        }
        if (NORM) {
            squares = simd_sum(squares);
            if (lane == 0 && rg == 0) norms[m][kw] = squares;
        }
    }
    for (uint l = 0; l < uint(LOOPS); l++) {
        uint p1[NP][Q][N]; float scale1[NP][Q]; float zero1[NP][Q];
        if (LOOPS > 1) {
            #pragma unroll
            for (int r = 0; r < R; r++) {
                row[r] = metal::min(first + metal::min(l + 1, uint(LOOPS - 1)) * uint(R) + uint(r), uint(O - 1));
                if (PAIR) row[Q - R + r] = row[r] + uint(O);
            }
            #pragma unroll
            for (int n = 0; n < NP; n++) {
                load_rows<T, FORM, BITS, GROUP, K, Q, N>(w, s, z, row, k[n] < uint(K) ? k[n] : 0, p1[n], scale1[n], zero1[n]);
            }
        }
        #pragma unroll
        for (int r = 0; r < Q; r++) {
            float a[M];
            #pragma unroll
            for (int m = 0; m < M; m++) a[m] = 0.0f;
            #pragma unroll
            for (int n = 0; n < NP; n++) {
                float d[M];
                #pragma unroll
                for (int m = 0; m < M; m++) d[m] = 0.0f;
                #pragma unroll
                for (int c = 0; c < 8; c++) {
                    float y[4];
                    numbers4<T, FORM, BITS>(p[n][r], c, y);
                    #pragma unroll
                    for (int m = 0; m < M; m++) {
                        #pragma unroll
                        for (int i = 0; i < 4; i++) d[m] += y[i] * v[m][n][4 * c + i];
                    }
                }
                #pragma unroll
                for (int m = 0; m < M; m++) a[m] += FORM == 2 ? d[m] : scale[n][r] * d[m] + zero[n][r] * sums[m][n];
            }
            #pragma unroll
            for (int m = 0; m < M; m++) {
                float whole = simd_sum(a[m]);
                if (lane == 0) part[m][(rg * uint(LOOPS) + l) * uint(Q) + uint(r)][kw] = whole;
            }
        }
        if (LOOPS > 1) {
            #pragma unroll
            for (int n = 0; n < NP; n++) {
                #pragma unroll
                for (int r = 0; r < Q; r++) {
                    #pragma unroll
                    for (int c = 0; c < N; c++) p[n][r][c] = p1[n][r][c];
                    scale[n][r] = scale1[n][r]; zero[n][r] = zero1[n][r];
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = t; i < uint(M * SG / KW * MINE); i += uint(SG * 32)) {
        uint m = i / uint(SG / KW * MINE); uint j = i % uint(SG / KW * MINE);
        uint o = threadgroup_position_in_grid.x * uint(SG / KW * MINE) + j;
        if (o < uint(O)) {
            uint at = j / uint(R) * uint(Q) + j % uint(R);
            float a = 0.0f; float u = 0.0f; float total = 0.0f;
            for (int c = 0; c < KW; c++) {
                a += part[m][at][c];
                if (PAIR) u += part[m][at + uint(Q - R)][c];
                if (NORM) total += norms[m][c];
            }
            if (NORM) {
                float inv = metal::rsqrt(total / float(K) + as_type<float>(uint(EPS)));
                a *= inv; u *= inv;
            }
            if (BIAS) { a += float(bias[o]); if (PAIR) u += float(bias[O + o]); }
            if (PAIR) { a = gated<ACT>(a, u); }
            else if (ACT > 0) { a = gated<ACT>(a, TIMES ? float(other[m * O + o]) : 1.0f); }
            if (RES) a += float(other[m * O + o]);
            y[m * O + o] = static_cast<T>(a);
        }
    }
"""
MATVEC = Source("mlxrt_matvec", ("x", "w", "s", "z", "g", "bias", "other"), ("y",), BODY, READ + ACTIVATE + ROWS)


def bits_of(value: float) -> int:
    """A float as the integer with its bits: kernel constants are whole numbers."""
    return int(mx.array(value, mx.float32).view(mx.int32).item())  # type: ignore[arg-type]  # a whole number


def activate(kind: str, gate: mx.array, up: mx.array | None) -> mx.array:
    if kind == "clamped":
        assert up is not None
        gate, up = mx.minimum(gate, 7.0), mx.clip(up, -7.0, 7.0)
        return gate * mx.sigmoid(1.702 * gate) * (up + 1)
    y = nn.silu(gate) if kind == "silu" else nn.gelu_approx(gate)
    return y if up is None else y * up


def matvec_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        ("affine", 4, 64, 40, 128, 1, {"norm": True, "eps": 1e-6}),
        ("affine", 4, 32, 37, 1056, 2, {"residual": True}),
        ("affine", 8, 64, 24, 1088, 2, {"norm": True, "eps": 1e-5, "activation": "silu", "pair": True}),
        ("affine", 3, 32, 9, 96, 2, {"bias": True}),
        ("affine", 5, 64, 7, 192, 1, {"activation": "gelu", "times": True}),
        ("affine", 6, 128, 5, 256, 1, {"bias": True, "activation": "clamped", "pair": True}),
        ("affine", 2, 32, 16, 64, 2, {"residual": True, "bias": True}),
        ("mxfp4", 4, 32, 11, 160, 1, {"norm": True, "eps": 1e-6}),
        ("dense", 16, 32, 13, 1184, 2, {"norm": True, "eps": 1e-6, "residual": True}),
    ]
    for mode, bits, group, rows, width, m, extra in shapes:
        mx.random.seed(rows)
        pair = bool(extra.get("pair"))
        total = rows * 2 if pair else rows
        w = (mx.random.normal((total, width)) * width**-0.5).astype(dtype)
        matrix = Matrix(w)
        if mode != "dense":
            packed = mx.quantize(w, group, bits, mode=mode)
            matrix = Matrix(packed[0], packed[1], packed[2] if mode == "affine" else None, bits, group, mode)
        arrays = {"x": mx.random.normal((m, width)).astype(dtype)}
        options = {"matrix": matrix, "activation": extra.get("activation"), "pair": pair, "eps": extra.get("eps", 0.0)}
        if extra.get("norm"):
            arrays["norm"] = (1 + 0.1 * mx.random.normal((width,))).astype(dtype)
        if extra.get("bias"):
            arrays["bias"] = mx.random.normal((total,)).astype(dtype)
        for name in ("residual", "times"):
            if extra.get(name):
                arrays[name] = mx.random.normal((m, rows)).astype(dtype)
        yield Case(f"{mode}{bits} group {group} [{rows}, {width}] x{m}", arrays, options)


@op(matvec_cases)
def matvec(x, matrix, norm=None, eps=0.0, bias=None, activation=None, pair=False, times=None, residual=None):
    """x [N, K] -> [N, O]: normed first, then the matrix, bias, activation (of gate times up with `pair`), residual."""
    h = x if norm is None else mx.fast.rms_norm(x, norm, eps)
    y = matrix.multiply(h)
    if bias is not None:
        y = y + bias
    if activation is not None:
        gate, up = mx.split(y, 2, axis=-1) if pair else (y, times)
        y = activate(activation, gate, up)
    if residual is not None:
        y = residual + y
    return y


def refuses(x, matrix, **rest) -> str | None:
    if matrix.width > WIDEST:
        return f"rows of {matrix.width} numbers: {WIDEST} fit a threadgroup"
    return matrix.refused(x)


def pays(x, **rest) -> bool:
    return x.shape[0] <= FEW


@matvec.kernel(MATVEC, refuses=refuses, pays=pays)
def launch(gpu, x, matrix, norm=None, eps=0.0, bias=None, activation=None, pair=False, times=None, residual=None):
    rows, m = matrix.rows // 2 if pair else matrix.rows, x.shape[0]
    way = share(rows, matrix, m, pair)
    other = times if times is not None else residual
    [y] = gpu(
        MATVEC,
        [x, *matrix.inputs(x), x if norm is None else norm, x if bias is None else bias, x if other is None else other],
        math.ceil(rows / (way["SG"] // way["KW"] * way["LOOPS"] * way["R"])),
        32 * way["SG"],
        [((m, rows), x.dtype)],
        T=x.dtype,
        M=m,
        K=matrix.width,
        O=rows,
        **way,
        **matrix.constants(),
        NORM=norm is not None,
        EPS=bits_of(eps) if norm is not None else 0,
        **after(bias, activation, pair, times, residual),
    )
    return y


def share(rows: int, matrix: Matrix, m: int, pair: bool) -> dict[str, int]:
    """How simdgroups share the work: no more threadgroups than run at once, and as many where there are rows enough."""
    pieces = math.ceil(matrix.width / 1024)
    deep = 1 if pieces <= 16 else 2
    wide = math.ceil(pieces / deep)
    side = max(1, 8 // wide)
    each = 1 if not matrix.packed else (4 if wide <= 4 else 2) // deep // m // (2 if pair else 1)
    each = max(1, each)
    while each > 1 and rows < TOGETHER * side * each:
        each //= 2
    loops = max(1, math.ceil(rows / (side * each * TOGETHER)))
    loops = min(loops, max(1, 4096 // (m * side * each * (2 if pair else 1) * wide)))  # 16 KB of partial sums
    return {"SG": wide * side, "KW": wide, "NP": deep, "R": each, "LOOPS": loops}


def after(bias, activation, pair, times, residual) -> dict[str, int]:
    """What follows a product, as constants of its kernel."""
    given = {"BIAS": bias is not None, "TIMES": times is not None, "RES": residual is not None}
    return {**given, "ACT": ACTIVATIONS[activation], "PAIR": pair}
