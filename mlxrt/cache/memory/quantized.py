"""KV codecs: how keys and values are stored, plain or quantized. What a token becomes depends on that token alone, so
chunking cannot change it.

A codec turns k and v [N, H, D] into arrays [N, heads, width] and computes with those: q . k, and weighted sums of v. A
quantized KV cache is never dequantized in full; on CUDA, plain MLX dequantizes the blocks that a step reads.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import mlx.core as mx

from ...errors import UnsupportedModel
from ...kernels import KVQuantLayout, backend

Parts = list[mx.array] | tuple[mx.array, ...]


class Codec(ABC):
    """Frozen and comparable, as the specs that hold it."""

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
    def mix(self, weights: mx.array, parts: Parts) -> mx.array:
        """weights [..., H, G, T] over the values -> [..., H, G, D]."""


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

    def mix(self, weights, parts):
        return weights @ self.decode(parts)[1]


BITS, GROUPS = (2, 3, 4, 6, 8), (32, 64, 128)


@dataclass(frozen=True)
class QuantizedKV(Codec):
    """Affine quantization as MLX packs it, `key` and `value` bits in groups of `group` elements; one uint32 array."""

    key: int = 8
    value: int = 8
    group: int = 32
    dtype: mx.Dtype = mx.float32  # of scales, biases and dequantized values

    def __post_init__(self):
        for bits in (self.key, self.value):
            if bits not in BITS:
                raise UnsupportedModel(f"keys and values can be kept in {BITS} bits, not {bits}")
        if self.group not in GROUPS:
            raise UnsupportedModel(f"keys and values can be quantised in groups of {GROUPS}, not {self.group}")

    @property
    def signature(self):
        return f"Quantised(key={self.key}, value={self.value}, group={self.group}, dtype={self.dtype})"

    def shapes(self, heads, dim):
        if dim % self.group:
            raise UnsupportedModel(f"head_dim {dim} is no multiple of the quantisation group {self.group}")
        return [(heads, self.layout.vector_words(dim), mx.uint32)]

    @property
    def layout(self) -> KVQuantLayout:
        return KVQuantLayout(self.key, self.value, self.group, self.dtype)

    def encode(self, k, v):
        return (self.layout.quantize(k, v),)

    def decode(self, parts):
        return self.layout.dequantize(parts[0])

    def score(self, q, parts):
        if backend() == "cuda":  # whose quantized_matmul refuses most batches
            return q @ self.decode(parts)[0].swapaxes(-1, -2)
        return self._matmul(q, self.layout.unpack(parts[0])[0], self.key, True)

    def mix(self, weights, parts):
        if backend() == "cuda":
            return weights @ self.decode(parts)[1]
        return self._matmul(weights, self.layout.unpack(parts[0])[1], self.value, False)

    def _matmul(self, x, parts, bits, transpose):
        if x.shape[:-2] != parts[0].shape[:-2]:  # quantized_matmul does not broadcast batches
            x = mx.broadcast_to(x, (*parts[0].shape[:-2], *x.shape[-2:]))
        w, scales, biases = parts
        return mx.quantized_matmul(x, w, scales, biases, transpose, self.group, bits)
