"""A product of a sum: residual + RMSNorm(x) is what the matrix reads, and is handed out beside the product.

Where a branch is normed on its way out, add_norm would be a launch of its own before every product. Here each
threadgroup makes the whole sum for itself while its first weights are on their way, and the first one writes it. The
rest of the text is matvec's: the sum is rounded as if it had been in memory, so the product is the same.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..registry import Case, Source, op
from .add_norm import add_norm
from .qmv import MATVEC, bits_of, matvec, multiplied, product_case

STAGE = r"""
// stage8 of (residual + x * inv * post) * f, which is also written to h.
template <typename T, int FORM, bool NORM, int K, typename X, typename R, typename W, typename H, typename G, typename P, typename S>
FN float stage_sum8(X x, R residual, W post, float inv, float f, H h, bool writes, uint from, G g, uint at, uint t, P xs, S sums) {
    uint i = piece_of(t); bool live = at + 8 * i < uint(K); uint here = (from + at) / 8 + i;
    uint a[2 * sizeof(T)]; uint b[2 * sizeof(T)]; uint c[2 * sizeof(T)]; uint d[2 * sizeof(T)];
    float v[8]; float r[8]; float p[8]; float w[8]; float squares = 0.0f;
    fetch8(x, here, live, a); fetch8(residual, here, live, b); fetch8(post, at / 8 + i, live, c);
    if (NORM) { fetch8(g, at / 8 + i, live, d); unpack8<T>(d, w); }
    unpack8<T>(a, v); unpack8<T>(b, r); unpack8<T>(c, p);
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        T sum = static_cast<T>((v[n] * inv * p[n] + r[n]) * f);
        if (writes && live) h[8 * here + uint(n)] = sum;
        v[n] = float(sum); squares += v[n] * v[n];
        if (NORM) v[n] *= w[n];
    }
    lay8<T, FORM>(v, i, xs, sums);
    return squares;
}
"""
# `norms` is matvec's: it is not used before the tiles are done, and there are barriers between.
DIVISORS = r"""
    float inv[M]; float f = SCALED ? float(scalar[0]) : 1.0f;
    #pragma unroll
    for (int m = 0; m < M; m++) {
        float mine = 0.0f;
        for (uint i = t; i < uint(K / 8); i += uint(SG * 32)) {
            float v[8]; load8<T>(x, m * (K / 8) + i, v);
            #pragma unroll
            for (int n = 0; n < 8; n++) mine += v[n] * v[n];
        }
        mine = simd_sum(mine);
        if (lane == 0) norms[m][sg] = mine;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    #pragma unroll
    for (int m = 0; m < M; m++) {
        float total = 0.0f;
        for (int c = 0; c < SG; c++) total += norms[m][c];
        inv[m] = metal::rsqrt(total / float(K) + as_type<float>(uint(POST_EPS)));
    }
"""
TILES = "    for (uint k0 = 0; k0 < uint(K); k0 += TILE) {\n"
FROM_MEMORY = "stage8<T, FORM, NORM, K>(x, m * K, "
OF_SUM = "stage_sum8<T, FORM, NORM, K>(x, residual, post, inv[m], f, h, threadgroup_position_in_grid.x == 0, m * K, "


def changed(text: str, old: str, new: str) -> str:
    """A text with one place changed. Who edits matvec's and forgets this file is told."""
    if text.count(old) != 1:
        raise ValueError(f"a kernel's text must have this once, for sums.py: {old}")
    return text.replace(old, new)


MATVEC_OF_SUM = Source(
    "mlxrt_matvec_sum",  # `_of_` begins what `named` adds to a name
    (*MATVEC.inputs, "residual", "post", "scalar"),
    (*MATVEC.outputs, "h"),
    changed(changed(MATVEC.body, TILES, DIVISORS.removeprefix("\n") + TILES), FROM_MEMORY, OF_SUM),
    MATVEC.helpers + STAGE,
)


def sum_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        ("affine", 4, 64, 24, 1088, 1, {"norm": True, "eps": 1e-5, "activation": "gelu", "pair": True}),
        ("affine", 4, 32, 9, 96, 1, {"activation": "gelu", "times": True}),
        ("dense", 16, 32, 13, 2208, 2, {"norm": True, "eps": 1e-6, "scaled": True}),  # two tiles
        ("affine", 8, 64, 11, 1152, 3, {"norm": True, "eps": 1e-6}),  # two tiles
        ("affine", 4, 32, 5, 1024, 4, {"bias": True, "scaled": True}),  # a whole tile
        ("dense", 16, 32, 7, 2112, 1, {"bias": True}),  # a thread takes two pieces of x
        ("mxfp4", 4, 32, 9, 4128, 1, {"norm": True, "eps": 1e-6}),  # two tiles
    ]
    for shape in shapes:
        base = product_case(dtype, *shape)
        (m, width), arrays = base.arrays["x"].shape, dict(base.arrays)
        arrays["x"] *= mx.arange(1, m + 1).astype(dtype)[:, None]  # each row has another divisor
        arrays["residual"] = mx.random.normal((m, width)).astype(dtype)
        arrays["post"] = (1 + 0.3 * mx.random.normal((width,))).astype(dtype)
        if shape[-1].get("scaled"):
            arrays["scalar"] = mx.array([0.7]).astype(dtype)
        yield Case(base.name, arrays, base.options | {"post_eps": 0.1})


@op(sum_cases)
def matvec_of_sum(x, matrix, residual, post, post_eps, scalar=None, **product):
    """h = (residual + RMSNorm(x)) * scalar, and matvec of it: (the product [N, O], h [N, K])."""
    h = add_norm.reference(x, post, post_eps, residual, scalar)
    return matvec.reference(h, matrix, **product), h


def refuses(x, matrix, residual, post, norm=None, **rest) -> str | None:
    if residual.dtype != x.dtype or post.dtype != x.dtype:  # they are read eight at a time, as words
        return f"a branch in {x.dtype}, the residual in {residual.dtype}, the norm in {post.dtype}"
    return matrix.refused(x, norm)


@matvec_of_sum.kernel(MATVEC_OF_SUM, refuses=refuses, pays=matvec.pays)
def launch(gpu, x, matrix, residual, post, post_eps, scalar=None, **product):
    given = {"POST_EPS": bits_of(post_eps), "SCALED": scalar is not None}
    more, outputs = [residual, post, scalar], [(x.shape, x.dtype)]
    return tuple(multiplied(gpu, MATVEC_OF_SUM, x, matrix, **product, more=more, outputs=outputs, **given))
