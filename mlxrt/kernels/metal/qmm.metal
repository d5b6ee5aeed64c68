// y [M, O] = x [M, K] times a quantized matrix [O, K] by matrix units, for 3 to 64 rows of x; bias, activation, residual and
// softcap after. With GROUPED a row of the grid is an expert and makes the rows of y that its part of `order` names.
#include "quantized.h"
#include "activation.h"
#include "staging.h"
#include "slab.h"

// Simdgroups are RG groups of rows by KS parts of k. A simdgroup makes RT tiles of 8 rows; with PAIR gates and their ups.
// GRID_SPLITS threadgroups share k as well: each writes a y of its own, and sum_splits.metal adds them up.
// GROUPED: y is a row of the grid, an expert, whose part of `order` names the rows of y it makes, a few at a time; each
// reads a row of x, which C of them share.
[[kernel]] void mlxrt_qmm(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint tid = thread_position_in_threadgroup.x;
    uint expert = GROUPED ? threadgroup_position_in_grid.y : 0u;
    uint row_group = sg / uint(KS);
    uint split = sg % uint(KS);
    uint grid_split = threadgroup_position_in_grid.z % uint(GRID_SPLITS);
    uint opaque_zero = threadgroup_position_in_grid.z / uint(GRID_SPLITS);
    uint tile = threadgroup_position_in_grid.x * uint(RG) + row_group;
    const int OUT_TILES = PAIR ? RT / 2 : RT;
    const int OUTPUTS = OUT_TILES * 8;
    const bool SPLIT_K = KS > 1;
    threadgroup float partial[RG][SPLIT_K ? KS - 1 : 1][SPLIT_K ? RT * MT * 64 : 1];
    const int LUT_SIZE = lut_size<FORM, BITS>();
    threadgroup float lut_shared[LUT_SIZE];
    load_lut<FORM, LUT_SIZE, RG * KS * 32>(lut, tid, &lut_shared[0]);
    uint last = uint(PAIR ? 2 * O - 1 : O - 1);
    uint base = expert * (last + 1);
    uint row[RT];
    #pragma unroll
    for (int r = 0; r < RT; r++) {
        uint weight_row = tile * OUTPUTS + uint(r * 8 % OUTPUTS) + left_row(lane, 0)
                          + (r * 8 < OUTPUTS ? 0u : uint(O));
        row[r] = base + metal::min(weight_row, last);
    }
    uint quarter = left_col(lane, 0) / 2;
    uint begin = GROUPED ? uint(bounds[expert]) : 0u;
    uint count = GROUPED ? uint(bounds[expert + 1]) - begin : uint(M);
    // The simdgroups of a part of k share its slab of x: 128 numbers of every column, eight at a time. What of it a thread
    // copies is on its way while the slab before is multiplied, and so are the next words of the matrix.
    const int CHUNKS = MT * 4 / RG;
    const int STEP = KS * 128;
    const int SPLIT_SIZE = (K + GRID_SPLITS * STEP - 1) / (GRID_SPLITS * STEP) * STEP;
    uint begin_k = grid_split * uint(SPLIT_SIZE);
    uint end_k = metal::min(begin_k + uint(SPLIT_SIZE), uint(K));
    threadgroup uint4 slab[KS * MT * 128];
    uint first_chunk = split * uint(MT * 128);
    uint thread_of_split = row_group * 32 + lane;
    const bool SHARED = shares_scales<GROUP, K, PAIRED>();
    const int SCALE_WORDS = scale_words<FORM, GROUP>();
    // Without GROUPED each threadgroup has its own columns.
    uint first = GROUPED ? 0u : threadgroup_position_in_grid.y * uint(8 * MT);
    uint stride = GROUPED ? uint(8 * MT) : uint(M);
    for (uint first_column = first; first_column < count; first_column += stride) {
        Tile<float> acc[RT][MT];
        uint x_offset[CHUNKS];
        uint4 fetched[CHUNKS];
        uint words[RT][BITS];
        uint scale[RT];
        uint zero[RT];
        uint step_scales[RT][SCALE_WORDS];
        uint step_zeros[RT][SCALE_WORDS];
        uint next_step_scales[RT][SCALE_WORDS];
        uint next_step_zeros[RT][SCALE_WORDS];
        #pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            // Columns past the last one repeat it: nobody reads what they make.
            uint column = first_column + slab_column(uint(c * RG * 32) + thread_of_split);
            column = metal::min(column, count - 1);
            x_offset[c] = (GROUPED ? uint(order[begin + column]) / uint(C) : column) * uint(K);
        }
        #pragma unroll
        for (int r = 0; r < RT; r++) {
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                set<float>(acc[r][m], 0, 0.0f);
                set<float>(acc[r][m], 1, 0.0f);
            }
        }
        fetch_slab<K, RG, STEP>(x, x_offset, begin_k + split * 128, thread_of_split, fetched);
        uint k_of_lane = clamp_quarter<K>(begin_k + split * 128, quarter);
        load_row_words<K>(packed, row, k_of_lane, words);
        if (SHARED) {
            uint own = begin_k + (quarter * uint(KS) + split) * 128;
            load_step_scales<FORM, GROUP, K>(scales, row, own, next_step_scales);
            if (FORM == AFFINE) load_step_scales<FORM, GROUP, K>(biases, row, own, next_step_zeros);
        } else {
            load_scale_bits<FORM, BITS, GROUP, K, PAIRED, T>(
                scales, biases, row, k_of_lane, scale, zero
            );
        }
        for (uint k = begin_k; k < end_k; k += uint(STEP)) {
            if (k > begin_k || GROUPED) threadgroup_barrier(mem_flags::mem_threadgroup);
            #pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                slab[first_chunk + slab_index(uint(c * RG * 32) + thread_of_split)] =
                    interleave_chunk(fetched[c]);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            uint next = k + uint(STEP) + split * 128;
            uint next_words[RT][BITS];
            uint next_scale[RT];
            uint next_zero[RT];
            fetch_slab<K, RG, STEP>(x, x_offset, next, thread_of_split, fetched);
            k_of_lane = clamp_quarter<K>(next, quarter);
            load_row_words<K>(packed, row, k_of_lane, next_words);
            if (SHARED) {
                uint step = (k - begin_k) / uint(STEP) % 4;
                if (step == 0) {
                    copy_words(step_scales, next_step_scales);
                    copy_words(step_zeros, next_step_zeros);
                    uint own = k + ((4 + quarter) * uint(KS) + split) * 128;
                    load_step_scales<FORM, GROUP, K>(scales, row, own, next_step_scales);
                    if (FORM == AFFINE)
                        load_step_scales<FORM, GROUP, K>(biases, row, own, next_step_zeros);
                }
                uint from = row_lane(lane, step);
                #pragma unroll
                for (int r = 0; r < RT; r++) {
                    scale[r] = take_scale<FORM, GROUP>(step_scales[r], from, quarter);
                    if (FORM == AFFINE)
                        zero[r] = take_scale<FORM, GROUP>(step_zeros[r], from, quarter);
                }
            } else {
                load_scale_bits<FORM, BITS, GROUP, K, PAIRED, T>(
                    scales, biases, row, k_of_lane, next_scale, next_zero
                );
            }
            simdgroup_barrier(mem_flags::mem_none);  // keeps compilers from waiting for them
            #pragma unroll
            for (int c = 0; c < 4; c++) {
                Tile<T> left[RT][4];
                #pragma unroll
                for (int r = 0; r < RT; r++) {
                    dequantize_tiles<FORM, BITS, PAIRED>(
                        words[r], c, scale[r], zero[r], opaque_zero, &lut_shared[0], left[r]
                    );
                }
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    Tile<T> right[4];
                    load_right4<T>(&slab[first_chunk + uint(m * 128)], lane, c, right);
                    #pragma unroll
                    for (int j = 0; j < 4; j += 2) {
                        #pragma unroll
                        for (int r = 0; r < RT; r += 2) {
                            multiply4(
                                acc[r][m], acc[r + 1][m], left[r][j], left[r + 1][j], right[j],
                                left[r][j + 1], left[r + 1][j + 1], right[j + 1]
                            );
                        }
                    }
                }
            }
            copy_words(words, next_words);
            if (!SHARED) {
                #pragma unroll
                for (int r = 0; r < RT; r++) {
                    scale[r] = next_scale[r];
                    zero[r] = next_zero[r];
                }
            }
        }
        // The first part of k adds up the others' sums, which lie in their lanes' order.
        if (SPLIT_K) {
            #pragma unroll
            for (int n = 0; n < RT * MT * 2; n++) {
                if (split > 0) {
                    partial[row_group][split - 1][n * 32 + lane] =
                        at<float>(acc[n / (MT * 2)][n / 2 % MT], n % 2);
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        #pragma unroll
        for (int n = 0; n < OUT_TILES * MT * 2; n++) {
            uint m = first_column + n / 2 % MT * 8 + sum_col(lane, n % 2);
            uint output = tile * OUTPUTS + n / (MT * 2) * 8 + sum_row(lane, n % 2);
            if (split > 0 || m >= count || output >= uint(O)) continue;
            const int UP = PAIR ? OUT_TILES * MT * 2 : 0;
            float value = at<float>(acc[n / (MT * 2)][n / 2 % MT], n % 2);
            float up = at<float>(acc[(n + UP) / (MT * 2)][n / 2 % MT], n % 2);
            #pragma unroll
            for (int c = 0; c < KS - 1; c++) {
                value += partial[row_group][c][n * 32 + lane];
                up += partial[row_group][c][(n + UP) * 32 + lane];
            }
            if (BIAS) {
                value += float(bias[base + output]);
                if (PAIR) up += float(bias[base + O + output]);
            }
            uint out_row = GROUPED ? uint(order[begin + m]) : grid_split * uint(M) + m;
            if (PAIR) {
                value = gated<ACT>(value, up);
            } else if (ACT != NO_ACTIVATION) {
                value = gated<ACT>(value, TIMES ? float(other[out_row * O + output]) : 1.0f);
            }
            if (RES) value += float(other[out_row * O + output]);
            y[out_row * O + output] = static_cast<OUT>(capped<CAP>(value));
        }
    }
}
