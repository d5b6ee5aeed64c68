#include "quantized.h"

// A tile of x lies in threadgroup memory as floats, four to a place: those a simdgroup's lanes read together lie together.
FN uint place_of(uint k) {
    return (k / 1024 * 8 + k % 32 / 4) * 32 + k % 1024 / 32;
}

// Which eight numbers of a tile thread t lays. Neighbours take numbers 32 apart, for those lie in different banks; what a
// simdgroup takes together still lies together in x.
FN uint piece_of(uint t) {
    return t / 32 * 32 + t % 8 * 4 + t % 32 / 8;
}

// The words of numbers 8 i ... 8 i + 7 of a row; past its end, zeros.
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

// Those numbers into the tile; where groups ask for them, two sums of each 32 beside it: of the numbers themselves, and of
// numbers times what numbers4 adds to the codes they meet beyond 16. A simdgroup must call it together, with its pieces.
template <typename T, int FORM, typename P, typename S>
FN void lay8(const thread float (&v)[8], uint i, P xs, S sums) {
    xs[place_of(8 * i)] = four(v[0], v[1], v[2], v[3]);
    xs[place_of(8 * i + 4)] = four(v[4], v[5], v[6], v[7]);
    if (FORM == AFFINE) {
        float near = v[0] + v[2] + v[4] + v[6] + v[7];
        float far = v[1] + v[3] + v[5];
        float sum = near + far;
        sum += simd_shuffle_xor(sum, 8);
        sum += simd_shuffle_xor(sum, 16);
        if (i % 4 == 0) sums[i / 4 * 2] = sum;
        if (sizeof(T) == 2) {
            float more = 112.0f * near + 2032.0f * far;
            more += simd_shuffle_xor(more, 8);
            more += simd_shuffle_xor(more, 16);
            if (i % 4 == 0) sums[i / 4 * 2 + 1] = more;
        }
    }
}

// Both for thread t, from number `at` of a row of K on, times the norm's weight between. Returns the sum of squares.
template <typename T, int FORM, bool NORM, int K, typename X, typename G, typename P, typename S>
FN float stage8(X x, uint from, G g, uint at, uint t, P xs, S sums) {
    uint i = piece_of(t);
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
    lay8<T, FORM>(v, i, xs, sums);
    return squares;
}

// Numbers k ... k + 31 of R rows: their words, scales and zeros.
template <int FORM, int BITS, int GROUP, int K, int R, int N, typename W, typename S, typename Z>
FN void load_rows(
    W w, S s, Z z, const thread uint (&row)[R], uint k, thread uint (&p)[R][N],
    thread float (&scale)[R], thread float (&zero)[R]
) {
    #pragma unroll
    for (int r = 0; r < R; r++) {
        uint at = row[r] * uint(K / 32) + k / 32;
        uint group = at / uint(GROUP / 32);
        load_words<N>(w, at, p[r]);
        scale[r] = FORM == DENSE ? 1.0f : scale_at<FORM>(s, group);
        zero[r] = zero_at<FORM, BITS>(z, group, scale[r]);
    }
}

// Whether codes are read where they lie, see numbers4.
template <typename T, int FORM, int BITS>
FN constexpr bool in_place() {
    return FORM == AFFINE && BITS == 4 && sizeof(T) == 2;
}

// Numbers 4 c ... 4 c + 3 of those 32. Shifting a code to where a float's last bits are is half of what one costs, so in half
// precision those of four bits are taken from two places of a float, where they say 128 and 2048 more: of the eight of a
// word only four need a shift, two of them to the left, which multipliers can do. What that adds is in x's second sums.
template <typename T, int FORM, int BITS, int N, typename L>
FN void numbers4(const thread uint (&p)[N], int c, uint one, L table, thread float (&y)[4]) {
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
        uint near = one + (3u << 23);
        uint far = one + (7u << 23);
        uint a = c % 2 == 0 ? w << 16 : w;
        uint b = c % 2 == 0 ? w << 8 : w >> 8;
        uint d = c % 2 == 0 ? w : w >> 12;
        y[0] = as_type<float>((a & 0xf0000u) | near);
        y[1] = as_type<float>((b & 0xf000u) | far);
        y[2] = as_type<float>((b & 0xf0000u) | near);
        y[3] = c % 2 == 0 ? as_type<float>((d & 0xf000u) | far)
                          : as_type<float>((d & 0xf0000u) | near);
    } else {
        #pragma unroll
        for (int n = 0; n < 4; n++) y[n] = number<FORM, BITS>(p, 4 * c + n, one, table);
    }
}

// acc[m][r] += 32 numbers of row r . x[m], whose tile has them from number kt on
template <
    typename T, int FORM, int BITS, int PLACES, int M, int R, int N, typename L, typename P,
    typename Q>
FN void rows_meet(
    const thread uint (&p)[R][N], const thread float (&scale)[R], const thread float (&zero)[R],
    uint kt, uint one, L table, P xs, Q sums, thread float (&acc)[M][R]
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
        for (int r = 0; r < R; r++) numbers4<T, FORM, BITS>(p[r], c, one, table, y[r]);
        #pragma unroll
        for (int m = 0; m < M; m++) {
            float4 v = xs[m * PLACES + (kt / 1024 * 8 + c) * 32 + lane];
            #pragma unroll
            for (int r = 0; r < R; r++) {
                d[m][r] += y[r][0] * v.x;
                d[m][r] += y[r][1] * v.y;
                d[m][r] += y[r][2] * v.z;
                d[m][r] += y[r][3] * v.w;
            }
        }
    }
    #pragma unroll
    for (int m = 0; m < M; m++) {
        uint at = 2 * (m * (PLACES / 8) + kt / 32);
        float sum = FORM == AFFINE ? sums[at] : 0.0f;
        float more = in_place<T, FORM, BITS>() ? sums[at + 1] : 0.0f;
        #pragma unroll
        for (int r = 0; r < R; r++)
            acc[m][r] += FORM == DENSE ? d[m][r] : scale[r] * (d[m][r] - more) + zero[r] * sum;
    }
}

// What was on its way is there.
template <int R, int N>
FN void take_rows(
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

// Both, for numbers k ... k + 31.
template <
    typename T, int FORM, int BITS, int GROUP, int K, int PLACES, int M, int R, typename W,
    typename S, typename Z, typename L, typename P, typename Q>
FN void rows_dot(
    W w, S s, Z z, const thread uint (&row)[R], uint k, uint kt, uint one, L table, P xs, Q sums,
    thread float (&acc)[M][R]
) {
    uint p[R][FORM == DENSE ? 8 * sizeof(T) : BITS];
    float scale[R];
    float zero[R];
    load_rows<FORM, BITS, GROUP, K>(w, s, z, row, k, p, scale, zero);
    rows_meet<T, FORM, BITS, PLACES>(p, scale, zero, kt, one, table, xs, sums, acc);
}
