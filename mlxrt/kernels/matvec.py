"""A few rows of x times a matrix, packed or plain, in one launch: norm before, bias, activation and residual after.

A matvec lives on bytes in flight and on few instructions a weight: a simdgroup reads several rows of the matrix at
once, 16 bytes a lane, and finds x unpacked in threadgroup memory. RMSNorm costs no pass of its own, because its divisor
is a factor of the result.
"""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .op import Case, Source, op
from .packing import READ, Matrix

FEW = 4  # rows of x up to which this is the faster way
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

DOT = r"""
// A tile of x lies in threadgroup memory as floats, four to a place: those a simdgroup's lanes read together lie together.
FN uint place_of(uint k) { return (k / 1024 * 8 + k % 32 / 4) * 32 + k % 1024 / 32; }
// Numbers 8 i ... 8 i + 7 of a row of x, times the norm's weight, into the tile; their sums by 32 beside it.
// Four neighbouring threads must call it together. Returns the sum of squares.
template <typename T, bool NORM, typename X, typename G, typename P, typename S>
FN float stage8(X x, uint from, G g, uint at, uint i, bool live, P xs, S sums) {
    float v[8]; float w[8]; float squares = 0.0f; float sum = 0.0f;
    if (live) {
        load8<T>(x, (from + at) / 8 + i, v);
        if (NORM) load8<T>(g, at / 8 + i, w);
    }
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        v[n] = live ? v[n] : 0.0f;
        squares += v[n] * v[n];
        if (NORM) v[n] *= live ? w[n] : 0.0f;
        sum += v[n];
    }
    sum += simd_shuffle_xor(sum, 1); sum += simd_shuffle_xor(sum, 2);
    if (live) {
        xs[place_of(8 * i)] = four(v[0], v[1], v[2], v[3]); xs[place_of(8 * i + 4)] = four(v[4], v[5], v[6], v[7]);
        if (i % 4 == 0) sums[i / 4] = sum;
    }
    return squares;
}
// acc[m][r] += row r of w (from number k on, 32 of them) . x[m], whose tile has them from number kt on
template <typename T, int FORM, int BITS, int GROUP, int K, int PLACES, int M, int R, typename W, typename S, typename Z, typename P, typename Q>
FN void rows_dot(W w, S s, Z z, const thread uint (&row)[R], uint k, uint kt, P xs, Q sums, thread float (&acc)[M][R]) {
    uint p[R][BITS]; float scale[R]; float zero[R]; float d[M][R];
    uint lane = kt % 1024 / 32;
    if (FORM != 2) {
        #pragma unroll
        for (int r = 0; r < R; r++) {
            load_codes<BITS>(w, (row[r] * K + k) / 32, p[r]);
            scale[r] = scale_at<FORM>(s, (row[r] * K + k) / GROUP);
            zero[r] = zero_at<FORM, BITS>(z, (row[r] * K + k) / GROUP, scale[r]);
        }
    }
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int r = 0; r < R; r++) d[m][r] = 0.0f;
    }
    #pragma unroll
    for (uint c = 0; c < 8; c++) {
        float y[R][4];
        #pragma unroll
        for (int r = 0; r < R; r++) {
            if (FORM == 2) {
                load4<T>(w, (row[r] * K + k) / 4 + c, y[r]);
            } else {
                #pragma unroll
                for (uint n = 0; n < 4; n++) y[r][n] = number<FORM, BITS>(p[r], 4 * c + n);
            }
        }
        #pragma unroll
        for (int m = 0; m < M; m++) {
            float4 v = xs[m * PLACES + (kt / 1024 * 8 + c) * 32 + lane];
            #pragma unroll
            for (int r = 0; r < R; r++) d[m][r] += y[r][0] * v.x + y[r][1] * v.y + y[r][2] * v.z + y[r][3] * v.w;
        }
    }
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int r = 0; r < R; r++) {
            acc[m][r] += FORM == 2 ? d[m][r] : scale[r] * d[m][r] + zero[r] * sums[m * (PLACES / 8) + kt / 32];
        }
    }
}
"""

# A simdgroup makes R outputs of each row of x; with PAIR an output is a gate and the up that belongs to it.
BODY = r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x;
    uint first = (threadgroup_position_in_grid.x * SG + sg) * R;
    const int Q = PAIR ? 2 * R : R; const int PLACES = TILE / 4;
    threadgroup float4 xs[M * PLACES]; threadgroup float sums[M * TILE / 32]; threadgroup float part[M][SG];
    uint row[Q]; float acc[M][Q]; float squares[M];
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = metal::min(first + uint(r), uint(O - 1));
        if (PAIR) row[Q - R + r] = row[r] + uint(O);
    }
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
                bool live = k0 + 8 * i < uint(K);
                squares[m] += stage8<T, NORM>(x, m * K, g, k0, i, live, &xs[m * PLACES], &sums[m * (TILE / 32)]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint end = metal::min(uint(TILE), uint(K) - k0);
        for (uint k = lane * 32; k < end; k += 1024) {
            rows_dot<T, FORM, BITS, GROUP, K, PLACES, M, Q>(w, s, z, row, k0 + k, k, &xs[0], &sums[0], acc);
        }
    }
    if (NORM) {
        #pragma unroll
        for (int m = 0; m < M; m++) {
            float ss = simd_sum(squares[m]);
            if (lane == 0) part[m][sg] = ss;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    #pragma unroll
    for (int m = 0; m < M; m++) {
        float inv = 1.0f;
        if (NORM) {
            float total = 0.0f;
            for (int i = 0; i < SG; i++) total += part[m][i];
            inv = metal::rsqrt(total / float(K) + as_type<float>(uint(EPS)));
        }
        float y0[Q];
        #pragma unroll
        for (int r = 0; r < Q; r++) y0[r] = simd_sum(acc[m][r]) * inv;
        if (lane == 0) {
            #pragma unroll
            for (int r = 0; r < R; r++) {
                uint o = first + uint(r);
                if (o < uint(O)) {
                    float a = y0[r];
                    if (BIAS) a += float(bias[o]);
                    if (PAIR) {
                        float u = y0[Q - R + r];
                        if (BIAS) u += float(bias[O + o]);
                        a = gated<ACT>(a, u);
                    } else if (ACT > 0) {
                        a = gated<ACT>(a, TIMES ? float(other[m * O + o]) : 1.0f);
                    }
                    if (RES) a += float(other[m * O + o]);
                    y[m * O + o] = static_cast<T>(a);
                }
            }
        }
    }
"""
MATVEC = Source("mlxrt_matvec", ("x", "w", "s", "z", "g", "bias", "other"), ("y",), BODY, READ + ACTIVATE + DOT)


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
        ("affine", 4, 32, 37, 1056, 3, {"residual": True}),
        ("affine", 8, 64, 24, 1088, 2, {"norm": True, "eps": 1e-5, "activation": "silu", "pair": True}),
        ("affine", 3, 32, 9, 96, 4, {"bias": True}),
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
    return matrix.refused(x)


def pays(x, **rest) -> bool:
    return x.shape[0] <= FEW


@matvec.kernel(MATVEC, refuses=refuses, pays=pays)
def launch(gpu, x, matrix, norm=None, eps=0.0, bias=None, activation=None, pair=False, times=None, residual=None):
    rows, m = matrix.rows // 2 if pair else matrix.rows, x.shape[0]
    each = rows_each(rows, m, pair)
    size = 8  # simdgroups
    other = times if times is not None else residual
    [y] = gpu(
        MATVEC,
        [x, *matrix.inputs(x), x if norm is None else norm, x if bias is None else bias, x if other is None else other],
        math.ceil(rows / (size * each)),
        32 * size,
        [((m, rows), x.dtype)],
        T=x.dtype,
        M=m,
        K=matrix.width,
        O=rows,
        R=each,
        SG=size,
        TILE=tile(matrix.width, m),
        **matrix.constants(),
        NORM=norm is not None,
        EPS=bits_of(eps) if norm is not None else 0,
        **after(bias, activation, pair, times, residual),
    )
    return y


def after(bias, activation, pair, times, residual) -> dict[str, int]:
    """What follows a product, as constants of its kernel."""
    given = {"BIAS": bias is not None, "TIMES": times is not None, "RES": residual is not None}
    return {**given, "ACT": ACTIVATIONS[activation], "PAIR": pair}


def tile(width: int, m: int) -> int:
    """Numbers of each row of x in threadgroup memory at a time: whole passes of a simdgroup, 16 KB of floats."""
    return 1024 * max(1, min(math.ceil(width / 1024), 4 // m))


def rows_each(rows: int, m: int, pair: bool) -> int:
    """Rows of the matrix (pairs of them) a simdgroup reads at once: many where there are enough to fill the device.

    Measured on an H200 (docs/numbers.md): 4 only for heads, 2 from 4096 rows on, 1 below and with several rows of x.
    """
    most = 4 if rows >= 65536 and not pair else 2 if rows >= 4096 else 1
    return max(1, min(most, 4 // m))
