#include "quantized.h"

// Where element k of a tile of x is in threadgroup memory, in float4: what the lanes of a simdgroup read together is adjacent.
FN uint tile_index(uint k) {
    return (k / 1024 * 8 + k % 32 / 4) * 32 + k % 1024 / 32;
}

// Which eight elements of a tile thread t stores. Neighbours take elements at a distance of 32, which are in different banks;
// what a simdgroup takes is still contiguous in x.
FN uint chunk_index(uint t) {
    return t / 32 * 32 + t % 8 * 4 + t % 32 / 8;
}

// Elements 8 i ... 8 i + 7 of a row, as packed uint32; zeros past its end.
template <int N, typename X>
FN void fetch8(X x, uint i, bool live, thread uint (&p)[N]) {
    if (live) load_words<N>(x, i, p);
    #pragma unroll
    for (int c = 0; c < N; c++) p[c] = live ? p[c] : 0u;
}

template <typename T, int N>
FN void unpack8(const thread uint (&p)[N], thread float (&v)[8]) {
    #pragma unroll
    for (int c = 0; c < N; c++) unpack2<T>(p[c], v + 8 / N * c);
}

// Stores those elements in the tile. Where sum_width is 32: and two sums of each 32, of the elements and of elements times what
// unpack_values4 adds, beyond 16, to the quantized values that they are multiplied by; where it is 16: the sums of both halves.
// All lanes of a simdgroup must call it.
template <typename T, int FORM, typename P, typename S>
FN void store8(const thread float (&v)[8], uint i, P xs, S sums) {
    xs[tile_index(8 * i)] = four(v[0], v[1], v[2], v[3]);
    xs[tile_index(8 * i + 4)] = four(v[4], v[5], v[6], v[7]);
    if (sum_width<FORM>() == 16) {
        float sum = v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7];
        sum += simd_shuffle_xor(sum, 8);
        if (i % 2 == 0) sums[i / 2] = sum;
    } else if (sum_width<FORM>() == 32) {
        float sum128 = v[0] + v[2] + v[4] + v[6] + v[7];
        float sum2048 = v[1] + v[3] + v[5];
        float sum = sum128 + sum2048;
        sum += simd_shuffle_xor(sum, 8);
        sum += simd_shuffle_xor(sum, 16);
        if (i % 4 == 0) sums[i / 4 * 2] = sum;
        if (sizeof(T) == 2) {
            float more = 112.0f * sum128 + 2032.0f * sum2048;
            more += simd_shuffle_xor(more, 8);
            more += simd_shuffle_xor(more, 16);
            if (i % 4 == 0) sums[i / 4 * 2 + 1] = more;
        }
    }
}

// Loads and stores eight elements for thread t, from element `at` of a row of K on, times the norm's weight. Returns the sum of
// squares.
template <typename T, int FORM, bool NORM, int K, typename X, typename G, typename P, typename S>
FN float stage_x8(X x, uint from, G g, uint at, uint t, P xs, S sums) {
    uint i = chunk_index(t);
    bool live = at + 8 * i < uint(K);
    uint p[2 * sizeof(T)];
    uint q[2 * sizeof(T)];
    float v[8];
    float w[8];
    float squares = 0.0f;
    fetch8(x, (from + at) / 8 + i, live, p);
    if (NORM) {
        fetch8(g, at / 8 + i, live, q);
        unpack8<T>(q, w);
    }
    unpack8<T>(p, v);
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        squares += v[n] * v[n];
        if (NORM) v[n] *= w[n];
    }
    store8<T, FORM>(v, i, xs, sums);
    return squares;
}

// Elements k ... k + 31 of R rows: packed values, and scales and zeros as load_scales has them.
template <int FORM, int BITS, int GROUP, int K, int R, int N, typename W, typename S, typename Z>
FN void load_rows(
    W w, S s, Z z, const thread uint (&row)[R], uint k, thread uint (&p)[R][N],
    thread float (&scale)[R], thread float (&zero)[R]
) {
    #pragma unroll
    for (int r = 0; r < R; r++) {
        uint at = row[r] * uint(K / 32) + k / 32;
        load_words<N>(w, at, p[r]);
        load_scales<FORM, BITS, GROUP>(s, z, at, scale[r], zero[r]);
    }
}

// Whether quantized values become floats without a shift of each, see unpack_values4.
template <typename T, int FORM, int BITS>
FN constexpr bool in_place() {
    return sum_width<FORM>() == 32 && BITS == 4 && sizeof(T) == 2;
}

// Elements 4 c ... 4 c + 3 of those 32, not scaled yet; e2m1 in units of E2M1_UNIT. Shifting a value to a float's last bits
// is half of its cost, so in half precision values of four bits stay at two positions of the mantissa, where they read as
// 128 and 2048 more: of the eight in a word only four need a shift, two of them to the left, which multipliers can do. x's
// second sums take away what that adds.
template <typename T, int FORM, int BITS, int N, typename L>
FN void unpack_values4(
    const thread uint (&p)[N], int c, uint magic, L table, thread float (&y)[4]
) {
    const int U = 4 / sizeof(T);
    if (FORM == DENSE) {
        #pragma unroll
        for (int i = 0; i < 4 / U; i++) {
            float v[U];
            unpack2<T>(p[(4 / U * c + i) % N], v);
            #pragma unroll
            for (int n = 0; n < U; n++) y[U * i + n] = v[n];
        }
    } else if (in_place<T, FORM, BITS>()) {
        uint w = p[c / 2 % N];
        uint plus128 = magic + (3u << 23);
        uint plus2048 = magic + (7u << 23);
        uint a = c % 2 == 0 ? w << 16 : w;
        uint b = c % 2 == 0 ? w << 8 : w >> 8;
        uint d = c % 2 == 0 ? w : w >> 12;
        y[0] = as_type<float>((a & 0xf0000u) | plus128);
        y[1] = as_type<float>((b & 0xf000u) | plus2048);
        y[2] = as_type<float>((b & 0xf0000u) | plus128);
        y[3] = c % 2 == 0 ? as_type<float>((d & 0xf000u) | plus2048)
                          : as_type<float>((d & 0xf0000u) | plus128);
    } else if (FORM == MXFP4) {
        #pragma unroll
        for (int n = 0; n < 4; n++) y[n] = e2m1_value(p, 4 * c + n);
    } else {
        #pragma unroll
        for (int n = 0; n < 4; n++) y[n] = unpack_value<FORM, BITS>(p, 4 * c + n, magic, table);
    }
}

// acc[m][r] += 32 elements of row r . x[m], whose tile has them from element kt on
template <
    typename T, int FORM, int BITS, int TILE_VECS, int M, int R, int N, typename L, typename P,
    typename Q>
FN void dot_rows(
    const thread uint (&p)[R][N], const thread float (&scale)[R], const thread float (&zero)[R],
    uint kt, uint magic, L table, P xs, Q sums, thread float (&acc)[M][R]
) {
    float d[M][R];
    uint lane = kt % 1024 / 32;
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int r = 0; r < R; r++) d[m][r] = 0.0f;
    }
    #pragma unroll
    for (uint c = 0; c < 8; c++) {
        float y[R][4];
        #pragma unroll
        for (int r = 0; r < R; r++) unpack_values4<T, FORM, BITS>(p[r], c, magic, table, y[r]);
        #pragma unroll
        for (int m = 0; m < M; m++) {
            float4 v = xs[m * TILE_VECS + (kt / 1024 * 8 + c) * 32 + lane];
            #pragma unroll
            for (int r = 0; r < R; r++) {
                d[m][r] += y[r][0] * v.x;
                d[m][r] += y[r][1] * v.y;
                d[m][r] += y[r][2] * v.z;
                d[m][r] += y[r][3] * v.w;
            }
        }
        if (num_parts<FORM>() == 2 && c % 4 == 3) {
            #pragma unroll
            for (int m = 0; m < M; m++) {
                float sum = sums[2 * (m * (TILE_VECS / 8) + kt / 32) + c / 4];
                #pragma unroll
                for (int r = 0; r < R; r++) {
                    acc[m][r] += group_scale<FORM>(scale[r], zero[r], c / 4) * d[m][r]
                                 + group_zero<FORM, BITS>(scale[r], zero[r], c / 4) * sum;
                    d[m][r] = 0.0f;
                }
            }
        }
    }
    if (num_parts<FORM>() == 2) return;
    #pragma unroll
    for (int m = 0; m < M; m++) {
        uint at = 2 * (m * (TILE_VECS / 8) + kt / 32);
        float sum = sum_width<FORM>() == 32 ? sums[at] : 0.0f;
        float more = in_place<T, FORM, BITS>() ? sums[at + 1] : 0.0f;
        #pragma unroll
        for (int r = 0; r < R; r++)
            acc[m][r] += FORM == DENSE ? d[m][r]
                         : FORM == MXFP4
                             ? scale[r] * (E2M1_UNIT * d[m][r])
                             : group_scale<FORM>(scale[r], zero[r], 0) * (d[m][r] - more)
                                   + group_zero<FORM, BITS>(scale[r], zero[r], 0) * sum;
    }
}

// Makes the rows that were loaded ahead the current ones.
template <int R, int N>
FN void copy_rows(
    thread uint (&p)[R][N], thread float (&scale)[R], thread float (&zero)[R],
    const thread uint (&p1)[R][N], const thread float (&scale1)[R], const thread float (&zero1)[R]
) {
    #pragma unroll
    for (int r = 0; r < R; r++) {
        #pragma unroll
        for (int c = 0; c < N; c++) p[r][c] = p1[r][c];
        scale[r] = scale1[r];
        zero[r] = zero1[r];
    }
}

// load_rows and dot_rows, for elements k ... k + 31.
template <
    typename T, int FORM, int BITS, int GROUP, int K, int TILE_VECS, int M, int R, typename W,
    typename S, typename Z, typename L, typename P, typename Q>
FN void load_dot_rows(
    W w, S s, Z z, const thread uint (&row)[R], uint k, uint kt, uint magic, L table, P xs, Q sums,
    thread float (&acc)[M][R]
) {
    uint p[R][FORM == DENSE ? 8 * sizeof(T) : BITS];
    float scale[R];
    float zero[R];
    load_rows<FORM, BITS, GROUP, K>(w, s, z, row, k, p, scale, zero);
    dot_rows<T, FORM, BITS, TILE_VECS>(p, scale, zero, kt, magic, table, xs, sums, acc);
}
