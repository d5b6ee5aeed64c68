"""What stands between the matrices of a gated MLP: for kernels, and the same in plain MLX."""

from functools import partial

import mlx.core as mx

ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "clamped": 3, "sigmoid": 4}


# One launch each, and in float32 as the kernels have it: rounded once, not after every operation.
@partial(mx.compile, shapeless=True)
def silu(gate: mx.array, up: mx.array) -> mx.array:
    x = gate.astype(mx.float32)
    return (x * mx.sigmoid(x) * up.astype(mx.float32)).astype(gate.dtype)


@partial(mx.compile, shapeless=True)
def gelu(gate: mx.array, up: mx.array) -> mx.array:
    """By tanh."""
    x = gate.astype(mx.float32)
    y = 0.5 * x * (1 + mx.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))
    return (y * up.astype(mx.float32)).astype(gate.dtype)


def clamped(gate: mx.array, up: mx.array, *, alpha: float = 1.702, limit: float = 7.0) -> mx.array:
    """gpt-oss' own; kernels have it with these constants."""
    x, u = mx.minimum(gate.astype(mx.float32), limit), mx.clip(up.astype(mx.float32), -limit, limit)
    return (x * mx.sigmoid(alpha * x) * (u + 1)).astype(gate.dtype)


@partial(mx.compile, shapeless=True)
def sigmoid(gate: mx.array, up: mx.array) -> mx.array:
    """The gate of attention's output."""
    return (mx.sigmoid(gate.astype(mx.float32)) * up.astype(mx.float32)).astype(gate.dtype)


GATES = {"silu": silu, "gelu": gelu, "clamped": mx.compile(clamped, shapeless=True), "sigmoid": sigmoid}


def activate(kind: str, gate: mx.array, up: mx.array | None) -> mx.array:
    assert up is not None or kind != "clamped", "it is made of both"
    return GATES[kind](gate, mx.ones_like(gate) if up is None else up)
