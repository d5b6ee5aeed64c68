"""The inputs of paged attention: how q, k and v lie in a projection, and the pages of the KV cache, plain or quantised.

A quantised key and value are one run of uint32 a head, so that a layer's KV cache is one array, as each array of a launch
costs its time:

    packed key | packed value | key's scales, key's biases, value's scales, value's biases
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

Affine = tuple[mx.array, mx.array, mx.array]  # packed values, scales and biases, as mx.quantize gives them


@dataclass(frozen=True)
class QKVLayout:
    """How q, k and v lie in a QKV projection, and the norms and the RoPE their heads get before attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: mx.array | None = None  # [dim]
    k_norm: mx.array | None = None
    v_norm: bool = False  # without a weight
    eps: float = 0.0
    inv_freq: mx.array | None = None  # [rotary dim / 2] radians per position
    magnitude: float = 1.0
    tied: bool = False  # the values are the projected keys (no v_proj)

    def arrays(self) -> dict[str, mx.array]:
        """Its arrays, by name."""
        return {name: a for name in ("q_norm", "k_norm", "inv_freq") if (a := getattr(self, name)) is not None}

    def split(self, qkv: mx.array) -> list[mx.array]:
        """[N, (heads + 2 KV heads) * dim] -> q, k, v [N, heads, dim]; q alone where there is no more."""
        y = qkv.reshape(qkv.shape[0], -1, self.head_dim)
        if y.shape[1] == self.num_heads:
            return [y]
        q, k, *v = mx.split(y, [self.num_heads, *([] if self.tied else [self.num_heads + self.num_kv_heads])], axis=1)
        return [q, k, *(v or [k])]

    def prepare(self, qkv: mx.array, positions: mx.array, rope: Callable | None = None) -> list[mx.array]:
        """q, k, v [N, heads, dim] after norms and RoPE; q alone where there is no more. `rope`: by MLX's own op."""
        apply_rope = self.apply_rope if rope is None else rope  # a module without parameters is falsy
        q, *kv = self.split(qkv)
        if not kv:
            return [apply_rope(self.norm(q, self.q_norm), positions)]
        k, v = kv
        if self.q_norm is None and self.k_norm is None:
            qk = qkv.reshape(qkv.shape[0], -1, self.head_dim)[:, : self.num_heads + self.num_kv_heads]
        else:
            qk = mx.concatenate([self.norm(q, self.q_norm), self.norm(k, self.k_norm)], axis=1)
        q, k = mx.split(apply_rope(qk, positions), [self.num_heads], axis=1)  # one call for all heads
        return [q, k, mx.fast.rms_norm(v, None, self.eps) if self.v_norm else v]

    def norm(self, x: mx.array, weight: mx.array | None) -> mx.array:
        return x if weight is None else mx.fast.rms_norm(x, weight, self.eps)

    def apply_rope(self, x: mx.array, positions: mx.array) -> mx.array:
        """x [N, heads, dim], rotated in float32, as the kernels do."""
        if self.inv_freq is None:
            return x
        half = self.inv_freq.shape[0]
        angle = positions.astype(mx.float32)[:, None, None] * self.inv_freq
        c, s = mx.cos(angle) * self.magnitude, mx.sin(angle) * self.magnitude
        a, b, rest = mx.split(x.astype(mx.float32), [half, 2 * half], axis=-1)
        return mx.concatenate([a * c - b * s, a * s + b * c, rest], axis=-1).astype(x.dtype)


@dataclass(frozen=True)
class Pages:
    """A batch's KV cache: blocks and tails of plain keys and values. Keys' heads come first, values' after them."""

    pool: mx.array  # [blocks, 2 KV heads, block size, dim]
    tail: mx.array  # [R, 2 KV heads, tail size, dim]
    table: mx.array  # [R, blocks of a row]
    row_range: (
        mx.array
    )  # [R, 3] position of the table's first slot, position of the tail's first slot, tokens in the tail

    def constants(self) -> dict[str, int]:
        return {"K_BITS": 16, "V_BITS": 16, "KV_GROUP": self.pool.shape[-1]}

    @property
    def raw(self) -> "Pages":
        return self

    @property
    def max_tokens(self) -> int:
        """Tokens that a row's block table can name."""
        return self.table.shape[1] * self.pool.shape[2]

    def wrap_tail(self, tail: mx.array) -> mx.array:
        return tail


@dataclass(frozen=True)
class KVQuantLayout:
    """Affine quantisation of keys and values, as mx.quantize does it, and how a token's vector lies in uint32."""

    key_bits: int
    value_bits: int
    group: int
    dtype: mx.Dtype  # of scales and biases, and of what comes out

    def packed_words(self, dim: int) -> int:
        """Words of both packed values."""
        return dim * (self.key_bits + self.value_bits) // 32

    def vector_words(self, dim: int) -> int:
        return self.packed_words(dim) + dim // self.group * self.dtype.size

    def head_dim(self, words: int) -> int:
        """Of the head whose vector takes so many words."""
        group_bits = self.group * (self.key_bits + self.value_bits) + 32 * self.dtype.size
        return 32 * words // group_bits * self.group

    def quantize(self, k: mx.array, v: mx.array) -> mx.array:
        """k and v [..., dim] -> words [..., vector_words]."""
        made: list[Any] = [
            mx.quantize(x.astype(self.dtype), self.group, bits)
            for x, bits in ((k, self.key_bits), (v, self.value_bits))
        ]
        return self.pack(*made)

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

    def dequantize(self, words: mx.array) -> tuple[mx.array, mx.array]:
        """k and v [..., dim]."""
        key, value = self.unpack(words)
        return mx.dequantize(*key, self.group, self.key_bits), mx.dequantize(*value, self.group, self.value_bits)


@dataclass(frozen=True)
class PackedKV:
    """Quantised keys and values [..., slots, vector_words] with their layout."""

    words: mx.array
    layout: KVQuantLayout

    def dequantize(self) -> mx.array:
        """[.., 2 KV heads, slots, dim], as Pages has them."""
        return mx.concatenate([*self.layout.dequantize(self.words)], axis=1)

    def to_float32(self) -> "PackedKV":
        """The same packed values, with scales and biases in float32."""
        wide = replace(self.layout, dtype=mx.float32)
        key, value = ((w, s.astype(mx.float32), b.astype(mx.float32)) for w, s, b in self.layout.unpack(self.words))
        return PackedKV(wide.pack(key, value), wide)


@dataclass(frozen=True)
class QuantizedPages:
    """A batch's KV cache in quantised form; pool and tail are [blocks or R, KV heads, slots, vector_words]."""

    pool: PackedKV
    tail: PackedKV
    table: mx.array  # as in Pages
    row_range: mx.array

    @property
    def layout(self) -> KVQuantLayout:
        return self.pool.layout

    @property
    def raw(self) -> Pages:
        """The arrays as a kernel gets them."""
        return Pages(self.pool.words, self.tail.words, self.table, self.row_range)

    @property
    def max_tokens(self) -> int:
        return self.raw.max_tokens

    def wrap_tail(self, tail: mx.array) -> PackedKV:
        return PackedKV(tail, self.layout)

    def constants(self) -> dict[str, int]:
        return {"K_BITS": self.layout.key_bits, "V_BITS": self.layout.value_bits, "KV_GROUP": self.layout.group}
