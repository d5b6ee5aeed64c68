#include "quantized.h"

// Numbers at the beginning of a row's parameters, see ../ops/draw_rows.py.
#define TOP_K 0
#define SHARPNESS 1
#define TOP_P 2
#define MAX_GAP 3
#define SEED 4
#define POSITION 6
#define RECENT 7
#define REPEATED_ABOVE 8
#define REPEATED_BELOW 9
#define PRESENCE 10
#define FREQUENCY 11
#define NUM_PROMPT 12
#define NUM_OUTPUT 13
#define NUM_BIAS 14
#define LISTS 16

#define SLICE 2048                // tokens of a threadgroup that works on a part of a row
#define PART 256                  // tokens of a simdgroup of it
#define BINS 256                  // of a slice's histogram
#define SMALLEST_WIDTH 1e-30f     // of all bins, where all logits are alike
#define LOWEST_KEY 0x007fffffu    // of -inf
#define INFINITE_KEY 0xff800000u  // of inf
#define LAST_GAP 41.0f  // a token that many powers of two less likely than the best weighs nothing

// Whole numbers in the order of the logits.
FN uint sort_key(float y) {
    uint bits = as_type<uint>(y == 0.0f ? 0.0f : y);
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

FN float key_logit(uint key) {
    return as_type<float>(key >> 31 != 0 ? key & 0x7fffffffu : ~key);
}

FN uint multiply_high(uint a, uint b) {
    return uint((ulong(a) * ulong(b)) >> 32);
}

// The upper half of a product.
FN ulong multiply_high64(ulong a, ulong b) {
    ulong low = 0xffffffffu;
    ulong middle = (a >> 32) * (b & low) + (((a & low) * (b & low)) >> 32);
    ulong carry = ((a & low) * (b >> 32) + (middle & low)) >> 32;
    return (a >> 32) * (b >> 32) + (middle >> 32) + carry;
}

// top_p of what all tokens weigh: a token stays while those before it weigh less. Never 0, the best token alone weighs 2^40.
FN ulong share_of(ulong total, uint top_p) {
    return (total >> 32) * top_p + (((total & 0xffffffffu) * ulong(top_p)) >> 32);
}

// Whether a number points at what weighs `weight` after others that weigh `before`. One that points before it wraps around.
FN bool points_at(ulong target, ulong before, ulong weight) {
    return target - before < weight;
}

// 2^40 for the best token, half of that for one whose gap is 1, and so on: whole numbers, whose sums are the same in any order.
FN ulong weigh(float gap) {
    if (!(gap < LAST_GAP)) return 0;
    uint fixed = uint(gap * 16777216.0f);
    uint g = fixed << 8;
    uint p = 0x025b4fa8u - multiply_high(0x003decd9u, g);
    p = 0x0e27f7b7u - multiply_high(p, g);
    p = 0x3d7c7222u - multiply_high(p, g);
    p = 0xb171ddeeu - multiply_high(p, g);
    uint mantissa = 0x80000000u - (multiply_high(p, g) >> 1);
    return (ulong(mantissa) << 9) >> (fixed >> 24);
}

// What the best logits of a row's slices come to. All lanes of a simdgroup must call it.
struct RowPeak {
    uint key;
    uint token;
    uint lowest;  // finite one
    uint usable;
};

template <int COUNT, typename P>
FN RowPeak find_peak(P slices, uint row, uint lane) {
    uint key = 0;
    uint token = 0xffffffffu;
    uint lowest = 0xffffffffu;
    uint nans = 0;
    for (uint i = lane; i < uint(COUNT); i += 32) {
        uint at = 4 * (row * uint(COUNT) + i);
        if (slices[at] > key) {
            key = slices[at];
            token = slices[at + 1];
        }
        lowest = metal::min(lowest, slices[at + 2]);
        nans |= slices[at + 3];
    }
    RowPeak found;
    found.key = simd_max(key);
    found.token = simd_min(key == found.key ? token : 0xffffffffu);
    found.lowest = simd_min(lowest);
    bool finite = found.key > LOWEST_KEY && found.key < INFINITE_KEY;
    found.usable = simd_max(nans) == 0 && finite ? 1 : 0;
    return found;
}

// Tokens `begin` to `begin` + 7 of a row; past its end -inf.
template <typename T, int V, typename P>
FN void load_logits8(P x, uint row, uint begin, thread float (&v)[8]) {
    if (V % 8 == 0 && begin < uint(V)) {
        load8<T>(x, (row * uint(V) + begin) / 8, v);
    } else {
        for (uint c = 0; c < 8; c++)
            v[c] = begin + c < uint(V) ? float(x[row * uint(V) + begin + c])
                                       : as_type<float>(0xff800000u);
    }
}

// The i-th eight tokens of a row or, of those in a list, the i-th alone, with -inf after it. Returns the first token.
template <int V, typename P, typename L>
FN uint load_tokens(P y, uint row, uint i, bool is_listed, L listed, thread float (&v)[8]) {
    if (is_listed) {
        uint token = atomic_load_explicit(&listed[i], memory_order_relaxed);
        v[0] = y[row * uint(V) + token];
        for (uint c = 1; c < 8; c++) v[c] = as_type<float>(0xff800000u);
        return token;
    }
    load_logits8<float, V>(y, row, 8 * i, v);
    return 8 * i;
}

// Which bin of a histogram a logit is in: the best in the first one.
FN uint bin_of(float distance, float scale) {
    return uint(metal::min(distance * scale, float(BINS - 1)));
}

// Whether a logit so many bins from the best is in one of the bins `first` to `last`. Of the last bin of all only tokens that weigh
// nothing are left out.
FN bool is_in_bins(float at, uint first, uint last) {
    return at >= float(first) && at < float(last + 1);
}

// No logit of a bin that weighs anything is above this, and none below the other: a bin more on both sides, rounding cannot lead
// farther.
FN float bin_ceiling(float peak, uint bin, float scale) {
    return peak - float(metal::max(bin, 1u) - 1) / scale;
}

FN float bin_floor(float peak, uint bin, float scale) {
    return peak - float(bin + 2) / scale;
}

// Adds to a sum of 64 bits that is kept as two numbers.
template <typename P>
FN void add64(P low, P high, uint i, ulong value) {
    uint part = uint(value);
    uint old = atomic_fetch_add_explicit(&low[i], part, memory_order_relaxed);
    uint more = uint(value >> 32) + (old + part < part ? 1u : 0u);
    if (more != 0) atomic_fetch_add_explicit(&high[i], more, memory_order_relaxed);
}

template <typename P>
FN void store64(P low, P high, uint i, ulong value) {
    atomic_store_explicit(&low[i], uint(value), memory_order_relaxed);
    atomic_store_explicit(&high[i], uint(value >> 32), memory_order_relaxed);
}

template <typename P>
FN ulong load64(P low, P high, uint i) {
    ulong upper = atomic_load_explicit(&high[i], memory_order_relaxed);
    return (upper << 32) | atomic_load_explicit(&low[i], memory_order_relaxed);
}

// What a slice's tokens in a bin weigh, as draw_weigh.metal has written it.
template <typename P>
FN ulong load_mass(P masses, uint slice, uint bin) {
    return ((const device ulong*)(masses))[slice * BINS + bin];
}

FN ulong simd_shuffle64(ulong v, uint from) {
    ulong upper = simd_shuffle(uint(v >> 32), from);
    return (upper << 32) | simd_shuffle(uint(v), from);
}

FN ulong simd_sum64(ulong v) {
    for (uint other = 16; other > 0; other /= 2) {
        ulong upper = simd_shuffle_xor(uint(v >> 32), other);
        v += (upper << 32) | simd_shuffle_xor(uint(v), other);
    }
    return v;
}

// How many of n numbers are at least `key`.
template <typename P>
FN uint count_from(P numbers, uint n, uint key) {
    uint found = 0;
    for (uint i = 0; i < n; i++)
        found += atomic_load_explicit(&numbers[i], memory_order_relaxed) >= key ? 1 : 0;
    return found;
}

// What the threads before this one have, all together. A threadgroup of 32 simdgroups must call it; `sums` has one for each.
template <typename P>
FN ulong sum_before(ulong v, uint lane, uint sg, P sums, thread ulong& total) {
    ulong upto = v;
    for (uint distance = 1; distance < 32; distance *= 2) {
        ulong other = simd_shuffle64(upto, (lane - distance) & 31u);
        if (lane >= distance) upto += other;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 31) sums[sg] = upto;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ulong group = sums[lane];
    total = simd_sum64(group);
    return upto - v + simd_sum64(lane < sg ? group : 0);
}

// The k-th best of the best logits of a row's parts, `least` if that is higher or there are fewer parts: no token below it is among
// the row's k best. Only parts as good as the k-th best slice are compared with each other. All of the threadgroup must call it;
// `listed` has room for all parts.
template <int SLICES, typename P, typename C>
FN uint kth_best_part(P best, P listed, C count, C found, uint k, uint least, uint tid) {
    if (tid == 0) {
        atomic_store_explicit(&count[0], 0u, memory_order_relaxed);
        atomic_store_explicit(&found[0], least, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint key = 0;
    if (tid < uint(SLICES)) {
        for (uint i = 8 * tid; i < 8 * tid + 8; i++)
            key = metal::max(key, atomic_load_explicit(&best[i], memory_order_relaxed));
        atomic_store_explicit(&listed[tid], key, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < uint(SLICES) && count_from(listed, uint(SLICES), key) >= k)
        atomic_fetch_max_explicit(&found[0], key, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint bound = atomic_load_explicit(&found[0], memory_order_relaxed);
    for (uint i = tid; i < uint(SLICES * 8); i += 1024) {
        key = atomic_load_explicit(&best[i], memory_order_relaxed);
        if (key >= bound) {
            uint at = atomic_fetch_add_explicit(&count[0], 1u, memory_order_relaxed);
            atomic_store_explicit(&listed[at], key, memory_order_relaxed);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint n = atomic_load_explicit(&count[0], memory_order_relaxed);
    for (uint i = tid; i < n; i += 1024) {
        key = atomic_load_explicit(&listed[i], memory_order_relaxed);
        if (count_from(listed, n, key) >= k)
            atomic_fetch_max_explicit(&found[0], key, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return atomic_load_explicit(&found[0], memory_order_relaxed);
}

// Philox 4x32 with ten rounds: a random number of 64 bits for a position of a seed.
FN ulong random_bits(uint low, uint high, uint position) {
    uint a = position;
    uint b = 0;
    uint c = 0;
    uint d = 0;
    for (uint i = 0; i < 10; i++) {
        uint first = 0xd2511f53u * a;
        uint second = 0xcd9e8d57u * c;
        uint next = multiply_high(0xcd9e8d57u, c) ^ b ^ low;
        c = multiply_high(0xd2511f53u, a) ^ d ^ high;
        a = next;
        b = second;
        d = first;
        low += 0x9e3779b9u;
        high += 0xbb67ae85u;
    }
    return (ulong(b) << 32) | ulong(a);
}
