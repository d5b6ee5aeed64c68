"""Dequantises matrices that MLX has no products for, where x has so many rows that MLX's own matmul is the faster way."""

import math
from collections.abc import Iterator

import mlx.core as mx

from ..registry import Case, KernelSource, op
from ..testing import sample
from .k_quants import SPLIT_KINDS

THREADS = 256
DEQUANTIZE = KernelSource("dequantize.metal", ("packed", "scales", "biases", "lut"), ("y",))


def dequantize_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for bits, shape in [(2, (5, 40, 96)), (3, (4, 9, 64)), (4, (3, 33, 32)), (8, (16, 160)), (1, (12, 64))]:
        mx.random.seed(bits)
        yield Case(f"{bits} bit {list(shape)}", {}, {"matrix": sample("lut", shape, dtype, bits), "dtype": dtype})
    for kind, split in SPLIT_KINDS.items():
        mx.random.seed(split.bits)
        yield Case(f"{kind} [2, 5, 512]", {}, {"matrix": sample(f"{kind}_split", (2, 5, 512), dtype), "dtype": dtype})


@op(dequantize_cases)
def dequantize(matrix, dtype):
    """The dense matrices [.., O, K]; those of a LUT in the rotated basis."""
    return matrix.plain().astype(dtype)


def unsupported(matrix, dtype) -> str | None:
    if matrix.weight.size // matrix.bits >= 1 << 27:
        return "a stack of 2^32 elements or more"
    return f"rows of {matrix.width} elements" if matrix.width % 32 else None


@dequantize.kernel(DEQUANTIZE, unsupported=unsupported)
def launch(gpu, matrix, dtype):
    shape = (*matrix.weight.shape[:-1], matrix.width)
    groups = math.ceil(math.prod(shape) / (8 * THREADS))
    constants = {"OUT": dtype, "ELEMENTS": math.prod(shape), "THREADS": THREADS, **matrix.constants()}
    return gpu(DEQUANTIZE, matrix.inputs(), groups, THREADS, [(shape, dtype)], **constants)[0]
