// y [N, K] = (residual + RMSNorm(x) * g) * scalar. Of GROUPS that x's rows belong to by turns, y has one after the other.
#include "quantized.h"

// Eight numbers of a row of type T, or one of any type.
template <typename T, int EACH, typename P>
FN void load_numbers(P p, uint at, thread float* v) {
    if (EACH == 8) {
        load8<T>(p, at / 8, v);
    } else {
        v[0] = float(p[at]);
    }
}

// A threadgroup has a row, and all of x is in registers before it is needed a second time.
[[kernel]] void mlxrt_add_norm(MLX_ARGUMENTS) {
    uint row = threadgroup_position_in_grid.x;
    uint tid = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint out_row = row % GROUPS * (threadgroups_per_grid.x / GROUPS) + row / GROUPS;
    const int TURNS = (K + EACH * SIZE - 1) / (EACH * SIZE);
    threadgroup float partial[SIZE / 32];
    float v[TURNS][EACH];
    float squares = 0.0f;
    #pragma unroll
    for (uint n = 0; n < uint(TURNS); n++) {
        uint i = (n * SIZE + tid) * EACH;
        #pragma unroll
        for (int c = 0; c < EACH; c++) v[n][c] = 0.0f;
        if (i < uint(K)) load_numbers<T, EACH>(x, row * K + i, v[n]);
        #pragma unroll
        for (int c = 0; c < EACH; c++) squares += v[n][c] * v[n][c];
    }
    squares = simd_sum(squares);
    if (lane == 0) partial[sg] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (int i = 0; i < SIZE / 32; i++) total += partial[i];
    float inv_rms = metal::rsqrt(total / float(K) + as_type<float>(uint(EPS)));
    float factor = SCALED ? float(scalar[0]) : as_type<float>(uint(TIMES));
    #pragma unroll
    for (uint n = 0; n < uint(TURNS); n++) {
        uint i = (n * SIZE + tid) * EACH;
        if (i < uint(K)) {
            float g[EACH];
            float r[EACH];
            load_numbers<T, EACH>(norm_weight, i, g);
            if (RES) load_numbers<T, EACH>(residual, row * K + i, r);
            #pragma unroll
            for (int c = 0; c < EACH; c++) {
                float w = v[n][c] * inv_rms * g[c] + (RES ? r[c] : 0.0f);
                y[out_row * K + i + c] = static_cast<T>(w * factor);
            }
        }
    }
}
