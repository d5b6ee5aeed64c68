"""Which experts a token goes to, and how much of each: norm, product, scores and the choice in one launch."""

import math
from collections.abc import Iterator

import mlx.core as mx

from .matvec import bits_of
from .op import Case, Source, op
from .packing import READ
from .samples import sample
from .staged import DOT

MOST = 512  # experts
WIDEST = 7168  # numbers of a row: with the logits they fill 32 KB

# One threadgroup a token: its simdgroups make the logits, the first of them chooses.
BODY = r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint n = threadgroup_position_in_grid.x; uint one = lift_of<BITS>(threadgroup_position_in_grid.z);
    const int PLACES = TILE / 4; uint t = thread_position_in_threadgroup.x;
    threadgroup float logits[E]; threadgroup float4 xs[PLACES]; threadgroup float sums[TILE / 32]; threadgroup float part[SG];
    const int LEVELS = FORM == 3 ? 1 << BITS : 1; threadgroup float table[LEVELS];
    lay_levels<FORM, LEVELS, SG * 32>(l, t, &table[0]);
    float squares = 0.0f;
    for (uint i = t; i < uint(TILE / 8); i += uint(SG * 32)) {
        squares += stage8<T, FORM, NORM, K>(x, n * K, g, 0, i, &xs[0], &sums[0]);
    }
    squares = simd_sum(squares);
    if (lane == 0) part[sg] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float inv = 1.0f;
    if (NORM) {
        float whole = 0.0f;
        for (int i = 0; i < SG; i++) whole += part[i];
        inv = metal::rsqrt(whole / float(K) + as_type<float>(uint(EPS)));
    }
    for (uint e = sg * R; e < uint(E); e += uint(SG * R)) {
        uint row[R]; float acc[1][R];
        #pragma unroll
        for (int r = 0; r < R; r++) { row[r] = metal::min(e + uint(r), uint(E - 1)); acc[0][r] = 0.0f; }
        for (uint k = lane * 32; k < uint(K); k += 1024) {
            rows_dot<T, FORM, BITS, GROUP, K, PLACES, 1, R>(w, s, z, row, k, k, one, &table[0], &xs[0], &sums[0], acc);
        }
        #pragma unroll
        for (int r = 0; r < R; r++) {
            float y = simd_sum(acc[0][r]) * inv;
            if (lane == 0 && e + uint(r) < uint(E)) logits[e + r] = BIAS ? y + float(bias[e + r]) : y;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg == 0) {
        const int EACH = (E + 31) / 32;
        float share[EACH]; float score[EACH]; float top = -1e30f; float total = 0.0f;
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            uint e = lane + 32 * j;
            share[j] = e < uint(E) ? logits[e] : -1e30f; top = metal::max(top, share[j]);
        }
        top = simd_max(top);
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            uint e = lane + 32 * j;
            share[j] = e >= uint(E) ? 0.0f : SIGMOID ? 1.0f / (1.0f + metal::exp(-share[j])) : metal::exp(share[j] - top);
            total += share[j];
            score[j] = e >= uint(E) ? -1e30f : CORRECT ? share[j] + float(correction[e]) : share[j];
        }
        total = SIGMOID ? 1.0f : simd_sum(total);
        float mine = 0.0f; uint which = 0; float chosen = 0.0f;
        for (uint c = 0; c < uint(C); c++) {
            float best = -2e30f; uint at = 0; float part = 0.0f;
            #pragma unroll
            for (int j = 0; j < EACH; j++) if (score[j] > best) { best = score[j]; at = lane + 32 * j; part = share[j]; }
            float most = simd_max(best);
            uint winner = simd_min(best == most ? at : 0xffffu);
            float won = simd_sum(winner == at ? part : 0.0f);
            #pragma unroll
            for (int j = 0; j < EACH; j++) if (winner == lane + 32 * j) score[j] = -2e30f;
            chosen += won;
            if (lane == c) { mine = won; which = winner; }
        }
        if (lane < uint(C)) {
            float f = NORMALISE ? chosen : total;
            experts[n * C + lane] = which;
            weights[n * C + lane] = mine / f * (SCALED ? float(scales[which]) : 1.0f);
        }
    }
"""
ROUTE = Source(
    "mlxrt_route",
    ("x", "w", "s", "z", "l", "g", "bias", "correction", "scales"),
    ("experts", "weights"),
    BODY,
    READ + DOT,
)


def route_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes = [
        (1, 40, 64, 4, "dense", {"norm": True, "normalise": True}),
        (3, 128, 1056, 8, "affine", {"norm": True}),
        (2, 33, 96, 2, "dense", {"sigmoid": True, "correction": True, "normalise": True}),
        (2, 32, 64, 4, "dense", {"bias": True, "normalise": True, "scales": True}),
        (1, 36, 96, 3, "codes", {"normalise": True}),
    ]
    for rows, count, width, k, mode, extra in shapes:
        mx.random.seed(count)
        matrix = sample(mode, (count, width), dtype, 8)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype)}
        for name, size in (("norm", width), ("bias", count), ("correction", count), ("scales", count)):
            if extra.get(name):
                arrays[name] = (1 + 0.3 * mx.random.normal((size,))).astype(dtype)
        rules = {name: bool(extra.get(name)) for name in ("sigmoid", "normalise")}
        options = {"matrix": matrix, "k": k, "eps": 1e-6, **rules}
        yield Case(f"{k} of {count}, {width} {mode}, {rows} tokens", arrays, options)


@op(route_cases)
def route(x, matrix, k, norm=None, eps=0.0, bias=None, sigmoid=False, normalise=False, correction=None, scales=None):
    """(experts [N, k], weights [N, k] float32), best first: softmax or sigmoid scores, `correction` on the choice."""
    h = x if norm is None else mx.fast.rms_norm(x, norm, eps)
    logits = matrix.multiply(h).astype(mx.float32)
    if bias is not None:
        logits = logits + bias
    shares = mx.sigmoid(logits) if sigmoid else mx.softmax(logits, axis=-1)
    experts = mx.argsort(-(shares if correction is None else shares + correction), axis=-1)[:, :k]
    weights = mx.take_along_axis(shares, experts, axis=-1)
    if normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return experts, weights if scales is None else weights * scales[experts].astype(mx.float32)


def refuses(x, matrix, k, norm=None, **rest) -> str | None:
    if matrix.rows > MOST or k > 32:
        return f"{k} of {matrix.rows} experts"
    if matrix.width > WIDEST:
        return f"rows of {matrix.width} numbers: {WIDEST} fit threadgroup memory"
    return matrix.refused(x, norm)


def pays(x, **rest) -> bool:
    return x.shape[0] <= 64


@route.kernel(ROUTE, refuses=refuses, pays=pays)
def launch(
    gpu, x, matrix, k, norm=None, eps=0.0, bias=None, sigmoid=False, normalise=False, correction=None, scales=None
):
    n, count = x.shape[0], matrix.rows
    experts, weights = gpu(
        ROUTE,
        [x, *matrix.inputs(), norm, bias, correction, scales],
        n,
        512,
        [((n, k), mx.uint32), ((n, k), mx.float32)],
        T=x.dtype,
        E=count,
        K=matrix.width,
        C=k,
        R=4 if count >= 64 else 2,
        SG=16,
        TILE=1024 * math.ceil(matrix.width / 1024),
        **matrix.constants(),
        NORM=norm is not None,
        EPS=bits_of(eps) if norm is not None else 0,
        BIAS=bias is not None,
        SIGMOID=sigmoid,
        NORMALISE=normalise,
        CORRECT=correction is not None,
        SCALED=scales is not None,
    )
    return experts, weights
