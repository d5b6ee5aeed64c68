"""What stands between the matrices of a gated MLP: for kernels, and the same in plain MLX."""

from functools import partial

import mlx.core as mx

ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "clamped": 3}

ACTIVATE = r"""
// 1: SiLU, 2: GELU by tanh; 3: gpt-oss' SwiGLU, which clamps both sides and adds one to up.
template <int ACT> FN float gated(float g, float u) {
    if (ACT == 1) return g / (1.0f + metal::exp(-g)) * u;
    if (ACT == 2) {
        float t = metal::min(metal::max(0.7978845608f * (g + 0.044715f * g * g * g), -15.0f), 15.0f);
        float e = metal::exp(2.0f * t);
        return 0.5f * g * (1.0f + (e - 1.0f) / (e + 1.0f)) * u;
    }
    g = metal::min(g, 7.0f); u = metal::max(metal::min(u, 7.0f), -7.0f);
    return g / (1.0f + metal::exp(-1.702f * g)) * (u + 1.0f);
}
template <int CAP> FN float capped(float a) {
    return CAP != 0 ? metal::tanh(a / as_type<float>(uint(CAP))) * as_type<float>(uint(CAP)) : a;
}
"""


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
    """gpt-oss' own; kernels have it with these numbers."""
    x, u = mx.minimum(gate.astype(mx.float32), limit), mx.clip(up.astype(mx.float32), -limit, limit)
    return (x * mx.sigmoid(alpha * x) * (u + 1)).astype(gate.dtype)


GATES = {"silu": silu, "gelu": gelu, "clamped": mx.compile(clamped, shapeless=True)}


def activate(kind: str, gate: mx.array, up: mx.array | None) -> mx.array:
    assert up is not None or kind != "clamped", "it is made of both"
    return GATES[kind](gate, mx.ones_like(gate) if up is None else up)
