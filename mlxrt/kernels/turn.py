"""The turning of a vector before it meets codes: signs, then a Walsh-Hadamard transform of each block.

Blocks are a width's powers of two, the largest first, or all of one size: an index and its partner differ in one bit.
"""

from collections.abc import Iterator
from itertools import accumulate

import mlx.core as mx

from .op import Case, Source, op

WIDEST = 8192  # floats in 32 KB of threadgroup memory
THREADS = 256
# (i ^ D) has its highest bit where i's block of D's binary digits ends: it is the block's size or more.
TURN = Source(
    "mlxrt_turn",
    ("x", "signs"),
    ("y",),
    r"""
    uint t = thread_position_in_threadgroup.x; uint n = threadgroup_position_in_grid.x;
    threadgroup float v[D];
    for (uint i = t; i < uint(D); i += THREADS) {
        float a = float(x[n * D + i]);
        v[i] = SIGNS ? a * float(signs[i]) : a;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint h = 1; h < uint(MOST); h *= 2) {
        for (uint p = t; p < uint(D / 2); p += THREADS) {
            uint i = (p / h) * 2 * h + p % h;
            if (UNIFORM || (i ^ uint(D)) >= 2 * h) {
                float a = v[i]; float b = v[i + h];
                v[i] = (a + b) * 0.70710678118f; v[i + h] = (a - b) * 0.70710678118f;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint i = t; i < uint(D); i += THREADS) y[n * D + i] = v[i];
""",
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
    ]:
        mx.random.seed(len(blocks))
        width = sum(blocks)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype)}
        if signed:
            arrays["signs"] = mx.where(mx.random.uniform(shape=(width,)) < 0.5, -1.0, 1.0)
        yield Case(f"{rows} x {'+'.join(map(str, blocks))}", arrays, {"blocks": blocks})


@op(turn_cases, {"float16": 2e-5, "bfloat16": 2e-5})
def turn(x, blocks, signs=None):
    """x [N, D] -> float32 [N, D]."""
    x = x.astype(mx.float32)
    return transform(x if signs is None else x * signs, blocks)


def refuses(x, blocks, **rest) -> str | None:
    return f"rows of {x.shape[-1]} numbers" if x.shape[-1] > WIDEST or x.ndim != 2 else None


@turn.kernel(TURN, refuses=refuses)
def launch(gpu, x, blocks, signs=None):
    uniform = len(set(blocks)) == 1
    [y] = gpu(
        TURN,
        [x, signs],
        x.shape[0],
        THREADS,
        [(x.shape, mx.float32)],
        D=x.shape[1],
        MOST=max(blocks),
        UNIFORM=uniform,
        SIGNS=signs is not None,
        THREADS=THREADS,
    )
    return y
