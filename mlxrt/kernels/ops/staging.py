"""x in threadgroup memory, unpacked, and a simdgroup's rows of a matrix against it.

For kernels whose threadgroup meets one x with many matrices, or many rows in turn: routers and experts.
"""

import math

ROOM = 32768  # bytes of threadgroup memory that every GPU has

DOT = '#include "staging.h"\n'


def padded_width(width: int) -> int:
    """Numbers of a row of x that lies in threadgroup memory all at once: whole passes of a simdgroup."""
    return 1024 * math.ceil(width / 1024)


def tile_width(width: int, m: int) -> int:
    """Numbers of each row of x in threadgroup memory at a time: whole passes of a simdgroup, 16 KB of floats."""
    return 1024 * max(1, min(math.ceil(width / 1024), 4 // m))
