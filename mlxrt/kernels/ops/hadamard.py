"""Randomised Hadamard rotation of activations: signs, then a Walsh-Hadamard transform of each block.

Blocks are a width's powers of two, the largest first, or all of one size: an index and its partner differ in one bit.
"""

from collections.abc import Iterator
from itertools import accumulate

import mlx.core as mx

from ..registry import Case, KernelSource, op

MAX_WIDTH = 8192  # floats in 32 KB of threadgroup memory
THREADS = 256
HADAMARD = KernelSource("hadamard.metal", ("x", "signs"), ("y",))


def transform_blocks(x: mx.array, blocks: tuple[int, ...]) -> mx.array:
    """Transforms each block by itself: one transform of the full width would be another matrix."""
    if len(set(blocks)) == 1:
        return mx.hadamard_transform(x.reshape(*x.shape[:-1], len(blocks), blocks[0])).flatten(-2)
    parts = mx.split(x, list(accumulate(blocks))[:-1], axis=-1)
    return mx.concatenate([mx.hadamard_transform(part) for part in parts], axis=-1)


def hadamard_cases(dtype: mx.Dtype) -> Iterator[Case]:
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


@op(hadamard_cases)
def hadamard(x, blocks, dtype, signs=None):
    """x [N, D] -> [N, D], computed in float32."""
    x = x.astype(mx.float32)
    return transform_blocks(x if signs is None else x * signs, blocks).astype(dtype)


def unsupported(x, blocks, **rest) -> str | None:
    return f"rows of {x.shape[-1]} elements" if x.shape[-1] > MAX_WIDTH or x.ndim != 2 else None


@hadamard.kernel(HADAMARD, unsupported=unsupported)
def launch(gpu, x, blocks, dtype, signs=None):
    [y] = gpu(
        HADAMARD,
        [x, signs],
        x.shape[0],
        THREADS,
        [(x.shape, dtype)],
        OUT=dtype,
        WIDTH=x.shape[1],
        MAX_BLOCK=max(blocks),
        UNIFORM=len(set(blocks)) == 1,
        SIGNS=signs is not None,
        THREADS=THREADS,
    )
    return y
