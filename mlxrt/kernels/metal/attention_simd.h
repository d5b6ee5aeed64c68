// Attention of a query by lanes alone: for float32, for heads too wide for matrix units, and for a few short rows. A lane has
// 16 elements of a key and of its value; LANES lanes have a key.
#include "kv_reader.h"

// A lane's part of a key and its value.
template <int K_WORDS, int V_WORDS>
struct LaneKV {
    uint k[K_WORDS];
    uint v[V_WORDS];
    Affine k_affine;
    Affine v_affine;
};

// Asks for UNROLL keys and values, every KEYS-th from `first` + lane_key on; beyond the end `first` stands in.
template <
    typename T, bool STAGED, int HEAD_DIM, int NUM_KV_HEADS, int BLOCK_SIZE, int TAIL_SIZE,
    int GROUP, int K_WORDS, int V_WORDS, int UNROLL, typename B, typename S>
FN void load_kv(
    const thread KVRange& range, const device uint* pool, const device uint* tail, B table_row,
    S staged, int first, int lane_key, uint lane_part,
    thread LaneKV<K_WORDS, V_WORDS> (&next)[UNROLL]
) {
    const int LANES = HEAD_DIM / 16;
    const int VECTORS = QUANTIZED_KV ? NUM_KV_HEADS : 2 * NUM_KV_HEADS;
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        int wanted = first + u * (32 / LANES) + lane_key;
        int key = wanted < range.end ? wanted : first;
        KVSlot slot =
            find_slot<STAGED, VECTORS, BLOCK_SIZE, TAIL_SIZE>(range, table_row, staged, key);
        const device uint* words = slot.pooled ? pool : tail;
#if QUANTIZED_KV
        const int KV_WORDS = (K_WORDS + V_WORDS) * LANES;
        const int GROUPS = HEAD_DIM / GROUP;
        const int VECTOR_WORDS = KV_WORDS + GROUPS * sizeof(T);
        uint at = slot.vector * VECTOR_WORDS;
        const device T* affine = (const device T*)(words);
        uint scale = (at + KV_WORDS) * (4 / sizeof(T)) + lane_part * 16 / GROUP;
        next[u].k_affine = load_affine(affine, scale, scale + GROUPS);
        next[u].v_affine = load_affine(affine, scale + 2 * GROUPS, scale + 3 * GROUPS);
        load_aligned<K_WORDS, VECTOR_WORDS>(words, at + lane_part * uint(K_WORDS), next[u].k);
        load_aligned<V_WORDS, VECTOR_WORDS>(
            words, at + K_WORDS * LANES + lane_part * uint(V_WORDS), next[u].v
        );
#else
        uint value =
            slot.vector + uint(NUM_KV_HEADS) * (slot.pooled ? uint(BLOCK_SIZE) : uint(TAIL_SIZE));
        load_words<K_WORDS>(words, slot.vector * uint(LANES) + lane_part, next[u].k);
        load_words<V_WORDS>(words, value * uint(LANES) + lane_part, next[u].v);
#endif
    }
}

#if QUANTIZED_KV
// The new token, which no memory holds yet.
template <int HEAD_DIM, int GROUP, int K_WORDS, int V_WORDS, typename P, typename F>
FN void load_new_kv(
    P new_words, F new_affine, uint lane_part, thread LaneKV<K_WORDS, V_WORDS>& kv
) {
    const int GROUPS = HEAD_DIM / GROUP;
    uint scale = lane_part * 16 / GROUP;
    kv.k_affine = load_affine(new_affine, scale, scale + GROUPS);
    kv.v_affine = load_affine(new_affine, scale + 2 * GROUPS, scale + 3 * GROUPS);
    load_shared<K_WORDS>(new_words, lane_part * uint(K_WORDS), kv.k);
    load_shared<V_WORDS>(
        new_words, uint(K_WORDS * HEAD_DIM / 16) + lane_part * uint(V_WORDS), kv.v
    );
}

// The quantized values as floats, with the scale and bias that make elements of them.
template <int K_BITS, int V_BITS, int K_WORDS, int V_WORDS>
FN void unpack_kv(
    const thread LaneKV<K_WORDS, V_WORDS>& kv, uint opaque_zero, thread float (&k)[16],
    thread float (&v)[16], thread Affine& k_affine, thread Affine& v_affine
) {
    k_affine = lower_bias<K_BITS>(kv.k_affine);
    v_affine = lower_bias<V_BITS>(kv.v_affine);
    uint k_magic = magic_bits<K_BITS>(opaque_zero);
    uint v_magic = magic_bits<V_BITS>(opaque_zero);
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        k[i] = magic_float<K_BITS>(kv.k, i, k_magic);
        v[i] = magic_float<V_BITS>(kv.v, i, v_magic);
    }
}
#else
template <typename T, int WORDS, typename K, typename V>
FN void load_new_kv(K key, V value, thread LaneKV<WORDS, WORDS>& kv) {
    #pragma unroll
    for (int i = 0; i < WORDS; i++) {
        kv.k[i] = pack_word<T>(key, uint(i));
        kv.v[i] = pack_word<T>(value, uint(i));
    }
}

template <typename T, int WORDS>
FN void unpack_kv(
    const thread LaneKV<WORDS, WORDS>& kv, thread float (&k)[16], thread float (&v)[16]
) {
    #pragma unroll
    for (int i = 0; i < WORDS; i++) {
        unpack2<T>(kv.k[i], &k[4 / sizeof(T) * i]);
        unpack2<T>(kv.v[i], &v[4 / sizeof(T) * i]);
    }
}
#endif

// Scores of UNROLL keys. QUANTIZED: a key's elements are k along k_affine, which takes no time from each of them, because the
// query's sum is q_sum.
template <int UNROLL, int LANES, int SOFTCAP, bool QUANTIZED>
FN void qk_dot(
    const thread float (&q)[16], float q_sum, const thread float (&k)[UNROLL][16],
    const thread Affine (&k_affine)[UNROLL], const thread bool (&live)[UNROLL],
    thread float (&score)[UNROLL]
) {
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        score[u] = 0.0f;
        #pragma unroll
        for (int i = 0; i < 16; i++) score[u] += q[i] * k[u][i];
        if (QUANTIZED) score[u] = score[u] * k_affine[u].scale + q_sum * k_affine[u].bias;
        #pragma unroll
        for (uint o = 1; o < uint(LANES); o *= 2) score[u] += simd_shuffle_xor(score[u], o);
        if (SOFTCAP != 0)
            score[u] = metal::tanh(score[u] / as_type<float>(uint(SOFTCAP)))
                       * as_type<float>(uint(SOFTCAP));
        score[u] = live[u] ? score[u] : -1e30f;
    }
}

// Scores become weights; what was summed so far is scaled to the new maximum.
template <int UNROLL>
FN void online_softmax(
    thread float (&score)[UNROLL], const thread bool (&live)[UNROLL], thread float& max_score,
    thread float& sum_exp, thread float (&acc)[16], thread float& bias_acc
) {
    float top = max_score;
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) top = metal::max(top, score[u]);
    float factor = metal::exp(max_score - top);
    sum_exp *= factor;
    bias_acc *= factor;
    max_score = top;
    #pragma unroll
    for (int i = 0; i < 16; i++) acc[i] *= factor;
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        score[u] = live[u] ? metal::exp(score[u] - top) : 0.0f;
        sum_exp += score[u];
    }
}

// acc += weights . v. QUANTIZED: the biases, the same for all sixteen elements of a lane, gather in bias_acc.
template <int UNROLL, bool QUANTIZED>
FN void accumulate_v(
    const thread float (&weight)[UNROLL], const thread float (&v)[UNROLL][16],
    const thread Affine (&v_affine)[UNROLL], thread float (&acc)[16], thread float& bias_acc
) {
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        float w = weight[u];
        if (QUANTIZED) {
            bias_acc += w * v_affine[u].bias;
            w *= v_affine[u].scale;
        }
        #pragma unroll
        for (int i = 0; i < 16; i++) acc[i] += w * v[u][i];
    }
}
