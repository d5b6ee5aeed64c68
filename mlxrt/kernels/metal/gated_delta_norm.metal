#include "gated_delta.h"

// Prefill of a Gated DeltaNet layer, after the delta rule: gated RMSNorm of each head of each token.
// o and y [N, V_HEADS, V_DIM]; the gate is part of `projected`, as in gated_delta_inputs.metal. A simdgroup has one head of
// one token.
[[kernel]] void mlxrt_gated_delta_norm(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint n = threadgroup_position_in_grid.x;
    uint head = threadgroup_position_in_grid.y * SIMDGROUPS + simdgroup_index_in_threadgroup;
    const int GATE = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM;
    const int WIDTH = GATE + V_HEADS * V_DIM + 2 * V_HEADS;
    uint from = (n * V_HEADS + head) * V_DIM + lane;
    float x[V_DIM / 32];
    float squares = 0.0f;
    #pragma unroll
    for (int e = 0; e < V_DIM / 32; e++) {
        x[e] = float(o[from + e * 32]);
        squares += x[e] * x[e];
    }
    float scale = metal::rsqrt(simd_sum(squares) / float(V_DIM) + as_type<float>(uint(EPS)));
    #pragma unroll
    for (int e = 0; e < V_DIM / 32; e++) {
        float gain = float(norm[e * 32 + lane]);
        float gate = float(projected[n * WIDTH + GATE + head * V_DIM + e * 32 + lane]);
        y[from + e * 32] = gate_normed<T>(x[e], scale, gain, gate);
    }
}
