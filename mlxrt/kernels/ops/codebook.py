"""Matrix product with codebook weights: W[row, j * g + i] = codebook[indices[row, j], i]."""

import math
from collections.abc import Iterator

import mlx.core as mx

from ..registry import Case, KernelSource, op

MAX_ROWS = 64  # of x up to which the kernel is the faster way
SIMDGROUPS = 8
CODEBOOK = KernelSource("codebook.metal", ("x", "experts", "indices", "codebook"), ("y",))


def dequantize_codebook(indices: mx.array, codebook: mx.array) -> mx.array:
    """indices [..., out, in / g] -> the dense rows [..., out, in]."""
    return codebook[indices].flatten(-2)


def codebook_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes = [(1, 0, 12, 96, 8, mx.uint16), (2, 4, 9, 72, 4, mx.uint8), (3, 3, 20, 64, 8, mx.uint32)]
    for rows, count, outs, width, length, kind in shapes:
        mx.random.seed(width)
        indices = mx.random.randint(0, 50, (*((count,) if count else ()), outs, width // length)).astype(kind)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype), "indices": indices}
        arrays["codebook"] = (mx.random.normal((50, length)) * width**-0.5).astype(mx.float16)
        if count:
            arrays["experts"] = mx.random.randint(0, count, (rows, 2)).astype(mx.uint32)
        yield Case(f"{length} of {width}, {count} experts, x{rows}", arrays, {"dtype": dtype})


@op(codebook_cases)
def codebook_rows(x, indices, codebook, dtype, experts=None):
    """x [N, K] -> [N, O]; with experts [N, k] of a stack: [N, k, O]."""
    x, codebook = x.astype(mx.float32), codebook.astype(mx.float32)
    if experts is None:
        return (x @ dequantize_codebook(indices, codebook).T).astype(dtype)
    return (x[:, None, None] @ dequantize_codebook(indices[experts], codebook).swapaxes(-1, -2))[:, :, 0].astype(dtype)


def unsupported(x, indices, codebook, **rest) -> str | None:
    if x.ndim != 2:
        return f"x of {x.ndim} axes"
    return "a stack of 2^32 elements or more" if indices.size * codebook.shape[1] >= 1 << 32 else None


@codebook_rows.kernel(CODEBOOK, unsupported=unsupported, is_faster=lambda x, **rest: x.shape[0] <= MAX_ROWS)
def launch(gpu, x, indices, codebook, dtype, experts=None):
    outs, pairs = indices.shape[-2], x.shape[0] if experts is None else experts.size
    each = 4 if outs * pairs >= 4096 else 1
    shape = (x.shape[0], outs) if experts is None else (*experts.shape, outs)
    [y] = gpu(
        CODEBOOK,
        [x, experts, indices, codebook],
        (math.ceil(outs / (SIMDGROUPS * each)), pairs, 1),
        32 * SIMDGROUPS,
        [(shape, dtype)],
        OUT=dtype, TOP_K=1 if experts is None else experts.shape[1], OUTPUTS=outs, VECTORS=indices.shape[-1],
        VECTOR=codebook.shape[1], ROWS=each, SIMDGROUPS=SIMDGROUPS, ROUTED=experts is not None,
    )  # fmt: skip
    return y
