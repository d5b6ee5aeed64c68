// The C experts of each token and their weights: norm, product with the router's matrix, scores, top k. With FUSE_GATE_UP also
// y [N, C, I] = act(gate) * up of those experts: every threadgroup then computes all logits for itself.
#include "quantized.h"
#include "activation.h"
#include "staging.h"

template <bool SIGMOID>
FN float expert_score(float logit, float top) {
    return SIGMOID ? 1.0f / (1.0f + metal::exp(-logit)) : metal::exp(logit - top);
}

// Whole numbers in the order of the floats: largest and first are found by them with few instructions. None is 0.
FN uint sort_key(float f) {
    uint u = as_type<uint>(f);
    return (u & 0x80000000u) != 0u ? ~u : u | 0x80000000u;
}

// RFORM, RBITS and RGROUP are the router's matrix's, RT what a plain one has; STAGE_FORM is that of the matrix which needs sums of x.
[[kernel]] void mlxrt_moe_router(MLX_ARGUMENTS) {
#if FUSE_GATE_UP
    uint pair = threadgroup_position_in_grid.y;
    uint token = pair / uint(C);
    threadgroup uint picked[C];
    const int LUT_SIZE = lut_size<FORM, BITS>();
    threadgroup float lut_shared[LUT_SIZE];
    load_lut<FORM, LUT_SIZE, SG * 32>(lut, thread_position_in_threadgroup.x, &lut_shared[0]);
#else
    uint token = threadgroup_position_in_grid.x;
#endif
    // A row of x in threadgroup memory, normed but for the factor `inv_rms`; then the logits, one of each expert.
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint tid = thread_position_in_threadgroup.x;
    uint opaque_zero = threadgroup_position_in_grid.z;
    const int VECS = TILE / 4;
    const int ROUTER_LUT_SIZE = lut_size<RFORM, RBITS>();
    threadgroup float logits[(E + RR - 1) / RR * RR];
    threadgroup float4 x_shared[VECS];
    threadgroup float x_sums[TILE / 16];
    threadgroup float partial_squares[SG];
    threadgroup float router_lut_shared[ROUTER_LUT_SIZE];
    load_lut<RFORM, ROUTER_LUT_SIZE, SG * 32>(router_lut, tid, &router_lut_shared[0]);
    float squares = 0.0f;
    for (uint i = tid; i < uint(TILE / 8); i += uint(SG * 32)) {
        squares += stage_x8<T, STAGE_FORM, NORM, K>(
            x, token * K, norm_weight, 0, i, &x_shared[0], &x_sums[0]
        );
    }
    squares = simd_sum(squares);
    if (lane == 0) partial_squares[sg] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float inv_rms = 1.0f;
    if (NORM) {
        float total = 0.0f;
        for (int i = 0; i < SG; i++) total += partial_squares[i];
        inv_rms = metal::rsqrt(total / float(K) + as_type<float>(uint(EPS)));
    }
    for (uint expert = sg * RR; expert < uint(E); expert += uint(SG * RR)) {
        uint row[RR];
        float acc[1][RR];
        #pragma unroll
        for (int r = 0; r < RR; r++) {
            row[r] = metal::min(expert + uint(r), uint(E - 1));
            acc[0][r] = 0.0f;
        }
        for (uint k = lane * 32; k < uint(K); k += 1024) {
            load_dot_rows<RT, RFORM, RBITS, RGROUP, K, VECS, 1, RR>(
                router_packed, router_scales, router_biases, row, k, k,
                magic_bits<RBITS>(opaque_zero), &router_lut_shared[0], &x_shared[0], &x_sums[0], acc
            );
        }
        #pragma unroll
        for (int r = 0; r < RR; r++) {
            float logit = simd_sum(acc[0][r]) * inv_rms;
            if (lane == 0)
                logits[expert + r] = RBIAS ? logit + float(router_bias[row[r]]) : logit;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // The first simdgroup chooses: its lane c < C then knows the c-th best expert and its weight.
    if (sg == 0) {
        const int PER_LANE = (E + 31) / 32;
        uint key[PER_LANE];
        float score[PER_LANE];  // first the logit; past the last expert one whose score is 0
        float top = -1e30f;
        float total = 0.0f;
        #pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            uint expert = lane + 32 * j;
            score[j] = expert < uint(E) ? logits[expert] : -1e30f;
            top = metal::max(top, score[j]);
        }
        top = simd_max(top);
        #pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            score[j] = expert_score<SIGMOID>(score[j], top);
            total += score[j];
        }
        total = SIGMOID ? 1.0f : simd_sum(total);
        #pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            uint expert = lane + 32 * j;
            key[j] = 0;
            if (expert < uint(E))
                key[j] =
                    sort_key(CORRECT ? score[j] / total + float(correction[expert]) : score[j]);
        }
        uint chosen = 0;
        for (uint c = 0; c < uint(C); c++) {
            uint best = 0;
            uint candidate = 0;
            #pragma unroll
            for (int j = 0; j < PER_LANE; j++)
                if (key[j] > best) {
                    best = key[j];
                    candidate = lane + 32 * j;
                }
            uint winner = simd_min(best == simd_max(best) ? candidate : 0xffffu);
            #pragma unroll
            for (int j = 0; j < PER_LANE; j++)
                key[j] = winner == lane + 32 * j ? 0 : key[j];
            if (lane == c) chosen = winner;
        }
        bool selected = lane < uint(C);
        float expert_weight = selected ? expert_score<SIGMOID>(logits[chosen], top) : 0.0f;
        expert_weight /= NORMALISE ? simd_sum(expert_weight) : total;
        if (SCALED && selected) expert_weight *= float(expert_scales[chosen]);
#if FUSE_GATE_UP
        if (selected) picked[lane] = chosen;
        if (selected && threadgroup_position_in_grid.x == 0 && pair % uint(C) == 0) {
            experts[token * C + lane] = chosen;
            weights[token * C + lane] = expert_weight;
        }
#else
        if (selected) {
            experts[token * C + lane] = chosen;
            weights[token * C + lane] = expert_weight;
        }
#endif
    }
#if FUSE_GATE_UP
    // Simdgroups take LOOPS times R gates with their ups.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint base = picked[pair % uint(C)] * uint(2 * I);
    uint magic = magic_bits<BITS>(opaque_zero);
    const int WORDS = FORM == DENSE ? 8 * sizeof(T) : BITS;
    uint first_row = (threadgroup_position_in_grid.x * uint(SG) + sg) * uint(LOOPS * R);
    uint row[2 * R];
    uint words[2 * R][WORDS];
    float scale[2 * R];
    float zero[2 * R];
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = base + metal::min(first_row + uint(r), uint(I - 1));
        row[R + r] = row[r] + uint(I);
    }
    load_rows<FORM, BITS, GROUP, K>(
        packed, scales, biases, row, lane * 32 < uint(K) ? lane * 32 : 0, words, scale, zero
    );
    for (uint loop = 0; loop < uint(LOOPS); loop++) {
        float acc[1][2 * R];
        #pragma unroll
        for (int r = 0; r < 2 * R; r++) acc[0][r] = 0.0f;
        for (uint j = 0; j < uint(K); j += 1024) {
            uint next_words[2 * R][WORDS];
            float next_scale[2 * R];
            float next_zero[2 * R];
            bool row_done = j + 1024 >= uint(K);
            if (row_done) {
                #pragma unroll
                for (int r = 0; r < R; r++) {
                    row[r] =
                        base + metal::min(first_row + (loop + 1) * uint(R) + uint(r), uint(I - 1));
                    row[R + r] = row[r] + uint(I);
                }
            }
            uint k = (row_done ? 0 : j + 1024) + lane * 32;
            load_rows<FORM, BITS, GROUP, K>(
                packed, scales, biases, row, k < uint(K) ? k : 0, next_words, next_scale, next_zero
            );
            simdgroup_barrier(mem_flags::mem_none);  // see qmv.metal
            dot_rows<T, FORM, BITS, VECS>(
                words, scale, zero, j + lane * 32, magic, &lut_shared[0], &x_shared[0], &x_sums[0],
                acc
            );
            copy_rows(words, scale, zero, next_words, next_scale, next_zero);
        }
        #pragma unroll
        for (int r = 0; r < R; r++) {
            float gate = simd_sum(acc[0][r]) * inv_rms;
            float up = simd_sum(acc[0][R + r]) * inv_rms;
            uint output = first_row + loop * uint(R) + uint(r);
            if (lane == 0 && output < uint(I)) {
                if (BIAS) {
                    gate += float(bias[base + output]);
                    up += float(bias[base + uint(I) + output]);
                }
                y[pair * I + output] = static_cast<T>(gated<ACT>(gate, up));
            }
        }
    }
#endif
}
