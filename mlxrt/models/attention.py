"""Attention of a layer over its KV cache: by the paged kernel where a decode step can use it, else by plain MLX."""

import mlx.core as mx

from ..kernels import Kernels, LazyQKV, QKVLayout, compute_qkv, decode_attention
from .rope import RoPE


def attend(
    qkv: mx.array | LazyQKV,
    kv,
    layout: QKVLayout,
    rope: RoPE,
    kernels: Kernels,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """qkv [N, heads * D], of any number of sequences, over the layer's view `kv` -> [N, Hq * D]."""
    params = {"scale": scale, "softcap": softcap, "sinks": sinks}
    pages = kv.pages() if kernels.gpu is not None else None
    if pages is not None:
        y, tail = decode_attention(kernels, qkv, pages, layout=layout, window=kv.spec.window, **params)
        kv.replace_tail(tail)
        return y
    q, *new = layout.prepare(compute_qkv(qkv, kernels), kv.positions, rope)  # [N, heads, D] each
    return kv.attend(q, *new, **params).flatten(1)
