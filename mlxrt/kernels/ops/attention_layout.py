"""The inputs of paged attention: how q, k and v lie in a projection, and the pages of the KV cache, plain or quantised."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from .kv_codec import Codec, PlainKV, QuantizedKV
from .rope import apply_rope


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
        """q, k, v [N, heads, dim] after norms and RoPE; q alone where there is no more. `rope`: in the dtype of qkv."""
        rotate = self.rotate if rope is None else rope  # a module without parameters is falsy
        q, *kv = self.split(qkv)
        if not kv:
            return [rotate(self.norm(q, self.q_norm), positions)]
        k, v = kv
        if self.q_norm is None and self.k_norm is None:
            qk = qkv.reshape(qkv.shape[0], -1, self.head_dim)[:, : self.num_heads + self.num_kv_heads]
        else:
            qk = mx.concatenate([self.norm(q, self.q_norm), self.norm(k, self.k_norm)], axis=1)
        q, k = mx.split(rotate(qk, positions), [self.num_heads], axis=1)  # one call for all heads
        return [q, k, mx.fast.rms_norm(v, None, self.eps) if self.v_norm else v]

    def norm(self, x: mx.array, weight: mx.array | None) -> mx.array:
        return x if weight is None else mx.fast.rms_norm(x, weight, self.eps)

    def rotate(self, x: mx.array, positions: mx.array) -> mx.array:
        """x [N, heads, dim] after RoPE in float32, rounded once, as by the kernels."""
        if self.inv_freq is None:
            return x
        dim, periods = 2 * self.inv_freq.shape[0], 1 / self.inv_freq
        y = apply_rope(x.astype(mx.float32), positions, dim, periods=periods, magnitude=self.magnitude)
        return y.astype(x.dtype)


@dataclass(frozen=True)
class Pages:
    """A batch's KV cache: blocks and tails of plain keys and values. Keys' heads come first, values' after them."""

    pool: mx.array  # [blocks, 2 KV heads, block size, dim]
    tail: mx.array  # [R, 2 KV heads, tail size, dim]
    table: mx.array  # [R, blocks of a row]
    # [R, 3] position of the table's first slot, position of the tail's first slot, tokens in the tail
    row_range: mx.array

    @property
    def codec(self) -> Codec:
        return PlainKV(self.pool.dtype)

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
class PackedKV:
    """Quantised keys and values [..., slots, words] with their codec."""

    words: mx.array
    codec: QuantizedKV

    def to_float32(self) -> "PackedKV":
        """The same packed values, with scales and biases in float32."""
        wide = replace(self.codec, dtype=mx.float32)
        key, value = ((w, s.astype(mx.float32), b.astype(mx.float32)) for w, s, b in self.codec.unpack(self.words))
        return PackedKV(wide.pack(key, value), wide)


@dataclass(frozen=True)
class QuantizedPages:
    """A batch's KV cache in quantised form; pool and tail are [blocks or R, KV heads, slots, words]."""

    pool: PackedKV
    tail: PackedKV
    table: mx.array  # as in Pages
    row_range: mx.array

    @property
    def codec(self) -> QuantizedKV:
        return self.pool.codec

    @property
    def raw(self) -> Pages:
        """The arrays as a kernel gets them."""
        return Pages(self.pool.words, self.tail.words, self.table, self.row_range)

    @property
    def max_tokens(self) -> int:
        return self.raw.max_tokens

    def wrap_tail(self, tail: mx.array) -> PackedKV:
        return PackedKV(tail, self.codec)

    def constants(self) -> dict[str, int]:
        return {"K_BITS": self.codec.key_bits, "V_BITS": self.codec.value_bits, "KV_GROUP": self.codec.group}


@dataclass(frozen=True)
class PrefillPages:
    """The KV cache of a step with prompts: all keys and values are in blocks, those of the step's tokens too."""

    pool: mx.array | PackedKV  # as in Pages
    table: mx.array  # [R, blocks of a row]
    row: mx.array  # [N] a token's row of the table
    row_range: mx.array  # [N, 3] position of the table's first slot, the token's, 0

    @property
    def codec(self) -> Codec:
        return self.pool.codec if isinstance(self.pool, PackedKV) else PlainKV(self.pool.dtype)

    @property
    def raw_pool(self) -> mx.array:
        return self.pool.words if isinstance(self.pool, PackedKV) else self.pool

    @property
    def block_size(self) -> int:
        return self.raw_pool.shape[2]

    @property
    def positions(self) -> mx.array:
        return self.row_range[:, 1]

    def wrap(self, slots: mx.array) -> mx.array | PackedKV:
        return PackedKV(slots, self.pool.codec) if isinstance(self.pool, PackedKV) else slots
