"""Hadamard rotation of a vector, for matrices whose rows were rotated before quantisation.

Signs, then a normalised Walsh-Hadamard transform of each block: orthogonal, so dot products stay the same.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import mlx.core as mx
import numpy as np

from ...kernels import PLAIN, Kernels, hadamard
from ...kernels.ops.hadamard import transform_blocks


@dataclass(frozen=True)
class Rotation:
    """Blocks, widest powers of two first or all alike, and the seed of the signs (None: all signs are plus)."""

    blocks: tuple[int, ...]
    seed: int | None

    @property
    def width(self) -> int:
        return sum(self.blocks)

    def signs(self) -> mx.array | None:
        """float32 [width]."""
        return None if self.seed is None else mx.array(random_signs(self.width, self.seed))

    def __str__(self) -> str:
        runs = [(size, len(list(run))) for size, run in groupby(self.blocks)]
        sizes = "+".join(f"{count}x{size}" if count > 1 else str(size) for size, count in runs)
        return f"hadamard {sizes}" + ("" if self.seed is None else f" seed {self.seed}")


def binary_blocks(width: int) -> tuple[int, ...]:
    """A width as its powers of two, the largest first: 192 is 128 + 64."""
    return tuple(1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1)


@lru_cache(maxsize=64)
def random_signs(width: int, seed: int) -> np.ndarray:
    """numpy's default_rng(seed).choice([-1, 1], width), from the generator's raw output: that never changes.

    A word of 64 bits makes two signs, by its bits 31 and 63.
    """
    raw = np.random.PCG64(seed).random_raw(-(-width // 2)).astype(np.uint64)
    bits = np.stack([raw >> np.uint64(31), raw >> np.uint64(63)], axis=1) & np.uint64(1)
    return np.where(bits.reshape(-1)[:width] == 1, 1.0, -1.0).astype(np.float32)


def rotate(
    x: mx.array, blocks: tuple[int, ...], signs: mx.array | None, kernels: Kernels = PLAIN, dtype: mx.Dtype = mx.float32
) -> mx.array:
    """x [..., width] rotated, computed in float32."""
    rows = x.reshape(-1, x.shape[-1])
    return kernels.run(hadamard, x=rows, blocks=blocks, dtype=dtype, signs=signs).reshape(x.shape)


def unrotate(x: mx.array, blocks: tuple[int, ...], signs: mx.array | None) -> mx.array:
    """The inverse of `rotate`."""
    x = transform_blocks(x.astype(mx.float32), blocks)
    return x if signs is None else x * signs


def divide_input(x: mx.array, divisor: mx.array | None, experts: mx.array | None = None) -> mx.array:
    """x by a divisor [in]; or x [..., 1, in] by the `experts` [...] of a divisor [E, in]."""
    if divisor is None:
        return x
    return x / (divisor if experts is None or divisor.ndim == 1 else divisor[experts][..., None, :])
