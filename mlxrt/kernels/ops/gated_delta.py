"""Gated DeltaNet decode step: all between a layer's two projections in one launch, from the convolution to the gated
norm.

    S = e^g S;  S = S + k (beta (v - k S));  o = q S

Prefill differs in the delta rule alone: `gated_delta_layer` takes it as an argument.
"""

import math
from collections.abc import Iterator
from functools import reduce

import mlx.core as mx
import mlx.nn as nn

from ..registry import Case, KernelSource, op
from .qmv import bits_of

UNIT_EPS = 1e-6  # under the square root of |q|^2 and |k|^2: part of the architecture, in no config
MAX_HEAD_DIM = 256  # no thread has more than one element of y, or 32 rows of a column of the state
CONV_WIDTHS = range(2, 9)
SIMDGROUPS = 16

INPUTS = ("projected", "conv_state", "state", "conv_weight", "a_log", "dt_bias", "norm")
GATED_DELTA = KernelSource("gated_delta.metal", INPUTS, ("y", "conv_out", "state_out"))


def causal_conv(conv_state, x, weight):
    """Depthwise convolution, then SiLU. conv_state [B, width - 1, C], x [B, L, C] -> new conv_state, y."""
    n, inputs = x.shape[1], mx.concatenate([conv_state, x], axis=1)
    # Summed in float32: it is few terms, and half precision would round after each.
    w = weight.astype(mx.float32)
    terms = (inputs[:, i : i + n].astype(mx.float32) * w[:, i] for i in range(w.shape[1]))
    return inputs[:, n:], nn.silu(reduce(mx.add, terms).astype(x.dtype))


def l2_normalize(x):
    """x / |x| over the last axis."""
    dim = x.shape[-1]
    return mx.fast.rms_norm(x, None, UNIT_EPS / dim) * dim**-0.5


def delta_rule(state, q, k, v, g, beta):
    """The rule for one token; shapes as in `gated_delta_layer`. The old state is read by k and q at once; what q reads of
    the correction is (q k) u."""
    decay = mx.exp(g)
    k_dot, q_dot = mx.split(mx.concatenate([k, q], axis=-2) @ state * decay, 2, axis=-2)
    u = beta * (v - k_dot)
    return decay * state + k.swapaxes(-1, -2) * u, q_dot + (q * k).sum(-1, keepdims=True) * u


def num_key_heads(channels, state) -> int:
    """`channels` holds q and k of these and v of the value heads, side by side."""
    _, heads, key_dim, value_dim = state.shape
    return (channels.shape[-1] - heads * value_dim) // (2 * key_dim)


def split_projection(projected: mx.array, state: mx.array) -> dict[str, mx.array]:
    """qkv, z, b, a of a layer's projection [..., W], which has them side by side."""
    _, heads, _, value_dim = state.shape
    ends = [projected.shape[-1] - n for n in (heads * (value_dim + 2), 2 * heads, heads)]
    return dict(zip(("qkv", "z", "b", "a"), mx.split(projected, ends, axis=-1)))


def gated_rms_norm(y, gate, weight, eps):
    normed = mx.fast.rms_norm(y, weight, eps).astype(mx.float32)
    return (normed * nn.silu(gate.astype(mx.float32))).astype(y.dtype)


def gated_delta_layer(rule, qkv, z, a, b, conv_state, state, conv_weight, a_log, dt_bias, norm, eps):
    """qkv [B, L, C], z [B, L, Hv Dv], a and b [B, L, Hv]; conv_state [B, width - 1, C], state [B, Hv, Dk, Dv] -> y as z,
    new conv_state, new state.

    rule(state, q, k, v, g, beta) -> state, y, all float32: state [..., Dk, Dv]; q and k [..., L, Dk], v [..., L, Dv],
    g (log of the decay) and beta [..., L, 1]. Leading axes broadcast: the value heads of a group share q and k.
    """
    g = -mx.exp(a_log.astype(mx.float32)) * nn.softplus(a.astype(mx.float32) + dt_bias)
    conv_state, mixed = causal_conv(conv_state, qkv, conv_weight)
    (B, L, _), heads, (_, _, key_dim, value_dim) = qkv.shape, num_key_heads(qkv, state), state.shape
    keys = heads * key_dim
    q, k, v = mx.split(mixed.astype(mx.float32), [keys, 2 * keys], axis=-1)
    q, k = (l2_normalize(x.reshape(B, L, heads, 1, key_dim)) for x in (q, k))
    v = v.reshape(B, L, heads, -1, value_dim)
    g, beta = (x.astype(mx.float32).reshape(B, L, heads, -1, 1) for x in (g, mx.sigmoid(b)))
    q, k, v, g, beta = (x.transpose(0, 2, 3, 1, 4) for x in (q * key_dim**-0.5, k, v, g, beta))
    new, y = rule(state.reshape(B, heads, -1, key_dim, value_dim), q, k, v, g, beta)
    y = y.transpose(0, 3, 1, 2, 4).reshape(B, L, -1, value_dim).astype(qkv.dtype)
    return gated_rms_norm(y, z.reshape(y.shape), norm, eps).flatten(2), conv_state, new.reshape(state.shape)


def delta_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, keys, each, key_dim, value_dim, width in [
        (1, 1, 1, 32, 32, 4),
        (3, 2, 2, 64, 32, 4),
        (2, 1, 4, 32, 64, 2),
        (1, 2, 1, 128, 128, 4),
        (2, 2, 3, 96, 64, 3),
        (1, 1, 2, 256, 256, 8),
        (4, 16, 2, 128, 128, 4),  # Qwen3.5 9B
    ]:
        mx.random.seed(key_dim + value_dim)
        heads = keys * each
        channels = 2 * keys * key_dim + heads * value_dim
        a = mx.linspace(-6, 6, rows * heads).reshape(rows, heads)  # both ways to a logarithm
        projected = [mx.random.normal((rows, channels + heads * (value_dim + 1))), a]
        halves = {
            "projected": mx.concatenate(projected, axis=-1),
            "conv_state": mx.random.normal((rows, width - 1, channels)),
            "conv_weight": mx.random.normal((channels, width)),
            "norm": mx.random.normal((value_dim,)),
        }
        arrays = {name: x.astype(dtype) for name, x in halves.items()}
        arrays["state"] = mx.random.normal((rows, heads, key_dim, value_dim))
        arrays["a_log"], arrays["dt_bias"] = mx.random.uniform(-3, 0, (heads,)), mx.random.normal((heads,))
        name = f"{rows} rows, {keys} x {each} heads of {key_dim} x {value_dim}, width {width}"
        yield Case(name, arrays, {"eps": 1e-6}, large=heads > 8)


@op(delta_cases)
def gated_delta_step(projected, conv_state, state, **weights):
    """projected [B, C + Hv Dv + 2 Hv] (q, k, v; z; b; a) of a token of each row -> y [B, Hv Dv], new conv_state, new
    state."""
    xs = split_projection(projected[:, None], state)
    y, conv_state, state = gated_delta_layer(delta_rule, **xs, conv_state=conv_state, state=state, **weights)
    return y[:, 0], conv_state, state


def unsupported(projected, conv_state, state, conv_weight, **rest) -> str | None:
    key_dim, value_dim = state.shape[2:]
    if key_dim % 32 or value_dim % 32 or max(key_dim, value_dim) > MAX_HEAD_DIM:
        return f"heads of {key_dim} x {value_dim}: multiples of 32 up to {MAX_HEAD_DIM}"
    if conv_weight.shape[1] not in CONV_WIDTHS:
        return f"a convolution {conv_weight.shape[1]} wide"
    if state.dtype != mx.float32 or projected.dtype != conv_state.dtype:
        return f"a state of {state.dtype}, {conv_state.dtype} before {projected.dtype}"
    return None


@gated_delta_step.kernel(GATED_DELTA, unsupported=unsupported)
def launch(gpu, projected, conv_state, state, conv_weight, a_log, dt_bias, norm, eps):
    rows, heads, key_dim, value_dim = state.shape
    y, conv_out, state_out = gpu(
        GATED_DELTA,
        [projected, conv_state, state, conv_weight, a_log, dt_bias, norm],
        (heads, rows, 1),
        SIMDGROUPS * 32,
        [
            ((rows, heads * value_dim), projected.dtype),
            (conv_state.shape, conv_state.dtype),
            (state.shape, state.dtype),
        ],
        T=projected.dtype,
        K_HEADS=num_key_heads(conv_state, state),
        V_HEADS=heads,
        K_DIM=key_dim,
        V_DIM=value_dim,
        CONV=conv_weight.shape[1],
        SIMDGROUPS=SIMDGROUPS,
        # A thread has 32 rows of a column at most: more would spill from registers.
        ACROSS=math.gcd(value_dim // 32, 4 if key_dim <= 128 else 2),
        UNIT_EPS=bits_of(UNIT_EPS),
        EPS=bits_of(eps),
    )
    return y, conv_out, state_out
