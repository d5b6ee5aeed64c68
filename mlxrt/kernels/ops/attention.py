"""Attention over the KV cache in plain MLX: decode rows as a batch, prefill chunks one by one. What steps compute where no
kernel does, and what the kernels are compared with.

Keys and values are copied only once, by the gather of a row's blocks; what is rearranged after that are the scores,
which are small.
"""

from dataclasses import dataclass

import mlx.core as mx

from ..device import backend
from .kv_codec import Codec, Parts

CPU_TILE = 64  # queries per call on a CPU, where MLX computes the masked half of a causal product too
MAX_FUSED_DIM = 128  # head_dim up to which MLX's GPU kernels are causal without a mask array


@dataclass(frozen=True)
class AttentionParams:
    """What a layer's attention computes, beside q, k and v."""

    scale: float
    window: int | None = None  # a token sees itself and window - 1 before it ...
    keep: int = 0  # ... and the first `keep` tokens (attention sinks)
    softcap: float | None = None
    sinks: mx.array | None = None  # [Hq] a logit per head that joins the softmax without a value

    def mask(self, keys: mx.array, queries: mx.array) -> mx.array:
        """Which keys queries see, by position; a key at -1 is none."""
        causal = (keys >= 0) & (keys <= queries)
        if self.window is None:
            return causal
        near = keys > queries - self.window
        return causal & (near | (keys < self.keep) if self.keep else near)

    def mask_band(self, before: int, n: int) -> mx.array:
        """Which of the `keep` first keys, of `before` keys before n neighbouring queries and of their own each of these
        sees, [n, keep + before + n]."""
        assert self.window is not None and self.window <= before + 1
        keys, queries = mx.arange(before + n), mx.arange(before, before + n)[:, None]
        near = (keys <= queries) & (keys > queries - self.window)
        return mx.concatenate([mx.ones((n, self.keep), mx.bool_), near], axis=1) if self.keep else near

    def mask_decode(self, keys: mx.array, start: mx.array, tail: int, queries: mx.array) -> mx.array:
        """Which slots of the blocks, with positions `keys` [R, slots], and then of a tail of `tail` tokens the token of each
        row sees, [R, slots + tail]; tails begin at `start` [R], where the blocks end."""
        keys = mx.where(keys < start[:, None], keys, -1)
        return self.mask(mx.concatenate([keys, start[:, None] + mx.arange(tail)], axis=1), queries[:, None])

    def softmax(self, scores: mx.array, mask: mx.array) -> mx.array:
        """Scores [..., H, G, T] to weights of the same shape."""
        if self.softcap is not None:
            scores = mx.tanh(scores / self.softcap) * self.softcap
        scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
        if self.sinks is None:
            return mx.softmax(scores, axis=-1, precise=True)
        *_, H, G, _ = scores.shape
        sink = self.sinks.astype(scores.dtype).reshape(H, G, 1)
        sink = mx.broadcast_to(sink, (*scores.shape[:-1], 1))
        return mx.softmax(mx.concatenate([scores, sink], axis=-1), axis=-1, precise=True)[..., :-1]

    def is_causal(self, dim: int, start: int, stop: int, first: int) -> bool:
        """Whether queries start..stop need no mask. `first`: position of the first key; where keys are not consecutive,
        the window says no."""
        if self.softcap is not None:
            return False
        return (self.window is None or stop <= first + self.window) and (backend() == "cpu" or dim <= MAX_FUSED_DIM)

    def for_sdpa(self, mask: mx.array, dtype: mx.Dtype) -> mx.array:
        """A mask in the form that `attend_masked` is fastest with: on CUDA numbers to add, for MLX would make them of
        flags for every layer and head."""
        if self.softcap is not None or backend() != "cuda":
            return mask
        return mx.where(mask, mx.array(0, dtype), mx.array(-mx.inf, dtype))


def slot_positions(base: mx.array, blocks: int, size: int, keep: int = 0) -> mx.array:
    """The position in every slot of block tables, [R, blocks * size]; `base` [R]: that of a table's first slot, if the
    blocks of the first `keep` tokens, which stay at its front, were followed by the next ones."""
    slots = mx.arange(blocks * size)
    positions = base[:, None] + slots
    return mx.where(slots < -(-keep // size) * size, slots, positions) if keep else positions


def attend_decode(
    q, codec: Codec, blocks: Parts, tail: Parts | None, mask, heads: int, params: AttentionParams, filled: int = 0
):
    """One token a row: q [R, Hq, D]; blocks [R, M, h, S, d] and tail [R, h, T, d] of each array; mask [R, M*S + T].

    Unseen slots may hold anything; only the first `filled` blocks of every row hold its own tokens throughout.
    """
    R, M, _, S, _ = blocks[0].shape
    q = (q * params.scale).reshape(R, 1, heads, -1, q.shape[-1])  # [R, 1, H, G, D]
    scores = codec.score(q, blocks).transpose(0, 2, 3, 1, 4).flatten(3)  # [R, H, G, M*S]
    if tail is not None:
        scores = mx.concatenate([scores, codec.score(q[:, 0], tail)], axis=-1)
    weights = params.softmax(scores, mask[:, None, None])
    by_block = weights[..., : M * S].reshape(R, heads, -1, M, S).transpose(0, 3, 1, 2, 4)  # [R, M, H, G, S]
    sums = [codec.mix(by_block[:, :filled], [b[:, :filled] for b in blocks]).sum(axis=1)] if filled else []
    if filled < M:
        seen = mask[:, filled * S : M * S].reshape(R, M - filled, S)
        sums.append(codec.mix(by_block[:, filled:], [b[:, filled:] for b in blocks], seen).sum(axis=1))
    if tail is not None:
        sums.append(codec.mix(weights[..., M * S :], tail, mask[:, M * S :]))
    out = sum(sums[1:], sums[0])
    return out.reshape(R, -1, out.shape[-1])


def attend_causal(q, k, v, params: AttentionParams):
    """A chunk of one row: q [n, Hq, D], k and v [H, T, D], of which the last n are the queries' own."""
    n, T = q.shape[0], k.shape[1]
    tile = CPU_TILE if backend() == "cpu" else n
    ends = [(a, min(a + tile, n)) for a in range(0, n, tile)]
    out = [sdpa(q[None, a:b], k[None, :, : T - n + b], v[None, :, : T - n + b], params, "causal")[0] for a, b in ends]
    return mx.concatenate(out) if len(out) > 1 else out[0]


def attend_masked(q, k, v, mask, params: AttentionParams):
    """Chunks that share a mask [n, T]: q [B, n, Hq, D], k and v [B, H, T, D]."""
    if params.softcap is None:
        return sdpa(q, k, v, params, mask)
    B, n, _, D = q.shape
    q = (q * params.scale).reshape(B, n, k.shape[1], -1, D).transpose(0, 2, 3, 1, 4)  # [B, H, G, n, D]
    scores = (q @ k[:, :, None].swapaxes(-1, -2)).transpose(0, 3, 1, 2, 4)  # [B, n, H, G, T]
    weights = params.softmax(scores, mask[:, None, None]).transpose(0, 2, 3, 1, 4)
    return (weights @ v[:, :, None]).transpose(0, 3, 1, 2, 4).reshape(B, n, -1, v.shape[-1])


def sdpa(q, k, v, params: AttentionParams, mask):
    """MLX's attention with heads after the tokens, [B, n, Hq, D]."""
    attend = mx.fast.scaled_dot_product_attention
    return attend(q.swapaxes(1, 2), k, v, scale=params.scale, mask=mask, sinks=params.sinks).swapaxes(1, 2)
