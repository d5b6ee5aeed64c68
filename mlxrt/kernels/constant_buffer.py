"""Arrays that never change, several in one buffer, and how a kernel's text finds them there.

Every input of a launch costs the host 0.8 microseconds (docs/decisions/0009), more than a small kernel runs. What is
read together therefore lies together: a kernel gets the buffer, and its text takes words, scales and norms out of it.
Knows no op and no device.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

ALIGNED = 256  # bytes: what MLX's own products may ask of a pointer
WORD = 4
NAMES = {
    mx.float32: "float",
    mx.float16: "FLOAT16",
    mx.bfloat16: "BFLOAT16",
    mx.uint32: "uint",
    mx.int32: "int",
    mx.uint16: "ushort",
    mx.uint8: "uchar",
}  # in our kernel texts, of the types a buffer can hold


@dataclass(frozen=True)
class Place:
    """Where an array lies: from word `at` of `whole` on. Holds the array, so that its id stays its own."""

    array: mx.array
    whole: mx.array
    at: int

    def line(self, name: str, whole: str) -> str:
        """The array in a kernel's text."""
        kind = NAMES[self.array.dtype]
        return f"const device {kind}* {name} = (const device {kind}*)({whole} + AT_{name});"


def lay(arrays: list[mx.array]) -> list[Place]:
    """The same numbers in one new buffer."""
    words, at = [], [0]
    for a in arrays:
        flat, step = a.reshape(-1), ALIGNED // a.dtype.size
        flat = mx.pad(flat, (0, math.ceil(a.size / step) * step - a.size)).view(mx.uint32)
        words.append(flat)
        at.append(at[-1] + flat.size)
    whole = mx.concatenate(words)
    views = [whole[i:j].view(a.dtype)[: a.size].reshape(a.shape) for a, i, j in zip(arrays, at, at[1:])]
    mx.eval(whole, views)
    return [Place(view, whole, i) for view, i in zip(views, at)]
