"""JANG 1.x: every matrix is one bitstream (X.qweight, uint8), with a scale and a bias or zero per block of 64 weights.

Converted to MLX's affine format with the same values. Where bits differ between the blocks of a matrix (1.0) all get
the most of them: scales and biases stay the same.
"""

import logging

import mlx.core as mx
import numpy as np

from ....errors import BadCheckpoint, quote
from ....kernels.dtypes import FLOATS
from ....kernels.ops.bitpack import pack_bits
from ..checkpoint import LARGEST_DIMENSION
from ..int_matrix import Arrays
from ..quantized import AFFINE_BITS
from ..weight_format import describe

log = logging.getLogger("mlxrt")

PARTS = ("qweight", "scales", "biases", "zeros", "bits", "bit_map", "block_offsets", "shape")
BLOCK = 64
STREAM_BITS = (2, 3, 4, 5, 6, 8)


def has_streams(arrays: Arrays) -> bool:
    return any(name.endswith(".qweight") and array.dtype == mx.uint8 for name, array in arrays.items())


def read_streams(arrays: Arrays, dtype: mx.Dtype) -> Arrays:
    """All tensors, the streams as X.weight, X.scales and X.biases, or as plain X.weight where blocks cross rows."""
    made: Arrays = {}
    plain = []
    for path in [name.removesuffix(".qweight") for name in arrays if name.endswith(".qweight")]:
        shape = read_shape(path, arrays)
        stream = read_stream(path, shape, arrays)
        if shape[-1] % BLOCK:
            made[f"{path}.weight"] = dequantize(shape, *stream).astype(dtype)
            plain.append(path)
        else:
            made |= to_affine(path, shape, *stream)
        mx.eval(made)  # one by one, to free the temporaries of unpacking
        for part in PARTS:
            arrays.pop(f"{path}.{part}", None)
    if plain:
        log.info(f"JANG 1: {len(plain)} matrices ({quote(plain[0])} ...) have blocks across rows; they are dequantised")
    if twice := sorted(made.keys() & arrays.keys()):
        raise BadCheckpoint(f"{quote(twice[0])} is in the checkpoint twice: as a stream and as itself")
    return arrays | made


def read_shape(path: str, arrays: Arrays) -> tuple[int, ...]:
    found = arrays.get(f"{path}.shape")
    if found is None or found.ndim != 1 or found.size not in (2, 3) or not mx.issubdtype(found.dtype, mx.integer):
        raise BadCheckpoint(f"{path}.shape: expected two or three integers, found {describe(found)}")
    shape = tuple(int(n) for n in np.array(found))
    if not all(0 < n <= LARGEST_DIMENSION for n in shape):
        raise BadCheckpoint(f"{path}.shape = {list(shape)} is not the shape of a matrix")
    return shape


def read_stream(path: str, shape: tuple[int, ...], arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Quantised values of all weights, scale and bias of all blocks, and the most bits of any block."""
    count = int(np.prod(shape, dtype=object))
    blocks = -(-count // BLOCK)
    stream = arrays[f"{path}.qweight"]
    if stream.dtype != mx.uint8 or stream.ndim != 1:
        raise BadCheckpoint(f"{path}.qweight: expected a stream of bytes, found {describe(stream)}")
    scale = per_block(path, "scales", blocks, arrays)
    if f"{path}.zeros" in arrays:
        bias = -scale * per_block(path, "zeros", blocks, arrays)
    else:
        bias = per_block(path, "biases", blocks, arrays)
    bits = read_bits(path, blocks, arrays)
    check_offsets(path, bits, arrays)
    values = unpack_stream(path, np.array(stream), bits, count)
    return values, scale, bias, int(bits.max())


def per_block(path: str, part: str, blocks: int, arrays: Arrays) -> np.ndarray:
    found = arrays.get(f"{path}.{part}")
    if found is None or found.dtype not in FLOATS or found.size != blocks:
        raise BadCheckpoint(f"{path}.{part}: expected a float for each of {blocks} blocks, found {describe(found)}")
    if not bool(mx.isfinite(found).all()):
        raise BadCheckpoint(f"{path}.{part} holds NaN or infinities; the file is damaged")
    return np.array(found.astype(mx.float32)).reshape(-1)


def read_bits(path: str, blocks: int, arrays: Arrays) -> np.ndarray:
    """The bits of every block."""
    name = "bits" if f"{path}.bits" in arrays else "bit_map"
    found = arrays.get(f"{path}.{name}")
    if found is None or found.dtype != mx.uint8 or found.size not in (1, blocks):
        raise BadCheckpoint(f"{path}.{name}: expected one uint8 or {blocks} of them, found {describe(found)}")
    bits = np.broadcast_to(np.array(found).reshape(-1), (blocks,)).astype(np.int64)
    if other := sorted(set(bits.tolist()) - set(STREAM_BITS)):
        raise BadCheckpoint(f"{path}.{name} holds {other[0]}; streams have {', '.join(map(str, STREAM_BITS))} bit")
    return bits


def check_offsets(path: str, bits: np.ndarray, arrays: Arrays) -> None:
    """Check that blocks follow each other without gaps."""
    found = arrays.get(f"{path}.block_offsets")
    if found is None:
        return
    begins = np.concatenate([[0], np.cumsum(bits * BLOCK // 8)[:-1]])
    if not np.array_equal(np.array(found).reshape(-1), begins):
        raise BadCheckpoint(f"{path}.block_offsets do not follow from the bits of its blocks; the file is damaged")


def unpack_stream(path: str, stream: np.ndarray, block_bits: np.ndarray, count: int) -> np.ndarray:
    """uint32 [count]: the quantised values of all blocks."""
    per = np.repeat(block_bits, BLOCK)[:count]
    ends = np.cumsum(per)
    if -(-int(ends[-1]) // 8) != stream.size:
        raise BadCheckpoint(
            f"{path}.qweight: {count} weights take {-(-int(ends[-1]) // 8)} bytes, found {stream.size}; "
            "the stream is cut short or does not belong to its shape"
        )
    bits = np.concatenate([np.unpackbits(stream, bitorder="little"), np.zeros(8, np.uint8)]).astype(np.uint32)
    starts, values = ends - per, np.zeros(count, np.uint32)
    for i in range(int(block_bits.max())):
        values |= np.where(i < per, bits[starts + np.minimum(i, per - 1)], 0).astype(np.uint32) << np.uint32(i)
    return values


def to_affine(
    path: str, shape: tuple[int, ...], values: np.ndarray, scale: np.ndarray, bias: np.ndarray, bits: int
) -> Arrays:
    assert bits in AFFINE_BITS
    groups = (*shape[:-1], shape[-1] // BLOCK)
    return {
        f"{path}.weight": pack_bits(mx.array(values).reshape(shape), bits),
        f"{path}.scales": mx.array(scale).reshape(groups),
        f"{path}.biases": mx.array(bias).reshape(groups),
    }


def dequantize(shape: tuple[int, ...], values: np.ndarray, scale: np.ndarray, bias: np.ndarray, bits: int) -> mx.array:
    block = np.arange(values.size) // BLOCK
    return mx.array(values.astype(np.float32) * scale[block] + bias[block]).reshape(shape)
