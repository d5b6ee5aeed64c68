"""Random matrices in every layout kernels read: what their cases multiply by."""

import mlx.core as mx

from .ops.bitpack import pack_bits
from .ops.quantized import K_QUANT_HALVES, K_QUANTS, QuantizedMatrix


def sample(mode: str, shape: tuple[int, ...], dtype: mx.Dtype, bits: int = 4, group: int = 32) -> QuantizedMatrix:
    """[.., O, K]; `group` is used by affine ones only."""
    width = shape[-1]
    if mode == "lut":
        indices = mx.random.randint(0, 1 << bits, shape).astype(mx.uint32)
        lut = mx.sort(mx.random.normal((1 << bits,))) * width**-0.5
        lut = mx.pad(lut, (0, max(0, 8 - lut.size)))  # as models keep them
        norms = (1 + mx.random.uniform(shape=shape[:-1])).astype(mx.float16)
        return QuantizedMatrix(pack_bits(indices, bits), norms, None, bits, width, mode, lut)
    if mode in K_QUANTS:
        return sample_k_quant(mode, shape)
    w = (mx.random.normal(shape) * width**-0.5).astype(dtype)
    if mode == "dense":
        return QuantizedMatrix(w)
    packed = mx.quantize(w, group, bits, mode=mode)
    return QuantizedMatrix(packed[0], packed[1], packed[2] if mode == "affine" else None, bits, group, mode)


def sample_k_quant(mode: str, shape: tuple[int, ...]) -> QuantizedMatrix:
    """Random blocks, with float16 scales of a size that models have."""
    size, (at, count) = K_QUANTS[mode], K_QUANT_HALVES[mode]
    blocks = mx.random.randint(0, 256, (shape[0], shape[1] // 256, size)).astype(mx.uint8)
    halves = (mx.random.normal((*blocks.shape[:-1], 2)) * 0.01).astype(mx.float16).view(mx.uint8)
    scales = halves[..., : 2 * count]
    blocks = mx.concatenate([blocks[..., :at], scales, blocks[..., at + scales.shape[-1] :]], axis=-1)
    return QuantizedMatrix(blocks.reshape(shape[0], -1), mode=mode)
