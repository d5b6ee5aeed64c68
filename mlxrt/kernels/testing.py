"""Random matrices in every layout kernels read: what their cases multiply by."""

import mlx.core as mx

from .ops.bitpack import pack_bits
from .ops.quantized import QuantizedMatrix


def sample(mode: str, shape: tuple[int, ...], dtype: mx.Dtype, bits: int = 4, group: int = 32) -> QuantizedMatrix:
    """[.., O, K]; `group` is used by affine ones only."""
    width = shape[-1]
    if mode == "lut":
        indices = mx.random.randint(0, 1 << bits, shape).astype(mx.uint32)
        lut = mx.sort(mx.random.normal((1 << bits,))) * width**-0.5
        lut = mx.pad(lut, (0, max(0, 8 - lut.size)))  # as models keep them
        norms = (1 + mx.random.uniform(shape=shape[:-1])).astype(mx.float16)
        return QuantizedMatrix(pack_bits(indices, bits), norms, None, bits, width, mode, lut)
    w = (mx.random.normal(shape) * width**-0.5).astype(dtype)
    if mode == "dense":
        return QuantizedMatrix(w)
    packed = mx.quantize(w, group, bits, mode=mode)
    return QuantizedMatrix(packed[0], packed[1], packed[2] if mode == "affine" else None, bits, group, mode)
