"""Rotary position embedding (RoPE) in plain MLX: what models compute where no kernel does, and what kernels are compared
with."""

import mlx.core as mx

from ..device import backend


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
    x = x[:, :, None]
    if dim < 32 and backend() == "cuda":
        # MLX gives a block up to 1,024 / (pairs * length) threads in z, of which CUDA allows 64 (MLX 0.32.4).
        x = mx.pad(x, [(0, 0), (0, 0), (0, (32 >> dim.bit_length() - 1) - 1), (0, 0)])
    base = theta if periods is None else None
    return mx.fast.rope(x, dim, traditional=False, base=base, scale=scale, offset=positions, freqs=periods)[:, :, 0]
