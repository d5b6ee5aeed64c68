// What kernels need besides Metal itself. ../cuda/shim.h has the same names, spelled for CUDA.
#include <metal_simdgroup_matrix>
#define FN inline
#define FLOAT16 half
#define BFLOAT16 bfloat16_t

// Rounded, whatever is done with it then.
FN float multiply(float a, float b) {
    #pragma METAL fp contract(off)
    return a * b;
}

// Where a lane's two numbers of an 8x8 simdgroup matrix lie, by the matrix' place in D = L R + D.
// On Apple GPUs all three lie alike.
FN uint tile_row(uint lane) {
    return ((lane / 4) & 4) + ((lane / 2) % 4);
}

FN uint tile_col(uint lane) {
    return (((lane / 4) & 2) * 2) + (lane % 2) * 2;
}

FN uint left_row(uint lane, uint i) {
    return tile_row(lane);
}

FN uint left_col(uint lane, uint i) {
    return tile_col(lane) + i;
}

FN uint right_row(uint lane, uint i) {
    return tile_row(lane);
}

FN uint right_col(uint lane, uint i) {
    return tile_col(lane) + i;
}

FN uint sum_row(uint lane, uint i) {
    return tile_row(lane);
}

FN uint sum_col(uint lane, uint i) {
    return tile_col(lane) + i;
}

// Which lane has a number of such a sum, and what all rows of its column come to.
FN uint sum_lane(uint row, uint col) {
    return row / 4 * 16 + col / 4 * 8 + row % 4 * 2 + col / 2 % 2;
}

// Which lane of the same row of a left tile has its columns 2q and 2q + 1.
FN uint row_lane(uint lane, uint q) {
    return (lane & 22u) | (q & 1u) | (q & 2u) << 2;
}

FN float rows_max(float v) {
    v = metal::max(v, simd_shuffle_xor(v, 2));
    v = metal::max(v, simd_shuffle_xor(v, 4));
    return metal::max(v, simd_shuffle_xor(v, 16));
}

FN float rows_sum(float v) {
    v += simd_shuffle_xor(v, 2);
    v += simd_shuffle_xor(v, 4);
    return v + simd_shuffle_xor(v, 16);
}

template <typename T>
struct Tile {
    metal::simdgroup_matrix<T, 8, 8> m;
};

template <typename T>
FN void set(thread Tile<T>& t, uint i, T v) {
    t.m.thread_elements()[i] = v;
}

template <typename T>
FN T at(thread Tile<T>& t, uint i) {
    return t.m.thread_elements()[i];
}

template <typename T>
FN void multiply2(
    thread Tile<float>& d0, thread Tile<float>& d1, thread Tile<T>& l0, thread Tile<T>& l1,
    thread Tile<T>& r
) {
    metal::simdgroup_multiply_accumulate(d0.m, l0.m, r.m, d0.m);
    metal::simdgroup_multiply_accumulate(d1.m, l1.m, r.m, d1.m);
}

// Both, for two tiles each that follow one another: d0 += l0 r + m0 s and d1 += l1 r + m1 s.
template <typename T>
FN void multiply4(
    thread Tile<float>& d0, thread Tile<float>& d1, thread Tile<T>& l0, thread Tile<T>& l1,
    thread Tile<T>& r, thread Tile<T>& m0, thread Tile<T>& m1, thread Tile<T>& s
) {
    multiply2(d0, d1, l0, l1, r);
    multiply2(d0, d1, m0, m1, s);
}

// Right tiles 4c ... 4c + 3 of a slab (slab.h).
template <typename T>
FN void load_right4(const threadgroup uint4* slab, uint lane, int c, thread Tile<T> (&t)[4]) {
    const threadgroup T* x = (const threadgroup T*)(slab);
    for (uint i = 0; i < 2; i++) {
        uint k = right_row(lane, i);
        for (uint j = 0; j < 4; j++) {
            uint chunk = uint(c) * 32 + ((right_col(lane, i) * 4 + k / 2) ^ uint(c * 2));
            t[j].m.thread_elements()[i] = x[chunk * 8 + j * 2 + k % 2];
        }
    }
}

// The lower, or the upper, halves of two words.
FN uint low_halves(uint a, uint b) {
    return (a & 0xffffu) | (b << 16);
}

FN uint high_halves(uint a, uint b) {
    return (a >> 16) | (b & 0xffff0000u);
}

// The lower, or the upper, half of a word, twice.
FN uint repeat_half(uint v, uint upper) {
    return (v >> (16 * upper) & 0xffffu) * 0x10001u;
}

FN uint4 four_words(uint a, uint b, uint c, uint d) {
    return uint4(a, b, c, d);
}

FN float4 four(float a, float b, float c, float d) {
    return float4(a, b, c, d);
}

template <typename T>
FN void unpack2(uint u, thread float* y);

template <>
FN void unpack2<float>(uint u, thread float* y) {
    y[0] = as_type<float>(u);
}

template <>
FN void unpack2<half>(uint u, thread float* y) {
    half2 h = as_type<half2>(u);
    y[0] = float(h.x);
    y[1] = float(h.y);
}

template <>
FN void unpack2<bfloat16_t>(uint u, thread float* y) {
    y[0] = as_type<float>(u << 16);
    y[1] = as_type<float>(u & 0xffff0000u);
}

// A word that holds two numbers, into a tile.
template <typename T>
FN void set_pair(thread Tile<T>& t, uint w) {
    float y[2];
    unpack2<T>(w, y);
    t.m.thread_elements()[0] = static_cast<T>(y[0]);
    t.m.thread_elements()[1] = static_cast<T>(y[1]);
}

// Quantized values k of both halves of a word into a tile.
template <int BITS, typename T>
FN void set_quantized(thread Tile<T>& t, uint w, uint k) {
    uint u = w >> (BITS * k);
    uint mask = (1u << BITS) - 1u;
    t.m.thread_elements()[0] = static_cast<T>(float(u & mask));
    t.m.thread_elements()[1] = static_cast<T>(float((u >> 16) & mask));
}

template <typename T>
FN uint pack_pair(float a, float b);

template <>
FN uint pack_pair<float>(float a, float b) {
    return as_type<uint>(a);
}  // a word holds one

template <>
FN uint pack_pair<half>(float a, float b) {
    return as_type<uint>(half2(half(a), half(b)));
}

template <>
FN uint pack_pair<bfloat16_t>(float a, float b) {
    return (as_type<uint>(a) >> 16) | (as_type<uint>(b) & 0xffff0000u);
}  // they are such

// Values p and p + 4 of eight of four bits, times a scale plus a zero that are packed twice in a word, into a tile.
template <typename T>
FN void set_affine4(thread Tile<T>& t, uint word, int p, uint scale, uint zero, uint opaque_zero) {
    float s[2];
    float z[2];
    unpack2<T>(scale, s);
    unpack2<T>(zero, z);
    t.m.thread_elements()[0] = static_cast<T>(float((word >> (4 * p)) & 15u) * s[0] + z[0]);
    t.m.thread_elements()[1] = static_cast<T>(float((word >> (4 * p + 16)) & 15u) * s[0] + z[0]);
}

// The same of e2m1 (a sign, two bits of exponent, one of fraction): its bits are a half's, 2^14 times smaller.
template <typename T>
FN void set_e2m1(thread Tile<T>& t, uint word, int p, uint scale) {
    uint magnitude = p < 3 ? word << (9 - 4 * (p % 3)) : word >> 3;
    float v[2];
    float s[2];
    unpack2<half>((magnitude & 0x0e000e00u) | ((word << (12 - 4 * p)) & 0x80008000u), v);
    unpack2<T>(scale, s);
    t.m.thread_elements()[0] = static_cast<T>(v[0] * 16384.0f * s[0]);
    t.m.thread_elements()[1] = static_cast<T>(v[1] * 16384.0f * s[0]);
}
