// Reads keys and values of a paged KV cache, plain or quantized, as packed uint32. A vector is what the cache holds of one
// token and KV head: plain, HEAD_DIM elements of a key, or of a value, which lies NUM_KV_HEADS * (slots of a block) vectors
// behind it; quantized, packed key, packed value, then scales and biases of both (kv_quant.py).
#include "quantized.h"

// What a row's threadgroup reads. Positions below tail_start lie in blocks of the pool, later ones in the row's tail; the
// token at `position` is the new one, which no memory holds yet. Keys are named by their positions, but for those of the first
// `keep` tokens, which go before the window as if they were its neighbours.
struct KVRange {
    uint row;
    uint kv_head;
    int table_start;  // position of the block table's first slot
    int tail_start;   // position of the tail's first slot
    int position;
    int keep;          // first tokens that stay visible, in the first blocks of the table
    int window_start;  // first key of the window
    int begin;         // keys of this split
    int end;
    uint first_block;  // of the table's part that is staged
};

struct KVSlot {
    bool pooled;  // in the pool, not in the tail
    uint vector;
};

struct Affine {
    float scale;
    float bias;
};

FN int key_position(const thread KVRange& range, int key) {
    bool kept = key < range.window_start;
    return kept ? key - range.window_start + range.keep : key;
}

template <bool STAGED, int VECTORS, int BLOCK_SIZE, typename B, typename S>
FN uint pool_vector(const thread KVRange& range, B table_row, S staged, int position) {
    bool kept = range.keep > 0 && position < range.keep;
    uint page = uint(kept ? position : position - range.table_start) / uint(BLOCK_SIZE);
    uint block = STAGED && !kept ? staged[page - range.first_block] : uint(table_row[page]);
    return (block * uint(VECTORS) + range.kv_head) * BLOCK_SIZE + uint(position) % BLOCK_SIZE;
}

// Where a key is. STAGED: the blocks of this split are in threadgroup memory, else they are read from the table.
template <bool STAGED, int VECTORS, int BLOCK_SIZE, int TAIL_SIZE, typename B, typename S>
FN KVSlot find_slot(const thread KVRange& range, B table_row, S staged, int key) {
    KVSlot slot;
    int position = key_position(range, key);
    slot.pooled = position < range.tail_start;
    slot.vector =
        (range.row * uint(VECTORS) + range.kv_head) * TAIL_SIZE + uint(position - range.tail_start);
    if (slot.pooled) {
        slot.vector = pool_vector<STAGED, VECTORS, BLOCK_SIZE>(range, table_row, staged, position);
    }
    return slot;
}

// Packed word i of elements as memory has them.
template <typename T, typename F>
FN uint pack_word(F elements, uint i) {
    const uint N = 4 / sizeof(T);
    return pack_pair<T>(elements[N * i], elements[N * i + N - 1]);
}

// N words from word `at` on, which is a multiple of N or of four, unless vectors are of VECTOR_WORDS that are no such.
template <int N, int VECTOR_WORDS, typename P>
FN void load_aligned(P words, uint at, thread uint (&p)[N]) {
    if (N % 4 == 0 && VECTOR_WORDS % 4 != 0) {
        #pragma unroll
        for (int c = 0; c < N / 2; c++) {
            uint two[2];
            load_words<2>(words + at, uint(c), two);
            p[2 * c] = two[0];
            p[(2 * c + 1) % N] = two[1];
        }
    } else {
        load_words<N>(words + at, 0, p);
    }
}

template <int N, typename P>
FN void load_shared(P words, uint at, thread uint (&p)[N]) {
    #pragma unroll
    for (int c = 0; c < N; c++) p[c] = words[at + c];
}

// Two elements of a word into a tile: those `k` places of BITS from where its halves begin.
template <typename U, int BITS>
FN void set_elements(thread Tile<U>& t, uint w, int k) {
    if (BITS == 16) {
        set_pair<U>(t, w);
    } else {
        set_quantized<BITS % 16>(t, w, uint(k));
    }
}

#if QUANTIZED_KV
template <typename S>
FN Affine load_affine(S affine, uint scale, uint bias) {
    Affine a;
    a.scale = float(affine[scale]);
    a.bias = float(affine[bias]);
    return a;
}

// For quantized values that were made floats with 2^BITS more (`magic_float`).
template <int BITS>
FN Affine lower_bias(Affine a) {
    a.bias -= float(1u << BITS) * a.scale;
    return a;
}

// Quantizes a head, group by group as mx.quantize does: `packed` words, scales and biases in `affine`, and in place of the
// head what they stand for. `values` is scratch memory.
template <
    typename T, int HEAD_DIM, int GROUP, int BITS, typename V, typename C, typename N, typename F>
FN void quantize_head(V head, C values, N packed, F affine, uint lane) {
    const float MAX_VALUE = float((1u << BITS) - 1u);
    const uint IN_WORD = 32 / BITS;
    for (uint g = 0; g < uint(HEAD_DIM / GROUP); g++) {
        float low = head[g * GROUP + lane];
        float high = low;
        for (uint i = lane + 32; i < uint(GROUP); i += 32) {
            low = metal::min(low, head[g * GROUP + i]);
            high = metal::max(high, head[g * GROUP + i]);
        }
        low = -simd_max(-low);
        high = simd_max(high);
        bool from_low = metal::abs(low) > metal::abs(high);
        float scale = metal::max((high - low) / MAX_VALUE, 1e-7f);
        scale = from_low ? scale : -scale;
        float edge = from_low ? low : high;
        float steps = metal::rint(edge / scale);
        float bias = 0.0f;
        if (steps != 0.0f) {
            scale = edge / steps;
            bias = edge;
        }
        float stored_scale = float(static_cast<T>(scale));
        float stored_bias = float(static_cast<T>(bias));
        for (uint i = lane; i < uint(GROUP); i += 32) {
            float value = metal::rint((head[g * GROUP + i] - bias) / scale);
            value = metal::min(value, MAX_VALUE);  // none is below the edge it is counted from
            values[g * GROUP + i] = uint(value);
            head[g * GROUP + i] = float(static_cast<T>(value * stored_scale + stored_bias));
        }
        if (lane == 0) {
            affine[g] = stored_scale;
            affine[HEAD_DIM / GROUP + g] = stored_bias;
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = lane; i < uint(HEAD_DIM) / IN_WORD; i += 32) {
        uint word = 0;
        for (uint c = 0; c < IN_WORD; c++) word |= values[i * IN_WORD + c] << (c * BITS);
        packed[i] = word;
    }
}
#endif
