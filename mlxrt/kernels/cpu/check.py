"""Compares a compiled library with numpy in float64: `python check.py LIBRARY`, exit 0 if it is right. Imports no MLX."""

import ctypes
import sys

import numpy as np
from calls import CallList, MatmulCall, Matrix, open_library
from interleave import interleave_rows

TOLERANCE = 1e-5
K_QUANTS = {
    "Q2_K": (1, 84, 80), "Q3_K": (2, 110, 108), "Q4_K": (3, 144, 0), "Q5_K": (4, 176, 0), "Q6_K": (5, 210, 208),
    "IQ2_XXS": (6, 66, 0), "IQ4_XS": (7, 136, 0), "IQ4_NL": (8, 18, 0), "Q8_0": (9, 34, 0),
    "Q4_0": (10, 18, 0), "Q4_1": (11, 20, 0),
}  # fmt: skip
MXFP4, PLAIN = 12, 13
SHORT = ("IQ4_NL", "Q8_0", "Q4_0", "Q4_1")  # of 32 weights


def make_affine(rng, rows, width, bits, group):
    """(struct, what it points at, float64 values) of a random matrix."""
    weight = rng.integers(0, 256, (rows, width * bits // 8), dtype=np.uint8)
    scales, biases = (rng.standard_normal((2, rows, width // group)) * 0.1).astype(np.float16)
    stream = np.unpackbits(weight, axis=1, bitorder="little").reshape(rows, width, bits)
    codes = (stream * (1 << np.arange(bits))).sum(-1).astype(np.float64)
    values = codes * scales.repeat(group, 1).astype(np.float64) + biases.repeat(group, 1).astype(np.float64)
    arrays = (weight, np.ascontiguousarray(scales), np.ascontiguousarray(biases))
    return Matrix(*(a.ctypes.data for a in arrays), rows, width, weight.shape[1], 0, bits, group, 1, 0), arrays, values


def make_k_quant(rng, rows, width, name):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    number, size, at = K_QUANTS[name]
    count = width // (32 if name in SHORT else 256)
    blocks = rng.integers(0, 256, (rows, count, size), dtype=np.uint8)
    halves = (rng.standard_normal((rows, count, 2)) * 0.01).astype(np.float16).view(np.uint8)
    blocks[..., at : at + 4] = halves[..., : min(4, size - at)]
    weight = np.ascontiguousarray(blocks.reshape(rows, -1))
    values = dequantize(weight, GGMLQuantizationType[name]).astype(np.float64)
    return Matrix(weight.ctypes.data, None, None, rows, width, weight.shape[1], number, 0, 0, 0, 0), (weight,), values


def make_mxfp4(rng, rows, width):
    weight = rng.integers(0, 256, (rows, width // 2), dtype=np.uint8)
    scales = rng.integers(118, 136, (rows, width // 32), dtype=np.uint8)
    codes = np.stack((weight & 15, weight >> 4), axis=-1).reshape(rows, width)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate((numbers, -numbers))[codes] * np.exp2(scales.astype(np.float64) - 127).repeat(32, 1)
    fields = (weight.ctypes.data, scales.ctypes.data, None, rows, width, weight.shape[1], MXFP4, 4, 32, 0, 0)
    return Matrix(*fields), (weight, scales), values


def make_plain(rng, rows, width, kind):
    """Of floats: 0 float32, 1 float16, 2 bfloat16, whose bits numpy has as those of a float32's first half."""
    weight = rng.standard_normal((rows, width)).astype(np.float16 if kind == 1 else np.float32)
    values = weight.astype(np.float64)
    if kind == 2:
        weight = (weight.view(np.uint32) >> 16).astype(np.uint16)
        values = (weight.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    fields = (weight.ctypes.data, None, None, rows, width, width * weight.itemsize, PLAIN, 16, 32, kind, 0)
    return Matrix(*fields), (weight,), values


def interleave(made, name, together):
    """The same matrix with rows side by side."""
    matrix, (weight,), values = made
    rows = interleave_rows(name.lower(), weight, together)
    row_bytes = rows.shape[1] // together
    fields = (rows.ctypes.data, None, None, matrix.rows, matrix.width, row_bytes, matrix.format, 0, 0, 0, 1)
    return Matrix(*fields), (rows,), values


def group_size(label):
    """Numbers of x that share a scale."""
    if "_K x" in label:
        return 256
    return 16 if label in ("Q2_K", "Q3_K", "Q6_K") else 32


def round_to_bytes(x, size):
    """Activations as a library with one digit has them: a scale for every group of `size`."""
    groups = x.reshape(-1, size)
    largest = np.abs(groups).max(1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / largest))
    return (codes.astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


def check(path: str) -> str | None:
    """The first difference found."""
    library = open_library(path)
    rounds = library.mlxrt_activation_bits() == 8
    rng = np.random.default_rng(0)
    made = [(f"{b} bit group {g}", make_affine(rng, 37, 9 * g, b, g)) for b in (2, 3, 4, 5, 6, 8) for g in (32, 64)]
    made += [(f"MXFP4 of {width}", make_mxfp4(rng, 37, width)) for width in (768, 352, 2880)]
    made += [(f"{'float32 float16 bfloat16'.split()[kind]}s", make_plain(rng, 37, 1040, kind)) for kind in range(3)]
    made += [(name, make_k_quant(rng, 37, 768, name)) for name in K_QUANTS]
    made += [(f"{name} of 352", make_k_quant(rng, 37, 352, name)) for name in SHORT]
    for name, (number, *_) in K_QUANTS.items():
        if together := library.mlxrt_rows_together(number):
            width = 352 if name in SHORT else 768
            made += [(f"{name} x{together}", interleave(make_k_quant(rng, 6 * together, width, name), name, together))]
    for label, (matrix, _held, values) in made:
        x = rng.standard_normal((21, matrix.width)).astype(np.float32)
        seen = round_to_bytes(x, group_size(label)) if rounds and matrix.format != PLAIN else x
        right = seen.astype(np.float64) @ values.T
        for columns in (1, 2, 3, 4, 21):
            y = np.full((columns, matrix.rows), np.nan, np.float32)
            at = {"matrix": ctypes.addressof(matrix), "x": x.ctypes.data, "y": y.ctypes.data, "columns": columns}
            CallList([MatmulCall(**at)]).run(library, 2)
            error = np.abs(y - right[:columns]).max() / np.abs(right).max()
            if not error <= TOLERANCE:
                return f"{label} x{columns}: off by {error:.3g} of the largest value"
    return None


if __name__ == "__main__":
    if found := check(sys.argv[1]):
        sys.exit(found)
