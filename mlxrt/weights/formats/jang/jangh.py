"""JANGTQ version 2 (JANGH): X.tq2_packed and X.tq2_scales, codes as one stream of bits, levels an odd cubic.

Turned in blocks of 32 or not at all: config.json alone says which, so here its word counts, and it has to be there.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import BadCheckpoint, UnsupportedModel, shown
from ....models.quantized.centroids import CUBIC, odd_cubic
from ....models.quantized.lut_linear import HADAMARD32, Coding
from ..int_matrix import described
from .jangtq import PARTS2, Coded, check_rows

ROTATIONS = {"hadamard32": True, "none": False}
PINNED = {"packing": "lsb-bitstream", "scale_dtype": "float16", "codebook_family": "odd-cubic"}


def read_jangh(path: str, shape: tuple[int, ...], arrays: Mapping[str, mx.array], config: Mapping[str, Any]) -> Coded:
    """The coding of the module at `path`; dense matrices may come as a stack of one."""
    words, width = arrays.get(f"{path}.tq2_packed"), shape[-1]
    bits = 0 if words is None or not words.ndim else 32 * words.shape[-1] // width
    if words is None or bits not in CUBIC or 32 * words.shape[-1] != bits * width or width % HADAMARD32:
        raise BadCheckpoint(
            f"{path}.tq2_packed: {described(words)} does not fit {width} inputs in "
            f"{', '.join(map(str, CUBIC))} bit (inputs are a multiple of {HADAMARD32})"
        )
    coding = Coding.jangtq2(bits, width, turned=turned(path, bits, config))
    stack = (1, *shape) if len(shape) == 2 and words.ndim == 3 else shape
    check_rows(path, PARTS2, stack, coding, arrays)
    return OneOfOne(coding, PARTS2) if stack != shape else Coded(coding, PARTS2)


class OneOfOne(Coded):
    """A dense matrix that is stored as a stack of one."""

    def words(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return super().words(path, arrays)[0]

    def norms(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return super().norms(path, arrays)[0]


def turned(path: str, bits: int, config: Mapping[str, Any]) -> bool:
    """Whether the matrix at `path` is turned, by its own entry or the bundle's; the bundle's levels are checked too."""
    block = config.get("jangtq")
    if not isinstance(block, Mapping) or block.get("version") != 2:
        found = block.get("version") if isinstance(block, Mapping) else block
        raise UnsupportedModel(f"config.json: {path} is of JANGTQ version 2, jangtq.version is {shown(found)}")
    for key, value in PINNED.items():
        if block.get(key, value) != value:
            raise UnsupportedModel(f"config.json: jangtq.{key} = {shown(block[key])}; only {value} is known")
    check_levels(bits, block)
    modules = config.get("quantization")
    own = modules.get(path) if isinstance(modules, Mapping) else None
    said = (own if isinstance(own, Mapping) else {}).get("rotation", block.get("rotation"))
    if not isinstance(said, str) or said not in ROTATIONS:
        raise UnsupportedModel(f"config.json: the rotation of {path} is {shown(said)}; known: {', '.join(ROTATIONS)}")
    return ROTATIONS[said]


def check_levels(bits: int, block: Mapping[str, Any]) -> None:
    """Levels that config.json lists are those the format has, to the last bit of a float32."""
    books = block.get("codebooks")
    book = books.get(str(bits)) if isinstance(books, Mapping) else None
    given = book.get("levels") if isinstance(book, Mapping) else None
    if given is None:
        return
    numbers = isinstance(given, list) and all(type(v) in (int, float) for v in given)
    if not numbers or not np.array_equal(np.array(given, dtype=np.float32), odd_cubic(bits)):
        raise UnsupportedModel(f"config.json: jangtq.codebooks.{bits}.levels are not those of the format")
