"""How a key or value vector is kept. A token's code depends on that token alone, so chunking cannot change it."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Plain:
    dtype: mx.Dtype = mx.float32

    def parts(self, dim: int) -> list[tuple[int, mx.Dtype]]:
        """Length and dtype of each array a vector becomes."""
        return [(dim, self.dtype)]

    def encode(self, x: mx.array) -> tuple[mx.array, ...]:
        return (x.astype(self.dtype),)

    def decode(self, parts) -> mx.array:
        return parts[0]
