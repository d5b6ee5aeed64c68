// y [N, C, I] = act(gate) * up of each token's C experts; x [N, K], RMSNorm before.
#include "quantized.h"
#include "activation.h"
#include "staging.h"

[[kernel]] void mlxrt_moe_gate_up(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint magic = magic_bits<BITS>(threadgroup_position_in_grid.z);
    uint first_row = (threadgroup_position_in_grid.x * SG + sg) * R;
    uint pair = threadgroup_position_in_grid.y;
    uint token = pair / uint(C);
    uint expert = uint(experts[pair]);
    uint base = expert * uint(2 * I);
    const int VECS = TILE / 4;
    uint tid = thread_position_in_threadgroup.x;
    threadgroup float4 x_shared[VECS];
    threadgroup float x_sums[TILE / 16];
    threadgroup float partial_squares[SG];
    const int LUT_SIZE = lut_size<FORM, BITS>();
    threadgroup float lut_shared[LUT_SIZE];
    load_lut<FORM, LUT_SIZE, SG * 32>(lut, tid, &lut_shared[0]);
    const int WORDS = FORM == DENSE ? 8 * sizeof(T) : BITS;
    uint row[2 * R];
    uint words[2 * R][WORDS];
    float scale[2 * R];
    float zero[2 * R];
    float acc[1][2 * R];
    float squares = 0.0f;
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = base + metal::min(first_row + uint(r), uint(I - 1));
        row[R + r] = row[r] + uint(I);
        acc[0][r] = 0.0f;
        acc[0][R + r] = 0.0f;
    }
    load_rows<FORM, BITS, GROUP, K>(
        packed, scales, biases, row, lane * 32 < uint(K) ? lane * 32 : 0, words, scale, zero
    );
    for (uint tile_start = 0; tile_start < uint(K); tile_start += TILE) {
        if (tile_start > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = tid; i < uint(TILE / 8); i += uint(SG * 32)) {
            squares += stage_x8<T, FORM, NORM, K>(
                x, token * K, norm_weight, tile_start, i, &x_shared[0], &x_sums[0]
            );
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint end = metal::min(uint(TILE), uint(K) - tile_start);
        for (uint offset = 0; offset < end; offset += 1024) {
            uint next_words[2 * R][WORDS];
            float next_scale[2 * R];
            float next_zero[2 * R];
            uint k = tile_start + offset + 1024 + lane * 32;
            load_rows<FORM, BITS, GROUP, K>(
                packed, scales, biases, row, k < uint(K) ? k : 0, next_words, next_scale, next_zero
            );
            simdgroup_barrier(mem_flags::mem_none);  // see matvec
            dot_rows<T, FORM, BITS, VECS>(
                words, scale, zero, offset + lane * 32, magic, &lut_shared[0], &x_shared[0],
                &x_sums[0], acc
            );
            copy_rows(words, scale, zero, next_words, next_scale, next_zero);
        }
    }
    float inv_rms = 1.0f;
    if (NORM) {
        squares = simd_sum(squares);
        if (lane == 0) partial_squares[sg] = squares;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float total = 0.0f;
        for (int i = 0; i < SG; i++) total += partial_squares[i];
        inv_rms = metal::rsqrt(total / float(K) + as_type<float>(uint(EPS)));
    }
    #pragma unroll
    for (int r = 0; r < R; r++) {
        float gate = simd_sum(acc[0][r]) * inv_rms;
        float up = simd_sum(acc[0][R + r]) * inv_rms;
        uint output = first_row + uint(r);
        if (lane == 0 && output < uint(I)) {
            if (BIAS) {
                gate += float(bias[base + output]);
                up += float(bias[base + uint(I) + output]);
            }
            y[pair * I + output] = static_cast<T>(gated<ACT>(gate, up));
        }
    }
}
