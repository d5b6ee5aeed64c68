"""Dequantises LUT matrices, for products with so many rows of x that MLX's own matmul is the faster way."""

import math
from collections.abc import Iterator

import mlx.core as mx

from ..registry import Case, Source, op
from ..testing import sample

THREADS = 256
LUT_DEQUANTIZE = Source("lut_dequantize.metal", ("packed", "scales", "biases", "lut"), ("y",))


def dequantize_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for bits, shape in [(2, (5, 40, 96)), (3, (4, 9, 64)), (4, (3, 33, 32)), (8, (16, 160)), (1, (12, 64))]:
        mx.random.seed(bits)
        yield Case(f"{bits} bit {list(shape)}", {}, {"matrix": sample("lut", shape, dtype, bits), "dtype": dtype})


@op(dequantize_cases)
def lut_dequantize(matrix, dtype):
    """The dense matrices in the rotated basis, [.., O, K]."""
    return matrix.plain().astype(dtype)


def unsupported(matrix, dtype) -> str | None:
    if matrix.scales.size * matrix.width >= 1 << 32:
        return "a stack of 2^32 elements or more"
    return f"rows of {matrix.width} elements" if matrix.width % 32 else None


@lut_dequantize.kernel(LUT_DEQUANTIZE, unsupported=unsupported)
def launch(gpu, matrix, dtype):
    shape = (*matrix.scales.shape, matrix.width)
    groups = math.ceil(math.prod(shape) / THREADS)
    constants = {"OUT": dtype, "ELEMENTS": math.prod(shape), "THREADS": THREADS, **matrix.constants()}
    return gpu(LUT_DEQUANTIZE, matrix.inputs(), groups, THREADS, [(shape, dtype)], **constants)[0]
