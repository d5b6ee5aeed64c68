// y [M, O] = x [M, K] times a matrix [O, K], plain or quantized, for a few rows of x. RMSNorm of x before; bias, activation,
// residual and softcap after. With ADD_NORM the matrix reads residual + RMSNorm(x), which is also written to h. With SPLIT_X
// it reads attention whose keys were split over threadgroups (paged_attention.metal), and combines the splits itself.
#include "quantized.h"
#include "activation.h"
#include "staging.h"

#if ADD_NORM
// stage_x8 of (residual + x * inv_rms * post) * factor, which is also written to h.
template <
    typename T, int FORM, bool NORM, int K, typename X, typename R, typename W, typename H,
    typename G, typename P, typename S>
FN float stage_add_norm8(
    X x, R residual, W post, float inv_rms, float factor, H h, bool writes, uint from,
    G norm_weight, uint tile_start, uint tid, P x_shared, S x_sums
) {
    uint chunk = chunk_index(tid);
    bool live = tile_start + 8 * chunk < uint(K);
    uint here = (from + tile_start) / 8 + chunk;
    uint x_words[2 * sizeof(T)];
    uint residual_words[2 * sizeof(T)];
    uint post_words[2 * sizeof(T)];
    uint norm_words[2 * sizeof(T)];
    float values[8];
    float residual_values[8];
    float post_values[8];
    float norm_values[8];
    float squares = 0.0f;
    fetch8(x, here, live, x_words);
    fetch8(residual, here, live, residual_words);
    fetch8(post, tile_start / 8 + chunk, live, post_words);
    if (NORM) {
        fetch8(norm_weight, tile_start / 8 + chunk, live, norm_words);
        unpack8<T>(norm_words, norm_values);
    }
    unpack8<T>(x_words, values);
    unpack8<T>(residual_words, residual_values);
    unpack8<T>(post_words, post_values);
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        T sum =
            static_cast<T>((values[n] * inv_rms * post_values[n] + residual_values[n]) * factor);
        if (writes && live) h[8 * here + uint(n)] = sum;
        values[n] = float(sum);
        squares += values[n] * values[n];
        if (NORM) values[n] *= norm_values[n];
    }
    store8<T, FORM>(values, chunk, x_shared, x_sums);
    return squares;
}
#endif

#if SPLIT_X
// stage_x8 of eight elements of a head: the results of its splits, weighted as attention_reduce.metal does.
template <
    typename T, int FORM, int K, int HEAD_DIM, int SPLITS, bool SINKS, typename X, typename B,
    typename P, typename S>
FN void stage_splits8(X parts, B sinks, uint row, uint tile_start, uint tid, P x_shared, S x_sums) {
    uint chunk = chunk_index(tid);
    uint element = tile_start + 8 * chunk;
    bool live = K % 1024 == 0 || element < uint(K);
    uint head = live ? element / uint(HEAD_DIM) : 0;
    auto results = parts + (row * uint(K / HEAD_DIM) + head) * uint(SPLITS * (HEAD_DIM + 2));
    uint stats[2 * SPLITS];  // largest scores, sums of exponentials
    load_words<2 * SPLITS>(results + SPLITS * HEAD_DIM, 0, stats);
    float sink = SINKS ? float(sinks[head]) : -1e30f;
    float top = sink;
    float values[8];
    #pragma unroll
    for (int s = 0; s < SPLITS; s++) top = metal::max(top, as_type<float>(stats[s]));
    float sum_exp = SINKS ? metal::exp(sink - top) : 0.0f;
    #pragma unroll
    for (int s = 0; s < SPLITS; s++) {
        uint words[8];
        float weight = metal::exp(as_type<float>(stats[s]) - top);
        sum_exp += as_type<float>(stats[SPLITS + s]) * weight;
        load_words<8>(results + s * HEAD_DIM, element % uint(HEAD_DIM) / 8, words);
        #pragma unroll
        for (int n = 0; n < 8; n++) {
            float part = as_type<float>(words[n]) * weight;
            values[n] = s == 0 ? part : values[n] + part;
        }
    }
    float factor = 1.0f / sum_exp;
    #pragma unroll
    for (int n = 0; n < 8; n++)
        values[n] = live ? float(static_cast<T>(values[n] * factor)) : 0.0f;
    store8<T, FORM>(values, chunk, x_shared, x_sums);
}
#endif

// A simdgroup makes LOOPS times R outputs of each row of x; with PAIR an output is a gate and the up that belongs to it.
[[kernel]] void mlxrt_qmv(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint tid = thread_position_in_threadgroup.x;
    uint magic = magic_bits<BITS>(threadgroup_position_in_grid.z);
    const int ROWS = PAIR ? 2 * R : R;
    const int VECS = TILE / 4;
    const int WORDS = FORM == DENSE ? 8 * sizeof(T) : BITS;
    threadgroup float4 x_shared[M * VECS];
    threadgroup float x_sums[M * TILE / 16];
    threadgroup float partial[M][SG * LOOPS * ROWS];
    threadgroup float partial_squares[M][SG];
    const int LUT_SIZE = lut_size<FORM, BITS>();
    threadgroup float lut_shared[LUT_SIZE];
    load_lut<FORM, LUT_SIZE, SG * 32>(lut, tid, &lut_shared[0]);
    uint first_row = (threadgroup_position_in_grid.x * uint(SG) + sg) * uint(LOOPS * R);
    uint row[ROWS];
    uint words[ROWS][WORDS];
    float scale[ROWS];
    float zero[ROWS];
    float acc[M][ROWS];
    float squares[M];
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = metal::min(first_row + uint(r), uint(O - 1));
        if (PAIR) row[ROWS - R + r] = row[r] + uint(O);
    }
    load_rows<FORM, BITS, GROUP, K>(
        packed, scales, biases, row, lane * 32 < uint(K) ? lane * 32 : 0, words, scale, zero
    );
    #pragma unroll
    for (int m = 0; m < M; m++) {
        squares[m] = 0.0f;
        #pragma unroll
        for (int r = 0; r < ROWS; r++) acc[m][r] = 0.0f;
    }
#if ADD_NORM
    float inv_rms[M];
    float factor = SCALED ? float(scalar[0]) : 1.0f;
    #pragma unroll
    for (int m = 0; m < M; m++) {
        float sum_squares = 0.0f;
        for (uint i = tid; i < uint(K / 8); i += uint(SG * 32)) {
            float v[8];
            load8<T>(x, m * (K / 8) + i, v);
            #pragma unroll
            for (int n = 0; n < 8; n++) sum_squares += v[n] * v[n];
        }
        sum_squares = simd_sum(sum_squares);
        if (lane == 0) partial_squares[m][sg] = sum_squares;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    #pragma unroll
    for (int m = 0; m < M; m++) {
        float total = 0.0f;
        for (int c = 0; c < SG; c++) total += partial_squares[m][c];
        inv_rms[m] = metal::rsqrt(total / float(K) + as_type<float>(uint(POST_EPS)));
    }
#endif
    for (uint tile_start = 0; tile_start < uint(K); tile_start += TILE) {
        if (tile_start > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma unroll
        for (int m = 0; m < M; m++) {
            for (uint i = tid; i < uint(TILE / 8); i += uint(SG * 32)) {
#if ADD_NORM
                squares[m] += stage_add_norm8<T, FORM, NORM, K>(
                    x, residual, post, inv_rms[m], factor, h, threadgroup_position_in_grid.x == 0,
                    m * K, norm_weight, tile_start, i, &x_shared[m * VECS], &x_sums[m * (TILE / 16)]
                );
#elif SPLIT_X
                stage_splits8<T, FORM, K, HEAD_DIM, SPLITS, SINKS>(
                    x, sinks, uint(m), tile_start, i, &x_shared[m * VECS], &x_sums[m * (TILE / 16)]
                );
#else
                squares[m] += stage_x8<T, FORM, NORM, K>(
                    x, m * K, norm_weight, tile_start, i, &x_shared[m * VECS],
                    &x_sums[m * (TILE / 16)]
                );
#endif
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint end = metal::min(uint(TILE), uint(K) - tile_start);
        for (uint loop = 0; loop < uint(LOOPS); loop++) {
            for (uint offset = 0; offset < end; offset += 1024) {
                // The next words are asked for before these are multiplied; the barrier keeps compilers from waiting.
                uint next_words[ROWS][WORDS];
                float next_scale[ROWS];
                float next_zero[ROWS];
                bool row_done = LOOPS > 1 && offset + 1024 >= end;
                uint k = (row_done ? 0 : tile_start + offset + 1024) + lane * 32;
                if (row_done) {
                    #pragma unroll
                    for (int r = 0; r < R; r++) {
                        row[r] =
                            metal::min(first_row + (loop + 1) * uint(R) + uint(r), uint(O - 1));
                        if (PAIR) row[ROWS - R + r] = row[r] + uint(O);
                    }
                }
                load_rows<FORM, BITS, GROUP, K>(
                    packed, scales, biases, row, k < uint(K) ? k : 0, next_words, next_scale,
                    next_zero
                );
                simdgroup_barrier(mem_flags::mem_none);
                dot_rows<T, FORM, BITS, VECS>(
                    words, scale, zero, offset + lane * 32, magic, &lut_shared[0], &x_shared[0],
                    &x_sums[0], acc
                );
                copy_rows(words, scale, zero, next_words, next_scale, next_zero);
            }
            if (tile_start + TILE >= uint(K)) {
                #pragma unroll
                for (int m = 0; m < M; m++) {
                    #pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        float total = simd_sum(acc[m][r]);
                        if (lane == 0)
                            partial[m][(sg * uint(LOOPS) + loop) * uint(ROWS) + uint(r)] = total;
                        acc[m][r] = 0.0f;
                    }
                }
            }
        }
    }
    if (NORM) {
        #pragma unroll
        for (int m = 0; m < M; m++) {
            float total = simd_sum(squares[m]);
            if (lane == 0) partial_squares[m][sg] = total;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint GROUP_OUTPUTS = SG * LOOPS * R;
    for (uint i = tid; i < uint(M) * GROUP_OUTPUTS; i += uint(SG * 32)) {
        uint m = i / GROUP_OUTPUTS;
        uint offset = i % GROUP_OUTPUTS;
        uint output = threadgroup_position_in_grid.x * GROUP_OUTPUTS + offset;
        if (output < uint(O)) {
            uint slot = offset / uint(R) * uint(ROWS) + offset % uint(R);
            float value = partial[m][slot];
            float up = PAIR ? partial[m][slot + uint(ROWS - R)] : 0.0f;
            if (NORM) {
                float total = 0.0f;
                for (int c = 0; c < SG; c++) total += partial_squares[m][c];
                float inv_rms = metal::rsqrt(total / float(K) + as_type<float>(uint(EPS)));
                value *= inv_rms;
                up *= inv_rms;
            }
            if (BIAS) {
                value += float(bias[output]);
                if (PAIR) up += float(bias[O + output]);
            }
            if (PAIR) {
                value = gated<ACT>(value, up);
            } else if (ACT != NO_ACTIVATION) {
                value = gated<ACT>(value, TIMES ? float(other[m * O + output]) : 1.0f);
            }
            if (RES) value += float(other[m * O + output]);
            y[m * O + output] = static_cast<T>(capped<CAP>(value));
        }
    }
}
