// Decode attention: one token a row against its row's paged keys and values. Norms and RoPE of the heads, the new token's key
// and value into the tail, online softmax over the keys, in one launch; keys that are split over threadgroups are combined
// by attention_reduce.metal or by the product that reads them (qmv.metal with SPLIT_X). Variants:
//   NEW_TOKEN     the QKV projection has a key and a value, which go to the tail; else attention only reads
//   TILED         by matrix units (attention_tiles.h), else by lanes alone (attention_simd.h)
//   QUANTIZED_KV  keys and values are quantized (kv_reader.h)
//   FUSED_QKV     the QKV projection is computed here, for one short row
#include "kv_reader.h"
#if TILED
#include "attention_tiles.h"
#else
#include "attention_simd.h"
#endif
#if FUSED_QKV
#include "staging.h"
#endif

// Which head of a QKV projection vector v of a threadgroup is: its queries, then the key, then the value.
template <int NUM_HEADS, int NUM_KV_HEADS, int HEADS, bool TIED_KV>
FN uint qkv_head(uint v, uint first_head, uint kv_head) {
    return v < uint(HEADS)               ? first_head + v
           : v == uint(HEADS) || TIED_KV ? uint(NUM_HEADS) + kv_head
                                         : uint(NUM_HEADS + NUM_KV_HEADS) + kv_head;
}

// RMSNorm and RoPE of a head by a simdgroup: x has elements lane + 32 i of it, head[] gets all.
template <int HEAD_DIM, int ROPE_PAIRS, int N, int R, typename V>
FN void norm_rope(
    const thread float (&x)[N], const thread float (&weight)[N], const thread float (&freq)[R],
    bool normed, float eps, bool rotated, float position, float magnitude, uint lane, V head
) {
    float squares = 0.0f;
    #pragma unroll
    for (uint i = 0; i < uint(N); i++) squares += x[i] * x[i];
    float inv = normed ? metal::rsqrt(simd_sum(squares) / float(HEAD_DIM) + eps) : 1.0f;
    #pragma unroll
    for (uint i = 0; i < uint(N); i++) head[lane + 32 * i] = x[i] * inv * weight[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (rotated) {
        #pragma unroll
        for (uint i = 0; i < uint(R); i++) {
            uint p = lane + 32 * i;
            if (p < uint(ROPE_PAIRS)) {
                float angle = position * freq[i];
                float c = metal::cos(angle) * magnitude;
                float s = metal::sin(angle) * magnitude;
                float a = head[p];
                float b = head[p + ROPE_PAIRS];
                head[p] = a * c - b * s;
                head[p + ROPE_PAIRS] = a * s + b * c;
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// One threadgroup: HEADS query heads that share a KV head, of one row, and one split of its keys.
[[kernel]] void mlxrt_paged_attention(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x;
    uint opaque_zero = threadgroup_position_in_grid.z;
    uint row = threadgroup_position_in_grid.x / uint(NUM_HEADS / HEADS);
    uint first_head = threadgroup_position_in_grid.x % uint(NUM_HEADS / HEADS) * uint(HEADS);
    uint split = threadgroup_position_in_grid.y;
    bool last_split = split == uint(SPLITS - 1);
    uint kv_head = first_head / uint(NUM_HEADS / NUM_KV_HEADS);

    // Words of a vector. Quantized values are small integers, which half precision holds exactly.
#if QUANTIZED_KV
    const int K_WORDS = HEAD_DIM * K_BITS / 32;
    const int KV_WORDS = K_WORDS + HEAD_DIM * V_BITS / 32;
    const int GROUPS = HEAD_DIM / KV_GROUP;
    const int IN_WORD = 4 / sizeof(T);
    const int VECTOR_WORDS = KV_WORDS + 4 * GROUPS / IN_WORD;
    const int VECTORS = NUM_KV_HEADS;  // of a token
    using Half = FLOAT16;
    threadgroup uint quantized_values[2 * HEAD_DIM];
    threadgroup float new_affine[4 * GROUPS];
#else
    const int K_WORDS = HEAD_DIM * sizeof(T) / 4;
    const int VECTOR_WORDS = K_WORDS;
    const int GROUPS = 1;
    const int VECTORS = 2 * NUM_KV_HEADS;
    using Half = T;
#endif
    const device uint* pool = (const device uint*)(kv_pool);
    const device uint* tail = (const device uint*)(kv_tail);
    const int MADE = NEW_TOKEN ? HEADS + 2 : HEADS;
    threadgroup float heads[HEADS + 2][HEAD_DIM];  // queries, the new key, the new value
    threadgroup uint new_words[TILED || QUANTIZED_KV ? HEAD_DIM * (K_BITS + V_BITS) / 32 : 1];
    threadgroup float partial_out[SIMDGROUPS][HEADS][HEAD_DIM];
    threadgroup float partial_max[SIMDGROUPS][HEADS];
    threadgroup float partial_sum[SIMDGROUPS][HEADS];
#if !TILED
    // A few narrow queries lie a second time, so that lanes which read together find them in different banks.
    const bool PADDED = HEADS * HEAD_DIM <= 256;
    const uint PADDED_HEADS = PADDED ? HEADS : 1;
    threadgroup float padded_query[PADDED_HEADS][PADDED ? HEAD_DIM + HEAD_DIM / 16 : 1];
#endif

    // Keys of this split.
    KVRange range;
    range.row = row;
    range.kv_head = kv_head;
    range.table_start = row_range[3 * row];
    range.tail_start = row_range[3 * row + 1];
    uint tail_slot = uint(row_range[3 * row + 2]);  // of the new token
    range.position = range.tail_start + int(tail_slot);
    int first_key =
        WINDOW > 0 ? metal::max(range.table_start, range.position - WINDOW + 1) : range.table_start;
    range.keep = KEEP;
    range.window_start = first_key > KEEP ? first_key : 0;
    if (KEEP > 0) first_key = metal::max(first_key - KEEP, 0);
    int pooled = range.tail_start - first_key;
    const int KEY_TILE = 16;
    // A window that begins in the tail leaves fewer than none, which rounding up makes none where keys are split.
    int split_keys = (pooled + SPLITS * KEY_TILE - 1) / (SPLITS * KEY_TILE) * KEY_TILE;
    // A short row's last split begins at its tail.
    range.begin =
        metal::min(first_key + int(split) * split_keys, metal::max(first_key, range.tail_start));
    range.end =
        last_split ? range.position + 1 : metal::min(range.begin + split_keys, range.tail_start);
    range.first_block = uint(range.begin - range.table_start) / uint(BLOCK_SIZE);

    // Stage this split's part of the block table: read at once, not one block before every key, and by simdgroups that have
    // no head to prepare.
    const int SPLIT_BLOCKS = MAX_BLOCKS / SPLITS + 4 + KEY_TILE / BLOCK_SIZE;
    const bool STAGED = SPLIT_BLOCKS <= 512;
    const int BUSY =
        SIMDGROUPS > HEADS + 2 ? HEADS + 2 : 0;  // simdgroups with heads to prepare; 0: all alike
    threadgroup uint blocks[STAGED ? SPLIT_BLOCKS : 1];
    if (STAGED && sg >= uint(BUSY)) {
        for (uint i = t - uint(BUSY * 32); i < uint(SPLIT_BLOCKS);
             i += uint((SIMDGROUPS - BUSY) * 32)) {
            blocks[i] = range.first_block + i < uint(MAX_BLOCKS)
                            ? uint(block_table[row * MAX_BLOCKS + range.first_block + i])
                            : 0;
        }
    }

#if FUSED_QKV
    // QKV projection: a simdgroup makes every SIMDGROUPS-th ROWS rows of the threadgroup's heads, not yet normed.
    const int WORDS = FORM == DENSE ? 8 * sizeof(T) : BITS;
    const uint OUTPUTS = uint(MADE * HEAD_DIM);
    threadgroup float4 xs[TILE / 4];
    threadgroup float x_sums[TILE / 16];
    threadgroup float norms[SIMDGROUPS];
    const int LUT_SIZE = lut_size<FORM, BITS>();
    threadgroup float lut[LUT_SIZE];
    load_lut<FORM, LUT_SIZE, SIMDGROUPS * 32>(w_lut, t, &lut[0]);
    uint magic = magic_bits<BITS>(opaque_zero);
    uint w_row[ROWS];
    uint w0[ROWS][WORDS];
    float s0[ROWS];
    float z0[ROWS];
    float squares = 0.0f;
    uint output = sg * uint(ROWS);
    #pragma unroll
    for (int n = 0; n < ROWS; n++) {
        w_row[n] = qkv_head<NUM_HEADS, NUM_KV_HEADS, HEADS, TIED_KV>(
                       output / uint(HEAD_DIM), first_head, kv_head
                   ) * uint(HEAD_DIM)
                   + output % uint(HEAD_DIM) + uint(n);
    }
    load_rows<FORM, BITS, W_GROUP, K>(
        w, w_scales, w_biases, w_row, lane * 32 < uint(K) ? lane * 32 : 0, w0, s0, z0
    );
    for (uint i = t; i < uint(TILE / 8); i += uint(SIMDGROUPS * 32)) {
        squares += stage_x8<T, FORM, NORM, K>(x, row * K, x_norm, 0, i, &xs[0], &x_sums[0]);
    }
    squares = simd_sum(squares);
    if (lane == 0) norms[sg] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint first = sg * uint(ROWS); first < OUTPUTS; first += uint(SIMDGROUPS * ROWS)) {
        float acc[1][ROWS];
        #pragma unroll
        for (int n = 0; n < ROWS; n++) acc[0][n] = 0.0f;
        for (uint j = 0; j < uint(K); j += 1024) {
            uint w1[ROWS][WORDS];
            float s1[ROWS];
            float z1[ROWS];
            bool next_rows = j + 1024 >= uint(K);
            if (next_rows) {
                output = metal::min(first + uint(SIMDGROUPS * ROWS), OUTPUTS - uint(ROWS));
                #pragma unroll
                for (int n = 0; n < ROWS; n++) {
                    w_row[n] = qkv_head<NUM_HEADS, NUM_KV_HEADS, HEADS, TIED_KV>(
                                   output / uint(HEAD_DIM), first_head, kv_head
                               ) * uint(HEAD_DIM)
                               + output % uint(HEAD_DIM) + uint(n);
                }
            }
            uint k = (next_rows ? 0 : j + 1024) + lane * 32;
            load_rows<FORM, BITS, W_GROUP, K>(
                w, w_scales, w_biases, w_row, k < uint(K) ? k : 0, w1, s1, z1
            );
            simdgroup_barrier(mem_flags::mem_none);  // see qmv.metal
            dot_rows<T, FORM, BITS, TILE / 4>(
                w0, s0, z0, j + lane * 32, magic, &lut[0], &xs[0], &x_sums[0], acc
            );
            copy_rows(w0, s0, z0, w1, s1, z1);
        }
        #pragma unroll
        for (int n = 0; n < ROWS; n++) {
            float y = simd_sum(acc[0][n]);
            if (lane == 0) heads[first / uint(HEAD_DIM)][first % uint(HEAD_DIM) + uint(n)] = y;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float x_inv = 1.0f;
    if (NORM) {
        float total = 0.0f;
        for (int n = 0; n < SIMDGROUPS; n++) total += norms[n];
        x_inv = metal::rsqrt(total / float(K) + as_type<float>(uint(X_EPS)));
    }
#endif

    // Norm and RoPE of queries and the new key, norm of the new value; a simdgroup has a head.
    for (uint v = sg; v < uint(MADE); v += uint(SIMDGROUPS)) {
        uint head = qkv_head<NUM_HEADS, NUM_KV_HEADS, HEADS, TIED_KV>(v, first_head, kv_head);
        float elements[HEAD_DIM / 32];
        float weight[HEAD_DIM / 32];
        float freq[ROPE_PAIRS / 32 + 1];
        #pragma unroll
        for (uint i = 0; i < uint(HEAD_DIM / 32); i++) {
#if FUSED_QKV
            // Rounded as if it had been in memory, so that both ways are the same attention.
            elements[i] = float(static_cast<T>(
                heads[v][lane + 32 * i] * x_inv
                + (BIAS ? float(bias[head * HEAD_DIM + lane + 32 * i]) : 0.0f)
            ));
#else
            elements[i] = float(qkv[(row * QKV_HEADS + head) * HEAD_DIM + lane + 32 * i]);
#endif
            weight[i] = 1.0f;
        }
        if (Q_NORM && v < uint(HEADS)) {
            #pragma unroll
            for (uint i = 0; i < uint(HEAD_DIM / 32); i++) weight[i] = float(q_norm[lane + 32 * i]);
        }
        if (K_NORM && v == uint(HEADS)) {
            #pragma unroll
            for (uint i = 0; i < uint(HEAD_DIM / 32); i++) weight[i] = float(k_norm[lane + 32 * i]);
        }
        #pragma unroll
        for (uint i = 0; i < uint(ROPE_PAIRS / 32 + 1); i++) {
            freq[i] = lane + 32 * i < uint(ROPE_PAIRS) ? float(rope_freqs[lane + 32 * i]) : 0.0f;
        }
        bool normed = v < uint(HEADS) ? Q_NORM : v == uint(HEADS) ? K_NORM : V_NORM;
        norm_rope<HEAD_DIM, ROPE_PAIRS>(
            elements, weight, freq, normed, as_type<float>(uint(NORM_EPS)), v <= uint(HEADS),
            float(range.position), as_type<float>(uint(ROPE_MAGNITUDE)), lane, &heads[v][0]
        );
#if NEW_TOKEN && QUANTIZED_KV
        // What the new token itself reads is what its quantized key and value stand for.
        if (v == uint(HEADS))
            quantize_head<T, HEAD_DIM, KV_GROUP, K_BITS>(
                &heads[v][0], &quantized_values[0], &new_words[0], &new_affine[0], lane
            );
        if (v == uint(HEADS + 1))
            quantize_head<T, HEAD_DIM, KV_GROUP, V_BITS>(
                &heads[v][0], &quantized_values[HEAD_DIM], &new_words[K_WORDS],
                &new_affine[2 * GROUPS], lane
            );
#endif
        for (uint i = lane; i < uint(HEAD_DIM); i += 32) {
            float y = float(static_cast<T>(heads[v][i]));
            heads[v][i] = y;
#if !TILED
            if (PADDED && v < uint(HEADS)) padded_query[v % PADDED_HEADS][i + i / 16] = y;
#endif
        }
#if NEW_TOKEN && TILED && !QUANTIZED_KV
        if (v >= uint(HEADS)) {
            simdgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = lane; i < uint(HEAD_DIM / 2); i += 32)
                new_words[(v - uint(HEADS)) * K_WORDS + i] =
                    pack_pair<T>(heads[v][2 * i], heads[v][2 * i + 1]);
        }
#endif
    }

#if !TILED
    // A lane takes 16 elements of a key and its value, UNROLL keys at a time; the next ones are on their way while it works on
    // those it has, the first ones while heads are prepared.
    const int LANES = HEAD_DIM / 16;  // that have a key together
    const int KEYS = 32 / LANES;      // of a simdgroup at once
    uint lane_part = lane % LANES;
    int lane_key = int(lane) / LANES;
    const int K_TAKE = QUANTIZED_KV ? K_BITS / 2 : 4 * sizeof(T);
    const int V_TAKE = QUANTIZED_KV ? V_BITS / 2 : 4 * sizeof(T);
    LaneKV<K_TAKE, V_TAKE> next[UNROLL];
    int next_key = range.begin + int(sg) * KEYS * UNROLL;
    if (next_key < range.end) {
        load_kv<T, false, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, TAIL_SIZE, KV_GROUP>(
            range, pool, tail, block_table + row * MAX_BLOCKS, &blocks[0], next_key, lane_key,
            lane_part, next
        );
    }
#endif

#if NEW_TOKEN
    // The tail as it will be: threadgroups that share a KV head copy a part of its old tokens each, by simdgroups that have no
    // head to prepare.
    if (last_split && sg >= uint(BUSY)) {
        const uint THREADS = (SIMDGROUPS - BUSY) * 32;
        uint start = first_head % uint(NUM_HEADS / NUM_KV_HEADS) / uint(HEADS) * THREADS + t
                     - uint(BUSY * 32);
#if QUANTIZED_KV
        uint vector = (row * uint(NUM_KV_HEADS) + kv_head) * TAIL_SIZE * VECTOR_WORDS;
        for (uint i = start; i < uint(TAIL_SIZE * VECTOR_WORDS);
             i += THREADS * uint(NUM_HEADS / NUM_KV_HEADS / HEADS)) {
            if (i / VECTOR_WORDS != tail_slot) tail_out[vector + i] = tail[vector + i];
        }
#else
        const uint CHUNK = 16 / sizeof(T);
        const uint CHUNKS = TAIL_SIZE * HEAD_DIM / CHUNK;
        for (uint i = start; i < 2 * CHUNKS;
             i += THREADS * uint(NUM_HEADS / NUM_KV_HEADS / HEADS)) {
            uint at = ((row * 2 + i / CHUNKS) * NUM_KV_HEADS + kv_head) * CHUNKS + i % CHUNKS;
            if (i % CHUNKS / (HEAD_DIM / CHUNK) != tail_slot) {
                ((device uint4*)(tail_out))[at] = ((const device uint4*)(kv_tail))[at];
            }
        }
#endif
    }
#endif
    threadgroup_barrier(mem_flags::mem_threadgroup);

#if NEW_TOKEN
    // One of them adds the new token.
    if (last_split && first_head % uint(NUM_HEADS / NUM_KV_HEADS) == 0) {
#if QUANTIZED_KV
        uint vector = ((row * uint(NUM_KV_HEADS) + kv_head) * TAIL_SIZE + tail_slot) * VECTOR_WORDS;
        for (uint i = t; i < uint(VECTOR_WORDS); i += uint(SIMDGROUPS * 32)) {
            tail_out[vector + i] = i < uint(KV_WORDS)
                                       ? new_words[i]
                                       : pack_word<T>(&new_affine[0], i - uint(KV_WORDS));
        }
#else
        for (uint i = t; i < uint(2 * HEAD_DIM); i += uint(SIMDGROUPS * 32)) {
            uint at = (((row * 2 + i / HEAD_DIM) * NUM_KV_HEADS + kv_head) * TAIL_SIZE + tail_slot)
                          * HEAD_DIM
                      + i % HEAD_DIM;
            tail_out[at] = static_cast<T>(heads[HEADS + i / HEAD_DIM][i % HEAD_DIM]);
        }
#endif
    }
#endif

#if TILED
    const int TILES = HEAD_DIM / GROUPS / 8;              // of a group
    const int K_TAKE = HEAD_DIM / GROUPS * K_BITS / 128;  // words of a group that a lane takes
    const int V_TAKE = HEAD_DIM / GROUPS * V_BITS / 256;
    const float WEIGHT_UNIT = 64.0f;  // keeps weights times scales within half precision

    // Load the queries, and sum up what biases of keys are multiplied by.
    Tile<Half> q[GROUPS][TILES];
    Tile<float> acc[GROUPS][TILES];
    float q_sum[GROUPS][2];
    float bias_acc[GROUPS][2];
    float max_score[2];
    float sum_exp[2];
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        Tile<float> sum[2];
        Tile<Half> ones;
        #pragma unroll
        for (uint i = 0; i < 2; i++) {
            const int PER_WORD = 16 / K_BITS;
            const int GROUP_DIM = HEAD_DIM / GROUPS;
            uint k = right_row(lane, i);
            uint head = right_col(lane, i);
            max_score[i] = -1e30f;
            sum_exp[i] = 0.0f;
            bias_acc[g][i] = 0.0f;
            set<float>(sum[0], i, 0.0f);
            set<float>(sum[1], i, 0.0f);
            set<Half>(ones, i, static_cast<Half>(1.0f));
            #pragma unroll
            for (int j = 0; j < TILES; j++) {
                uint d = g * GROUP_DIM + k / 2 * (GROUP_DIM / 4) + j / PER_WORD * (2 * PER_WORD)
                         + j % PER_WORD + k % 2 * PER_WORD;
                set<Half>(
                    q[g][j], i, static_cast<Half>(head < uint(HEADS) ? heads[head][d] : 0.0f)
                );
                set<float>(acc[g][j], i, 0.0f);
            }
        }
        #pragma unroll
        for (int j = 0; j < TILES; j++) {
            if (QUANTIZED_KV) multiply2(sum[0], sum[1], ones, ones, q[g][j]);
        }
        q_sum[g][0] = at<float>(sum[0], 0);
        q_sum[g][1] = at<float>(sum[0], 1);
    }

    // Sixteen keys at a time. Quantized ones are so few words that a lane asks for the next while it works on those it has.
    uint k_words[2][GROUPS][K_TAKE];
    uint v_words[2][2][GROUPS][V_TAKE];
    uint affine_words[2][2 * GROUPS];
    auto table_row = block_table + row * MAX_BLOCKS;
    KeyTile tile;
    tile.key = range.begin + int(sg) * 16;
    tile.contiguous = false;
    tile.vector = 0;
#if QUANTIZED_KV
    find_tile<STAGED, VECTORS, BLOCK_SIZE>(range, table_row, &blocks[0], tile);
    if (tile.key < range.end) {
        load_keys<T, STAGED, VECTORS, BLOCK_SIZE, TAIL_SIZE, VECTOR_WORDS, KV_WORDS>(
            range, tile, pool, tail, table_row, &blocks[0], &new_words[0], &new_affine[0], lane,
            k_words, affine_words
        );
        load_values<STAGED, NUM_KV_HEADS, BLOCK_SIZE, TAIL_SIZE, VECTOR_WORDS, K_WORDS>(
            range, tile, pool, tail, table_row, &blocks[0], &new_words[0], lane, v_words
        );
    }
#endif
    for (int key = tile.key; key < range.end; key += SIMDGROUPS * 16) {
        Tile<float> score[GROUPS][2];
        float weight[2][2];
        Affine k_affine[2][GROUPS];
        Affine v_affine[2][GROUPS];
#if QUANTIZED_KV
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            float affine[4 * GROUPS];
            #pragma unroll
            for (int n = 0; n < 2 * GROUPS; n++) unpack2<T>(affine_words[c][n], affine + 2 * n);
            #pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                k_affine[c][g].scale = affine[g];
                k_affine[c][g].bias = affine[GROUPS + g];
                v_affine[c][g].scale = affine[2 * GROUPS + g];
                v_affine[c][g].bias = affine[3 * GROUPS + g];
            }
        }
#else
        find_tile<STAGED, VECTORS, BLOCK_SIZE>(range, table_row, &blocks[0], tile);
        load_keys<T, STAGED, VECTORS, BLOCK_SIZE, TAIL_SIZE, VECTOR_WORDS, VECTOR_WORDS>(
            range, tile, pool, tail, table_row, &blocks[0], &new_words[0], &new_words[0], lane,
            k_words, affine_words
        );
        load_values<STAGED, NUM_KV_HEADS, BLOCK_SIZE, TAIL_SIZE, VECTOR_WORDS, K_WORDS>(
            range, tile, pool, tail, table_row, &blocks[0], &new_words[0], lane, v_words
        );
#endif
        qk_dot_tiles<Half, K_BITS>(k_words, q, score);
        tile.key += SIMDGROUPS * 16;
#if QUANTIZED_KV
        find_tile<STAGED, VECTORS, BLOCK_SIZE>(range, table_row, &blocks[0], tile);
        if (tile.key < range.end) {
            load_keys<T, STAGED, VECTORS, BLOCK_SIZE, TAIL_SIZE, VECTOR_WORDS, KV_WORDS>(
                range, tile, pool, tail, table_row, &blocks[0], &new_words[0], &new_affine[0], lane,
                k_words, affine_words
            );
        }
#endif
        online_softmax_tiles<SCALE, SOFTCAP, QUANTIZED_KV>(
            score, k_affine, q_sum, key, range.end, lane, weight, max_score, sum_exp, acc, bias_acc
        );
        accumulate_v_tiles<Half, V_BITS, QUANTIZED_KV>(
            v_words, v_affine, weight, WEIGHT_UNIT, lane, acc, bias_acc
        );
#if QUANTIZED_KV
        if (tile.key < range.end) {
            load_values<STAGED, NUM_KV_HEADS, BLOCK_SIZE, TAIL_SIZE, VECTOR_WORDS, K_WORDS>(
                range, tile, pool, tail, table_row, &blocks[0], &new_words[0], lane, v_words
            );
        }
#endif
    }

    // This simdgroup's part of the result.
    #pragma unroll
    for (uint i = 0; i < 2; i++) {
        uint head = sum_col(lane, i);
        float total = rows_sum(sum_exp[i]);
        #pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            float bias = QUANTIZED_KV ? rows_sum(bias_acc[g][i]) : 0.0f;
            #pragma unroll
            for (int j = 0; j < TILES; j++) {
                float v = at<float>(acc[g][j], i);
                uint d = g * (HEAD_DIM / GROUPS) + sum_row(lane, i) * TILES + j;
                if (head < uint(HEADS))
                    partial_out[sg][head][d] = QUANTIZED_KV ? v / WEIGHT_UNIT + bias : v;
            }
        }
        if (head < uint(HEADS) && sum_row(lane, i) == 0) {
            partial_max[sg][head] = max_score[i];
            partial_sum[sg][head] = total;
        }
    }
#else
    // Load the queries, scaled.
    float q[HEADS][16];
    float q_sum[HEADS];
    float max_score[HEADS];
    float sum_exp[HEADS];
    float acc[HEADS][16];
    float bias_acc[HEADS];
    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        max_score[h] = -1e30f;
        sum_exp[h] = 0.0f;
        q_sum[h] = 0.0f;
        bias_acc[h] = 0.0f;
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            q[h][i] = (PADDED ? padded_query[uint(h) % PADDED_HEADS][lane_part * 17 + uint(i)]
                              : heads[h][lane_part * 16 + i])
                      * as_type<float>(uint(SCALE));
            q_sum[h] += q[h][i];
            acc[h][i] = 0.0f;
        }
    }
    for (int key = next_key; key < range.end; key = next_key) {
        float k[UNROLL][16];
        float v[UNROLL][16];
        Affine k_affine[UNROLL];
        Affine v_affine[UNROLL];
        bool live[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int p = key + u * KEYS + lane_key;
            live[u] = p < range.end;
            bool is_new = NEW_TOKEN && (live[u] ? p : key) == range.position;
#if QUANTIZED_KV
            if (is_new)
                load_new_kv<HEAD_DIM, KV_GROUP>(&new_words[0], &new_affine[0], lane_part, next[u]);
            unpack_kv<K_BITS, V_BITS>(next[u], opaque_zero, k[u], v[u], k_affine[u], v_affine[u]);
#else
            if (is_new)
                load_new_kv<T>(
                    &heads[HEADS][lane_part * 16], &heads[HEADS + 1][lane_part * 16], next[u]
                );
            unpack_kv<T>(next[u], k[u], v[u]);
#endif
        }
        next_key = key + SIMDGROUPS * KEYS * UNROLL;
        if (next_key < range.end) {
            load_kv<T, STAGED, HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE, TAIL_SIZE, KV_GROUP>(
                range, pool, tail, block_table + row * MAX_BLOCKS, &blocks[0], next_key, lane_key,
                lane_part, next
            );
        }
        simdgroup_barrier(mem_flags::mem_none);  // keeps compilers from waiting for them
        #pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float score[UNROLL];
            qk_dot<UNROLL, LANES, SOFTCAP, QUANTIZED_KV>(q[h], q_sum[h], k, k_affine, live, score);
            online_softmax(score, live, max_score[h], sum_exp[h], acc[h], bias_acc[h]);
            accumulate_v<UNROLL, QUANTIZED_KV>(score, v, v_affine, acc[h], bias_acc[h]);
        }
    }

    // This simdgroup's part of the result: lanes that had other keys together.
    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float top = max_score[h];
        #pragma unroll
        for (uint o = LANES; o < 32; o *= 2) top = metal::max(top, simd_shuffle_xor(top, o));
        float factor = metal::exp(max_score[h] - top);
        float total = sum_exp[h] * factor;
        #pragma unroll
        for (uint o = LANES; o < 32; o *= 2) total += simd_shuffle_xor(total, o);
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            float v = (QUANTIZED_KV ? acc[h][i] + bias_acc[h] : acc[h][i]) * factor;
            #pragma unroll
            for (uint o = LANES; o < 32; o *= 2) v += simd_shuffle_xor(v, o);
            if (lane_key == 0) partial_out[sg][h][lane_part * 16 + i] = v;
        }
        if (lane == 0) {
            partial_max[sg][h] = top;
            partial_sum[sg][h] = total;
        }
    }
#endif

    // Combine the simdgroups: lanes weigh a simdgroup's part each and hand the weights round.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = t; i < uint(HEADS * HEAD_DIM); i += uint(SIMDGROUPS * 32)) {
        uint h = i / HEAD_DIM;
        uint d = i % HEAD_DIM;
        bool has_part = lane < uint(SIMDGROUPS);
        float part_max = has_part ? partial_max[lane % SIMDGROUPS][h] : -1e30f;
        float top = simd_max(part_max);
        float result = 0.0f;
        if (SINKS && SPLITS == 1) top = metal::max(top, float(sinks[first_head + h]));
        float weight = has_part ? metal::exp(part_max - top) : 0.0f;
        float sum_exp = simd_sum(has_part ? partial_sum[lane % SIMDGROUPS][h] * weight : 0.0f);
        for (uint s = 0; s < uint(SIMDGROUPS); s++)
            result += partial_out[s][h][d] * simd_shuffle(weight, s);
        if (SPLITS == 1) {
            if (SINKS) sum_exp += metal::exp(float(sinks[first_head + h]) - top);
            out[(row * NUM_HEADS + first_head + h) * HEAD_DIM + d] =
                static_cast<OUT>(result / sum_exp);
        } else {
            uint at = (row * NUM_HEADS + first_head + h) * (SPLITS * (HEAD_DIM + 2));
            out[at + split * HEAD_DIM + d] = static_cast<OUT>(result);
            if (d == 0) {
                out[at + SPLITS * HEAD_DIM + split] = static_cast<OUT>(top);
                out[at + SPLITS * (HEAD_DIM + 1) + split] = static_cast<OUT>(sum_exp);
            }
        }
    }
}
