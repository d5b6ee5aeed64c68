"""GGUF blocks to MLX arrays: Q4_0, Q4_1, Q8_0 and MXFP4 keep their bits in MLX's layouts, others are dequantised.

Reads through our own directory and never calls `mx.load`, so a damaged file cannot reach its parser.
Refuses to know names and architectures.
"""

import mlx.core as mx
import numpy as np

from ....errors import BadCheckpoint, UnsupportedModel, shown
from .header import Directory, TensorRecord

PLAIN = ("F32", "F16", "BF16")
# What fits MLX's layouts, affine group 32 or mxfp4, without changing a bit -> bytes in a block of 32.
PACKED = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "MXFP4": 17}


def stays_packed(record: TensorRecord) -> bool:
    """Only matrices and stacks of them: a packed layout for anything else has no module to go to."""
    return record.kind in PACKED and len(record.shape) in (2, 3) and record.name.endswith(".weight")


def needs_dequantising(record: TensorRecord) -> bool:
    return record.kind not in PLAIN and not stays_packed(record)


def stored_rows(directory: Directory, record: TensorRecord) -> np.ndarray:
    """The stored bytes, one row per row of the tensor."""
    rows = record.shape[0] if len(record.shape) > 1 else 1
    return directory.bytes_of(record).reshape(rows, -1)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of rope pairs in q and k. It moves whole rows, so packed data stays exact."""
    pairs = len(rows) // heads // 2
    return rows.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def convert(record: TensorRecord, rows: np.ndarray) -> dict[str, mx.array]:
    """The arrays of one tensor by GGUF name; `rows` are its stored bytes, already in the wanted order."""
    if record.kind in PLAIN:
        return {record.name: plain(record, rows)}
    with np.errstate(all="ignore"):  # damaged scales overflow; `finite` says so with the tensor's name
        return pack(record, rows) if stays_packed(record) else {record.name: dequantised(record, rows)}


def plain(record: TensorRecord, rows: np.ndarray) -> mx.array:
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[record.kind]  # numpy has no bfloat16
    array = mx.array(np.ascontiguousarray(rows).view(dtype).reshape(record.shape))
    return array.view(mx.bfloat16) if record.kind == "BF16" else array


def pack(record: TensorRecord, rows: np.ndarray) -> dict[str, mx.array]:
    """Codes packed from the low bits of each uint32 up; affine: value = scale * code + bias, mxfp4: 2^scale * code."""
    *outer, width = record.shape
    blocks = rows.reshape(*outer, width // 32, PACKED[record.kind])
    stem, biases = record.name.removesuffix(".weight"), None
    if record.kind == "MXFP4":
        scales, codes = np.ascontiguousarray(blocks[..., 0]), nibbles(blocks[..., 1:])
    else:
        scales, biases, codes = affine(record, blocks)
        finite(record, biases), finite(record, scales)
    words = np.ascontiguousarray(codes).reshape(*outer, -1).view(np.uint32)
    parts = {f"{stem}.weight": mx.array(words), f"{stem}.scales": mx.array(scales)}
    return parts if biases is None else parts | {f"{stem}.biases": mx.array(biases)}


def affine(record: TensorRecord, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales, biases and codes."""
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    if record.kind == "Q8_0":
        return scales, scales * np.float16(-128), blocks[..., 2:] ^ 0x80  # signed bytes to unsigned
    if record.kind == "Q4_1":
        return scales, np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0], nibbles(blocks[..., 4:])
    return scales, scales * np.float16(-8), nibbles(blocks[..., 2:])


def nibbles(packed: np.ndarray) -> np.ndarray:
    """ggml keeps elements i and i + 16 of a block in one byte, MLX neighbours 2i and 2i + 1."""
    pairs = np.ascontiguousarray(packed).view("<u2")  # neighbours side by side: one shift joins them
    out = np.empty((*pairs.shape[:-1], 2, 8), np.uint8)
    for half, shift in ((0, 0), (1, 4)):
        codes = (pairs >> shift) & 0x0F0F
        out[..., half, :] = (codes | codes >> 4).astype(np.uint8)  # keeps the low byte
    return out.reshape(packed.shape)


def dequantised(record: TensorRecord, rows: np.ndarray) -> mx.array:
    """float16: the blocks' own scales have no more precision, and float32 would take twice the memory."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[record.kind])
    except (NotImplementedError, KeyError):
        raise UnsupportedModel(
            f"the tensor {shown(record.name)} is of the GGUF kind {record.kind}, which neither MLX nor PyPI gguf "
            "can unpack; take another quantisation of the model"
        ) from None
    return mx.array(finite(record, values.astype(np.float16)).reshape(record.shape))


def finite(record: TensorRecord, values: np.ndarray) -> np.ndarray:
    if np.isfinite(values).all():
        return values
    raise BadCheckpoint(
        f"the tensor {shown(record.name)} ({record.kind}) holds values beyond float16; download the file again"
    )
