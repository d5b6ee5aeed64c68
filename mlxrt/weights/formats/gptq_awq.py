"""Readers of GPTQ and AWQ matrices.

GPTQ packs weights along the input [in * bits / 32, out] and zeros along the output, with one scale per group of inputs;
`g_idx` is the group of every input (not contiguous with act-order), and version 1 stores zeros minus one. AWQ for
AutoAWQ's GEMM kernels packs 4-bit weights along the output [in, out / 8], interleaved; the packings of its other
kernels (gemv, marlin) use the same tensor names and are refused.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...errors import BadCheckpoint, UnsupportedModel, quote
from ...kernels.ops.bitpack import unpack_bits
from .int_matrix import Arrays, IntMatrix, check_groups, find_packed, find_scales, require
from .weight_format import describe

GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")
GPTQ_BITS = (2, 3, 4, 8)
AWQ_PARTS = ("qweight", "qzeros", "scales")
AWQ_BITS = 4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each of eight outputs


def read_gptq(path: str, config: Mapping[str, Any], arrays: Arrays) -> IntMatrix:
    bits, offset = config.get("bits"), zero_offset(config)
    if type(bits) is not int or bits not in GPTQ_BITS:
        raise UnsupportedModel(f"config.json: quantization_config.bits = {quote(bits)}; GPTQ has {list(GPTQ_BITS)}")
    packed, scale = find_packed(path, "qweight", arrays), find_scales(path, "scales", arrays)
    rows, out = packed.shape
    require(rows * 32 % bits == 0, path, f"{rows} rows of qweight do not hold a whole number of {bits}-bit inputs")
    columns = rows * 32 // bits
    groups = scale.shape[0]
    require(scale.shape[1] == out, path, f"scales for {scale.shape[1]} outputs, qweight for {out}")
    q = unpack_bits(packed.T, bits)  # [out, in]
    zeros = read_zeros(path, config, arrays, (out, groups), bits, offset)
    return IntMatrix(q, zeros, scale.T, bits, read_groups(path, config, arrays, columns, groups))


def zero_offset(config: Mapping[str, Any]) -> int:
    """What must be added to stored zeros."""
    form = config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise UnsupportedModel(
            f"config.json: quantization_config.checkpoint_format = {quote(form)}; gptq and gptq_v2 are read"
        )
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or any(not str(rule).startswith("-:") for rule in dynamic):
        raise UnsupportedModel("config.json: quantization_config.dynamic (bits by module) is not supported")
    return 1 if form == "gptq" else 0


def read_zeros(path, config, arrays, shape, bits, offset) -> mx.array:
    if f"{path}.qzeros" not in arrays:
        if config.get("sym") is not True:
            raise BadCheckpoint(f"{path}.qzeros is missing, and quantization_config does not say sym: true")
        return mx.full(shape, 1 << (bits - 1), mx.float32)
    out, groups = shape
    packed = find_packed(path, "qzeros", arrays)
    fits = packed.shape == (groups, -(-out * bits // 32))
    require(fits, path, f"qzeros are {list(packed.shape)} for {groups} groups of {out} outputs")
    return (unpack_bits(packed, bits)[:, :out].T + offset).astype(mx.float32)


def read_groups(path, config, arrays, columns, groups) -> mx.array | None:
    index = arrays.get(f"{path}.g_idx")
    if index is not None:
        fits = index.shape == (columns,) and mx.issubdtype(index.dtype, mx.integer)
        require(fits, path, f"g_idx is {describe(index)} for {columns} inputs")
        return check_groups(path, index, groups)
    size = config.get("group_size", -1)
    if type(size) is not int or (size < 1 and size != -1):
        raise BadCheckpoint(f"config.json: quantization_config.group_size = {quote(size)} must be -1 or >= 1")
    size = columns if size == -1 else size
    require(-(-columns // size) == groups, path, f"{groups} groups of {size} for {columns} inputs")
    return check_groups(path, mx.arange(columns) // size, groups)


def read_awq(path: str, config: Mapping[str, Any], arrays: Arrays) -> IntMatrix:
    bits, version = config.get("bits", AWQ_BITS), config.get("version", "gemm")
    if bits != AWQ_BITS or str(version).lower() != "gemm":
        raise UnsupportedModel(
            f"config.json: quantization_config has bits {quote(bits)} and version {quote(version)}; "
            "AWQ is read with 4 and gemm"
        )
    packed, zeros = find_packed(path, "qweight", arrays), find_packed(path, "qzeros", arrays)
    scale = find_scales(path, "scales", arrays)
    columns, out, groups = packed.shape[0], 8 * packed.shape[1], scale.shape[0]
    require(scale.shape == (groups, out), path, f"scales are {list(scale.shape)} for {out} outputs")
    fits = zeros.shape == (groups, out // 8)
    require(fits, path, f"qzeros are {list(zeros.shape)} for {groups} groups of {out} outputs")
    require(columns % groups == 0, path, f"{groups} groups for {columns} inputs")
    return IntMatrix(unpack_outputs(packed).T, unpack_outputs(zeros).T.astype(mx.float32), scale.T, AWQ_BITS)


def unpack_outputs(packed: mx.array) -> mx.array:
    """[n, out / 8] -> [n, out]."""
    nibbles = unpack_bits(packed, AWQ_BITS).reshape(*packed.shape, 8)
    return nibbles[..., mx.array(AWQ_ORDER)].flatten(-2)
