"""What packed words stand for, in numpy float64, from the formats' definitions: no MLX."""

import numpy as np

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Rows of quantised values: each row is one stream of bits, low bits first."""
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(len(words), -1, bits) @ (1 << np.arange(bits))


def e4m3(code: np.ndarray) -> np.ndarray:
    sign, exponent, fraction = code >> 7, (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    return np.where(sign == 1, -size, size)


def matrix(mode: str, bits: int, group: int, words, scales, biases=None) -> np.ndarray:
    code = unpack(words, bits)
    if mode == "affine":
        return np.repeat(scales.astype(np.float64), group, 1) * code + np.repeat(biases.astype(np.float64), group, 1)
    value = e4m3(code) if mode == "mxfp8" else np.where(code >> 3 == 1, -FP4[code & 7], FP4[code & 7])
    factor = e4m3(scales.astype(int)) if mode == "nvfp4" else 2.0 ** (scales.astype(np.float64) - 127)
    return np.repeat(factor, group, 1) * value
