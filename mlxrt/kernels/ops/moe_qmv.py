"""A token's experts: gates and ups of each, then the weighted sum of their downs. Two launches for all of them."""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..registry import Case, InlineSource, op
from ..testing import sample
from .activation import ACTIVATE, ACTIVATIONS, activate
from .gather import gather_mm
from .qmv import bits_of, refuses
from .quantized import READ, Matrix
from .staging import DOT, tile

MANY = 64  # tokens up to which a matvec for each of their experts is the faster way
RESIDENT = (
    4  # threadgroups of downs to a multiprocessor, by their registers: 7.0 us against 8.7 with as many as each likes
)
TOGETHER = 4  # experts whose downs are computed side by side: 1024 numbers of x each are 16 KB

GATE_UP = InlineSource(
    "mlxrt_expert_gate_up",
    ("x", "experts", "w", "s", "z", "l", "g", "bias"),
    ("y",),
    r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint one = lift_of<BITS>(threadgroup_position_in_grid.z);
    uint first = (threadgroup_position_in_grid.x * SG + sg) * R;
    uint p = threadgroup_position_in_grid.y; uint n = p / uint(C);
    uint expert = uint(experts[p]); uint base = expert * uint(2 * I);
    const int PLACES = TILE / 4; uint t = thread_position_in_threadgroup.x;
    threadgroup float4 xs[PLACES]; threadgroup float sums[TILE / 16]; threadgroup float part[SG];
    const int LEVELS = FORM == 3 ? 1 << BITS : 1; threadgroup float table[LEVELS];
    lay_levels<FORM, LEVELS, SG * 32>(l, t, &table[0]);
    const int N = FORM == 2 ? 8 * sizeof(T) : BITS;
    uint row[2 * R]; uint w0[2 * R][N]; float s0[2 * R]; float z0[2 * R]; float acc[1][2 * R]; float squares = 0.0f;
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = base + metal::min(first + uint(r), uint(I - 1)); row[R + r] = row[r] + uint(I);
        acc[0][r] = 0.0f; acc[0][R + r] = 0.0f;
    }
    load_rows<FORM, BITS, GROUP, K>(w, s, z, row, lane * 32 < uint(K) ? lane * 32 : 0, w0, s0, z0);
    for (uint k0 = 0; k0 < uint(K); k0 += TILE) {
        if (k0 > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = t; i < uint(TILE / 8); i += uint(SG * 32)) {
            squares += stage8<T, FORM, NORM, K>(x, n * K, g, k0, i, &xs[0], &sums[0]);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint end = metal::min(uint(TILE), uint(K) - k0);
        for (uint j = 0; j < end; j += 1024) {
            uint w1[2 * R][N]; float s1[2 * R]; float z1[2 * R]; uint k = k0 + j + 1024 + lane * 32;
            load_rows<FORM, BITS, GROUP, K>(w, s, z, row, k < uint(K) ? k : 0, w1, s1, z1);
            simdgroup_barrier(mem_flags::mem_none);  // see matvec
            rows_meet<T, FORM, BITS, PLACES>(w0, s0, z0, j + lane * 32, one, &table[0], &xs[0], &sums[0], acc);
            take_rows(w0, s0, z0, w1, s1, z1);
        }
    }
    float inv = 1.0f;
    if (NORM) {
        squares = simd_sum(squares);
        if (lane == 0) part[sg] = squares;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float whole = 0.0f;
        for (int i = 0; i < SG; i++) whole += part[i];
        inv = metal::rsqrt(whole / float(K) + as_type<float>(uint(EPS)));
    }
    #pragma unroll
    for (int r = 0; r < R; r++) {
        float a = simd_sum(acc[0][r]) * inv; float u = simd_sum(acc[0][R + r]) * inv; uint o = first + uint(r);
        if (lane == 0 && o < uint(I)) {
            if (BIAS) { a += float(bias[base + o]); u += float(bias[base + uint(I) + o]); }
            y[p * I + o] = static_cast<T>(gated<ACT>(a, u));
        }
    }
""",
    READ + ACTIVATE + DOT,
)
# A simdgroup takes every SG-th expert of R rows, and lays 1024 numbers of x at a time for itself alone: simdgroups wait for
# each other only at the end, when their sums are added in order.
DOWN = InlineSource(
    "mlxrt_expert_down",
    ("x", "experts", "weights", "w", "s", "z", "l", "bias", "residual"),
    ("y",),
    r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x; uint one = lift_of<BITS>(threadgroup_position_in_grid.z);
    uint first = threadgroup_position_in_grid.x * uint(R); uint n = threadgroup_position_in_grid.y;
    const int N = FORM == 2 ? 8 * sizeof(T) : BITS;
    threadgroup float4 xs[SG * 256]; threadgroup float sums[SG * 64]; threadgroup float part[SG][R];
    const int LEVELS = FORM == 3 ? 1 << BITS : 1; threadgroup float table[LEVELS]; threadgroup uint ids[C];
    uint row[R]; uint w0[R][N]; float s0[R]; float z0[R]; float total[R];
    uint base = uint(experts[n * uint(C) + sg]) * uint(O);
    #pragma unroll
    for (int r = 0; r < R; r++) { row[r] = base + metal::min(first + uint(r), uint(O - 1)); total[r] = 0.0f; }
    load_rows<FORM, BITS, GROUP, K>(w, s, z, row, lane * 32 < uint(K) ? lane * 32 : 0, w0, s0, z0);
    lay_levels<FORM, LEVELS, SG * 32>(l, t, &table[0]);
    for (uint c = t; c < uint(C); c += uint(SG * 32)) ids[c] = uint(experts[n * uint(C) + c]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint c = sg; c < uint(C); c += uint(SG)) {
        uint p = n * uint(C) + c; float f = float(weights[p]); float acc[1][R];
        #pragma unroll
        for (int r = 0; r < R; r++) {
            acc[0][r] = 0.0f;
            if (BIAS && lane == 0) total[r] += f * float(bias[row[r]]);
        }
        for (uint k0 = 0; k0 < uint(K); k0 += 1024) {
            uint w1[R][N]; float s1[R]; float z1[R]; uint x1[4][2 * sizeof(T)]; uint k = k0 + 1024;
            simdgroup_barrier(mem_flags::mem_threadgroup);
            #pragma unroll
            for (uint j = 0; j < 4; j++) {
                uint i = piece_of(32 * j + lane);
                fetch8(x, (p * K + k0) / 8 + i, k0 + 8 * i < uint(K), x1[j]);
            }
            if (k >= uint(K)) {  // the next expert's rows
                k = 0; base = ids[metal::min(c + uint(SG), uint(C - 1))] * uint(O);
                #pragma unroll
                for (int r = 0; r < R; r++) row[r] = base + metal::min(first + uint(r), uint(O - 1));
            }
            k += lane * 32;
            load_rows<FORM, BITS, GROUP, K>(w, s, z, row, k < uint(K) ? k : 0, w1, s1, z1);
            #pragma unroll
            for (uint j = 0; j < 4; j++) {
                float v[8]; unpack8<T>(x1[j], v);
                lay8<T, FORM>(v, piece_of(32 * j + lane), &xs[sg * 256], &sums[sg * 64]);
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            rows_meet<T, FORM, BITS, 256>(w0, s0, z0, lane * 32, one, &table[0], &xs[sg * 256], &sums[sg * 64], acc);
            take_rows(w0, s0, z0, w1, s1, z1);
        }
        #pragma unroll
        for (int r = 0; r < R; r++) total[r] += f * acc[0][r];
    }
    #pragma unroll
    for (int r = 0; r < R; r++) {
        float a = simd_sum(total[r]);
        if (lane == 0) part[sg][r] = a;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint o = first + t;
    if (t < uint(R) && o < uint(O)) {
        float a = RES ? float(residual[n * O + o]) : 0.0f;
        for (int c = 0; c < SG; c++) a += part[c][t];
        y[n * O + o] = static_cast<T>(a);
    }
""",
    READ + DOT,
)


def gate_up_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        (1, 4, 8, 64, 24, "affine", {"norm": True}),
        (3, 2, 5, 1056, 9, "affine", {}),
        (2, 2, 4, 96, 10, "mxfp4", {"bias": True, "activation": "clamped"}),
        (1, 2, 3, 64, 7, "dense", {"activation": "gelu"}),
        (1, 2, 3, 1024, 5, "affine", {"norm": True}),
        (2, 2, 4, 96, 10, "codes", {"bits": 2}),
        (1, 3, 4, 1120, 9, "codes", {"bits": 3, "activation": "gelu"}),
        (3, 2, 3, 64, 7, "codes", {"bits": 4, "norm": True}),
        (1, 2, 3, 160, 8, "codes", {"bits": 8}),
        (1, 2, 3, 1056, 5, "codes", {"bits": 1, "bias": True}),
    ]
    for rows, k, count, width, hidden, mode, extra in shapes:
        mx.random.seed(width + hidden)
        matrix = sample(mode, (count, 2 * hidden, width), dtype, extra.get("bits", 4))
        experts = mx.random.randint(0, count, (rows, k)).astype(mx.uint32)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype), "experts": experts}
        if extra.get("norm"):
            arrays["norm"] = (1 + 0.1 * mx.random.normal((width,))).astype(dtype)
        if extra.get("bias"):
            arrays["bias"] = mx.random.normal((count, 2 * hidden)).astype(dtype)
        options = {"matrix": matrix, "eps": 1e-6, "activation": extra.get("activation", "silu")}
        yield Case(f"{mode}{matrix.bits} {k} of {count} [{2 * hidden}, {width}], {rows} tokens", arrays, options)


def down_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, k, count, width, outs, mode, bits, extra in [
        (1, 4, 8, 96, 40, "affine", 4, ("residual",)),
        (3, 2, 5, 1056, 9, "affine", 4, ()),
        (2, 3, 4, 64, 33, "mxfp4", 4, ("bias", "residual")),
        (1, 2, 3, 64, 8, "dense", 16, ()),
        (1, 6, 8, 1024, 9, "affine", 4, ()),  # whole tiles, and more experts than simdgroups
        (1, 8, 9, 1120, 7, "codes", 2, ("residual",)),
        (2, 5, 4, 96, 12, "codes", 3, ("bias",)),
        (1, 1, 3, 2080, 9, "codes", 4, ()),
        (3, 2, 3, 64, 10, "codes", 8, ("residual",)),
        (1, 3, 3, 160, 8, "codes", 1, ()),
        (2, 6, 5, 1056, 514, "codes", 2, ()),  # so many rows that a simdgroup takes several, of which some are none
    ]:
        mx.random.seed(width + outs)
        arrays = {
            "x": mx.random.normal((rows, k, width)).astype(dtype),
            "experts": mx.random.randint(0, count, (rows, k)).astype(mx.uint32),
            "weights": mx.random.uniform(0, 1, (rows, k)),
        }
        if "residual" in extra:
            arrays["residual"] = mx.random.normal((rows, outs)).astype(dtype)
        if "bias" in extra:
            arrays["bias"] = mx.random.normal((count, outs)).astype(dtype)
        name = f"{mode}{bits} {k} of {count} [{outs}, {width}], {rows} tokens"
        yield Case(name, arrays, {"matrix": sample(mode, (count, outs, width), dtype, bits)})


def gathered(matrix: Matrix, x: mx.array, experts: mx.array) -> mx.array:
    """x [N, k or 1, K] through the matrices of `experts` [N, k] -> [N, k, O]."""
    if matrix.codes is not None:
        return matrix.codes.gathered(x[:, :, None], experts)[:, :, 0].astype(x.dtype)
    if matrix.scales is not None:
        w, s, b = matrix.weight, matrix.scales, matrix.biases
        y = mx.gather_qmm(
            x[:, :, None], w, s, b, rhs_indices=experts, transpose=True,
            group_size=matrix.group, bits=matrix.bits, mode=matrix.mode,
        )  # fmt: skip
    else:
        y = gather_mm(x[:, :, None], matrix.weight.swapaxes(-1, -2), experts)
    return y[:, :, 0]


@op(gate_up_cases)
def expert_gate_up(x, experts, matrix, activation, norm=None, eps=0.0, bias=None):
    """x [N, K] -> [N, k, I]: the activated gates times ups of each token's experts."""
    h = x if norm is None else mx.fast.rms_norm(x, norm, eps)
    y = gathered(matrix, h[:, None], experts)
    if bias is not None:
        y = y + bias[experts]
    return activate(activation, *mx.split(y, 2, axis=-1))


@op(down_cases)
def expert_down(x, experts, weights, matrix, bias=None, residual=None):
    """x [N, k, I] -> [N, O]: the sum of what each token's experts make of it, by weight; + residual."""
    y = gathered(matrix, x, experts)
    if bias is not None:
        y = y + bias[experts]
    y = (y * weights.astype(y.dtype)[..., None]).sum(axis=1)
    return y if residual is None else residual + y


@expert_gate_up.kernel(GATE_UP, refuses=refuses, pays=lambda x, **rest: x.shape[0] <= MANY)
def launch_gate_up(gpu, x, experts, matrix, activation, norm=None, eps=0.0, bias=None):
    (n, k), hidden = experts.shape, matrix.rows // 2
    each = 2 if hidden * n * k >= 4096 else 1
    [y] = gpu(
        GATE_UP,
        [x, experts, *matrix.inputs(), norm, bias],
        (math.ceil(hidden / (8 * each)), n * k, 1),
        256,
        [((n, k, hidden), x.dtype)],
        T=x.dtype,
        C=k,
        K=matrix.width,
        I=hidden,
        R=each,
        SG=8,
        RESIDENT=2,  # not timed apart: downs and products gained by it
        TILE=tile(matrix.width, 1),
        **matrix.constants(),
        NORM=norm is not None,
        EPS=bits_of(eps) if norm is not None else 0,
        BIAS=bias is not None,
        ACT=ACTIVATIONS[activation],
    )
    return y


@expert_down.kernel(DOWN, refuses=refuses, pays=lambda x, **rest: x.shape[0] <= MANY)
def launch_down(gpu, x, experts, weights, matrix, bias=None, residual=None):
    (n, k), outs = experts.shape, matrix.rows
    each, size = at_once(outs * n, matrix), min(k, TOGETHER)
    [y] = gpu(
        DOWN,
        [x, experts, weights, *matrix.inputs(), bias, residual],
        (math.ceil(outs / each), n, 1),
        32 * size,
        [((n, outs), x.dtype)],
        T=x.dtype,
        C=k,
        K=matrix.width,
        O=outs,
        R=each,
        SG=size,
        RESIDENT=RESIDENT,
        **matrix.constants(),
        BIAS=bias is not None,
        RES=residual is not None,
    )
    return y


def at_once(rows: int, matrix: Matrix) -> int:
    """Rows a simdgroup takes together: as many as a lane has room for, but at least 256 threadgroups of them."""
    return max(1, min(4, rows // 256, 16 // matrix.bits)) if matrix.packed else 1
