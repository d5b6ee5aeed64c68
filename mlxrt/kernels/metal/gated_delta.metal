#include "gated_delta.h"

// One decode step of a Gated DeltaNet layer: causal convolution, the gated delta rule, gated RMSNorm.
//     S = e^g S;  S = S + k (beta (v - k S));  o = q S
// projected [rows, WIDTH]: q, k and v of all heads, the output's gate, b, a: one array, which a batch's rows need not be cut of.
// y [rows, V_HEADS V_DIM], conv_out [rows, CONV - 1, channels], state_out [rows, V_HEADS, K_DIM, V_DIM].

// A threadgroup has one value head's state, of which every element is read once: ACROSS simdgroups lie side by side, 32
// columns each, and parts of the rows go to as many more. What a thread has of a column stays in registers from the
// product to the update. Memory is asked for everything before the first barrier (docs/decisions/0008), but for columns
// beyond the first COLS. q and k are made by every threadgroup that needs them; the first value head of a group writes
// the convolution's state for them.
[[kernel]] void mlxrt_gated_delta(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x;
    uint head = threadgroup_position_in_grid.x;
    uint n = threadgroup_position_in_grid.y;
    const int KEYS = K_HEADS * K_DIM;
    const int CHANNELS = 2 * KEYS + V_HEADS * V_DIM;
    const int WIDTH = CHANNELS + V_HEADS * V_DIM + 2 * V_HEADS;
    const int ROWS = K_DIM * ACROSS / SIMDGROUPS;
    const int COLS = 32 * ACROSS;
    threadgroup float mixed[2 * K_DIM + V_DIM];  // q, k, v after the convolution
    threadgroup float k_sums[SIMDGROUPS][32];
    threadgroup float q_sums[SIMDGROUPS][32];
    threadgroup float o[V_DIM];
    uint k_head = head / uint(V_HEADS / K_HEADS);
    bool first = head % uint(V_HEADS / K_HEADS) == 0;

    // Load the state, the output's gate and norm, and the gates of the rule.
    uint strip = sg % ACROSS;
    uint row = sg / ACROSS * ROWS;
    uint at = ((n * V_HEADS + head) * K_DIM + row) * V_DIM + strip * 32 + lane;
    float s[ROWS];
    #pragma unroll
    for (int r = 0; r < ROWS; r++) s[r] = state[at + r * V_DIM];
    uint to = (n * V_HEADS + head) * V_DIM + t;
    float gate = 0.0f;
    float gain = 0.0f;
    if (t < uint(V_DIM)) {
        gate = float(projected[n * WIDTH + CHANNELS + head * V_DIM + t]);
        gain = float(norm[t]);
    }
    uint b = n * WIDTH + CHANNELS + V_HEADS * V_DIM + head;
    float a = float(projected[b + V_HEADS]);
    float decay = state_decay(float(a_log[head]), a, float(dt_bias[head]));
    float beta = sigmoid(float(projected[b]));

    // Convolution and SiLU; its state moves on by one token.
    for (uint i = t; i < uint(2 * K_DIM + V_DIM); i += uint(SIMDGROUPS * 32)) {
        bool value = i >= uint(2 * K_DIM);
        uint c = value ? 2 * KEYS + head * V_DIM + i - 2 * K_DIM
                       : i / K_DIM * KEYS + k_head * K_DIM + i % K_DIM;
        T x[CONV];
        #pragma unroll
        for (int j = 0; j < CONV; j++) {
            x[j] = j + 1 == CONV ? projected[n * WIDTH + c]
                                 : conv_state[(n * (CONV - 1) + j) * CHANNELS + c];
        }
        #pragma unroll
        for (int j = 1; j < CONV; j++) {
            if (value || first) conv_out[(n * (CONV - 1) + j - 1) * CHANNELS + c] = x[j];
        }
        mixed[i] = float(convolve(x, conv_weight + c * CONV));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // q and k are used as unit vectors: 1 / |q|, 1 / |k| and their dot product.
    float qq = 0.0f;
    float kk = 0.0f;
    float qk = 0.0f;
    for (uint i = lane; i < uint(K_DIM); i += 32) {
        float q = mixed[i];
        float k = mixed[K_DIM + i];
        qq += q * q;
        kk += k * k;
        qk += q * k;
    }
    float tiny = as_type<float>(uint(UNIT_EPS));
    float q_unit = metal::rsqrt(simd_sum(qq) + tiny) * metal::rsqrt(float(K_DIM));
    float k_unit = metal::rsqrt(simd_sum(kk) + tiny);
    qk = simd_sum(qk) * q_unit * k_unit;

    // The delta rule, COLS columns of the state at a time.
    for (uint c0 = 0; c0 < uint(V_DIM); c0 += COLS) {
        float k_dot = 0.0f;
        float q_dot = 0.0f;
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            s[r] *= decay;
            k_dot += mixed[K_DIM + row + r] * s[r];
            q_dot += mixed[row + r] * s[r];
        }
        k_sums[sg][lane] = k_dot;
        q_sums[sg][lane] = q_dot;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        k_dot = 0.0f;
        q_dot = 0.0f;
        #pragma unroll
        for (int p = 0; p < SIMDGROUPS; p += ACROSS) {
            k_dot += k_sums[p + strip][lane];
            q_dot += q_sums[p + strip][lane];
        }
        uint col = c0 + strip * 32 + lane;
        float u = beta * (mixed[2 * K_DIM + col] - k_dot * k_unit);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            state_out[at + c0 + r * V_DIM] = s[r] + mixed[K_DIM + row + r] * k_unit * u;
            if (c0 + COLS < uint(V_DIM)) s[r] = state[at + c0 + COLS + r * V_DIM];
        }
        if (row == 0) o[col] = float(static_cast<T>(q_dot * q_unit + qk * u));
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    // Gated RMSNorm of the head's output.
    float squares = 0.0f;
    for (uint i = lane; i < uint(V_DIM); i += 32) squares += o[i] * o[i];
    float inv = metal::rsqrt(simd_sum(squares) / float(V_DIM) + as_type<float>(uint(EPS)));
    if (t < uint(V_DIM)) y[to] = gate_normed<T>(o[t], inv, gain, gate);
}
