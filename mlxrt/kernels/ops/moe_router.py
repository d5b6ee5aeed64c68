"""Which experts a token goes to, and how much of each: norm, product, scores and the choice in one launch."""

from collections.abc import Iterator

import mlx.core as mx

from ..registry import Case, InlineSource, op
from ..testing import sample
from .qmv import bits_of
from .quantized import READ, Matrix
from .staging import DOT, ROOM, whole_tile

MOST = 512  # experts
SIMDGROUPS = 16

# A row of x in threadgroup memory, normed but for the factor `inv`; then the logits, one for each expert. RFORM, RBITS and
# RGROUP are the router's matrix's; LAID is 0 where anybody wants x's sums by 32.
LOGITS = r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x; uint nil = threadgroup_position_in_grid.z;
    const int PLACES = TILE / 4; const int RLEVELS = RFORM == 3 ? 1 << RBITS : 1;
    threadgroup float logits[E]; threadgroup float4 xs[PLACES]; threadgroup float sums[TILE / 16]; threadgroup float part[SG];
    threadgroup float rtable[RLEVELS];
    lay_levels<RFORM, RLEVELS, SG * 32>(rl, t, &rtable[0]);
    float squares = 0.0f;
    for (uint i = t; i < uint(TILE / 8); i += uint(SG * 32)) {
        squares += stage8<T, LAID, NORM, K>(x, n * K, g, 0, i, &xs[0], &sums[0]);
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
    for (uint e = sg * RR; e < uint(E); e += uint(SG * RR)) {
        uint row[RR]; float acc[1][RR];
        #pragma unroll
        for (int r = 0; r < RR; r++) { row[r] = metal::min(e + uint(r), uint(E - 1)); acc[0][r] = 0.0f; }
        for (uint k = lane * 32; k < uint(K); k += 1024) {
            rows_dot<T, RFORM, RBITS, RGROUP, K, PLACES, 1, RR>(rw, rs, rz, row, k, k, lift_of<RBITS>(nil), &rtable[0], &xs[0], &sums[0], acc);
        }
        #pragma unroll
        for (int r = 0; r < RR; r++) {
            float y = simd_sum(acc[0][r]) * inv;
            if (lane == 0 && e + uint(r) < uint(E)) logits[e + r] = RBIAS ? y + float(rbias[e + r]) : y;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
"""
# The first simdgroup chooses: its lane c < C then knows the c-th best expert and its weight, for CHOSEN.
CHOOSE = r"""
    if (sg == 0) {
        const int EACH = (E + 31) / 32;
        uint key[EACH]; float share[EACH]; float top = -1e30f; float total = 0.0f;
        #pragma unroll
        for (int j = 0; j < EACH; j++) top = metal::max(top, lane + 32 * j < uint(E) ? logits[lane + 32 * j] : -1e30f);
        top = simd_max(top);
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            share[j] = lane + 32 * j < uint(E) ? share_of<SIGMOID>(logits[lane + 32 * j], top) : 0.0f; total += share[j];
        }
        total = SIGMOID ? 1.0f : simd_sum(total);
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            uint e = lane + 32 * j; key[j] = 0;
            if (e < uint(E)) key[j] = key_of(CORRECT ? share[j] / total + float(correction[e]) : share[j]);
        }
        uint which = 0;
        for (uint c = 0; c < uint(C); c++) {
            uint best = 0; uint at = 0;
            #pragma unroll
            for (int j = 0; j < EACH; j++) if (key[j] > best) { best = key[j]; at = lane + 32 * j; }
            uint winner = simd_min(best == simd_max(best) ? at : 0xffffu);
            #pragma unroll
            for (int j = 0; j < EACH; j++) if (winner == lane + 32 * j) key[j] = 0;
            if (lane == c) which = winner;
        }
        bool mine = lane < uint(C); float weight = mine ? share_of<SIGMOID>(logits[which], top) : 0.0f;
        weight /= NORMALISE ? simd_sum(weight) : total;
        if (SCALED && mine) weight *= float(scales[which]);
        CHOSEN
    }
"""
ROUTING = r"""
template <bool SIGMOID> FN float share_of(float logit, float top) {
    return SIGMOID ? 1.0f / (1.0f + metal::exp(-logit)) : metal::exp(logit - top);
}
// Whole numbers in the order of the floats: largest and first are found by them with few instructions. None is 0.
FN uint key_of(float f) { uint u = as_type<uint>(f); return (u & 0x80000000u) != 0u ? ~u : u | 0x80000000u; }
"""
INPUTS = ("rw", "rs", "rz", "rl", "g", "rbias", "correction", "scales")
GIVE = "if (mine) { experts[n * C + lane] = which; weights[n * C + lane] = weight; }"
ROUTE = InlineSource(
    "mlxrt_route",
    ("x", *INPUTS),
    ("experts", "weights"),
    "    uint n = threadgroup_position_in_grid.x;" + LOGITS + CHOOSE.replace("CHOSEN", GIVE),
    READ + DOT + ROUTING,
)


def route_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes = [
        (1, 40, 64, 4, "dense", {"norm": True, "normalise": True}),
        (3, 128, 1056, 8, "affine", {"norm": True}),
        (2, 33, 96, 2, "dense", {"sigmoid": True, "correction": True, "normalise": True}),
        (2, 32, 64, 4, "dense", {"bias": True, "normalise": True, "scales": True}),
        (2, 35, 64, 3, "dense", {"correction": True}),
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
    if (need := memory(matrix)) > ROOM:
        return f"{matrix.rows} experts of {matrix.width} numbers: {need} bytes of threadgroup memory, {ROOM} are there"
    return matrix.refused(x, norm)


def memory(matrix: Matrix) -> int:
    """Bytes of threadgroup memory: a row of x with its sums, the logits, the levels of codes, a number a simdgroup."""
    row, levels = whole_tile(matrix.width), 1 if matrix.levels is None else 1 << matrix.bits
    return 4 * (row + row // 16 + matrix.rows + levels + SIMDGROUPS)


def pays(x, **rest) -> bool:
    return x.shape[0] <= 64


@route.kernel(ROUTE, refuses=refuses, pays=pays)
def launch(gpu, x, matrix, k, norm=None, eps=0.0, bias=None, correction=None, scales=None, **rules):
    n, constants = x.shape[0], routing(matrix, k, norm, eps, bias, correction, scales, **rules)
    experts, weights = gpu(
        ROUTE,
        [x, *matrix.inputs(), norm, bias, correction, scales],
        n,
        32 * SIMDGROUPS,
        [((n, k), mx.uint32), ((n, k), mx.float32)],
        T=x.dtype,
        LAID=constants["RFORM"],
        **constants,
    )
    return experts, weights


def routing(matrix, k, norm, eps, bias, correction, scales, sigmoid=False, normalise=False) -> dict[str, int]:
    """The choice, as constants of a kernel."""
    held = matrix.constants()
    return {
        "RFORM": held["FORM"],
        "RBITS": held["BITS"],
        "RGROUP": held["GROUP"],
        "E": matrix.rows,
        "K": matrix.width,
        "C": k,
        "RR": 4 if matrix.rows >= 64 else 2,
        "SG": SIMDGROUPS,
        "TILE": whole_tile(matrix.width),
        "NORM": norm is not None,
        "EPS": bits_of(eps) if norm is not None else 0,
        "RBIAS": bias is not None,
        "SIGMOID": sigmoid,
        "NORMALISE": normalise,
        "CORRECT": correction is not None,
        "SCALED": scales is not None,
    }
