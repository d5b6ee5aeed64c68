"""Rows of a packed embedding, gathered and unpacked in one launch."""

import math
from collections.abc import Iterator

import mlx.core as mx

from ..registry import Case, KernelSource, op
from ..testing import sample
from .k_quants import K_QUANTS
from .qmv import bits_of
from .quantized import FORMS

THREADS = 64
EMBEDDING = KernelSource("embedding.metal", ("tokens", "packed", "scales", "biases", "lut"), ("y",))


def embed_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for mode, bits, group, rows, width, many in [
        ("affine", 4, 64, 40, 128, 1),
        ("affine", 3, 32, 17, 288, 9),
        ("affine", 6, 64, 10, 320, 2),
        ("mxfp4", 4, 32, 12, 64, 3),
        ("q4_k_split", 4, 32, 9, 512, 3),
        ("q6_k_split", 6, 32, 7, 256, 2),
        ("q2_k_split", 2, 32, 5, 512, 4),
        ("q5_k_split", 5, 32, 3, 768, 1),
        ("q3_k_split", 3, 32, 5, 256, 3),
        ("iq4_xs_split", 4, 32, 4, 512, 2),
        ("iq4_nl_split", 4, 32, 11, 96, 3),
    ]:
        mx.random.seed(width)
        matrix = sample(mode, (rows, width), dtype, bits, group)
        tokens = mx.random.randint(0, rows, (many,)).astype(mx.uint32)
        options = {"matrix": matrix, "scale": width**0.5, "dtype": dtype}
        yield Case(f"{mode}{bits} group {group} [{rows}, {width}] x{many}", {"tokens": tokens}, options)


@op(embed_cases)
def embed_rows(tokens, matrix, dtype, scale=1.0):
    """[N, K]: the rows the tokens name, unpacked, times `scale`."""
    if matrix.is_k_quant:
        return (matrix.take(tokens).plain() * scale).astype(dtype)
    if not matrix.packed:
        return matrix.weight[tokens].astype(dtype) * scale
    biases = None if matrix.biases is None else matrix.biases[tokens]
    words, scales = matrix.weight[tokens], matrix.scales[tokens]
    y = mx.dequantize(words, scales, biases, matrix.group, matrix.bits, matrix.mode, dtype=dtype)
    return y if scale == 1.0 else y * scale


def unsupported(tokens, matrix, dtype, **rest) -> str | None:
    if matrix.packed and matrix.mode not in FORMS:
        return f"{matrix.mode} weights"
    if matrix.rows * matrix.width >= 1 << 32:
        return "2^32 elements or more"  # they are counted in 32 bits
    return f"rows of {matrix.width} numbers" if matrix.width % 32 else None


def is_faster(matrix, **rest) -> bool:
    return matrix.packed  # plain rows are one gather


@embed_rows.kernel(EMBEDDING, unsupported=unsupported, is_faster=is_faster)
def launch(gpu, tokens, matrix, dtype, scale=1.0):
    groups = (math.ceil(matrix.width / (8 * THREADS)), tokens.shape[0], 1)
    shape = (tokens.shape[0], matrix.width)
    constants = {"T": dtype, "K": matrix.width, "TIMES": bits_of(scale), "THREADS": THREADS, **matrix.constants()}
    return gpu(EMBEDDING, [tokens, *matrix.inputs()], groups, THREADS, [(shape, dtype)], **constants)[0]


def cpu_unsupported(tokens, matrix, dtype, **rest) -> str | None:
    return matrix.cpu_unsupported(dtype)


def cpu_cases() -> Iterator[Case]:
    for mode in K_QUANTS:
        mx.random.seed(7)
        options = {"matrix": sample(mode, (11, 512), mx.float32), "scale": 1.5, "dtype": mx.float32}
        yield Case(f"{mode} [11, 512] x3", {"tokens": mx.array([10, 0, 3])}, options)


@embed_rows.cpu_kernel(unsupported=cpu_unsupported, cases=cpu_cases)
def launch_cpu(cpu, tokens, matrix, dtype, scale=1.0):
    return cpu.embed(matrix, tokens, scale)
