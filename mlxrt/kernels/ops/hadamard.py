"""The turning of a vector before it meets codes: signs, then a Walsh-Hadamard transform of each block.

Blocks are a width's powers of two, the largest first, or all of one size: an index and its partner differ in one bit.
"""

from collections.abc import Iterator
from itertools import accumulate

import mlx.core as mx

from ..registry import Case, InlineSource, op

WIDEST = 8192  # floats in 32 KB of threadgroup memory
THREADS = 256
WITHIN = r"""
// Whether number i of D meets number i ^ h: they are of one block. (i ^ D) has its highest bit where i's block of D's
// binary digits ends: it is the block's size or more, and less than twice that.
template <int D, int MOST, bool UNIFORM> FN bool within(uint i, uint h) {
    return UNIFORM ? h < uint(MOST) : (i ^ uint(D)) >= 2 * h;
}
template <bool SIGNS, typename X, typename S> FN float signed_at(X x, S signs, uint from, uint i) {
    return SIGNS ? float(x[from + i]) * float(signs[i]) : float(x[from + i]);
}
// Two numbers that meet.
FN void meet(thread float& a, thread float& b) {
    float sum = (a + b) * 0.70710678118f; b = (a - b) * 0.70710678118f; a = sum;
}
"""
# The steps may be taken in any order. First a thread holds numbers THREADS apart and takes those of that distance and more;
# where there are none, it starts with what comes then: a lane holds eight numbers, 32 apart. One exchange lies between.
TURN = InlineSource(
    "mlxrt_turn",
    ("x", "signs"),
    ("y",),
    r"""
    uint t = thread_position_in_threadgroup.x; uint n = threadgroup_position_in_grid.x;
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    const int EACH = (D + THREADS - 1) / THREADS; const bool FAR = MOST > THREADS;
    threadgroup float v[FAR ? D : 1];
    if (FAR) {
        float a[EACH];
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            uint i = t + uint(THREADS * j);
            a[j] = i < uint(D) ? signed_at<SIGNS>(x, signs, n * D, i) : 0.0f;
        }
        #pragma unroll
        for (int h = 1; h < EACH; h *= 2) {
            #pragma unroll
            for (int j = 0; j + h < EACH; j++) {
                uint i = t + uint(THREADS * j);
                if ((j & h) == 0 && within<D, MOST, UNIFORM>(i, uint(THREADS * h))) meet(a[j], a[j + h]);
            }
        }
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            uint i = t + uint(THREADS * j);
            if (i < uint(D)) v[i] = a[j];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint q = sg; q < uint(EACH); q += uint(THREADS / 32)) {
        float b[8]; uint first = q * 256 + lane;
        #pragma unroll
        for (int m = 0; m < 8; m++) {
            uint i = first + uint(32 * m);
            b[m] = i >= uint(D) ? 0.0f : FAR ? v[i] : signed_at<SIGNS>(x, signs, n * D, i);
        }
        #pragma unroll
        for (int h = 1; h < 8; h *= 2) {
            #pragma unroll
            for (int m = 0; m < 8; m++) {
                if ((m & h) == 0 && within<D, MOST, UNIFORM>(first + uint(32 * m), uint(32 * h))) meet(b[m], b[(m + h) % 8]);
            }
        }
        #pragma unroll
        for (uint h = 1; h < 32; h *= 2) {
            #pragma unroll
            for (int m = 0; m < 8; m++) {
                float other = simd_shuffle_xor(b[m], h);
                if (within<D, MOST, UNIFORM>(first + uint(32 * m), h)) {
                    b[m] = ((lane & h) == 0 ? b[m] + other : other - b[m]) * 0.70710678118f;
                }
            }
        }
        #pragma unroll
        for (int m = 0; m < 8; m++) {
            uint i = first + uint(32 * m);
            if (i < uint(D)) y[n * D + i] = static_cast<OUT>(b[m]);
        }
    }
""",
    WITHIN,
)


def transform(x: mx.array, blocks: tuple[int, ...]) -> mx.array:
    """Every block transformed alone: the transform of the whole width at once is another matrix."""
    if len(set(blocks)) == 1:
        return mx.hadamard_transform(x.reshape(*x.shape[:-1], len(blocks), blocks[0])).flatten(-2)
    parts = mx.split(x, list(accumulate(blocks))[:-1], axis=-1)
    return mx.concatenate([mx.hadamard_transform(part) for part in parts], axis=-1)


def turn_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, blocks, signed in [
        (3, (64, 32), True),
        (1, (512, 128, 8), True),
        (2, (32,) * 5, False),
        (1, (1024,), True),
        (2, (2048, 1024), True),
        (1, (512, 512), False),
        (1, (1024, 256, 64, 2), True),
        (1, (64,) * 5, True),
    ]:
        mx.random.seed(len(blocks))
        width = sum(blocks)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype)}
        if signed:
            arrays["signs"] = mx.where(mx.random.uniform(shape=(width,)) < 0.5, -1.0, 1.0)
        yield Case(f"{rows} x {'+'.join(map(str, blocks))}", arrays, {"blocks": blocks, "dtype": dtype})


@op(turn_cases)
def turn(x, blocks, dtype, signs=None):
    """x [N, D] -> [N, D], computed in float32."""
    x = x.astype(mx.float32)
    return transform(x if signs is None else x * signs, blocks).astype(dtype)


def refuses(x, blocks, **rest) -> str | None:
    return f"rows of {x.shape[-1]} numbers" if x.shape[-1] > WIDEST or x.ndim != 2 else None


@turn.kernel(TURN, refuses=refuses)
def launch(gpu, x, blocks, dtype, signs=None):
    uniform = len(set(blocks)) == 1
    [y] = gpu(
        TURN,
        [x, signs],
        x.shape[0],
        THREADS,
        [(x.shape, dtype)],
        OUT=dtype,
        D=x.shape[1],
        MOST=max(blocks),
        UNIFORM=uniform,
        SIGNS=signs is not None,
        THREADS=THREADS,
    )
    return y
