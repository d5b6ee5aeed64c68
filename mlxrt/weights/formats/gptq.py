"""GPTQ: words along the input [in * bits / 32, out], zeros along the output, one scale per group of inputs.

`g_idx` gives every input its group; written by act-order it is no run of equal groups. The first version of the format
stores zeros less one.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...errors import BadCheckpoint, UnsupportedModel, shown
from ...kernels.ops.bitpack import unpack_bits
from .int_matrix import Arrays, Codes, checked_groups, described, require, scales_of, words_of

PARTS = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)


def read_gptq(path: str, given: Mapping[str, Any], arrays: Arrays) -> Codes:
    bits, less = given.get("bits"), zeros_less(given)
    if type(bits) is not int or bits not in BITS:
        raise UnsupportedModel(f"config.json: quantization_config.bits = {shown(bits)}; GPTQ is read with {list(BITS)}")
    words, scale = words_of(path, "qweight", arrays), scales_of(path, "scales", arrays)
    rows, out = words.shape
    require(rows * 32 % bits == 0, path, f"{rows} rows of words hold no whole number of {bits}-bit inputs")
    columns = rows * 32 // bits
    groups = scale.shape[0]
    require(scale.shape[1] == out, path, f"scales for {scale.shape[1]} outputs, words for {out}")
    q = unpack_bits(words.T, bits)  # [out, in]
    return Codes(
        q,
        zeros(path, given, arrays, (out, groups), bits, less),
        scale.T,
        bits,
        groups_of(path, given, arrays, columns, groups),
    )


def zeros_less(given: Mapping[str, Any]) -> int:
    """How much smaller than they are zeros are stored."""
    form = given.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2") or given.get("is_marlin_format"):
        raise UnsupportedModel(
            f"config.json: quantization_config.checkpoint_format = {shown(form)}; gptq and gptq_v2 are read"
        )
    dynamic = given.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or any(not str(rule).startswith("-:") for rule in dynamic):
        raise UnsupportedModel(
            "config.json: quantization_config.dynamic gives modules other bits, which is not supported"
        )
    return 1 if form == "gptq" else 0


def zeros(path, given, arrays, shape, bits, less) -> mx.array:
    if f"{path}.qzeros" not in arrays:
        if given.get("sym") is not True:
            raise BadCheckpoint(f"{path}.qzeros is missing, and quantization_config does not say sym: true")
        return mx.full(shape, 1 << (bits - 1), mx.float32)
    out, groups = shape
    words = words_of(path, "qzeros", arrays)
    require(
        words.shape == (groups, -(-out * bits // 32)),
        path,
        f"qzeros are {list(words.shape)} for {groups} groups of {out} outputs",
    )
    return (unpack_bits(words, bits)[:, :out].T + less).astype(mx.float32)


def groups_of(path, given, arrays, columns, groups) -> mx.array | None:
    index = arrays.get(f"{path}.g_idx")
    if index is not None:
        fits = index.shape == (columns,) and mx.issubdtype(index.dtype, mx.integer)
        require(fits, path, f"g_idx is {described(index)} for {columns} inputs")
        return checked_groups(path, index, groups)
    size = given.get("group_size", -1)
    if type(size) is not int or (size < 1 and size != -1):
        raise BadCheckpoint(f"config.json: quantization_config.group_size = {shown(size)} is not a usable size")
    size = columns if size == -1 else size
    require(-(-columns // size) == groups, path, f"{groups} groups of {size} for {columns} inputs")
    return checked_groups(path, mx.arange(columns) // size, groups)
