"""GGUF's K-quants, IQ4_NL and IQ4_XS, as kernels read them; for CPUs also Q8_0, Q4_0 and Q4_1.

A file has blocks of 256 weights: bits of values in planes, scales of groups as integers of a few bits, one or two float16.
Some types have blocks of 32 with float16s alone. CPU kernels read these blocks. GPU kernels read 16 aligned bytes a lane, so for them a matrix is split, without loss, into
values packed as MLX packs them, the integers of the groups, and the float16s of the blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..cpu.build import multiplies_bytes
from ..cpu.interleave import BLOCKS, TOGETHER, interleave_rows, separate_rows
from .bitpack import pack_bits, unpack_bits

# Bytes of 256 weights that lie in uint8 rows as in the file, which CPU kernels read.
K_QUANTS = {"q2_k": 84, "q3_k": 110, "q4_k": 144, "q5_k": 176, "q6_k": 210, "iq2_xxs": 66, "iq4_xs": 136, "iq4_nl": 144}
K_QUANTS |= {"q8_0": 272, "q4_0": 144, "q4_1": 160}
SHORT_BLOCKS = ("iq4_nl", "q8_0", "q4_0", "q4_1")  # of them, those whose blocks are of 32 weights
# MLX's affine layout holds these as well. CPU kernels multiply their blocks faster where bytes have dot products, on ARM
# (dot.h) and with AVX-512 VNNI (lanes.h); elsewhere they look affine values up.
AFFINE_BLOCKS = ("q8_0", "q4_0", "q4_1")
# Modes of matrices whose rows CPU kernels read side by side: the type, and how many rows are one.
INTERLEAVED = {f"{kind}_x{together}": (kind, together) for kind in BLOCKS for together in TOGETHER}
CPU_BLOCKS = tuple(kind for kind in K_QUANTS if kind not in AFFINE_BLOCKS or multiplies_bytes())
K_QUANT_HALVES = {
    "q2_k": (80, 2),
    "q3_k": (108, 1),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208, 1),
    "iq2_xxs": (0, 1),
    "iq4_xs": (0, 1),
    "iq4_nl": (0, 1),
    "q8_0": (0, 1),
    "q4_0": (0, 1),
    "q4_1": (0, 2),
}  # float16: where, how many

# How a split matrix stores its scales (metal/quantized.h): groups of 32 with a scale and a minimum in uint16; two groups
# of 16 with signed scales in uint16, plus 128; two groups of 16 with scale and minimum in a byte each; groups of 32 with a
# signed scale in uint8, plus 128, of centroids; groups of 32 with a float16 scale of centroids.
K_MIN, K_SIGNED, K_NIBBLE, K_LUT, GROUP_LUT = "k_min", "k_signed", "k_nibble", "k_lut", "group_lut"
# The types of what belongs to 32 weights and of what belongs to a block.
SPLIT_MODES: dict[str, tuple[mx.Dtype, mx.Dtype | None]] = {
    K_MIN: (mx.uint16, mx.uint32),
    K_SIGNED: (mx.uint16, mx.uint16),
    K_NIBBLE: (mx.uint16, mx.uint32),
    K_LUT: (mx.uint8, mx.uint16),
    GROUP_LUT: (mx.float16, None),
}
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SPLIT_AT_ONCE = 1 << 24  # weights: a value takes several bytes while it is moved


@dataclass(frozen=True)
class SplitKind:
    """A GGUF type that is split: its blocks in the file, and what becomes of them."""

    mode: str
    bits: int
    nbytes: int  # of a block in the file
    unpack: Callable[[mx.array], tuple[mx.array, ...]]  # blocks [.., nbytes] -> values, scales, float16s as integers
    elements: int = 256  # of a block

    @property
    def has_lut(self) -> bool:
        return self.mode in (K_LUT, GROUP_LUT)

    @property
    def split_bytes(self) -> int:
        """Of a block once it is split."""
        scales, halves = SPLIT_MODES[self.mode]
        return self.elements * self.bits // 8 + self.elements // 32 * scales.size + (halves.size if halves else 0)


def block_shape(kind: str) -> tuple[int, int]:
    """(bytes, weights) of a block in the file."""
    return (K_QUANTS[kind] // 8, 32) if kind in SHORT_BLOCKS else (K_QUANTS[kind], 256)


def interleave_matrix(kind: str, rows: mx.array, together: int) -> mx.array:
    """uint8 [O, bytes] as in a file -> [O / together, together * bytes], as CPU kernels read them (cpu/interleave.py)."""
    return mx.array(interleave_rows(kind, np.array(rows, copy=False), together))


def separate_matrix(kind: str, rows: mx.array, together: int) -> mx.array:
    """What interleave_matrix was given."""
    return mx.array(separate_rows(kind, np.array(rows, copy=False), together))


def planes(data: mx.array, run: int, bits: int) -> mx.array:
    """Fields of `bits` bits of bytes, as ggml has them: of each `run` of bytes first the lowest ones, then the next."""
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)[:, None]
    fields = (data.reshape(*data.shape[:-1], -1, 1, run) >> shifts) & mx.array((1 << bits) - 1, mx.uint8)
    return fields.flatten(-3)


def as_words(data: mx.array, dtype: mx.Dtype) -> mx.array:
    """Bytes as larger integers, the lowest byte first."""
    return mx.contiguous(data).view(dtype)


def scales_and_minima(packed: mx.array) -> mx.array:
    """Twelve bytes of Q4_K and Q5_K -> eight uint16: a scale of six bits, and a minimum above it."""
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = mx.concatenate([low & 63, (rest & 15) | ((low >> 2) & 48)], axis=-1)
    minima = mx.concatenate([high & 63, (rest >> 4) | ((high >> 2) & 48)], axis=-1)
    return scales.astype(mx.uint16) | (minima.astype(mx.uint16) << 8)


def unpack_q2_k(blocks: mx.array) -> tuple[mx.array, ...]:
    return (
        planes(blocks[..., 16:80], 32, 2),
        as_words(blocks[..., :16], mx.uint16),
        as_words(blocks[..., 80:], mx.uint32),
    )


def unpack_q3_k(blocks: mx.array) -> tuple[mx.array, ...]:
    values = planes(blocks[..., 32:96], 32, 2) | (planes(blocks[..., :32], 32, 1) << 2)
    scales = planes(blocks[..., 96:104], 8, 4) | (planes(blocks[..., 104:108], 4, 2) << 4)
    return values, as_words(scales + 96, mx.uint16), as_words(blocks[..., 108:], mx.uint16)


def unpack_q4_k(blocks: mx.array) -> tuple[mx.array, ...]:
    return planes(blocks[..., 16:], 32, 4), scales_and_minima(blocks[..., 4:16]), as_words(blocks[..., :4], mx.uint32)


def unpack_q5_k(blocks: mx.array) -> tuple[mx.array, ...]:
    values = planes(blocks[..., 48:], 32, 4) | (planes(blocks[..., 16:48], 32, 1) << 4)
    return values, scales_and_minima(blocks[..., 4:16]), as_words(blocks[..., :4], mx.uint32)


def unpack_q6_k(blocks: mx.array) -> tuple[mx.array, ...]:
    values = planes(blocks[..., :128], 64, 4) | (planes(blocks[..., 128:192], 32, 2) << 4)
    return values, as_words(blocks[..., 192:208] ^ 128, mx.uint16), as_words(blocks[..., 208:], mx.uint16)


def unpack_iq4_xs(blocks: mx.array) -> tuple[mx.array, ...]:
    low = (blocks[..., 4:8, None] >> mx.array([0, 4], mx.uint8)) & 15
    scales = low.flatten(-2) | (((blocks[..., 2:4, None] >> mx.arange(0, 8, 2, dtype=mx.uint8)) & 3).flatten(-2) << 4)
    return planes(blocks[..., 8:], 16, 4), scales + 96, as_words(blocks[..., :2], mx.uint16)


def unpack_iq4_nl(blocks: mx.array) -> tuple[mx.array, ...]:
    return planes(blocks[..., 2:], 16, 4), as_words(blocks[..., :2], mx.float16)


SPLIT_KINDS = {
    "q2_k": SplitKind(K_NIBBLE, 2, 84, unpack_q2_k),
    "q3_k": SplitKind(K_SIGNED, 3, 110, unpack_q3_k),
    "q4_k": SplitKind(K_MIN, 4, 144, unpack_q4_k),
    "q5_k": SplitKind(K_MIN, 5, 176, unpack_q5_k),
    "q6_k": SplitKind(K_SIGNED, 6, 210, unpack_q6_k),
    "iq4_xs": SplitKind(K_LUT, 4, 136, unpack_iq4_xs),
    "iq4_nl": SplitKind(GROUP_LUT, 4, 18, unpack_iq4_nl, 32),
}


def split_parts(kind: str) -> tuple[str, ...]:
    """What the tensors of a split matrix are called, below their module."""
    names = (kind, f"{kind}_scales", f"{kind}_halves")
    return names[:2] if SPLIT_KINDS[kind].mode == GROUP_LUT else names


# Of all tensors that hold K-quants, as they are in a file or split.
TENSOR_NAMES = tuple(dict.fromkeys((*K_QUANTS, *(part for kind in SPLIT_KINDS for part in split_parts(kind)))))


def split_blocks(kind: str, rows: mx.array) -> tuple[mx.array, ...]:
    """uint8 [.., O, bytes] -> packed values [.., O, words], scales [.., O, groups] and, but for IQ4_NL, float16s as
    integers [.., O, blocks]. A part of the rows at a time."""
    split = SPLIT_KINDS[kind]
    flat = rows.reshape(-1, rows.shape[-1])
    each = max(1, SPLIT_AT_ONCE // (flat.shape[1] // split.nbytes * split.elements))
    parts = []
    for i in range(0, flat.shape[0], each):
        some = flat[i : i + each]
        values, *rest = split.unpack(some.reshape(some.shape[0], -1, split.nbytes))
        made = pack_bits(values.flatten(1), split.bits), *(a.flatten(1) for a in rest)
        mx.eval(made)
        parts.append(made)
    joined = (mx.concatenate(list(arrays)) if len(parts) > 1 else arrays[0] for arrays in zip(*parts, strict=True))
    return tuple(a.reshape(*rows.shape[:-1], -1) for a in joined)


def empty_split(kind: str, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
    """What split_blocks makes of a matrix [.., O, K], as lazy zeros."""
    split, (*rows, width) = SPLIT_KINDS[kind], shape
    scales, halves = SPLIT_MODES[split.mode]
    made = mx.zeros((*rows, width * split.bits // 32), mx.uint32), mx.zeros((*rows, width // 32), scales)
    return made if halves is None else (*made, mx.zeros((*rows, width // split.elements), halves))


def iq4_lut() -> mx.array:
    return mx.array(IQ4_VALUES, mx.float32)


def dequantize_split(
    mode: str, bits: int, weight: mx.array, scales: mx.array, biases: mx.array | None, lut: mx.array | None
) -> mx.array:
    """The float32 values [.., O, K] of a split matrix: those of llama.cpp's dequantisation, bit for bit."""
    values = unpack_bits(weight, bits)
    groups = lambda count: values.reshape(*weight.shape[:-1], count, -1)  # noqa: E731
    if mode == GROUP_LUT:
        assert lut is not None
        return (scales.astype(mx.float32)[..., None] * lut[groups(scales.shape[-1])]).flatten(-2)
    assert biases is not None
    halves = biases.view(mx.float16).astype(mx.float32).reshape(*biases.shape, -1)
    integers = scales.view(mx.uint8).reshape(*biases.shape, -1)  # of each block: one byte, or two, for 32 weights
    per_block = lambda numbers, i: (numbers.astype(mx.float32) * halves[..., i : i + 1]).flatten(-2)[..., None]  # noqa: E731
    if mode == K_LUT:
        assert lut is not None
        scale = per_block(integers.astype(mx.int32) - 128, 0)
        return (scale * lut[groups(scale.shape[-2])]).flatten(-2)
    if mode == K_SIGNED:
        scale = per_block(integers.astype(mx.int32) - 128, 0)
        signed = values.astype(mx.float32) - (1 << (bits - 1))
        return (scale * signed.reshape(*weight.shape[:-1], scale.shape[-2], -1)).flatten(-2)
    pairs = (integers & 15, integers >> 4) if mode == K_NIBBLE else (integers[..., ::2], integers[..., 1::2])
    scale, minimum = per_block(pairs[0], 0), per_block(pairs[1], 1)
    return (scale * groups(scale.shape[-2]).astype(mx.float32) - minimum).flatten(-2)


def dequantize_blocks(rows: mx.array, kind: str) -> mx.array:
    """The float32 values of rows of blocks as a file has them, by PyPI's gguf."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(np.array(rows), GGMLQuantizationType[kind.upper()])
    return mx.array(values.astype(np.float32, copy=False))
