"""JANGTQ version 2 (JANGH): X.tq2_packed and X.tq2_scales; values are one bitstream, centroids an odd cubic.

Rows are Hadamard-rotated in blocks of 32 or not at all. Only config.json says which, so it must.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import BadCheckpoint, UnsupportedModel, quote
from ....models.quantized.centroids import CUBIC, odd_cubic
from ....models.quantized.lut_linear import HADAMARD32, LUTEncoding
from ..weight_format import Arrays, describe
from .jangtq import JANGTQ2_PARTS, LUTFormat, check_rows

ROTATIONS = {"hadamard32": True, "none": False}
SUPPORTED_VALUES = {"packing": "lsb-bitstream", "scale_dtype": "float16", "codebook_family": "odd-cubic"}


def read_jangh(path: str, shape: tuple[int, ...], arrays: Arrays, config: Mapping[str, Any]) -> LUTFormat:
    """The format of the module at `path`; dense matrices may come as a stack of one."""
    packed, width = arrays.get(f"{path}.tq2_packed"), shape[-1]
    bits = 0 if packed is None or not packed.ndim else 32 * packed.shape[-1] // width
    if packed is None or bits not in CUBIC or 32 * packed.shape[-1] != bits * width or width % HADAMARD32:
        raise BadCheckpoint(
            f"{path}.tq2_packed: {describe(packed)} does not fit {width} inputs in "
            f"{', '.join(map(str, CUBIC))} bit (inputs are a multiple of {HADAMARD32})"
        )
    coding = LUTEncoding.jangtq2(bits, width, rotated=read_rotation(path, bits, config))
    stack = (1, *shape) if len(shape) == 2 and packed.ndim == 3 else shape
    check_rows(path, JANGTQ2_PARTS, stack, coding, arrays)
    return SingleLUTFormat(coding, JANGTQ2_PARTS) if stack != shape else LUTFormat(coding, JANGTQ2_PARTS)


class SingleLUTFormat(LUTFormat):
    """A dense matrix that is stored as a stack of one."""

    def packed(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return super().packed(path, arrays)[0]

    def norms(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return super().norms(path, arrays)[0]


def read_rotation(path: str, bits: int, config: Mapping[str, Any]) -> bool:
    """Whether the matrix at `path` is rotated, by its own entry or the checkpoint's; centroids are checked too."""
    block = config.get("jangtq")
    if not isinstance(block, Mapping) or block.get("version") != 2:
        found = block.get("version") if isinstance(block, Mapping) else block
        raise UnsupportedModel(f"config.json: {path} is of JANGTQ version 2, jangtq.version is {quote(found)}")
    for key, value in SUPPORTED_VALUES.items():
        if block.get(key, value) != value:
            raise UnsupportedModel(f"config.json: jangtq.{key} = {quote(block[key])}; only {value} is supported")
    check_centroids(bits, block)
    modules = config.get("quantization")
    own = modules.get(path) if isinstance(modules, Mapping) else None
    rotation = (own if isinstance(own, Mapping) else {}).get("rotation", block.get("rotation"))
    if not isinstance(rotation, str) or rotation not in ROTATIONS:
        raise UnsupportedModel(f"config.json: {path} has rotation {quote(rotation)}; supported: {', '.join(ROTATIONS)}")
    return ROTATIONS[rotation]


def check_centroids(bits: int, block: Mapping[str, Any]) -> None:
    """Centroids listed in config.json must be the format's, to the last bit of a float32."""
    books = block.get("codebooks")
    book = books.get(str(bits)) if isinstance(books, Mapping) else None
    listed = book.get("levels") if isinstance(book, Mapping) else None
    if listed is None:
        return
    numbers = isinstance(listed, list) and all(type(v) in (int, float) for v in listed)
    if not numbers or not np.array_equal(np.array(listed, dtype=np.float32), odd_cubic(bits)):
        raise UnsupportedModel(f"config.json: jangtq.codebooks.{bits}.levels are not those of the format")
