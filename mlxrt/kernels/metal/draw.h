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

#define SLICE 2048  // tokens of a threadgroup that works on a part of a row
#define PART 256    // tokens of a simdgroup of it
#define BINS 256    // of a slice's histogram
#define LOWEST_KEY 0x007fffffu    // of -inf
#define INFINITE_KEY 0xff800000u  // of inf
#define LAST_GAP 41.0f            // a token that many powers of two less likely than the best weighs nothing

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

// top_p of what all tokens weigh, at least 1: a token stays while those before it weigh less.
FN ulong share_of(ulong total, uint top_p) {
    ulong share = (total >> 32) * top_p + (((total & 0xffffffffu) * ulong(top_p)) >> 32);
    return share > 0 ? share : 1;
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

// Which bin of a histogram a logit is in: the best in the first one.
FN uint bin_of(float distance, float scale) {
    float at = distance * scale;
    return at < float(BINS - 1) ? uint(at) : BINS - 1;
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

// What the threads before this one have, all together. All of the threadgroup must call it; `sums` has one for each simdgroup.
template <int GROUPS, typename P>
FN ulong sum_before(ulong v, uint lane, uint sg, P sums, thread ulong& total) {
    ulong upto = v;
    for (uint distance = 1; distance < 32; distance *= 2) {
        ulong other = simd_shuffle64(upto, (lane - distance) & 31u);
        if (lane >= distance) upto += other;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 31) sums[sg] = upto;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ulong before = upto - v;
    total = 0;
    for (uint i = 0; i < uint(GROUPS); i++) {
        if (i < sg) before += sums[i];
        total += sums[i];
    }
    return before;
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
