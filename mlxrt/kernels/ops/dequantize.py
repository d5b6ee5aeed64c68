"""Matrices of codes unpacked, for products with so many rows of x that MLX's own is the faster way."""

import math
from collections.abc import Iterator

import mlx.core as mx

from ..registry import Case, InlineSource, op
from ..testing import sample
from .quantized import READ

THREADS = 256
UNPACK = InlineSource(
    "mlxrt_coded_unpack",
    ("w", "n", "z", "levels"),
    ("y",),
    r"""
    uint t = thread_position_in_threadgroup.x; uint i = threadgroup_position_in_grid.x * uint(THREADS) + t;
    const int LEVELS = 1 << BITS; threadgroup float table[LEVELS];
    lay_levels<FORM, LEVELS, THREADS>(levels, t, &table[0]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i < uint(NUMBERS)) {
        uint bit = i % 32 * BITS; uint at = i / 32 * BITS + bit / 32; uint shift = bit % 32;
        uint v = w[at] >> shift;
        if (shift + BITS > 32) v |= w[at + 1] << (32 - shift);
        y[i] = static_cast<OUT>(float(n[i / GROUP]) * table[v & ((1u << BITS) - 1u)]);
    }
""",
    READ,
)


def unpack_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for bits, shape in [(2, (5, 40, 96)), (3, (4, 9, 64)), (4, (3, 33, 32)), (8, (16, 160)), (1, (12, 64))]:
        mx.random.seed(bits)
        yield Case(f"{bits} bit {list(shape)}", {}, {"matrix": sample("codes", shape, dtype, bits), "dtype": dtype})


@op(unpack_cases)
def coded_unpack(matrix, dtype):
    """The matrices themselves in the turned basis, [.., O, K]: what many tokens are multiplied by."""
    return matrix.plain().astype(dtype)


def refuses(matrix, dtype) -> str | None:
    if matrix.scales.size * matrix.width >= 1 << 32:
        return "a stack of 2^32 numbers or more"
    return f"rows of {matrix.width} numbers" if matrix.width % 32 else None


@coded_unpack.kernel(UNPACK, refuses=refuses)
def launch(gpu, matrix, dtype):
    shape = (*matrix.scales.shape, matrix.width)
    groups = math.ceil(math.prod(shape) / THREADS)
    constants = {"OUT": dtype, "NUMBERS": math.prod(shape), "THREADS": THREADS, **matrix.constants()}
    return gpu(UNPACK, matrix.inputs(), groups, THREADS, [(shape, dtype)], **constants)[0]
