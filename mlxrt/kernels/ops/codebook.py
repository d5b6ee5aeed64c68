"""Products with matrices of codebook vectors: W[row, j * g + i] = codebook[codes[row, j], i]."""

import math
from collections.abc import Iterator

import mlx.core as mx

from ..registry import Case, InlineSource, op

MANY = 64
SIMDGROUPS = 8
VECTORS = InlineSource(
    "mlxrt_vector_rows",
    ("x", "experts", "codes", "book"),
    ("y",),
    r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint first = (threadgroup_position_in_grid.x * SG + sg) * R; uint p = threadgroup_position_in_grid.y;
    uint base = ROUTED ? uint(experts[p]) * uint(O) : 0u; uint at = (p / uint(C)) * uint(J * G);
    float acc[R]; uint row[R];
    #pragma unroll
    for (int r = 0; r < R; r++) { row[r] = base + metal::min(first + uint(r), uint(O - 1)); acc[r] = 0.0f; }
    for (uint j = lane; j < uint(J); j += 32) {
        float v[G];
        #pragma unroll
        for (int g = 0; g < G; g++) v[g] = float(x[at + j * G + uint(g)]);
        #pragma unroll
        for (int r = 0; r < R; r++) {
            uint c = uint(codes[row[r] * J + j]) * uint(G);
            #pragma unroll
            for (int g = 0; g < G; g++) acc[r] += v[g] * float(book[c + uint(g)]);
        }
    }
    #pragma unroll
    for (int r = 0; r < R; r++) {
        float a = simd_sum(acc[r]); uint o = first + uint(r);
        if (lane == 0 && o < uint(O)) y[p * O + o] = static_cast<OUT>(a);
    }
""",
)


def expand(codes: mx.array, book: mx.array) -> mx.array:
    """The rows [..., out, in] that codes [..., out, in / g] stand for."""
    return book[codes].flatten(-2)


def vector_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes = [(1, 0, 12, 96, 8, mx.uint16), (2, 4, 9, 72, 4, mx.uint8), (3, 3, 20, 64, 8, mx.uint32)]
    for rows, count, outs, width, length, kind in shapes:
        mx.random.seed(width)
        codes = mx.random.randint(0, 50, (*((count,) if count else ()), outs, width // length)).astype(kind)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype), "codes": codes}
        arrays["book"] = (mx.random.normal((50, length)) * width**-0.5).astype(mx.float16)
        if count:
            arrays["experts"] = mx.random.randint(0, count, (rows, 2)).astype(mx.uint32)
        yield Case(f"{length} of {width}, {count} experts, x{rows}", arrays, {"dtype": dtype})


@op(vector_cases)
def vector_rows(x, codes, book, dtype, experts=None):
    """x [N, K] -> [N, O]; with experts [N, k] of a stack: [N, k, O]."""
    x, book = x.astype(mx.float32), book.astype(mx.float32)
    if experts is None:
        return (x @ expand(codes, book).T).astype(dtype)
    return (x[:, None, None] @ expand(codes[experts], book).swapaxes(-1, -2))[:, :, 0].astype(dtype)


def refuses(x, codes, book, **rest) -> str | None:
    if x.ndim != 2:
        return f"x of {x.ndim} axes"
    return "a stack of 2^32 numbers or more" if codes.size * book.shape[1] >= 1 << 32 else None


@vector_rows.kernel(VECTORS, refuses=refuses, pays=lambda x, **rest: x.shape[0] <= MANY)
def launch(gpu, x, codes, book, dtype, experts=None):
    outs, pairs = codes.shape[-2], x.shape[0] if experts is None else experts.size
    each = 4 if outs * pairs >= 4096 else 1
    shape = (x.shape[0], outs) if experts is None else (*experts.shape, outs)
    [y] = gpu(
        VECTORS,
        [x, experts, codes, book],
        (math.ceil(outs / (SIMDGROUPS * each)), pairs, 1),
        32 * SIMDGROUPS,
        [(shape, dtype)],
        OUT=dtype, C=1 if experts is None else experts.shape[1], O=outs, J=codes.shape[-1], G=book.shape[1], R=each,
        SG=SIMDGROUPS, ROUTED=experts is not None,
    )  # fmt: skip
    return y
