"""`shape:NAME[@4bit]`: a published architecture to be filled with random numbers, for speed and memory work.

A shape has a config and a width of its weights, no files and no tokenizer.
"""

import copy
import re
from dataclasses import dataclass

from ..errors import BadRequest, ModelNotFound
from .published import SHAPES, Config
from .randomise import random_weights

__all__ = ["SHAPES", "Shape", "random_weights", "shape_config"]

BITS = (2, 3, 4, 5, 6, 8)
SUFFIX = re.compile(r"(?P<bits>\d+)bit|(?P<mode>mxfp4)")


@dataclass(frozen=True)
class Shape:
    """A published architecture and how its matrices are stored; `bits` None: in the compute dtype."""

    name: str
    bits: int | None = None
    mode: str = "affine"
    group_size: int = 64

    @classmethod
    def parse(cls, name: str) -> "Shape":
        """From `shape:NAME`, `shape:NAME@4bit` or `shape:NAME@mxfp4`."""
        plain, at, suffix = name.removeprefix("shape:").partition("@")
        if plain not in SHAPES:
            raise ModelNotFound(f"no published shape goes by {plain!r}; there are {', '.join(sorted(SHAPES))}")
        if not at:
            return cls(plain)
        found = SUFFIX.fullmatch(suffix)
        if found is None or (found["bits"] and int(found["bits"]) not in BITS):
            widths = ", ".join(f"@{bits}bit" for bits in BITS)
            raise BadRequest(f"{name} asks for weights stored as {suffix!r}; there are {widths} and @mxfp4")
        return cls(plain, 4, "mxfp4", 32) if found["mode"] else cls(plain, int(found["bits"]))

    @property
    def config(self) -> Config:
        return shape_config(self.name)


def shape_config(name: str) -> Config:
    """A copy: whoever reads a config may take keys out of it."""
    if name not in SHAPES:
        raise ModelNotFound(f"no published shape goes by {name!r}; there are {', '.join(sorted(SHAPES))}")
    return copy.deepcopy(SHAPES[name])
