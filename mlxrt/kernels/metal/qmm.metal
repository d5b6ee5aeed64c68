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
    uint t = thread_position_in_threadgroup.x;
    uint expert = GROUPED ? threadgroup_position_in_grid.y : 0u;
    uint rg = sg / uint(KS);
    uint ks = sg % uint(KS);
    uint one = lift_of<BITS>(threadgroup_position_in_grid.z);
    uint tile = threadgroup_position_in_grid.x * uint(RG) + rg;
    const int OUTS = PAIR ? RT * 4 : RT * 8;
    threadgroup float part[RG][KS][RT * 8][MT * 8];
    const int LEVELS = FORM == 3 ? 1 << BITS : 1;
    threadgroup float table[LEVELS];
    lay_levels<FORM, LEVELS, RG * KS * 32>(l, t, &table[0]);
    if (FORM == 3) threadgroup_barrier(mem_flags::mem_threadgroup);
    uint last = uint(PAIR ? 2 * O - 1 : O - 1);
    uint base = expert * (last + 1);
    uint row[RT];
    #pragma unroll
    for (int r = 0; r < RT; r++) {
        uint at =
            tile * OUTS + uint(r * 8 % OUTS) + left_row(lane, 0) + (r * 8 < OUTS ? 0u : uint(O));
        row[r] = base + metal::min(at, last);
    }
    uint quarter = left_col(lane, 0) / 2;
    uint begin = GROUPED ? uint(bounds[expert]) : 0u;
    uint count = GROUPED ? uint(bounds[expert + 1]) - begin : uint(M);
    for (uint c0 = 0; c0 < count; c0 += 8 * MT) {
        Tile<float> acc[RT][MT];
        uint from[MT][2];
        bool live[MT][2];
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            #pragma unroll
            for (uint i = 0; i < 2; i++) {
                uint c = c0 + 8 * m + right_col(lane, i);
                live[m][i] = c < count;
                c = metal::min(c, count - 1);
                from[m][i] = (GROUPED ? uint(order[begin + c]) / uint(C) : c) * uint(K);
            }
            #pragma unroll
            for (int r = 0; r < RT; r++) {
                set<float>(acc[r][m], 0, 0.0f);
                set<float>(acc[r][m], 1, 0.0f);
            }
        }
        for (uint k = ks * 128; k < uint(K); k += uint(KS) * 128) {
            uint mine = k + quarter * 32;
            Tile<T> left[RT][16];
            #pragma unroll
            for (int r = 0; r < RT; r++) {
                uint from = row[r] * uint(K / 32) + mine / 32;
                uint group = from / uint(GROUP / 32);
                uint p[BITS];
                load_words<BITS>(w, from, p);
                float scale = scale_at<FORM>(s, group);
                float zero = zero_at<FORM, BITS>(z, group, scale);
                #pragma unroll
                for (int n = 0; n < 32; n++) {
                    set<T>(
                        left[r][n / 2], n % 2,
                        static_cast<T>(number<FORM, BITS>(p, n, one, &table[0]) * scale + zero)
                    );
                }
            }
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                Tile<T> right[16];
                right16<T>(x + k, from[m], live[m], lane, right);
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
                    part[rg][ks][r * 8 + sum_row(lane, i)][m * 8 + sum_col(lane, i)] =
                        at<float>(acc[r][m], i);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint here = metal::min(count - c0, uint(8 * MT));
        for (uint i = t; i < uint(RG * OUTS) * here; i += uint(RG * KS * 32)) {
            uint r = i % OUTS;
            uint g = i / OUTS % RG;
            uint m = i / (OUTS * RG);
            uint o = (threadgroup_position_in_grid.x * RG + g) * OUTS + r;
            if (o < uint(O)) {
                float a = 0.0f;
                float u = 0.0f;
                for (int c = 0; c < KS; c++) {
                    a += part[g][c][r][m];
                    if (PAIR) u += part[g][c][(r + OUTS) % (RT * 8)][m];
                }
                if (BIAS) {
                    a += float(bias[base + o]);
                    if (PAIR) u += float(bias[base + O + o]);
                }
                uint to = GROUPED ? uint(order[begin + c0 + m]) : m;
                if (PAIR) {
                    a = gated<ACT>(a, u);
                } else if (ACT > 0) {
                    a = gated<ACT>(a, TIMES ? float(other[to * O + o]) : 1.0f);
                }
                if (RES) a += float(other[to * O + o]);
                y[to * O + o] = static_cast<OUT>(capped<CAP>(a));
            }
        }
        if (GROUPED) threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
