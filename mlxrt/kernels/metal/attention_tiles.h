// Attention by matrix units, in half precision: sixteen keys at a time, as two tiles of eight, against up to eight query
// heads. Scores are [16 keys, 8 queries], results [elements, 8 queries]. Sums over the elements of a head may be taken in any
// order, and so may its results be made: a lane takes neighbours of a key and of a value, and nothing is moved. Quantized
// values are multiplied as they are; scale and bias of a group are put to the sums. Plain elements are one group.
#include "kv_reader.h"

// Sixteen keys from `key` on. Where all of them lie in one block, all addresses are one and constants.
struct KeyTile {
    int key;
    bool contiguous;
    uint vector;  // of the first, if contiguous
};

template <bool STAGED, int VECTORS, int BLOCK_SIZE, typename B, typename S>
FN void find_tile(const thread KVRange& range, B table_row, S staged, thread KeyTile& tile) {
    tile.contiguous =
        tile.key + 16 <= metal::min(range.end, range.tail_start)
        && tile.key >= range.window_start
        && uint(tile.key - range.table_start) % uint(BLOCK_SIZE) + 16 <= uint(BLOCK_SIZE);
    if (tile.contiguous) {
        tile.vector = pool_vector<STAGED, VECTORS, BLOCK_SIZE>(range, table_row, staged, tile.key);
    }
}

// What a lane takes of sixteen keys, as it lies in memory. QUANTIZED_KV: and the scales and biases of their groups.
template <
    typename T, bool STAGED, int VECTORS, int BLOCK_SIZE, int TAIL_SIZE, int VECTOR_WORDS,
    int KV_WORDS, int GROUPS, int WORDS, int A, typename B, typename S, typename P, typename F>
FN void load_keys(
    const thread KVRange& range, const thread KeyTile& tile, const device uint* pool,
    const device uint* tail, B table_row, S staged, P new_words, F new_affine, uint lane,
    thread uint (&k_words)[2][GROUPS][WORDS], thread uint (&affine_words)[2][A]
) {
    uint quarter = left_col(lane, 0) / 2;
    if (tile.contiguous) {
        const device uint* w =
            pool + ((tile.vector + left_row(lane, 0)) * VECTOR_WORDS + quarter * WORDS);
#if QUANTIZED_KV
        const device uint* affine =
            pool + ((tile.vector + left_row(lane, 0)) * VECTOR_WORDS + KV_WORDS);
        load_aligned<A, VECTOR_WORDS>(affine, 0, affine_words[0]);
        load_aligned<A, VECTOR_WORDS>(affine, 8 * VECTOR_WORDS, affine_words[1]);
#endif
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            #pragma unroll
            for (int g = 0; g < GROUPS; g++)
                load_aligned<WORDS, VECTOR_WORDS>(
                    w, 8 * c * VECTOR_WORDS + g * (4 * WORDS), k_words[c][g]
                );
        }
    } else {
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            int key = metal::min(tile.key + 8 * c + int(left_row(lane, 0)), range.end - 1);
            bool is_new = NEW_TOKEN && key == range.position;
            KVSlot slot =
                find_slot<STAGED, VECTORS, BLOCK_SIZE, TAIL_SIZE>(range, table_row, staged, key);
            const device uint* words = slot.pooled ? pool : tail;
#if QUANTIZED_KV
            if (is_new) {
                #pragma unroll
                for (int n = 0; n < A; n++) affine_words[c][n] = pack_word<T>(new_affine, uint(n));
            } else {
                load_aligned<A, VECTOR_WORDS>(
                    words, slot.vector * VECTOR_WORDS + KV_WORDS, affine_words[c]
                );
            }
#endif
            #pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                uint word = g * (4 * WORDS) + quarter * WORDS;
                if (is_new) {
                    load_shared<WORDS>(new_words, word, k_words[c][g]);
                } else {
                    load_aligned<WORDS, VECTOR_WORDS>(
                        words, slot.vector * VECTOR_WORDS + word, k_words[c][g]
                    );
                }
            }
        }
    }
}

// What a lane takes of their values.
template <
    bool STAGED, int NUM_KV_HEADS, int BLOCK_SIZE, int TAIL_SIZE, int VECTOR_WORDS, int K_WORDS,
    int GROUPS, int WORDS, typename B, typename S, typename P>
FN void load_values(
    const thread KVRange& range, const thread KeyTile& tile, const device uint* pool,
    const device uint* tail, B table_row, S staged, P new_words, uint lane,
    thread uint (&v_words)[2][2][GROUPS][WORDS]
) {
    const int VECTORS = QUANTIZED_KV ? NUM_KV_HEADS : 2 * NUM_KV_HEADS;
    uint eighth = left_row(lane, 0);
    if (tile.contiguous) {
        uint distance = left_col(lane, 1) - left_col(lane, 0);
        const int BEHIND = QUANTIZED_KV ? K_WORDS : NUM_KV_HEADS * BLOCK_SIZE * VECTOR_WORDS;
        const device uint* w =
            pool + ((tile.vector + left_col(lane, 0)) * VECTOR_WORDS + BEHIND + eighth * WORDS);
        #pragma unroll
        for (int n = 0; n < 4 * GROUPS; n++) {
            int c = n / GROUPS / 2;
            uint i = n / GROUPS % 2;
            int g = n % GROUPS;
            load_aligned<WORDS, VECTOR_WORDS>(
                w, (8 * c + i * distance) * VECTOR_WORDS + g * (8 * WORDS), v_words[c][i][g]
            );
        }
    } else {
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            #pragma unroll
            for (uint i = 0; i < 2; i++) {
                int key = metal::min(tile.key + 8 * c + int(left_col(lane, i)), range.end - 1);
                KVSlot slot = find_slot<STAGED, VECTORS, BLOCK_SIZE, TAIL_SIZE>(
                    range, table_row, staged, key
                );
                uint value = QUANTIZED_KV
                                 ? slot.vector * VECTOR_WORDS + K_WORDS
                                 : (slot.vector
                                    + uint(NUM_KV_HEADS)
                                          * (slot.pooled ? uint(BLOCK_SIZE) : uint(TAIL_SIZE)))
                                       * VECTOR_WORDS;
                #pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    uint word = g * (8 * WORDS) + eighth * WORDS;
                    if (NEW_TOKEN && key == range.position) {
                        load_shared<WORDS>(new_words, K_WORDS + word, v_words[c][i][g]);
                    } else {
                        load_aligned<WORDS, VECTOR_WORDS>(
                            slot.pooled ? pool : tail, value + word, v_words[c][i][g]
                        );
                    }
                }
            }
        }
    }
}

// score[g][c] = keys . queries, group by group.
template <typename Half, int K_BITS, int GROUPS, int TILES, int WORDS>
FN void qk_dot_tiles(
    const thread uint (&k_words)[2][GROUPS][WORDS], thread Tile<Half> (&q)[GROUPS][TILES],
    thread Tile<float> (&score)[GROUPS][2]
) {
    const int PER_WORD = 16 / K_BITS;
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        #pragma unroll
        for (uint i = 0; i < 2; i++) {
            set<float>(score[g][0], i, 0.0f);
            set<float>(score[g][1], i, 0.0f);
        }
        #pragma unroll
        for (int j = 0; j < TILES; j++) {
            Tile<Half> keys[2];
            #pragma unroll
            for (int c = 0; c < 2; c++)
                set_elements<Half, K_BITS>(keys[c], k_words[c][g][j / PER_WORD], j % PER_WORD);
            multiply2(score[g][0], score[g][1], keys[0], keys[1], q[g][j]);
        }
    }
}

// Weights of sixteen keys, from number `key` on; what was summed so far is scaled to the new maximum.
template <int SCALE, int SOFTCAP, bool QUANTIZED, int GROUPS, int TILES>
FN void online_softmax_tiles(
    thread Tile<float> (&score)[GROUPS][2], const thread Affine (&k_affine)[2][GROUPS],
    const thread float (&q_sum)[GROUPS][2], int key, int end, uint lane,
    thread float (&weight)[2][2], thread float (&max_score)[2], thread float (&sum_exp)[2],
    thread Tile<float> (&acc)[GROUPS][TILES], thread float (&bias_acc)[GROUPS][2]
) {
    #pragma unroll
    for (uint i = 0; i < 2; i++) {
        float top = max_score[i];
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            float s = QUANTIZED ? 0.0f : at<float>(score[0][c], i);
            #pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                if (QUANTIZED)
                    s += at<float>(score[g][c], i) * k_affine[c][g].scale
                         + q_sum[g][i] * k_affine[c][g].bias;
            }
            s *= as_type<float>(uint(SCALE));
            if (SOFTCAP != 0)
                s = metal::tanh(s / as_type<float>(uint(SOFTCAP))) * as_type<float>(uint(SOFTCAP));
            weight[c][i] = key + 8 * c + int(sum_row(lane, i)) < end ? s : -1e30f;
            top = metal::max(top, weight[c][i]);
        }
        top = rows_max(top);
        float factor = metal::exp(max_score[i] - top);
        max_score[i] = top;
        #pragma unroll
        for (int c = 0; c < 2; c++) weight[c][i] = metal::exp(weight[c][i] - top);
        sum_exp[i] = sum_exp[i] * factor + weight[0][i] + weight[1][i];
        #pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            bias_acc[g][i] *= factor;
            #pragma unroll
            for (int j = 0; j < TILES; j++)
                set<float>(acc[g][j], i, at<float>(acc[g][j], i) * factor);
        }
    }
}

// acc += values . weights. WEIGHT_UNIT keeps weights times scales within half precision.
template <typename Half, int V_BITS, bool QUANTIZED, int GROUPS, int TILES, int WORDS>
FN void accumulate_v_tiles(
    const thread uint (&v_words)[2][2][GROUPS][WORDS], const thread Affine (&v_affine)[2][GROUPS],
    const thread float (&weight)[2][2], float WEIGHT_UNIT, uint lane,
    thread Tile<float> (&acc)[GROUPS][TILES], thread float (&bias_acc)[GROUPS][2]
) {
    const int PER_HALF = 16 / V_BITS;
    #pragma unroll
    for (int c = 0; c < 2; c++) {
        #pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            Tile<Half> weights;
            float mine[2];
            #pragma unroll
            for (uint i = 0; i < 2; i++) {
                mine[i] =
                    QUANTIZED ? weight[c][i] * (v_affine[c][g].scale * WEIGHT_UNIT) : weight[c][i];
                if (QUANTIZED) bias_acc[g][i] += weight[c][i] * v_affine[c][g].bias;
            }
            #pragma unroll
            for (uint i = 0; i < 2; i++) {
                uint head = right_col(lane, i);
                uint source = sum_lane(right_row(lane, i), head);
                float even = simd_shuffle(mine[0], source);
                float odd = simd_shuffle(mine[1], source);
                set<Half>(weights, i, static_cast<Half>(head % 2 == 0 ? even : odd));
            }
            #pragma unroll
            for (int j = 0; j < TILES; j += 2) {
                Tile<Half> values[2];
                #pragma unroll
                for (int e = 0; e < 2; e++) {
                    uint a = v_words[c][0][g][(j + e) / PER_HALF / 2];
                    uint b = v_words[c][1][g][(j + e) / PER_HALF / 2];
                    uint both = (j + e) / PER_HALF % 2 == 0 ? (a & 0xffffu) | (b << 16)
                                                            : (a >> 16) | (b & 0xffff0000u);
                    set_elements<Half, V_BITS>(values[e], both, (j + e) % PER_HALF);
                }
                multiply2(acc[g][j], acc[g][(j + 1) % TILES], values[0], values[1], weights);
            }
        }
    }
}
