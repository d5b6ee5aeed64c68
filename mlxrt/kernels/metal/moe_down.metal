// y [N, O] = the weighted sum of what each token's C experts make of x [N, C, K], plus the residual.
#include "quantized.h"
#include "staging.h"

// A simdgroup takes every SG-th expert of R rows, and lays 1024 numbers of x at a time for itself alone: simdgroups wait for
// each other only at the end, when their sums are added in order.
[[kernel]] void mlxrt_moe_down(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x;
    uint one = lift_of<BITS>(threadgroup_position_in_grid.z);
    uint first = threadgroup_position_in_grid.x * uint(R);
    uint n = threadgroup_position_in_grid.y;
    const int N = FORM == 2 ? 8 * sizeof(T) : BITS;
    threadgroup float4 xs[SG * 256];
    threadgroup float sums[SG * 64];
    threadgroup float part[SG][R];
    const int LEVELS = FORM == 3 ? 1 << BITS : 1;
    threadgroup float table[LEVELS];
    threadgroup uint ids[C];
    uint row[R];
    uint w0[R][N];
    float s0[R];
    float z0[R];
    float total[R];
    uint base = uint(experts[n * uint(C) + sg]) * uint(O);
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = base + metal::min(first + uint(r), uint(O - 1));
        total[r] = 0.0f;
    }
    load_rows<FORM, BITS, GROUP, K>(w, s, z, row, lane * 32 < uint(K) ? lane * 32 : 0, w0, s0, z0);
    lay_levels<FORM, LEVELS, SG * 32>(l, t, &table[0]);
    for (uint c = t; c < uint(C); c += uint(SG * 32)) ids[c] = uint(experts[n * uint(C) + c]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint c = sg; c < uint(C); c += uint(SG)) {
        uint p = n * uint(C) + c;
        float f = float(weights[p]);
        float acc[1][R];
        #pragma unroll
        for (int r = 0; r < R; r++) {
            acc[0][r] = 0.0f;
            if (BIAS && lane == 0) total[r] += f * float(bias[row[r]]);
        }
        for (uint k0 = 0; k0 < uint(K); k0 += 1024) {
            uint w1[R][N];
            float s1[R];
            float z1[R];
            uint x1[4][2 * sizeof(T)];
            uint k = k0 + 1024;
            simdgroup_barrier(mem_flags::mem_threadgroup);
            #pragma unroll
            for (uint j = 0; j < 4; j++) {
                uint i = piece_of(32 * j + lane);
                fetch8(x, (p * K + k0) / 8 + i, k0 + 8 * i < uint(K), x1[j]);
            }
            if (k >= uint(K)) {  // the next expert's rows
                k = 0;
                base = ids[metal::min(c + uint(SG), uint(C - 1))] * uint(O);
                #pragma unroll
                for (int r = 0; r < R; r++)
                    row[r] = base + metal::min(first + uint(r), uint(O - 1));
            }
            k += lane * 32;
            load_rows<FORM, BITS, GROUP, K>(w, s, z, row, k < uint(K) ? k : 0, w1, s1, z1);
            #pragma unroll
            for (uint j = 0; j < 4; j++) {
                float v[8];
                unpack8<T>(x1[j], v);
                lay8<T, FORM>(v, piece_of(32 * j + lane), &xs[sg * 256], &sums[sg * 64]);
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            rows_meet<T, FORM, BITS, 256>(
                w0, s0, z0, lane * 32, one, &table[0], &xs[sg * 256], &sums[sg * 64], acc
            );
            take_rows(w0, s0, z0, w1, s1, z1);
        }
        #pragma unroll
        for (int r = 0; r < R; r++) total[r] += f * acc[0][r];
    }
    #pragma unroll
    for (int r = 0; r < R; r++) {
        float a = simd_sum(total[r]);
        if (lane == 0) part[sg][r] = a;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint o = first + t;
    if (t < uint(R) && o < uint(O)) {
        float a = RES ? float(residual[n * O + o]) : 0.0f;
        for (int c = 0; c < SG; c++) a += part[c][t];
        y[n * O + o] = static_cast<T>(a);
    }
}
