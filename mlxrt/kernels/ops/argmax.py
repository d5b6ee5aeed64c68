"""The best token of each row and whether its logit is a number, in one launch: for the next step, and for the host."""

from collections.abc import Iterator

import mlx.core as mx

from ..registry import Case, Source, op
from .quantized import READ

SIZE = 1024
BODY = r"""
    uint n = threadgroup_position_in_grid.x; uint t = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    threadgroup float tops[32]; threadgroup uint wheres[32]; threadgroup uint odd[32];
    float huge = as_type<float>(0x7f800000u); float best = -huge; uint at = 0xffffffffu; uint nan = 0;
    if (V % 8 == 0) {  // sixteen bytes at a time, where rows begin at such
        for (uint i = t; i < uint(V / 8); i += 1024) {
            float v[8]; load8<T>(x, n * uint(V / 8) + i, v);
            #pragma unroll
            for (uint c = 0; c < 8; c++) {
                if (v[c] != v[c]) nan = 1;
                if (v[c] > best) { best = v[c]; at = 8 * i + c; }
            }
        }
    } else {
        for (uint i = t; i < uint(V); i += 1024) {
            float v = float(x[n * V + i]);
            if (v != v) nan = 1;
            if (v > best) { best = v; at = i; }
        }
    }
    float top = simd_max(best);
    uint where = simd_min(best == top ? at : 0xffffffffu);
    uint any = 1 - simd_min(1 - nan);
    if (lane == 0) { tops[sg] = top; wheres[sg] = where; odd[sg] = any; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 0) {
        uint wrong = 0;
        for (int s = 0; s < 32; s++) {
            wrong |= odd[s];
            if (tops[s] > top || (tops[s] == top && wheres[s] < where)) { top = tops[s]; where = wheres[s]; }
        }
        bool fine = wrong == 0 && top > -huge && top < huge;
        tokens[n] = fine ? where : 0; told[2 * n] = fine ? where : 0; told[2 * n + 1] = fine ? 0 : 1;
    }
"""
GREEDY = Source("mlxrt_greedy", ("x",), ("tokens", "told"), BODY, READ)


TIE = 9.0  # the largest of a row, twice in what one thread reads
CASES = [
    (1, 40, None), (3, 2500, None), (3, 1100, mx.nan), (2, 1024, mx.inf), (2, 33, -mx.inf),
    (2, 8200, None), (2, 9000, mx.nan), (2, 48, -mx.inf), (2, 2500, TIE), (2, 9000, TIE),
]  # fmt: skip


def greedy_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, vocab, odd in CASES:
        mx.random.seed(vocab)
        x = mx.random.normal((rows, vocab)).astype(dtype)
        if odd == TIE:
            x[0, 17] = x[0, 17 + (8192 if vocab % 8 == 0 else 1024)] = odd
        elif odd is not None:
            x[0] = (
                mx.full((vocab,), odd) if odd == -mx.inf else mx.where(mx.arange(vocab) == 17, odd, x[0]).astype(dtype)
            )
        yield Case(f"[{rows}, {vocab}]{'' if odd is None else f' with {odd}'}", {"x": x})


@op(greedy_cases)
def greedy(x):
    """(tokens uint32 [R], told uint32 [R, 2]): the first of the largest logits; rows without a finite one have token 0.
    `told` is the same token, and 1 if the row has none."""
    tokens = mx.argmax(x, axis=-1)
    peak = mx.take_along_axis(x, tokens[:, None], axis=-1)[:, 0].astype(mx.float32)
    bad = ~mx.isfinite(peak)
    tokens = mx.where(bad, mx.array(0, mx.uint32), tokens.astype(mx.uint32))
    return tokens, mx.stack([tokens, bad.astype(mx.uint32)], axis=1)


@greedy.kernel(GREEDY)
def launch(gpu, x):
    rows, vocab = x.shape
    outputs = [((rows,), mx.uint32), ((rows, 2), mx.uint32)]
    tokens, told = gpu(GREEDY, [x], rows, SIZE, outputs, T=x.dtype, V=vocab)
    return tokens, told
