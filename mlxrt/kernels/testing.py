"""Random matrices in every layout kernels read: what their cases multiply by."""

import mlx.core as mx

from .ops.bitpack import pack_bits
from .ops.k_quants import K_QUANT_HALVES, K_QUANTS, SPLIT_KINDS, block_shape, split_blocks
from .ops.quantized import QuantizedMatrix, split_matrix


def sample(mode: str, shape: tuple[int, ...], dtype: mx.Dtype, bits: int = 4, group: int = 32) -> QuantizedMatrix:
    """[.., O, K]; `group` is used by affine ones only. K-quants by their type: q4_k as in a file, q4_k_split for GPUs."""
    width = shape[-1]
    if mode == "lut":
        indices = mx.random.randint(0, 1 << bits, shape).astype(mx.uint32)
        lut = mx.sort(mx.random.normal((1 << bits,))) * width**-0.5
        lut = mx.pad(lut, (0, max(0, 8 - lut.size)))  # as models keep them
        norms = (1 + mx.random.uniform(shape=shape[:-1])).astype(mx.float16)
        return QuantizedMatrix(pack_bits(indices, bits), norms, None, bits, width, mode, lut)
    if mode in K_QUANTS:
        size = 0.002 if mode.startswith("iq4") or mode == "q8_0" else 0.01  # their values reach 127
        return QuantizedMatrix(sample_blocks(mode, shape, size, *block_shape(mode)), mode=mode)
    if split := SPLIT_KINDS.get(mode.removesuffix("_split")):
        kind, size = mode.removesuffix("_split"), 0.3 * width**-0.5 / (8 << split.bits)
        return split_matrix(kind, split_blocks(kind, sample_blocks(kind, shape, size, split.nbytes, split.elements)))
    w = (mx.random.normal(shape) * width**-0.5).astype(dtype)
    if mode == "dense":
        return QuantizedMatrix(w)
    packed = mx.quantize(w, group, bits, mode=mode)
    return QuantizedMatrix(packed[0], packed[1], packed[2] if mode == "affine" else None, bits, group, mode)


def sample_blocks(kind: str, shape: tuple[int, ...], size: float, nbytes: int, elements: int) -> mx.array:
    """Random blocks of `nbytes` for so many elements, uint8 rows; their float16 scales are about `size`."""
    at, count = K_QUANT_HALVES[kind]
    blocks = mx.random.randint(0, 256, (*shape[:-1], shape[-1] // elements, nbytes)).astype(mx.uint8)
    halves = (mx.random.normal((*blocks.shape[:-1], 2)) * size).astype(mx.float16).view(mx.uint8)
    scales = halves[..., : 2 * count]
    blocks = mx.concatenate([blocks[..., :at], scales, blocks[..., at + scales.shape[-1] :]], axis=-1)
    return blocks.flatten(-2)
