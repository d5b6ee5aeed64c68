"""The inputs of paged attention: q, k and v as one projection makes them, and the pages of the KV cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class QKVLayout:
    """How q, k and v lie in a QKV projection, and the norms and the RoPE their heads get before attention."""

    queries: int
    keys: int
    dim: int
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
        """[N, (queries + 2 keys) * dim] -> q, k, v [N, heads, dim]; q alone where there is no more."""
        y = qkv.reshape(qkv.shape[0], -1, self.dim)
        if y.shape[1] == self.queries:
            return [y]
        q, k, *v = mx.split(y, [self.queries, *([] if self.tied else [self.queries + self.keys])], axis=1)
        return [q, k, *(v or [k])]

    def prepare(self, qkv: mx.array, positions: mx.array, rope: Callable | None = None) -> list[mx.array]:
        """q, k, v [N, heads, dim] after norms and RoPE; q alone where there is no more. `rope`: by MLX's own op."""
        apply_rope = self.apply_rope if rope is None else rope  # a module without parameters is falsy
        q, *kv = self.split(qkv)
        if not kv:
            return [apply_rope(self.norm(q, self.q_norm), positions)]
        k, v = kv
        if self.q_norm is None and self.k_norm is None:
            qk = qkv.reshape(qkv.shape[0], -1, self.dim)[:, : self.queries + self.keys]
        else:
            qk = mx.concatenate([self.norm(q, self.q_norm), self.norm(k, self.k_norm)], axis=1)
        q, k = mx.split(apply_rope(qk, positions), [self.queries], axis=1)  # one call for all heads
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
    """Where the rows' keys and values lie. Keys' heads come first, values' after them."""

    pool: mx.array  # [blocks, 2 keys, size, dim]
    tail: mx.array  # [R, 2 keys, T, dim]
    table: mx.array  # [R, W]
    where: mx.array  # [R, 3] position of the table's first slot, position of the tail's first slot, tokens in the tail

    def form(self) -> dict[str, Any]:
        """What a kernel must know of how numbers are kept, as constants: not as codes."""
        return {"CODED": False, "KB": 16, "VB": 16, "GROUP": self.pool.shape[-1]}

    @property
    def words(self) -> "Pages":
        """The arrays themselves."""
        return self

    def kept(self, tail: mx.array) -> mx.array:
        """A tail as such pages have it, of its array."""
        return tail
