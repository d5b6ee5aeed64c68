"""AWQ as AutoAWQ's GEMM kernels want it: 4-bit words along the output [in, out / 8], their numbers interleaved.

Refuses to know the other kernels' packings (gemv, marlin): their tensors have the same names.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...errors import UnsupportedModel, shown
from ...kernels.ops.bitpack import unpack_bits
from .int_matrix import Arrays, Codes, require, scales_of, words_of

PARTS = ("qweight", "qzeros", "scales")
BITS = 4
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # in which nibble of its word each of eight outputs lies


def read_awq(path: str, given: Mapping[str, Any], arrays: Arrays) -> Codes:
    bits, version = given.get("bits", BITS), given.get("version", "gemm")
    if bits != BITS or str(version).lower() != "gemm":
        raise UnsupportedModel(
            f"config.json: quantization_config has bits {shown(bits)} and version {shown(version)}; "
            "AWQ is read with 4 and gemm"
        )
    words, zeros, scale = (
        words_of(path, "qweight", arrays),
        words_of(path, "qzeros", arrays),
        scales_of(path, "scales", arrays),
    )
    columns, out, groups = words.shape[0], 8 * words.shape[1], scale.shape[0]
    require(scale.shape == (groups, out), path, f"scales are {list(scale.shape)} for {out} outputs")
    require(
        zeros.shape == (groups, out // 8), path, f"qzeros are {list(zeros.shape)} for {groups} groups of {out} outputs"
    )
    require(columns % groups == 0, path, f"{groups} groups for {columns} inputs")
    return Codes(outputs(words).T, outputs(zeros).T.astype(mx.float32), scale.T, BITS)


def outputs(words: mx.array) -> mx.array:
    """[n, out / 8] words -> [n, out]."""
    nibbles = unpack_bits(words, BITS).reshape(*words.shape, 8)
    return nibbles[..., mx.array(PLACE)].flatten(-2)
