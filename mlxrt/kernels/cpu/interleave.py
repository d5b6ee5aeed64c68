"""Rows of GGUF blocks side by side, as dot.h and lanes.h read them. Imports no MLX: check.py reads it too.

Of every block first the float16s, one of each row, then the bytes of scales, one of each row, then quants, four bytes of each
row. Q4_K and Q5_K pack eight scales and eight minima into twelve bytes; here each has its own, and minima are four bytes of
each row, as quants are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

TOGETHER = (4, 8, 16)  # rows side by side; which, the library says


@dataclass(frozen=True)
class Block:
    """Where a block of the file has its parts, in bytes; in the order in which they are interleaved."""

    nbytes: int
    weights: int
    halves: slice
    scales: slice
    quants: slice

    @property
    def packs_scales(self) -> bool:
        return self.scales.stop - self.scales.start == 12

    @property
    def scale_bytes(self) -> int:
        return 16 if self.packs_scales else self.scales.stop - self.scales.start

    @property
    def interleaved_bytes(self) -> int:
        """Of a block's row, side by side with others."""
        return self.nbytes + (4 if self.packs_scales else 0)

    def layout(self) -> Iterator[tuple[slice, int, str, slice]]:
        """Parts of a row's bytes once interleaved: which, how many bytes of a row stay together, and what they are of."""
        halves, quants = self.halves.stop - self.halves.start, self.quants.stop - self.quants.start
        minima = 8 if self.packs_scales else 0
        scales = self.scale_bytes - minima
        sizes = (
            ("halves", 0, halves, 2),
            ("scales", 0, scales, 1),
            ("scales", scales, minima, 4),
            ("quants", 0, quants, 4),
        )
        at = 0
        for name, begin, size, unit in sizes:
            yield slice(at, at + size), unit, name, slice(begin, begin + size)
            at += size


def short(nbytes: int, head: int = 2) -> Block:
    return Block(nbytes, 32, slice(0, head), slice(head, head), slice(head, nbytes))


BLOCKS = {
    "q4_k": Block(144, 256, slice(0, 4), slice(4, 16), slice(16, 144)),
    "q5_k": Block(176, 256, slice(0, 4), slice(4, 16), slice(16, 176)),
    "q6_k": Block(210, 256, slice(208, 210), slice(192, 208), slice(0, 192)),
    "iq4_nl": short(18),
    "q8_0": short(34),
    "q4_0": short(18),
    "q4_1": short(20, head=4),
}


def interleave_rows(kind: str, rows: np.ndarray, together: int) -> np.ndarray:
    """uint8 [O, bytes] as in a file -> [O / together, together * bytes]."""
    block = BLOCKS[kind]
    blocks = rows.reshape(rows.shape[0] // together, together, -1, block.nbytes)
    scales = blocks[..., block.scales]
    if block.packs_scales:
        scales = unpack_scales(scales)
    parts = {"halves": blocks[..., block.halves], "scales": scales, "quants": blocks[..., block.quants]}
    made = np.empty((blocks.shape[0], blocks.shape[2], together * block.interleaved_bytes), np.uint8)
    for where, unit, name, within in block.layout():
        part = parts[name][..., within]
        moved = part.reshape(*part.shape[:3], -1, unit).transpose(0, 2, 3, 1, 4)
        made[..., together * where.start : together * where.stop] = moved.reshape(*moved.shape[:2], -1)
    return made.reshape(blocks.shape[0], -1)


def separate_rows(kind: str, rows: np.ndarray, together: int) -> np.ndarray:
    """What interleave_rows was given."""
    block = BLOCKS[kind]
    blocks = rows.reshape(rows.shape[0], -1, together * block.interleaved_bytes)
    made = np.empty((blocks.shape[0], together, blocks.shape[1], block.nbytes), np.uint8)
    scales = np.empty((*made.shape[:3], block.scale_bytes), np.uint8)
    parts = {"halves": made[..., block.halves], "scales": scales, "quants": made[..., block.quants]}
    for where, unit, name, within in block.layout():
        part = blocks[..., together * where.start : together * where.stop]
        moved = part.reshape(*blocks.shape[:2], -1, together, unit).transpose(0, 3, 1, 2, 4)
        parts[name][..., within] = moved.reshape(*made.shape[:3], -1)
    made[..., block.scales] = pack_scales(scales) if block.packs_scales else scales
    return made.reshape(-1, blocks.shape[1] * block.nbytes)


def unpack_scales(packed: np.ndarray) -> np.ndarray:
    """Twelve bytes -> eight scales of six bits, eight minima."""
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    parts = (low & 63, rest & 15 | low >> 2 & 48, high & 63, rest >> 4 | high >> 2 & 48)
    return np.concatenate(parts, axis=-1)


def pack_scales(scales: np.ndarray) -> np.ndarray:
    """What unpack_scales was given."""
    a, b, c, d = (scales[..., i : i + 4] for i in range(0, 16, 4))
    return np.concatenate((a | (b & 48) << 2, c | (d & 48) << 2, b & 15 | (d & 15) << 4), axis=-1)
