"""A few rows of x times a matrix, packed or plain, in one launch: norm before, bias, activation and residual after.

A matvec lives on bytes in flight: a simdgroup reads several rows of the matrix at once, 16 bytes a lane. RMSNorm costs
no pass of its own, because its divisor is a factor of the result.
"""

import math
from collections.abc import Iterator

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
// acc[m][r] += row r of w (from number k on, 32 of them) . x[m]
template <typename T, int FORM, int BITS, int GROUP, int K, int M, int R, typename W, typename S, typename Z>
FN void rows_dot(W w, S s, Z z, const thread uint (&row)[R], uint k, const thread float (&x)[M][32], const thread float (&sum)[M], thread float (&acc)[M][R]) {
    if (FORM == 2) {
        #pragma unroll
        for (int r = 0; r < R; r++) {
            float v[32];
            #pragma unroll
            for (uint c = 0; c < 4; c++) load8<T>(w, (row[r] * K + k) / 8 + c, v + 8 * c);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                #pragma unroll
                for (int n = 0; n < 32; n++) acc[m][r] += v[n] * x[m][n];
            }
        }
    } else {
        uint p[R][BITS]; float scale[R]; float zero[R];
        #pragma unroll
        for (int r = 0; r < R; r++) {
            load_codes<BITS>(w, (row[r] * K + k) / 32, p[r]);
            scale[r] = scale_at<FORM>(s, (row[r] * K + k) / GROUP);
            zero[r] = FORM == 0 ? float(z[(row[r] * K + k) / GROUP]) : 0.0f;
        }
        #pragma unroll
        for (int r = 0; r < R; r++) {
            float d[M];
            #pragma unroll
            for (int m = 0; m < M; m++) d[m] = 0.0f;
            #pragma unroll
            for (int n = 0; n < 32; n++) {
                float v = number<FORM, BITS>(p[r], n);
                #pragma unroll
                for (int m = 0; m < M; m++) d[m] += v * x[m][n];
            }
            #pragma unroll
            for (int m = 0; m < M; m++) acc[m][r] += scale[r] * d[m] + zero[r] * sum[m];
        }
    }
}
// Numbers k ... k + 31 of M rows of x, times the norm's weight; their sums and sums of squares.
template <typename T, int K, int M, bool NORM, typename X, typename G>
FN void rows_of_x(X x, G g, uint k, thread float (&v)[M][32], thread float (&sum)[M], thread float (&squares)[M]) {
    float w[32];
    if (NORM) {
        #pragma unroll
        for (uint c = 0; c < 4; c++) load8<T>(g, k / 8 + c, w + 8 * c);
    }
    #pragma unroll
    for (int m = 0; m < M; m++) {
        sum[m] = 0.0f;
        #pragma unroll
        for (uint c = 0; c < 4; c++) load8<T>(x, (m * K + k) / 8 + c, v[m] + 8 * c);
        #pragma unroll
        for (int n = 0; n < 32; n++) {
            if (NORM) { squares[m] += v[m][n] * v[m][n]; v[m][n] *= w[n]; }
            sum[m] += v[m][n];
        }
    }
}
"""

# A simdgroup makes R outputs of each row of x; with PAIR an output is a gate and the up that belongs to it.
BODY = r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint first = (threadgroup_position_in_grid.x * SG + sg) * R;
    const int Q = PAIR ? 2 * R : R;
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
    for (uint k = lane * 32; k < uint(K); k += 1024) {
        float v[M][32]; float sum[M];
        rows_of_x<T, K, M, NORM>(x, g, k, v, sum, squares);
        rows_dot<T, FORM, BITS, GROUP, K, M, Q>(w, s, z, row, k, v, sum, acc);
    }
    #pragma unroll
    for (int m = 0; m < M; m++) {
        float inv = 1.0f;
        if (NORM) inv = metal::rsqrt(simd_sum(squares[m]) / float(K) + as_type<float>(uint(EPS)));
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
                    y[m * O + o] = static_cast<OUT>(a);
                }
            }
        }
    }
"""
MATVEC = Source("mlxrt_matvec", ("x", "w", "s", "z", "g", "bias", "other"), ("y",), BODY, READ + ACTIVATE + DOT)


def bits_of(value: float) -> int:
    """A float as the integer with its bits: kernel constants are whole numbers."""
    return int(mx.array(value, mx.float32).view(mx.int32).item())


def activate(kind: str, gate: mx.array, up: mx.array | None) -> mx.array:
    if kind == "clamped":
        gate, up = mx.minimum(gate, 7.0), mx.clip(up, -7.0, 7.0)
        return gate * mx.sigmoid(1.702 * gate) * (up + 1)
    y = nn.silu(gate) if kind == "silu" else nn.gelu_approx(gate)
    return y if up is None else y * up


def matvec_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes = [
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
def matvec(
    x, matrix, norm=None, eps=0.0, bias=None, activation=None, pair=False, times=None, residual=None, wide=False
):
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
    return y.astype(mx.float32) if wide else y


def refuses(x, matrix, **rest) -> str | None:
    return matrix.refused(x)


def pays(x, **rest) -> bool:
    return x.shape[0] <= FEW


@matvec.kernel(MATVEC, refuses=refuses, pays=pays)
def launch(
    gpu, x, matrix, norm=None, eps=0.0, bias=None, activation=None, pair=False, times=None, residual=None, wide=False
):
    rows, m = matrix.rows // 2 if pair else matrix.rows, x.shape[0]
    each = rows_each(rows, m, pair)
    size = 8  # simdgroups
    other = times if times is not None else residual
    out = mx.float32 if wide else x.dtype
    [y] = gpu(
        MATVEC,
        [x, *matrix.inputs(x), x if norm is None else norm, x if bias is None else bias, x if other is None else other],
        math.ceil(rows / (size * each)),
        32 * size,
        [((m, rows), out)],
        T=x.dtype,
        OUT=out,
        M=m,
        K=matrix.width,
        O=rows,
        R=each,
        SG=size,
        **matrix.constants(),
        NORM=norm is not None,
        EPS=bits_of(eps) if norm is not None else 0,
        BIAS=bias is not None,
        ACT=ACTIVATIONS[activation],
        PAIR=pair,
        TIMES=times is not None,
        RES=residual is not None,
    )
    return y


def rows_each(rows: int, m: int, pair: bool) -> int:
    """Rows of the matrix a simdgroup reads at once: many where there are enough of them to fill the device."""
    most = 4 if rows >= 16384 else 2 if rows >= 4096 else 1
    return max(1, min(most, 4 // m) // (2 if pair and most > 1 else 1))
