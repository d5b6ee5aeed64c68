"""The gated delta rule for one token a row: all between a layer's two products in one launch, from the convolution to
the gated norm.

    S = e^g S;  S = S + k (beta (v - k S));  o = q S

What the layer computes for more tokens at once differs in the rule alone: `through` takes it as an argument.
"""

import math
from collections.abc import Iterator
from functools import reduce

import mlx.core as mx
import mlx.nn as nn

from ..registry import Case, InlineSource, op
from .qmv import bits_of

NORM_EPS = 1e-6  # under the square root of |q|^2 and |k|^2: part of the architecture, in no config
MOST = 256  # rows and columns of a state: no thread has more than one number of y, or 32 rows of a column
WIDTHS = range(2, 9)  # of the convolution
SG = 16  # simdgroups of a threadgroup

GATES = r"""
FN float sigmoid_of(float v) { return 1.0f / (1.0f + metal::exp(-v)); }
// log(1 + e^v). Near 1 a GPU's log is exact to 4e-7 of one, which is much of a small decay: there a series is better.
FN float softplus_of(float v) {
    float e = metal::exp(-metal::abs(v));
    return metal::max(v, 0.0f) + (e < 0.03f ? e * (1.0f - e * (0.5f - e * 0.33333333f)) : metal::log(1.0f + e));
}
"""
# A threadgroup has one head's state, of which every number is read once: SIDE simdgroups lie side by side, 32 columns each,
# and parts of the rows go to as many more. What a thread has of a column stays in registers from the product to the update.
# Memory is asked for everything before the first barrier (docs/decisions/0008), but for columns beyond the first COLS.
# q and k are made by every threadgroup that needs them; the first value head of a group keeps what they were made of.
BODY = r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup; uint t = thread_position_in_threadgroup.x;
    uint h = threadgroup_position_in_grid.x; uint n = threadgroup_position_in_grid.y;
    const int KEYS = HK * DK; const int C = 2 * KEYS + HV * DV; const int ROWS = DK * SIDE / SG; const int COLS = 32 * SIDE;
    threadgroup float mixed[2 * DK + DV]; threadgroup float ks[SG][32]; threadgroup float qs[SG][32]; threadgroup float o[DV];
    uint kh = h / uint(HV / HK); bool first = h % uint(HV / HK) == 0;
    uint side = sg % SIDE; uint row = sg / SIDE * ROWS; uint at = ((n * HV + h) * DK + row) * DV + side * 32 + lane;
    float s[ROWS];
    #pragma unroll
    for (int r = 0; r < ROWS; r++) s[r] = state[at + r * DV];
    uint to = (n * HV + h) * DV + t; float gate = 0.0f; float gain = 0.0f;
    if (t < uint(DV)) { gate = float(z[to]); gain = float(norm[t]); }
    float fade = metal::exp(-metal::exp(float(a_log[h])) * softplus_of(float(a[n * HV + h]) + float(dt_bias[h])));
    float beta = sigmoid_of(float(b[n * HV + h]));
    for (uint i = t; i < uint(2 * DK + DV); i += uint(SG * 32)) {
        bool value = i >= uint(2 * DK);
        uint c = value ? 2 * KEYS + h * DV + i - 2 * DK : i / DK * KEYS + kh * DK + i % DK;
        T x[W]; float sum = 0.0f;
        #pragma unroll
        for (int j = 0; j < W; j++) {
            x[j] = j + 1 == W ? qkv[n * C + c] : past[(n * (W - 1) + j) * C + c];
            sum += float(x[j]) * float(weight[c * W + j]);
        }
        #pragma unroll
        for (int j = 1; j < W; j++) if (value || first) kept[(n * (W - 1) + j - 1) * C + c] = x[j];
        sum = float(static_cast<T>(sum));
        mixed[i] = float(static_cast<T>(sum * sigmoid_of(sum)));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float qq = 0.0f; float kk = 0.0f; float qk = 0.0f;
    for (uint i = lane; i < uint(DK); i += 32) {
        float q = mixed[i]; float k = mixed[DK + i];
        qq += q * q; kk += k * k; qk += q * k;
    }
    float tiny = as_type<float>(uint(TINY));
    float q_unit = metal::rsqrt(simd_sum(qq) + tiny) * metal::rsqrt(float(DK)); float k_unit = metal::rsqrt(simd_sum(kk) + tiny);
    qk = simd_sum(qk) * q_unit * k_unit;
    for (uint c0 = 0; c0 < uint(DV); c0 += COLS) {
        float known = 0.0f; float seen = 0.0f;
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            s[r] *= fade;
            known += mixed[DK + row + r] * s[r]; seen += mixed[row + r] * s[r];
        }
        ks[sg][lane] = known; qs[sg][lane] = seen;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        known = 0.0f; seen = 0.0f;
        #pragma unroll
        for (int p = 0; p < SG; p += SIDE) { known += ks[p + side][lane]; seen += qs[p + side][lane]; }
        uint col = c0 + side * 32 + lane;
        float u = beta * (mixed[2 * DK + col] - known * k_unit);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            fresh[at + c0 + r * DV] = s[r] + mixed[DK + row + r] * k_unit * u;
            if (c0 + COLS < uint(DV)) s[r] = state[at + c0 + COLS + r * DV];
        }
        if (row == 0) o[col] = float(static_cast<T>(seen * q_unit + qk * u));
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    float squares = 0.0f;
    for (uint i = lane; i < uint(DV); i += 32) squares += o[i] * o[i];
    float inv = metal::rsqrt(simd_sum(squares) / float(DV) + as_type<float>(uint(EPS)));
    if (t < uint(DV)) y[to] = static_cast<T>(float(static_cast<T>(o[t] * inv * gain)) * gate * sigmoid_of(gate));
"""
INPUTS = ("qkv", "z", "a", "b", "past", "state", "weight", "a_log", "dt_bias", "norm")
DELTA_STEP = InlineSource("mlxrt_delta_step", INPUTS, ("y", "kept", "fresh"), BODY, GATES)


def convolved(before, x, weight):
    """Every channel with itself. before [B, width - 1, C], x [B, L, C] -> what the next call needs before it, y."""
    n, whole = x.shape[1], mx.concatenate([before, x], axis=1)
    # Summed in float32: it is few terms, and half precision would round after each.
    w = weight.astype(mx.float32)
    terms = (whole[:, i : i + n].astype(mx.float32) * w[:, i] for i in range(w.shape[1]))
    return whole[:, n:], nn.silu(reduce(mx.add, terms).astype(x.dtype))


def unit(x):
    """x / |x| over the last axis."""
    dim = x.shape[-1]
    return mx.fast.rms_norm(x, None, NORM_EPS / dim) * dim**-0.5


def step(state, q, k, v, g, beta):
    """One token; shapes as in `through`. The old state is read by k and q at once; what q sees of the correction is
    (q k) u."""
    fade = mx.exp(g)
    known, seen = mx.split(mx.concatenate([k, q], axis=-2) @ state * fade, 2, axis=-2)
    u = beta * (v - known)
    return fade * state + k.swapaxes(-1, -2) * u, seen + (q * k).sum(-1, keepdims=True) * u


def key_heads(qkv, state) -> int:
    """qkv holds q and k of these and v of the value heads, side by side."""
    _, heads, key_dim, value_dim = state.shape
    return (qkv.shape[-1] - heads * value_dim) // (2 * key_dim)


def gated_norm(y, gate, weight, eps):
    normed = mx.fast.rms_norm(y, weight, eps).astype(mx.float32)
    return (normed * nn.silu(gate.astype(mx.float32))).astype(y.dtype)


def through(rule, qkv, z, a, b, past, state, weight, a_log, dt_bias, norm, eps):
    """qkv [B, L, C], z [B, L, Hv Dv], a and b [B, L, Hv]; past [B, width - 1, C], state [B, Hv, Dk, Dv] -> y as z, new
    past, new state.

    rule(state, q, k, v, g, beta) -> state, y, all float32: state [..., Dk, Dv]; q and k [..., L, Dk], v [..., L, Dv],
    g (log of the decay) and beta [..., L, 1]. Leading axes broadcast: the value heads of a group share q and k.
    """
    g = -mx.exp(a_log.astype(mx.float32)) * nn.softplus(a.astype(mx.float32) + dt_bias)
    past, mixed = convolved(past, qkv, weight)
    (B, L, _), heads, (_, _, key_dim, value_dim) = qkv.shape, key_heads(qkv, state), state.shape
    keys = heads * key_dim
    q, k, v = mx.split(mixed.astype(mx.float32), [keys, 2 * keys], axis=-1)
    q, k = (unit(x.reshape(B, L, heads, 1, key_dim)) for x in (q, k))
    v = v.reshape(B, L, heads, -1, value_dim)
    g, beta = (x.astype(mx.float32).reshape(B, L, heads, -1, 1) for x in (g, mx.sigmoid(b)))
    q, k, v, g, beta = (x.transpose(0, 2, 3, 1, 4) for x in (q * key_dim**-0.5, k, v, g, beta))
    new, y = rule(state.reshape(B, heads, -1, key_dim, value_dim), q, k, v, g, beta)
    y = y.transpose(0, 3, 1, 2, 4).reshape(B, L, -1, value_dim).astype(qkv.dtype)
    return gated_norm(y, z.reshape(y.shape), norm, eps).flatten(2), past, new.reshape(state.shape)


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
        halves = {
            "qkv": mx.random.normal((rows, channels)),
            "z": mx.random.normal((rows, heads * value_dim)),
            "past": mx.random.normal((rows, width - 1, channels)),
            "a": mx.linspace(-6, 6, rows * heads).reshape(rows, heads),  # both ways to a logarithm
            "b": mx.random.normal((rows, heads)),
            "weight": mx.random.normal((channels, width)),
            "norm": mx.random.normal((value_dim,)),
        }
        arrays = {name: x.astype(dtype) for name, x in halves.items()}
        arrays["state"] = mx.random.normal((rows, heads, key_dim, value_dim))
        arrays["a_log"], arrays["dt_bias"] = mx.random.uniform(-3, 0, (heads,)), mx.random.normal((heads,))
        name = f"{rows} rows, {keys} x {each} heads of {key_dim} x {value_dim}, width {width}"
        yield Case(name, arrays, {"eps": 1e-6}, large=heads > 8)


@op(delta_cases)
def delta_step(qkv, z, a, b, past, state, **constants):
    """As `through`, less the axis of tokens: qkv [B, C], z [B, Hv Dv], a and b [B, Hv] -> y as z, new past, new state."""
    qkv, z, a, b = (x[:, None] for x in (qkv, z, a, b))
    y, past, state = through(step, qkv, z, a, b, past, state, **constants)
    return y[:, 0], past, state


def refuses(qkv, z, past, state, weight, **rest) -> str | None:
    key_dim, value_dim = state.shape[2:]
    if key_dim % 32 or value_dim % 32 or max(key_dim, value_dim) > MOST:
        return f"heads of {key_dim} x {value_dim} numbers: multiples of 32 up to {MOST}"
    if weight.shape[1] not in WIDTHS:
        return f"a convolution {weight.shape[1]} wide"
    if state.dtype != mx.float32 or not qkv.dtype == z.dtype == past.dtype:
        return f"a state of {state.dtype}, {past.dtype} before {qkv.dtype}, a gate of {z.dtype}"
    return None


@delta_step.kernel(DELTA_STEP, refuses=refuses)
def launch(gpu, qkv, z, a, b, past, state, weight, a_log, dt_bias, norm, eps):
    rows, heads, key_dim, value_dim = state.shape
    # A thread has 32 rows of a column at most: of more the compiler would make memory.
    side = math.gcd(value_dim // 32, 4 if key_dim <= 128 else 2)
    y, kept, fresh = gpu(
        DELTA_STEP,
        [qkv, z, a, b, past, state, weight, a_log, dt_bias, norm],
        (heads, rows, 1),
        SG * 32,
        [(z.shape, z.dtype), (past.shape, past.dtype), (state.shape, state.dtype)],
        T=qkv.dtype,
        HK=key_heads(qkv, state),
        HV=heads,
        DK=key_dim,
        DV=value_dim,
        W=weight.shape[1],
        SG=SG,
        SIDE=side,
        TINY=bits_of(NORM_EPS),
        EPS=bits_of(eps),
    )
    return y, kept, fresh
