// y [M, O] = x [M, K] times a quantized matrix [O, K] by matrix units, for 5 to 64 rows of x; bias, activation, residual and
// softcap after. With GROUPED a row of the grid is an expert and makes the rows of y that its part of `order` names.
#include "quantized.h"
#include "activation.h"

// Simdgroups are RG groups of rows by KS parts of k. A simdgroup makes RT tiles of 8 rows; with PAIR gates and their ups.
// GROUPED: y is a row of the grid, an expert, whose part of `order` names the rows of y it makes, a few at a time; each
// reads a row of x, which C of them share.
[[kernel]] void mlxrt_qmm(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint tid = thread_position_in_threadgroup.x;
    uint expert = GROUPED ? threadgroup_position_in_grid.y : 0u;
    uint row_group = sg / uint(KS);
    uint split = sg % uint(KS);
    uint magic = magic_bits<BITS>(threadgroup_position_in_grid.z);
    uint tile = threadgroup_position_in_grid.x * uint(RG) + row_group;
    const int OUTPUTS = PAIR ? RT * 4 : RT * 8;
    threadgroup float partial[RG][KS][RT * 8][MT * 8];
    const int LUT_SIZE = lut_size<FORM, BITS>();
    threadgroup float lut_shared[LUT_SIZE];
    load_lut<FORM, LUT_SIZE, RG * KS * 32>(lut, tid, &lut_shared[0]);
    if (LUT_SIZE > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
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
    for (uint first_column = 0; first_column < count; first_column += 8 * MT) {
        Tile<float> acc[RT][MT];
        uint x_offset[MT][2];
        bool live[MT][2];
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            #pragma unroll
            for (uint i = 0; i < 2; i++) {
                uint c = first_column + 8 * m + right_col(lane, i);
                live[m][i] = c < count;
                c = metal::min(c, count - 1);
                x_offset[m][i] = (GROUPED ? uint(order[begin + c]) / uint(C) : c) * uint(K);
            }
            #pragma unroll
            for (int r = 0; r < RT; r++) {
                set<float>(acc[r][m], 0, 0.0f);
                set<float>(acc[r][m], 1, 0.0f);
            }
        }
        for (uint k = split * 128; k < uint(K); k += uint(KS) * 128) {
            // The last part of k may have fewer than four quarters; x counts as zero in the others.
            uint quarters = K % 128 == 0 ? 4u : metal::min(4u, (uint(K) - k) / 32);
            uint first_k = k + metal::min(quarter, quarters - 1) * 32;
            Tile<T> left[RT][16];
            #pragma unroll
            for (int r = 0; r < RT; r++) {
                uint block = row[r] * uint(K / 32) + first_k / 32;
                uint words[BITS];
                float scale;
                float zero;
                load_words<BITS>(packed, block, words);
                load_scales<FORM, BITS, GROUP>(scales, biases, block, scale, zero);
                #pragma unroll
                for (int n = 0; n < 32; n++) {
                    int part = n * num_parts<FORM>() / 32;
                    set<T>(
                        left[r][n / 2], n % 2,
                        static_cast<T>(
                            unpack_value<FORM, BITS>(words, n, magic, &lut_shared[0])
                                * group_scale<FORM>(scale, zero, part)
                            + group_zero<FORM, BITS>(scale, zero, part)
                        )
                    );
                }
            }
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                Tile<T> right[16];
                right16<T>(x + k, x_offset[m], live[m], quarters, lane, right);
                #pragma unroll
                for (int j = 0; j < 16; j += 2) {
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
        #pragma unroll
        for (int r = 0; r < RT; r++) {
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                #pragma unroll
                for (uint i = 0; i < 2; i++) {
                    partial[row_group][split][r * 8 + sum_row(lane, i)][m * 8 + sum_col(lane, i)] =
                        at<float>(acc[r][m], i);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint columns = metal::min(count - first_column, uint(8 * MT));
        for (uint i = tid; i < uint(RG * OUTPUTS) * columns; i += uint(RG * KS * 32)) {
            uint r = i % OUTPUTS;
            uint out_group = i / OUTPUTS % RG;
            uint m = i / (OUTPUTS * RG);
            uint output = (threadgroup_position_in_grid.x * RG + out_group) * OUTPUTS + r;
            if (output < uint(O)) {
                float value = 0.0f;
                float up = 0.0f;
                for (int c = 0; c < KS; c++) {
                    value += partial[out_group][c][r][m];
                    if (PAIR) up += partial[out_group][c][(r + OUTPUTS) % (RT * 8)][m];
                }
                if (BIAS) {
                    value += float(bias[base + output]);
                    if (PAIR) up += float(bias[base + O + output]);
                }
                uint out_row = GROUPED ? uint(order[begin + first_column + m]) : m;
                if (PAIR) {
                    value = gated<ACT>(value, up);
                } else if (ACT != NO_ACTIVATION) {
                    value = gated<ACT>(value, TIMES ? float(other[out_row * O + output]) : 1.0f);
                }
                if (RES) value += float(other[out_row * O + output]);
                y[out_row * O + output] = static_cast<OUT>(capped<CAP>(value));
            }
        }
        if (GROUPED) threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
