// y [N, O] = the weighted sum of what each token's C experts make of x [N, C, K], plus the residual.
#include "quantized.h"
#include "staging.h"

// A simdgroup takes every SG-th expert of R rows, and stages 1024 elements of x at a time for itself alone: simdgroups wait for
// each other only at the end, when their sums are added in order.
[[kernel]] void mlxrt_moe_down(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint tid = thread_position_in_threadgroup.x;
    uint magic = magic_bits<BITS>(threadgroup_position_in_grid.z);
    uint first_row = threadgroup_position_in_grid.x * uint(R);
    uint token = threadgroup_position_in_grid.y;
    const int WORDS = FORM == DENSE ? 8 * sizeof(T) : BITS;
    threadgroup float4 x_shared[SG * 256];
    threadgroup float x_sums[SG * 64];
    threadgroup float partial[SG][R];
    const int LUT_SIZE = lut_size<FORM, BITS>();
    threadgroup float lut_shared[LUT_SIZE];
    threadgroup uint expert_ids[C];
    uint row[R];
    uint words[R][WORDS];
    float scale[R];
    float zero[R];
    float total[R];
    uint base = uint(experts[token * uint(C) + sg]) * uint(O);
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = base + metal::min(first_row + uint(r), uint(O - 1));
        total[r] = 0.0f;
    }
    load_rows<FORM, BITS, GROUP, K>(
        packed, scales, biases, row, lane * 32 < uint(K) ? lane * 32 : 0, words, scale, zero
    );
    load_lut<FORM, LUT_SIZE, SG * 32>(lut, tid, &lut_shared[0]);
    for (uint slot = tid; slot < uint(C); slot += uint(SG * 32))
        expert_ids[slot] = uint(experts[token * uint(C) + slot]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint slot = sg; slot < uint(C); slot += uint(SG)) {
        uint pair = token * uint(C) + slot;
        float expert_weight = float(weights[pair]);
        float acc[1][R];
        #pragma unroll
        for (int r = 0; r < R; r++) {
            acc[0][r] = 0.0f;
            if (BIAS && lane == 0) total[r] += expert_weight * float(bias[row[r]]);
        }
        for (uint tile_start = 0; tile_start < uint(K); tile_start += 1024) {
            uint next_words[R][WORDS];
            float next_scale[R];
            float next_zero[R];
            uint x_words[4][2 * sizeof(T)];
            uint k = tile_start + 1024;
            simdgroup_barrier(mem_flags::mem_threadgroup);
            #pragma unroll
            for (uint j = 0; j < 4; j++) {
                uint i = chunk_index(32 * j + lane);
                fetch8(
                    x, (pair * K + tile_start) / 8 + i, tile_start + 8 * i < uint(K), x_words[j]
                );
            }
            if (k >= uint(K)) {  // the next expert'scales rows
                k = 0;
                base = expert_ids[metal::min(slot + uint(SG), uint(C - 1))] * uint(O);
                #pragma unroll
                for (int r = 0; r < R; r++)
                    row[r] = base + metal::min(first_row + uint(r), uint(O - 1));
            }
            k += lane * 32;
            load_rows<FORM, BITS, GROUP, K>(
                packed, scales, biases, row, k < uint(K) ? k : 0, next_words, next_scale, next_zero
            );
            #pragma unroll
            for (uint j = 0; j < 4; j++) {
                float values[8];
                unpack8<T>(x_words[j], values);
                store8<T, FORM>(
                    values, chunk_index(32 * j + lane), &x_shared[sg * 256], &x_sums[sg * 64]
                );
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            dot_rows<T, FORM, BITS, 256>(
                words, scale, zero, lane * 32, magic, &lut_shared[0], &x_shared[sg * 256],
                &x_sums[sg * 64], acc
            );
            copy_rows(words, scale, zero, next_words, next_scale, next_zero);
        }
        #pragma unroll
        for (int r = 0; r < R; r++) total[r] += expert_weight * acc[0][r];
    }
    #pragma unroll
    for (int r = 0; r < R; r++) {
        float value = simd_sum(total[r]);
        if (lane == 0) partial[sg][r] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint output = first_row + tid;
    if (tid < uint(R) && output < uint(O)) {
        float value = RES ? float(residual[token * O + output]) : 0.0f;
        for (int slot = 0; slot < SG; slot++) value += partial[slot][tid];
        y[token * O + output] = static_cast<T>(value);
    }
}
