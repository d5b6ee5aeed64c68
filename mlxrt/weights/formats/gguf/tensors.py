"""GGUF blocks to MLX arrays: Q4_0 to Q8_0 and MXFP4 are repacked bit for bit, and K-quants where kernels compute with
them, or kept as they are; other types are dequantised."""

import mlx.core as mx
import numpy as np

from ....errors import BadCheckpoint, UnsupportedModel, quote
from ....kernels.ops.k_quants import CPU_BLOCKS, K_QUANT_HALVES, SPLIT_KINDS, block_shape, split_blocks, split_parts
from .reader import GGML_BLOCKS, GGUFTensor
from .splits import GGUFSet

# What becomes of K-quants: dequantised, kept as they are for CPU kernels, or split for GPU kernels.
UNPACKED, BLOCKS, SPLIT = "unpacked", "blocks", "split"
PLAIN = ("F32", "F16", "BF16")
# Types that fit MLX's affine (group 32) or mxfp4 exactly -> bytes per block of 32.
PACKED = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "MXFP4": 17}


def stays_packed(tensor: GGUFTensor) -> bool:
    """Only matrices and stacks of them: nothing else has a quantised module."""
    return tensor.ggml_type in PACKED and len(tensor.shape) in (2, 3) and tensor.name.endswith(".weight")


def stays_k_quant(tensor: GGUFTensor, k_quants: str) -> bool:
    """Whether it is a matrix or a stack of them, whose blocks kernels read."""
    kind, known = tensor.ggml_type.lower(), {UNPACKED: (), BLOCKS: CPU_BLOCKS, SPLIT: SPLIT_KINDS}[k_quants]
    fits = len(tensor.shape) in (2, 3) and tensor.name.endswith(".weight")
    return fits and kind in known and tensor.shape[-1] % GGML_BLOCKS[tensor.ggml_type] == 0


def needs_dequantizing(tensor: GGUFTensor) -> bool:
    return tensor.ggml_type not in PLAIN and not stays_packed(tensor)


def stored_rows(file: GGUFSet, tensor: GGUFTensor) -> np.ndarray:
    """The stored bytes [rows of the tensor, bytes]."""
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    return file.tensor_bytes(tensor).reshape(rows, -1)


def convert(
    tensor: GGUFTensor, rows: np.ndarray, k_quants: str = UNPACKED, dtype: mx.Dtype = mx.float16
) -> dict[str, mx.array]:
    """The arrays of one tensor by GGUF name; `rows`: its bytes, already unpermuted; `dtype`: of what is unpacked.

    K-quants that stay are X.q4_k, and split also X.q4_k_scales and X.q4_k_halves.
    """
    if stays_k_quant(tensor, k_quants):
        kind, stem = tensor.ggml_type.lower(), tensor.name.removesuffix(".weight")
        check_block_scales(tensor, kind, rows)
        blocks = mx.array(np.ascontiguousarray(rows).reshape(*tensor.shape[:-1], -1))
        if k_quants == BLOCKS:
            return {f"{stem}.{kind}": blocks}
        return {f"{stem}.{part}": a for part, a in zip(split_parts(kind), split_blocks(kind, blocks), strict=True)}
    if tensor.ggml_type in PLAIN:
        return {tensor.name: read_plain(tensor, rows)}
    with np.errstate(all="ignore"):  # damaged scales overflow; `check_finite` names the tensor
        return repack(tensor, rows) if stays_packed(tensor) else {tensor.name: dequantize(tensor, rows, dtype)}


def read_plain(tensor: GGUFTensor, rows: np.ndarray) -> mx.array:
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.ggml_type]  # numpy has no bfloat16
    array = mx.array(np.ascontiguousarray(rows).view(dtype).reshape(tensor.shape))
    return array.view(mx.bfloat16) if tensor.ggml_type == "BF16" else array


def repack(tensor: GGUFTensor, rows: np.ndarray) -> dict[str, mx.array]:
    """Packed from the low bits of each uint32 up; affine: w = scale * q + bias, mxfp4: w = 2^scale * q."""
    *outer, width = tensor.shape
    blocks = rows.reshape(*outer, width // 32, PACKED[tensor.ggml_type])
    stem, biases = tensor.name.removesuffix(".weight"), None
    if tensor.ggml_type == "MXFP4":
        scales, values = np.ascontiguousarray(blocks[..., 0]), unpack_nibbles(blocks[..., 1:])
    else:
        scales, biases, values = split_affine(tensor, blocks)
        check_finite(tensor, biases), check_finite(tensor, scales)
    packed = np.ascontiguousarray(values).reshape(*outer, -1).view(np.uint32)
    parts = {f"{stem}.weight": mx.array(packed), f"{stem}.scales": mx.array(scales)}
    return parts if biases is None else parts | {f"{stem}.biases": mx.array(biases)}


def split_affine(tensor: GGUFTensor, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales, biases and quantised values."""
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    if tensor.ggml_type == "Q8_0":
        return scales, scales * np.float16(-128), blocks[..., 2:] ^ 0x80  # signed bytes to unsigned
    if tensor.ggml_type in ("Q4_1", "Q5_1"):
        biases = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
        pack = unpack_nibbles if tensor.ggml_type == "Q4_1" else pack_5_bit
        return scales, biases, pack(blocks[..., 4:])
    if tensor.ggml_type == "Q5_0":
        return scales, scales * np.float16(-16), pack_5_bit(blocks[..., 2:])
    return scales, scales * np.float16(-8), unpack_nibbles(blocks[..., 2:])


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Reorder: ggml has elements i and i + 16 of a block in one byte, MLX elements 2i and 2i + 1."""
    pairs = np.ascontiguousarray(packed).view("<u2")  # two neighbours per element: one shift joins them
    out = np.empty((*pairs.shape[:-1], 2, 8), np.uint8)
    for half, shift in ((0, 0), (1, 4)):
        values = (pairs >> shift) & 0x0F0F
        out[..., half, :] = (values | values >> 4).astype(np.uint8)  # keeps the low byte
    return out.reshape(packed.shape)


def pack_5_bit(packed: np.ndarray) -> np.ndarray:
    """ggml has the fifth bits of a block before its nibbles; MLX one stream of codes, eight of them in five bytes."""
    high = np.unpackbits(packed[..., :4], axis=-1, bitorder="little")
    nibbles = packed[..., 4:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1) | high << 4
    eights = codes.reshape(*codes.shape[:-1], 4, 8)
    words = sum(eights[..., k].astype("<u8") << np.uint64(5 * k) for k in range(8))
    return np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 8)[..., :5].reshape(*packed.shape[:-1], 20)


def dequantize(tensor: GGUFTensor, rows: np.ndarray, dtype: mx.Dtype = mx.float16) -> mx.array:
    """To float16 or float32, which is exact: a value is the product of a block's scale, a group's and a code."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_blocks

    try:
        values = dequantize_blocks(np.ascontiguousarray(rows), GGMLQuantizationType[tensor.ggml_type])
    except (NotImplementedError, KeyError):
        raise UnsupportedModel(
            f"the tensor {quote(tensor.name)} has the GGUF type {tensor.ggml_type}, which neither MLX nor PyPI's gguf "
            "can unpack; take another quantisation of the model"
        ) from None
    values = values.astype(np.float32 if dtype == mx.float32 else np.float16, copy=False)
    return mx.array(check_finite(tensor, values).reshape(tensor.shape))


def check_block_scales(tensor: GGUFTensor, kind: str, rows: np.ndarray) -> None:
    """The float16 scales of every block, as `check_finite` sees those of unpacked ones."""
    at, count = K_QUANT_HALVES[kind]
    blocks = rows.reshape(-1, block_shape(kind)[0])
    check_finite(tensor, np.ascontiguousarray(blocks[:, at : at + 2 * count]).view(np.float16))


def check_finite(tensor: GGUFTensor, values: np.ndarray) -> np.ndarray:
    if np.isfinite(values).all():
        return values
    raise BadCheckpoint(
        f"{quote(tensor.name)} ({tensor.ggml_type}) holds values beyond {values.dtype}; download it again"
    )
