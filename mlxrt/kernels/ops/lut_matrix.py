"""Matrices of codes: a number is its row's norm times the level its code points at. x is turned already (turn.py).

Knows what codes mean in plain MLX, in both ways they lie in words. Kernels read them as any packed matrix (packing.py).
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from .bitpack import unpack_fields, unpack_whole
from .gather import gather_mm


@dataclass(frozen=True)
class Codes:
    """A matrix [O, K], or a stack [E, O, K], as words [.., O, W], norms [.., O] and levels [2 ** bits or more]."""

    words: mx.array
    norms: mx.array
    levels: mx.array
    bits: int
    width: int
    whole: bool = True  # no code crosses a word

    def plain(self) -> mx.array:
        """Levels without norms, float32."""
        whole = unpack_whole(self.words, self.bits, self.width) if self.whole else unpack_fields(self.words, self.bits)
        return self.levels[whole]

    def numbers(self) -> mx.array:
        """The matrix itself, float32."""
        return self.plain() * self.norms.astype(mx.float32)[..., None]

    def multiply(self, x: mx.array) -> mx.array:
        """x [..., K] -> float32 [..., O]."""
        return (x.astype(mx.float32) @ self.plain().swapaxes(-1, -2)) * self.norms.astype(mx.float32)

    def gathered(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, K] by the matrices of `experts` [...], float32.

        Few pairs unpack the matrices they use; many would unpack most of them several times, so they unpack all once.
        """
        x = x.astype(mx.float32)
        if experts.size < self.words.shape[0]:
            y = x @ replace(self, words=self.words[experts]).plain().swapaxes(-1, -2)
        else:
            y = gather_mm(x, self.plain().swapaxes(-1, -2), experts, ordered=ordered)
        return y * self.norms.astype(mx.float32)[experts][..., None, :]
