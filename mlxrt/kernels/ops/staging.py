"""Sizes of x staged in threadgroup memory (metal/staging.h), for kernels that multiply one x by many rows."""

import math


def padded_width(width: int) -> int:
    """Elements of a row of x that is staged at once: full passes of a simdgroup."""
    return 1024 * math.ceil(width / 1024)


def tile_width(width: int, m: int) -> int:
    """Elements of each row of x that are staged at a time: full passes of a simdgroup, 16 KB of floats."""
    return 1024 * max(1, min(math.ceil(width / 1024), 4 // m))
