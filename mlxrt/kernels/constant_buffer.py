"""Packs constant arrays into one buffer, so that a kernel that reads several of them has one input.

Every input of a launch costs the host 0.8 microseconds (docs/decisions/0009), more than a small kernel runs: weights,
scales and norms that are read together therefore share a buffer, and the kernel's source takes them out of it.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

ALIGNMENT = 256  # bytes: what MLX's own products may ask of a pointer
TYPE_NAMES = {
    mx.float32: "float",
    mx.float16: "FLOAT16",
    mx.bfloat16: "BFLOAT16",
    mx.uint32: "uint",
    mx.int32: "int",
    mx.uint16: "ushort",
    mx.uint8: "uchar",
}  # in our kernels, of the types a buffer can hold


@dataclass(frozen=True)
class PackedArray:
    """An array that is a view of `buffer`, from its uint32 number `offset` on. Holds the array, so that its id stays its own."""

    array: mx.array
    buffer: mx.array
    offset: int

    def declaration(self, name: str, buffer: str) -> str:
        """The line of a kernel that makes a pointer of it."""
        kind = TYPE_NAMES[self.array.dtype]
        return f"const device {kind}* {name} = (const device {kind}*)({buffer} + OFFSET_{name});"


def pack_arrays(arrays: list[mx.array]) -> list[PackedArray]:
    """The same values in one new buffer."""
    packed, offsets = [], [0]
    for a in arrays:
        flat, step = a.reshape(-1), ALIGNMENT // a.dtype.size
        flat = mx.pad(flat, (0, math.ceil(a.size / step) * step - a.size)).view(mx.uint32)
        packed.append(flat)
        offsets.append(offsets[-1] + flat.size)
    buffer = mx.concatenate(packed)
    views = [buffer[i:j].view(a.dtype)[: a.size].reshape(a.shape) for a, i, j in zip(arrays, offsets, offsets[1:])]
    mx.eval(buffer, views)
    return [PackedArray(view, buffer, i) for view, i in zip(views, offsets)]
