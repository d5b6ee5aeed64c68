#include "gated_delta.h"

// Prefill of a Gated DeltaNet layer, before the delta rule: what it reads of every token, all tokens at once.
// projected [N, WIDTH]: q, k and v of all heads, the output's gate, b, a. Rows of tokens lie end to end: spans [R, 2] have the
// first token and one past the last, tokens [N, 2] the row and the slot of the state after the token, or -1.
// qk [N, K_HEADS, 2, K_DIM] unit vectors, dots [N, K_HEADS] q k, v [N, V_HEADS, V_DIM], gates [N, V_HEADS, 2] decay and
// beta, conv_out [slots, CONV - 1, channels].
//
// A simdgroup has q and k of one key head, or v of one value head, of one token.
[[kernel]] void mlxrt_gated_delta_inputs(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint n = threadgroup_position_in_grid.x;
    uint unit = threadgroup_position_in_grid.y * SIMDGROUPS + simdgroup_index_in_threadgroup;
    const int KEYS = K_HEADS * K_DIM;
    const int CHANNELS = 2 * KEYS + V_HEADS * V_DIM;
    const int WIDTH = CHANNELS + V_HEADS * V_DIM + 2 * V_HEADS;
    const int EACH = (2 * K_DIM > V_DIM ? 2 * K_DIM : V_DIM) / 32;
    bool value = unit >= uint(K_HEADS);
    uint head = value ? unit - K_HEADS : unit;
    uint count = value ? V_DIM : 2 * K_DIM;
    uint row = uint(tokens[2 * n]);
    int slot = tokens[2 * n + 1];
    uint before = n - uint(spans[2 * row]);  // tokens of the row before this one

    float mixed[EACH];
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
        uint i = e * 32 + lane;
        mixed[e] = 0.0f;
        if (i < count) {
            uint c =
                value ? 2 * KEYS + head * V_DIM + i : i / K_DIM * KEYS + head * K_DIM + i % K_DIM;
            T x[CONV];
            #pragma unroll
            for (int j = 0; j < CONV; j++) {
                x[j] = before + j + 1 >= uint(CONV)
                           ? projected[(n + j + 1 - CONV) * WIDTH + c]
                           : conv_state[(row * (CONV - 1) + before + j) * CHANNELS + c];
            }
            #pragma unroll
            for (int j = 1; j < CONV; j++) {
                if (slot >= 0) conv_out[(slot * (CONV - 1) + j - 1) * CHANNELS + c] = x[j];
            }
            mixed[e] = float(convolve(x, conv_weight + c * CONV));
        }
    }

    if (value) {
        #pragma unroll
        for (int e = 0; e < V_DIM / 32; e++) {
            v[(n * V_HEADS + head) * V_DIM + e * 32 + lane] = static_cast<T>(mixed[e]);
        }
        if (lane == 0) {
            uint b = n * WIDTH + CHANNELS + V_HEADS * V_DIM + head;
            float a = float(projected[b + V_HEADS]);
            uint to = 2 * (n * V_HEADS + head);
            gates[to] = state_decay(float(a_log[head]), a, float(dt_bias[head]));
            gates[to + 1] = sigmoid(float(projected[b]));
        }
    } else {
        float qq = 0.0f;
        float kk = 0.0f;
        float dot = 0.0f;
        #pragma unroll
        for (int e = 0; e < K_DIM / 32; e++) {
            float q = mixed[e];
            float k = mixed[K_DIM / 32 + e];
            qq += q * q;
            kk += k * k;
            dot += q * k;
        }
        float tiny = as_type<float>(uint(UNIT_EPS));
        float q_unit = metal::rsqrt(simd_sum(qq) + tiny) * metal::rsqrt(float(K_DIM));
        float k_unit = metal::rsqrt(simd_sum(kk) + tiny);
        dot = simd_sum(dot) * q_unit * k_unit;
        if (lane == 0) dots[n * K_HEADS + head] = dot;
        #pragma unroll
        for (int e = 0; e < 2 * K_DIM / 32; e++) {
            float unit_scale = e < K_DIM / 32 ? q_unit : k_unit;
            qk[(n * K_HEADS + head) * 2 * K_DIM + e * 32 + lane] = mixed[e] * unit_scale;
        }
    }
}
