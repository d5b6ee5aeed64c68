"""The gated delta rule for one token a row: convolution, gates, norms and the memory's update in one launch.

    S = e^g S;  S = S + k (beta (v - k S));  o = q S

What the layer computes for more tokens at once differs in the rule alone: `through` takes it as an argument.
"""

from collections.abc import Iterator
from functools import reduce

import mlx.core as mx
import mlx.nn as nn

from .matvec import bits_of
from .op import Case, Source, op

NORM_EPS = 1e-6  # under the square root of |q|^2 and |k|^2: part of the architecture, in no config
MOST = 256  # rows and columns of a state that were tried
WIDTHS = range(2, 9)  # of the convolution
PARTS = 8  # simdgroups of a threadgroup: each has as many rows of the state

GATES = r"""
FN float sigmoid_of(float v) { return 1.0f / (1.0f + metal::exp(-v)); }
// log(1 + e^v). Near 1 a GPU's log is exact to 4e-7 of one, which is much of a small decay: there a series is better.
FN float softplus_of(float v) {
    float e = metal::exp(-metal::abs(v));
    return metal::max(v, 0.0f) + (e < 0.03f ? e * (1.0f - e * (0.5f - e * 0.33333333f)) : metal::log(1.0f + e));
}
"""
# A threadgroup has 32 columns of one head's state: columns never meet. A lane is a column, a simdgroup a part of its rows,
# which stay in registers from the product to the update. q and k are made by every threadgroup that needs them.
BODY = r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x; uint c0 = threadgroup_position_in_grid.x * 32;
    uint h = threadgroup_position_in_grid.y; uint n = threadgroup_position_in_grid.z;
    const int KEYS = HK * DK; const int C = 2 * KEYS + HV * DV; const int ROWS = DK / PARTS;
    uint kh = h / uint(HV / HK); bool first = c0 == 0 && h % uint(HV / HK) == 0;
    threadgroup float mixed[2 * DK + 32]; threadgroup float ks[PARTS][32]; threadgroup float qs[PARTS][32];
    uint at = ((n * HV + h) * DK + sg * ROWS) * DV + c0 + lane;
    float s[ROWS];
    #pragma unroll
    for (int r = 0; r < ROWS; r++) s[r] = state[at + r * DV];
    for (uint i = t; i < uint(2 * DK + 32); i += uint(PARTS * 32)) {
        bool value = i >= uint(2 * DK);
        uint c = value ? 2 * KEYS + h * DV + c0 + i - 2 * DK : i / DK * KEYS + kh * DK + i % DK;
        float sum = 0.0f;
        #pragma unroll
        for (int j = 0; j < W; j++) {
            T x = j + 1 == W ? qkv[n * C + c] : past[(n * (W - 1) + j) * C + c];
            sum += float(x) * float(weight[c * W + j]);
            if (j != 0 && (value || first)) kept[(n * (W - 1) + j - 1) * C + c] = x;
        }
        sum = float(static_cast<T>(sum));
        mixed[i] = float(static_cast<T>(sum * sigmoid_of(sum)));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float qq = 0.0f; float kk = 0.0f; float qk = 0.0f;
    for (uint i = lane; i < uint(DK); i += 32) {
        float q = mixed[i]; float k = mixed[DK + i];
        qq += q * q; kk += k * k; qk += q * k;
    }
    float eps = as_type<float>(uint(EPS));
    float q_unit = metal::rsqrt(simd_sum(qq) + eps) * metal::rsqrt(float(DK)); float k_unit = metal::rsqrt(simd_sum(kk) + eps);
    qk = simd_sum(qk) * q_unit * k_unit;
    float fade = metal::exp(-metal::exp(float(a_log[h])) * softplus_of(float(a[n * HV + h]) + float(dt_bias[h])));
    float beta = sigmoid_of(float(b[n * HV + h]));
    float known = 0.0f; float seen = 0.0f;
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        s[r] *= fade;
        known += mixed[DK + sg * ROWS + r] * s[r]; seen += mixed[sg * ROWS + r] * s[r];
    }
    ks[sg][lane] = known; qs[sg][lane] = seen;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    known = 0.0f; seen = 0.0f;
    #pragma unroll
    for (int p = 0; p < PARTS; p++) { known += ks[p][lane]; seen += qs[p][lane]; }
    float u = beta * (mixed[2 * DK + lane] - known * k_unit);
    #pragma unroll
    for (int r = 0; r < ROWS; r++) fresh[at + r * DV] = s[r] + mixed[DK + sg * ROWS + r] * k_unit * u;
    if (sg == 0) y[(n * HV + h) * DV + c0 + lane] = static_cast<T>(seen * q_unit + qk * u);
"""
INPUTS = ("qkv", "past", "state", "a", "b", "weight", "a_log", "dt_bias")
DELTA_STEP = Source("mlxrt_delta_step", INPUTS, ("y", "kept", "fresh"), BODY, GATES)


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


def through(rule, qkv, past, state, a, b, weight, a_log, dt_bias):
    """qkv [B, L, C], past [B, width - 1, C], state [B, Hv, Dk, Dv], a and b [B, L, Hv] -> y [B, L, Hv, Dv], new past,
    new state.

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
    y = y.transpose(0, 3, 1, 2, 4).reshape(B, L, -1, value_dim)
    return y.astype(qkv.dtype), past, new.reshape(state.shape)


def delta_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, keys, each, key_dim, value_dim, width in [
        (1, 1, 1, 32, 32, 4),
        (3, 2, 2, 64, 32, 4),
        (2, 1, 4, 32, 64, 2),
        (1, 2, 1, 128, 128, 4),
        (2, 2, 3, 96, 64, 3),
        (1, 1, 2, 256, 256, 8),
    ]:
        mx.random.seed(key_dim + value_dim)
        heads = keys * each
        channels = 2 * keys * key_dim + heads * value_dim
        halves = {
            "qkv": mx.random.normal((rows, channels)),
            "past": mx.random.normal((rows, width - 1, channels)),
            "a": mx.linspace(-6, 6, rows * heads).reshape(rows, heads),  # both ways to a logarithm
            "b": mx.random.normal((rows, heads)),
            "weight": mx.random.normal((channels, width)),
        }
        arrays = {name: x.astype(dtype) for name, x in halves.items()}
        arrays["state"] = mx.random.normal((rows, heads, key_dim, value_dim))
        arrays["a_log"], arrays["dt_bias"] = mx.random.uniform(-3, 0, (heads,)), mx.random.normal((heads,))
        name = f"{rows} rows, {keys} x {each} heads of {key_dim} x {value_dim}, width {width}"
        yield Case(name, arrays)


@op(delta_cases)
def delta_step(qkv, past, state, a, b, weight, a_log, dt_bias):
    """qkv [B, C], a and b [B, Hv], otherwise as `through`: y [B, Hv, Dv], new past, new state."""
    y, past, state = through(step, qkv[:, None], past, state, a[:, None], b[:, None], weight, a_log, dt_bias)
    return y[:, 0], past, state


def refuses(qkv, past, state, weight, **rest) -> str | None:
    key_dim, value_dim = state.shape[2:]
    if key_dim % 32 or value_dim % 32 or max(key_dim, value_dim) > MOST:
        return f"heads of {key_dim} x {value_dim} numbers: multiples of 32 up to {MOST}"
    if weight.shape[1] not in WIDTHS:
        return f"a convolution {weight.shape[1]} wide"
    if state.dtype != mx.float32 or past.dtype != qkv.dtype:
        return f"a state of {state.dtype}, {past.dtype} before {qkv.dtype}"
    return None


@delta_step.kernel(DELTA_STEP, refuses=refuses)
def launch(gpu, qkv, past, state, a, b, weight, a_log, dt_bias):
    rows, heads, key_dim, value_dim = state.shape
    y, kept, fresh = gpu(
        DELTA_STEP,
        [qkv, past, state, a, b, weight, a_log, dt_bias],
        (value_dim // 32, heads, rows),
        PARTS * 32,
        [((rows, heads, value_dim), qkv.dtype), (past.shape, qkv.dtype), (state.shape, mx.float32)],
        T=qkv.dtype,
        HK=key_heads(qkv, state),
        HV=heads,
        DK=key_dim,
        DV=value_dim,
        W=weight.shape[1],
        PARTS=PARTS,
        EPS=bits_of(NORM_EPS),
    )
    return y, kept, fresh
