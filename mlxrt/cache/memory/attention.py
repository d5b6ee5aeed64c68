"""Attention of packed tokens over the memory of their rows: the plain-MLX meaning of the op.

Nothing here copies keys or values beyond the one gather of the blocks a row names: scores are small, so they are
what gets moved into order.
"""

import mlx.core as mx

FAR = 1 << 30


def attend_singles(q, blocks, tail, known, at, *, heads, window, scale):
    """One token a row. q [R, Hq, D]; blocks [R, M, 2H, S, D] and tail [R, 2H, T, D] or None; known [R, M*S + T]."""
    R, M, _, S, D = blocks.shape
    q = (q * scale).reshape(R, 1, heads, -1, D)  # [R, 1, H, G, D]
    scores = q @ blocks[:, :, :heads].swapaxes(-1, -2)  # [R, M, H, G, S]
    scores = scores.transpose(0, 2, 3, 1, 4).flatten(3)  # [R, H, G, M*S]
    if tail is not None:
        scores = mx.concatenate([scores, q[:, 0] @ tail[:, :heads].swapaxes(-1, -2)], axis=-1)
    seen = visible(known, at[:, None], window)[:, None, None]
    weights = mx.softmax(mx.where(seen, scores, mx.array(-mx.inf, scores.dtype)), axis=-1, precise=True)
    spread = weights[..., : M * S].reshape(R, heads, -1, M, S).transpose(0, 3, 1, 2, 4)  # [R, M, H, G, S]
    out = (spread @ blocks[:, :, heads:]).sum(axis=1)
    if tail is not None:
        out = out + weights[..., M * S :] @ tail[:, heads:]
    return out.reshape(R, -1, D)


def attend_span(q, k, v, first, start, *, window, scale):
    """A chunk of one row: q [n, Hq, D] at positions start..; k, v [H, T, D] from position `first` to the chunk's end."""
    n, T = q.shape[0], k.shape[1]
    mask: str | mx.array = "causal"  # the last query lines up with the last key
    if window is not None and first + window < start + n:
        at, key = (start + mx.arange(n))[:, None], (first + mx.arange(T))[None]
        mask = visible(key, at, window)
    out = mx.fast.scaled_dot_product_attention(q.swapaxes(0, 1)[None], k[None], v[None], scale=scale, mask=mask)
    return out[0].swapaxes(0, 1)


def visible(known, at, window):
    return (known >= 0) & (known <= at) & (known > at - (window or FAR))
