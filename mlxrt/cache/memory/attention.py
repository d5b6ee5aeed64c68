"""Attention of packed tokens over the memory of their rows: the plain-MLX meaning of the op.

Nothing here copies keys or values beyond the one gather of the blocks a row names: scores are small, so they are
what gets moved into order.
"""

from dataclasses import dataclass

import mlx.core as mx

from .codec import Codec, Parts

TILE = 64  # queries a CPU takes together: MLX computes there what the causal mask then throws away
FUSED = 128  # numbers of a head up to which MLX's GPUs do causal attention in one launch; beyond, a call makes a mask


@dataclass(frozen=True)
class Form:
    """What a layer's attention computes, besides the keys it sees."""

    scale: float
    window: int | None = None  # a token sees itself and window - 1 before it ...
    keep: int = 0  # ... and the first `keep` tokens of the text
    softcap: float | None = None
    sinks: mx.array | None = None  # [Hq] a logit per head that takes its share of the softmax and gives nothing

    def visible(self, known: mx.array, at: mx.array) -> mx.array:
        seen = (known >= 0) & (known <= at)
        if self.window is None:
            return seen
        near = known > at - self.window
        return seen & (near | (known < self.keep) if self.keep else near)

    def weigh(self, scores: mx.array, seen: mx.array) -> mx.array:
        """Scores [..., H, G, T] to weights of the same shape."""
        if self.softcap is not None:
            scores = mx.tanh(scores / self.softcap) * self.softcap
        scores = mx.where(seen, scores, mx.array(-mx.inf, scores.dtype))
        if self.sinks is None:
            return mx.softmax(scores, axis=-1, precise=True)
        *_, H, G, _ = scores.shape
        sink = self.sinks.astype(scores.dtype).reshape(H, G, 1)
        sink = mx.broadcast_to(sink, (*scores.shape[:-1], 1))
        return mx.softmax(mx.concatenate([scores, sink], axis=-1), axis=-1, precise=True)[..., :-1]

    def causal(self, dim: int, start: int, stop: int, first: int) -> bool:
        """Whether tokens start..stop need no mask. `first`: of keys that follow each other up to there, or -1."""
        if self.softcap is not None or self.sinks is not None or first < 0:
            return False
        cpu = mx.default_device() == mx.Device(mx.cpu)
        return (self.window is None or stop <= first + self.window) and (cpu or dim <= FUSED)


def attend_singles(q, codec: Codec, blocks: Parts, tail: Parts | None, seen, heads: int, form: Form):
    """One token a row: q [R, Hq, D]; blocks [R, M, h, S, d] and tail [R, h, T, d] of each part; seen [R, M*S + T]."""
    R, M, _, S, _ = blocks[0].shape
    q = (q * form.scale).reshape(R, 1, heads, -1, q.shape[-1])  # [R, 1, H, G, D]
    scores = codec.score(q, blocks).transpose(0, 2, 3, 1, 4).flatten(3)  # [R, H, G, M*S]
    if tail is not None:
        scores = mx.concatenate([scores, codec.score(q[:, 0], tail)], axis=-1)
    weights = form.weigh(scores, seen[:, None, None])
    spread = weights[..., : M * S].reshape(R, heads, -1, M, S).transpose(0, 3, 1, 2, 4)  # [R, M, H, G, S]
    out = codec.mix(spread, blocks).sum(axis=1)
    if tail is not None:
        out = out + codec.mix(weights[..., M * S :], tail)
    return out.reshape(R, -1, out.shape[-1])


def attend_span(q, k, v, seen, form: Form):
    """A chunk of one row: q [n, Hq, D], k and v [H, T, D]; seen [n, T]; None: keys up to its own, the last is last."""
    n, T = q.shape[0], k.shape[1]
    if seen is None:
        if n > TILE and mx.default_device() == mx.Device(mx.cpu):
            tiles = [(a, min(a + TILE, n)) for a in range(0, n, TILE)]
            return mx.concatenate(
                [sdpa(q[a:b], k[:, : T - n + b], v[:, : T - n + b], form.scale, "causal") for a, b in tiles]
            )
        return sdpa(q, k, v, form.scale, "causal")
    if form.softcap is None:
        return sdpa(q, k, v, form.scale, seen, form.sinks)
    H, D = k.shape[0], q.shape[-1]
    q = (q * form.scale).reshape(n, H, -1, D).transpose(1, 2, 0, 3)  # [H, G, n, D]
    scores = (q @ k[:, None].swapaxes(-1, -2)).transpose(2, 0, 1, 3)  # [n, H, G, T]
    weights = form.weigh(scores, seen[:, None, None]).transpose(1, 2, 0, 3)
    return (weights @ v[:, None]).transpose(2, 0, 1, 3).reshape(n, -1, v.shape[-1])


def sdpa(q, k, v, scale, mask, sinks=None):
    out = mx.fast.scaled_dot_product_attention(
        q.swapaxes(0, 1)[None], k[None], v[None], scale=scale, mask=mask, sinks=sinks
    )
    return out[0].swapaxes(0, 1)
