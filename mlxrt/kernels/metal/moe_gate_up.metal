// y [N, C, I] = act(gate) * up of each token's C experts; x [N, K], RMSNorm before.
#include "quantized.h"
#include "activation.h"
#include "staging.h"

[[kernel]] void mlxrt_moe_gate_up(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint one = lift_of<BITS>(threadgroup_position_in_grid.z);
    uint first = (threadgroup_position_in_grid.x * SG + sg) * R;
    uint p = threadgroup_position_in_grid.y;
    uint n = p / uint(C);
    uint expert = uint(experts[p]);
    uint base = expert * uint(2 * I);
    const int PLACES = TILE / 4;
    uint t = thread_position_in_threadgroup.x;
    threadgroup float4 xs[PLACES];
    threadgroup float sums[TILE / 16];
    threadgroup float part[SG];
    const int LEVELS = FORM == 3 ? 1 << BITS : 1;
    threadgroup float table[LEVELS];
    lay_levels<FORM, LEVELS, SG * 32>(l, t, &table[0]);
    const int N = FORM == 2 ? 8 * sizeof(T) : BITS;
    uint row[2 * R];
    uint w0[2 * R][N];
    float s0[2 * R];
    float z0[2 * R];
    float acc[1][2 * R];
    float squares = 0.0f;
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = base + metal::min(first + uint(r), uint(I - 1));
        row[R + r] = row[r] + uint(I);
        acc[0][r] = 0.0f;
        acc[0][R + r] = 0.0f;
    }
    load_rows<FORM, BITS, GROUP, K>(w, s, z, row, lane * 32 < uint(K) ? lane * 32 : 0, w0, s0, z0);
    for (uint k0 = 0; k0 < uint(K); k0 += TILE) {
        if (k0 > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = t; i < uint(TILE / 8); i += uint(SG * 32)) {
            squares += stage8<T, FORM, NORM, K>(x, n * K, g, k0, i, &xs[0], &sums[0]);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint end = metal::min(uint(TILE), uint(K) - k0);
        for (uint j = 0; j < end; j += 1024) {
            uint w1[2 * R][N];
            float s1[2 * R];
            float z1[2 * R];
            uint k = k0 + j + 1024 + lane * 32;
            load_rows<FORM, BITS, GROUP, K>(w, s, z, row, k < uint(K) ? k : 0, w1, s1, z1);
            simdgroup_barrier(mem_flags::mem_none);  // see matvec
            rows_meet<T, FORM, BITS, PLACES>(
                w0, s0, z0, j + lane * 32, one, &table[0], &xs[0], &sums[0], acc
            );
            take_rows(w0, s0, z0, w1, s1, z1);
        }
    }
    float inv = 1.0f;
    if (NORM) {
        squares = simd_sum(squares);
        if (lane == 0) part[sg] = squares;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float whole = 0.0f;
        for (int i = 0; i < SG; i++) whole += part[i];
        inv = metal::rsqrt(whole / float(K) + as_type<float>(uint(EPS)));
    }
    #pragma unroll
    for (int r = 0; r < R; r++) {
        float a = simd_sum(acc[0][r]) * inv;
        float u = simd_sum(acc[0][R + r]) * inv;
        uint o = first + uint(r);
        if (lane == 0 && o < uint(I)) {
            if (BIAS) {
                a += float(bias[base + o]);
                u += float(bias[base + uint(I) + o]);
            }
            y[p * I + o] = static_cast<T>(gated<ACT>(a, u));
        }
    }
}
