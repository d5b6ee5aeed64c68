// The C experts of each token and their weights: norm, product with the router's matrix, scores, top k. With FUSE_GATE_UP also
// y [N, C, I] = act(gate) * up of those experts: every threadgroup then computes all logits for itself.
#include "quantized.h"
#include "activation.h"
#include "staging.h"

template <bool SIGMOID>
FN float share_of(float logit, float top) {
    return SIGMOID ? 1.0f / (1.0f + metal::exp(-logit)) : metal::exp(logit - top);
}

// Whole numbers in the order of the floats: largest and first are found by them with few instructions. None is 0.
FN uint key_of(float f) {
    uint u = as_type<uint>(f);
    return (u & 0x80000000u) != 0u ? ~u : u | 0x80000000u;
}

// RFORM, RBITS and RGROUP are the router's matrix's; LAID is 0 where anybody wants x's sums by 32.
[[kernel]] void mlxrt_moe_router(MLX_ARGUMENTS) {
#if FUSE_GATE_UP
    uint p = threadgroup_position_in_grid.y;
    uint n = p / uint(C);
    threadgroup uint picked[C];
    const int LEVELS = FORM == 3 ? 1 << BITS : 1;
    threadgroup float table[LEVELS];
    lay_levels<FORM, LEVELS, SG * 32>(l, thread_position_in_threadgroup.x, &table[0]);
#else
    uint n = threadgroup_position_in_grid.x;
#endif
    // A row of x in threadgroup memory, normed but for the factor `inv`; then the logits, one for each expert.
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x;
    uint nil = threadgroup_position_in_grid.z;
    const int PLACES = TILE / 4;
    const int RLEVELS = RFORM == 3 ? 1 << RBITS : 1;
    threadgroup float logits[E];
    threadgroup float4 xs[PLACES];
    threadgroup float sums[TILE / 16];
    threadgroup float part[SG];
    threadgroup float rtable[RLEVELS];
    lay_levels<RFORM, RLEVELS, SG * 32>(rl, t, &rtable[0]);
    float squares = 0.0f;
    for (uint i = t; i < uint(TILE / 8); i += uint(SG * 32)) {
        squares += stage8<T, LAID, NORM, K>(x, n * K, g, 0, i, &xs[0], &sums[0]);
    }
    squares = simd_sum(squares);
    if (lane == 0) part[sg] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float inv = 1.0f;
    if (NORM) {
        float whole = 0.0f;
        for (int i = 0; i < SG; i++) whole += part[i];
        inv = metal::rsqrt(whole / float(K) + as_type<float>(uint(EPS)));
    }
    for (uint e = sg * RR; e < uint(E); e += uint(SG * RR)) {
        uint row[RR];
        float acc[1][RR];
        #pragma unroll
        for (int r = 0; r < RR; r++) {
            row[r] = metal::min(e + uint(r), uint(E - 1));
            acc[0][r] = 0.0f;
        }
        for (uint k = lane * 32; k < uint(K); k += 1024) {
            rows_dot<T, RFORM, RBITS, RGROUP, K, PLACES, 1, RR>(
                rw, rs, rz, row, k, k, lift_of<RBITS>(nil), &rtable[0], &xs[0], &sums[0], acc
            );
        }
        #pragma unroll
        for (int r = 0; r < RR; r++) {
            float y = simd_sum(acc[0][r]) * inv;
            if (lane == 0 && e + uint(r) < uint(E))
                logits[e + r] = RBIAS ? y + float(rbias[e + r]) : y;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // The first simdgroup chooses: its lane c < C then knows the c-th best expert and its weight.
    if (sg == 0) {
        const int EACH = (E + 31) / 32;
        uint key[EACH];
        float share[EACH];
        float top = -1e30f;
        float total = 0.0f;
        #pragma unroll
        for (int j = 0; j < EACH; j++)
            top = metal::max(top, lane + 32 * j < uint(E) ? logits[lane + 32 * j] : -1e30f);
        top = simd_max(top);
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            share[j] =
                lane + 32 * j < uint(E) ? share_of<SIGMOID>(logits[lane + 32 * j], top) : 0.0f;
            total += share[j];
        }
        total = SIGMOID ? 1.0f : simd_sum(total);
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            uint e = lane + 32 * j;
            key[j] = 0;
            if (e < uint(E))
                key[j] = key_of(CORRECT ? share[j] / total + float(correction[e]) : share[j]);
        }
        uint which = 0;
        for (uint c = 0; c < uint(C); c++) {
            uint best = 0;
            uint at = 0;
            #pragma unroll
            for (int j = 0; j < EACH; j++)
                if (key[j] > best) {
                    best = key[j];
                    at = lane + 32 * j;
                }
            uint winner = simd_min(best == simd_max(best) ? at : 0xffffu);
            #pragma unroll
            for (int j = 0; j < EACH; j++)
                if (winner == lane + 32 * j) key[j] = 0;
            if (lane == c) which = winner;
        }
        bool mine = lane < uint(C);
        float weight = mine ? share_of<SIGMOID>(logits[which], top) : 0.0f;
        weight /= NORMALISE ? simd_sum(weight) : total;
        if (SCALED && mine) weight *= float(scales[which]);
#if FUSE_GATE_UP
        if (mine) picked[lane] = which;
        if (mine && threadgroup_position_in_grid.x == 0 && p % uint(C) == 0) {
            experts[n * C + lane] = which;
            weights[n * C + lane] = weight;
        }
#else
        if (mine) {
            experts[n * C + lane] = which;
            weights[n * C + lane] = weight;
        }
#endif
    }
#if FUSE_GATE_UP
    // Simdgroups take LOOPS times R gates with their ups.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint base = picked[p % uint(C)] * uint(2 * I);
    uint one = lift_of<BITS>(nil);
    const int N = FORM == 2 ? 8 * sizeof(T) : BITS;
    uint first = (threadgroup_position_in_grid.x * uint(SG) + sg) * uint(LOOPS * R);
    uint row[2 * R];
    uint w0[2 * R][N];
    float s0[2 * R];
    float z0[2 * R];
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = base + metal::min(first + uint(r), uint(I - 1));
        row[R + r] = row[r] + uint(I);
    }
    load_rows<FORM, BITS, GROUP, K>(w, s, z, row, lane * 32 < uint(K) ? lane * 32 : 0, w0, s0, z0);
    for (uint turn = 0; turn < uint(LOOPS); turn++) {
        float acc[1][2 * R];
        #pragma unroll
        for (int r = 0; r < 2 * R; r++) acc[0][r] = 0.0f;
        for (uint j = 0; j < uint(K); j += 1024) {
            uint w1[2 * R][N];
            float s1[2 * R];
            float z1[2 * R];
            bool next = j + 1024 >= uint(K);
            if (next) {
                #pragma unroll
                for (int r = 0; r < R; r++) {
                    row[r] = base + metal::min(first + (turn + 1) * uint(R) + uint(r), uint(I - 1));
                    row[R + r] = row[r] + uint(I);
                }
            }
            uint k = (next ? 0 : j + 1024) + lane * 32;
            load_rows<FORM, BITS, GROUP, K>(w, s, z, row, k < uint(K) ? k : 0, w1, s1, z1);
            simdgroup_barrier(mem_flags::mem_none);  // see matvec
            rows_meet<T, FORM, BITS, PLACES>(
                w0, s0, z0, j + lane * 32, one, &table[0], &xs[0], &sums[0], acc
            );
            take_rows(w0, s0, z0, w1, s1, z1);
        }
        #pragma unroll
        for (int r = 0; r < R; r++) {
            float a = simd_sum(acc[0][r]) * inv;
            float u = simd_sum(acc[0][R + r]) * inv;
            uint o = first + turn * uint(R) + uint(r);
            if (lane == 0 && o < uint(I)) {
                if (BIAS) {
                    a += float(bias[base + o]);
                    u += float(bias[base + uint(I) + o]);
                }
                y[p * I + o] = static_cast<T>(gated<ACT>(a, u));
            }
        }
    }
#endif
}
