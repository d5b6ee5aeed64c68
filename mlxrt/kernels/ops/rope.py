"""Rotary position embedding (RoPE) in plain MLX: what models compute where no kernel does, and what kernels are compared
with."""

import mlx.core as mx

from ..mlx_defects import fast_rope


def apply_rope(
    x: mx.array,
    positions: mx.array,
    dim: int,
    *,
    theta: float | None = None,
    periods: mx.array | None = None,
    scale: float = 1.0,
    magnitude: float = 1.0,
) -> mx.array:
    """x [N, heads, D], each token at its own position: tokens are the batch of MLX's rope.

    The first `dim` of a head rotate, by 1 / period radians per position (None: theta ** (2i / dim)), times `scale`.
    """
    if magnitude != 1.0 and dim == x.shape[-1]:
        x = x * magnitude  # a Python float keeps the dtype
    elif magnitude != 1.0:
        x = mx.concatenate([x[..., :dim] * magnitude, x[..., dim:]], axis=-1)
    base = theta if periods is None else None
    return fast_rope(x[:, :, None], dim, base=base, scale=scale, offset=positions, freqs=periods)[:, :, 0]
