"""How a token's key and value lie in memory as codes: one run of words a head, so that a layer's memory is one array.

    key's codes | value's codes | key's scales, key's biases, value's scales, value's biases

Each array of a launch costs its time.
"""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

Affine = tuple[mx.array, mx.array, mx.array]  # words, scales and biases, as mx.quantize gives them


@dataclass(frozen=True)
class CodedToken:
    """Affine codes of `key` and `value` bits per group of `group` numbers."""

    key: int
    value: int
    group: int
    dtype: mx.Dtype  # of scales and biases, and of what comes out

    def codes(self, dim: int) -> int:
        """Words of both codes."""
        return dim * (self.key + self.value) // 32

    def width(self, dim: int) -> int:
        """Words of a token's head."""
        return self.codes(dim) + dim // self.group * self.dtype.size

    def dim(self, width: int) -> int:
        """Of the head that takes so many words."""
        bits = self.group * (self.key + self.value) + 32 * self.dtype.size  # of a group
        return 32 * width // bits * self.group

    def encode(self, k: mx.array, v: mx.array) -> mx.array:
        """k and v [..., dim] -> words [..., width]."""
        made: list[Any] = [
            mx.quantize(x.astype(self.dtype), self.group, bits) for x, bits in ((k, self.key), (v, self.value))
        ]
        return self.join(*made)

    def join(self, key: Affine, value: Affine) -> mx.array:
        lines = mx.concatenate([*key[1:], *value[1:]], axis=-1)
        return mx.concatenate([key[0], value[0], lines.view(mx.uint32)], axis=-1)

    def split(self, words: mx.array) -> tuple[Affine, Affine]:
        """Those of the key and of the value."""
        dim = self.dim(words.shape[-1])
        middle, end, n = dim * self.key // 32, self.codes(dim), dim // self.group
        # Not mx.split: a compiled step that uses only some of what it gives cannot be replayed (MLX 0.32.4).
        lines = words[..., end:].view(self.dtype)
        ks, kb, vs, vb = (lines[..., i * n : (i + 1) * n] for i in range(4))
        return (words[..., :middle], ks, kb), (words[..., middle:end], vs, vb)

    def decode(self, words: mx.array) -> tuple[mx.array, mx.array]:
        """k and v [..., dim]."""
        key, value = self.split(words)
        return mx.dequantize(*key, self.group, self.key), mx.dequantize(*value, self.group, self.value)


@dataclass(frozen=True)
class Packed:
    """Words [..., slots, width] with what tells how to read them."""

    words: mx.array
    layout: CodedToken

    def plain(self) -> mx.array:
        """[.., 2 keys, slots, dim], as Pages has them."""
        return mx.concatenate([*self.layout.decode(self.words)], axis=1)

    def widened(self) -> "Packed":
        """The same codes, and their scales and biases in float32."""
        wide = replace(self.layout, dtype=mx.float32)
        key, value = ((w, s.astype(mx.float32), b.astype(mx.float32)) for w, s, b in self.layout.split(self.words))
        return Packed(wide.join(key, value), wide)
