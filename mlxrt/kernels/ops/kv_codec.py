"""KV codecs: how keys and values are stored, plain or quantized. What a token becomes depends on that token alone, so
chunking cannot change it.

A codec turns k and v [N, H, D] into arrays [N, heads, width] and computes with those: q . k, and weighted sums of v. A
quantized KV cache is never dequantized in full; on CUDA, plain MLX dequantizes the blocks that a step reads.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...errors import UnsupportedModel
from ..device import backend

Parts = list[mx.array] | tuple[mx.array, ...]
Affine = tuple[mx.array, mx.array, mx.array]  # packed values, scales and biases, as mx.quantize gives them


class Codec(ABC):
    """Frozen and comparable, as the specs that hold it."""

    dtype: mx.Dtype  # of keys and values as they are read

    @property
    @abstractmethod
    def signature(self) -> str:
        """The codec's part of `LayerSpec.signature`."""

    @abstractmethod
    def shapes(self, heads: int, dim: int) -> list[tuple[int, int, mx.Dtype]]:
        """Heads, width and dtype of each array of the pool."""

    @abstractmethod
    def encode(self, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        """k and v [N, H, D] -> one [N, heads, width] per array."""

    @abstractmethod
    def decode(self, parts: Parts) -> tuple[mx.array, mx.array]:
        """Arrays [..., heads, T, width] -> k, v [..., H, T, D]."""

    @abstractmethod
    def score(self, q: mx.array, parts: Parts) -> mx.array:
        """q [..., H, G, D] against the keys of [..., heads, T, width] -> [..., H, G, T]."""

    @abstractmethod
    def mix(self, weights: mx.array, parts: Parts, seen: mx.array | None = None) -> mx.array:
        """weights [..., H, G, T] over the values -> [..., H, G, D].

        A value that is not `seen` [..., T] counts as 0: its slot may hold the NaN of another sequence, and a weight of 0
        would not help. Without `seen` every value is a number.
        """


@dataclass(frozen=True)
class PlainKV(Codec):
    """Unquantized; the heads of keys, then those of values, in one array: one gather, one scatter."""

    dtype: mx.Dtype = mx.float32

    @property
    def signature(self):
        return f"Plain(dtype={self.dtype})"

    def shapes(self, heads, dim):
        return [(2 * heads, dim, self.dtype)]

    def encode(self, k, v):
        return (mx.concatenate([k, v], axis=1).astype(self.dtype),)

    def decode(self, parts):
        heads = parts[0].shape[-3] // 2
        return parts[0][..., :heads, :, :], parts[0][..., heads:, :, :]

    def score(self, q, parts):
        return q @ self.decode(parts)[0].swapaxes(-1, -2)

    def mix(self, weights, parts, seen=None):
        values = self.decode(parts)[1]
        return weights @ (values if seen is None else zero_unseen(values, seen))


def zero_unseen(values: mx.array, seen: mx.array) -> mx.array:
    """values [..., heads, T, width], 0 where `seen` [..., T] is false."""
    return mx.where(seen[..., None, :, None], values, mx.array(0, values.dtype))


KV_BITS, KV_GROUPS = (2, 3, 4, 6, 8), (32, 64, 128)


@dataclass(frozen=True)
class QuantizedKV(Codec):
    """Affine quantization as mx.quantize does it, in groups of `group` elements.

    A key and value are one run of uint32 a head, so that a layer's KV cache is one array, as each array of a launch costs
    its time:

        packed key | packed value | key's scales, key's biases, value's scales, value's biases
    """

    key_bits: int = 8
    value_bits: int = 8
    group: int = 32
    dtype: mx.Dtype = mx.float32  # of scales, biases and dequantized values

    def __post_init__(self):
        for bits in (self.key_bits, self.value_bits):
            if bits not in KV_BITS:
                raise UnsupportedModel(f"keys and values can be kept in {KV_BITS} bits, not {bits}")
        if self.group not in KV_GROUPS:
            raise UnsupportedModel(f"keys and values can be quantised in groups of {KV_GROUPS}, not {self.group}")

    @property
    def signature(self):
        return f"Quantised(key={self.key_bits}, value={self.value_bits}, group={self.group}, dtype={self.dtype})"

    def shapes(self, heads, dim):
        if dim % self.group:
            raise UnsupportedModel(f"head_dim {dim} is no multiple of the quantisation group {self.group}")
        return [(heads, self.packed_words(dim) + dim // self.group * self.dtype.size, mx.uint32)]

    def packed_words(self, dim: int) -> int:
        """Words of both packed values."""
        return dim * (self.key_bits + self.value_bits) // 32

    def head_dim(self, words: int) -> int:
        """Of the head whose vector takes so many words."""
        group_bits = self.group * (self.key_bits + self.value_bits) + 32 * self.dtype.size
        return 32 * words // group_bits * self.group

    def encode(self, k, v):
        made: list[Any] = [
            mx.quantize(x.astype(self.dtype), self.group, bits)
            for x, bits in ((k, self.key_bits), (v, self.value_bits))
        ]
        return (self.pack(*made),)

    def pack(self, key: Affine, value: Affine) -> mx.array:
        affine = mx.concatenate([*key[1:], *value[1:]], axis=-1)
        return mx.concatenate([key[0], value[0], affine.view(mx.uint32)], axis=-1)

    def unpack(self, words: mx.array) -> tuple[Affine, Affine]:
        """Those of the key and of the value."""
        dim = self.head_dim(words.shape[-1])
        middle, end, n = dim * self.key_bits // 32, self.packed_words(dim), dim // self.group
        # Not mx.split: a compiled step that uses only some of what it gives cannot be replayed (MLX 0.32.4).
        affine = words[..., end:].view(self.dtype)
        ks, kb, vs, vb = (affine[..., i * n : (i + 1) * n] for i in range(4))
        return (words[..., :middle], ks, kb), (words[..., middle:end], vs, vb)

    def decode(self, parts):
        key, value = self.unpack(parts[0])
        return mx.dequantize(*key, self.group, self.key_bits), mx.dequantize(*value, self.group, self.value_bits)

    def score(self, q, parts):
        if backend() == "cuda":  # whose quantized_matmul refuses most batches
            return q @ self.decode(parts)[0].swapaxes(-1, -2)
        return self._matmul(q, self.unpack(parts[0])[0], self.key_bits, True)

    def mix(self, weights, parts, seen=None):
        packed, scales, biases = self.unpack(parts[0])[1]
        if seen is not None:  # a scale and a bias of 0 make any packed value 0
            scales, biases = zero_unseen(scales, seen), zero_unseen(biases, seen)
        if backend() == "cuda":
            return weights @ mx.dequantize(packed, scales, biases, self.group, self.value_bits)
        return self._matmul(weights, (packed, scales, biases), self.value_bits, False)

    def _matmul(self, x, parts, bits, transpose):
        if x.shape[:-2] != parts[0].shape[:-2]:  # quantized_matmul does not broadcast batches
            x = mx.broadcast_to(x, (*parts[0].shape[:-2], *x.shape[-2:]))
        w, scales, biases = parts
        return mx.quantized_matmul(x, w, scales, biases, transpose, self.group, bits)
