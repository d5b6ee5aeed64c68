// y [M, O] = x [M, K] times a matrix [O, K], plain or quantized, for a few rows of x. RMSNorm of x before; bias, activation,
// residual and softcap after. With ADD_NORM the matrix reads residual + RMSNorm(x), which is also written to h.
#include "quantized.h"
#include "activation.h"
#include "staging.h"

#if ADD_NORM
// stage8 of (residual + x * inv * post) * f, which is also written to h.
template <
    typename T, int FORM, bool NORM, int K, typename X, typename R, typename W, typename H,
    typename G, typename P, typename S>
FN float stage_sum8(
    X x, R residual, W post, float inv, float f, H h, bool writes, uint from, G g, uint at, uint t,
    P xs, S sums
) {
    uint i = piece_of(t);
    bool live = at + 8 * i < uint(K);
    uint here = (from + at) / 8 + i;
    uint a[2 * sizeof(T)];
    uint b[2 * sizeof(T)];
    uint c[2 * sizeof(T)];
    uint d[2 * sizeof(T)];
    float v[8];
    float r[8];
    float p[8];
    float w[8];
    float squares = 0.0f;
    fetch8(x, here, live, a);
    fetch8(residual, here, live, b);
    fetch8(post, at / 8 + i, live, c);
    if (NORM) {
        fetch8(g, at / 8 + i, live, d);
        unpack8<T>(d, w);
    }
    unpack8<T>(a, v);
    unpack8<T>(b, r);
    unpack8<T>(c, p);
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        T sum = static_cast<T>((v[n] * inv * p[n] + r[n]) * f);
        if (writes && live) h[8 * here + uint(n)] = sum;
        v[n] = float(sum);
        squares += v[n] * v[n];
        if (NORM) v[n] *= w[n];
    }
    lay8<T, FORM>(v, i, xs, sums);
    return squares;
}
#endif

// A simdgroup makes LOOPS times R outputs of each row of x; with PAIR an output is a gate and the up that belongs to it.
[[kernel]] void mlxrt_qmv(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x;
    uint one = lift_of<BITS>(threadgroup_position_in_grid.z);
    const int Q = PAIR ? 2 * R : R;
    const int PLACES = TILE / 4;
    const int N = FORM == 2 ? 8 * sizeof(T) : BITS;
    threadgroup float4 xs[M * PLACES];
    threadgroup float sums[M * TILE / 16];
    threadgroup float part[M][SG * LOOPS * Q];
    threadgroup float norms[M][SG];
    const int LEVELS = FORM == 3 ? 1 << BITS : 1;
    threadgroup float table[LEVELS];
    lay_levels<FORM, LEVELS, SG * 32>(l, t, &table[0]);
    uint first = (threadgroup_position_in_grid.x * uint(SG) + sg) * uint(LOOPS * R);
    uint row[Q];
    uint p[Q][N];
    float scale[Q];
    float zero[Q];
    float acc[M][Q];
    float squares[M];
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = metal::min(first + uint(r), uint(O - 1));
        if (PAIR) row[Q - R + r] = row[r] + uint(O);
    }
    load_rows<FORM, BITS, GROUP, K>(
        w, s, z, row, lane * 32 < uint(K) ? lane * 32 : 0, p, scale, zero
    );
    #pragma unroll
    for (int m = 0; m < M; m++) {
        squares[m] = 0.0f;
        #pragma unroll
        for (int r = 0; r < Q; r++) acc[m][r] = 0.0f;
    }
#if ADD_NORM
    float inv[M];
    float f = SCALED ? float(scalar[0]) : 1.0f;
    #pragma unroll
    for (int m = 0; m < M; m++) {
        float mine = 0.0f;
        for (uint i = t; i < uint(K / 8); i += uint(SG * 32)) {
            float v[8];
            load8<T>(x, m * (K / 8) + i, v);
            #pragma unroll
            for (int n = 0; n < 8; n++) mine += v[n] * v[n];
        }
        mine = simd_sum(mine);
        if (lane == 0) norms[m][sg] = mine;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    #pragma unroll
    for (int m = 0; m < M; m++) {
        float total = 0.0f;
        for (int c = 0; c < SG; c++) total += norms[m][c];
        inv[m] = metal::rsqrt(total / float(K) + as_type<float>(uint(POST_EPS)));
    }
#endif
    for (uint k0 = 0; k0 < uint(K); k0 += TILE) {
        if (k0 > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma unroll
        for (int m = 0; m < M; m++) {
            for (uint i = t; i < uint(TILE / 8); i += uint(SG * 32)) {
#if ADD_NORM
                squares[m] += stage_sum8<T, FORM, NORM, K>(
                    x, residual, post, inv[m], f, h, threadgroup_position_in_grid.x == 0, m * K, g,
                    k0, i, &xs[m * PLACES], &sums[m * (TILE / 16)]
                );
#else
                squares[m] += stage8<T, FORM, NORM, K>(
                    x, m * K, g, k0, i, &xs[m * PLACES], &sums[m * (TILE / 16)]
                );
#endif
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint end = metal::min(uint(TILE), uint(K) - k0);
        for (uint l = 0; l < uint(LOOPS); l++) {
            for (uint j = 0; j < end; j += 1024) {
                // The next words are asked for before these are multiplied; the barrier keeps compilers from waiting.
                uint p1[Q][N];
                float scale1[Q];
                float zero1[Q];
                bool turn = LOOPS > 1 && j + 1024 >= end;
                uint k = (turn ? 0 : k0 + j + 1024) + lane * 32;
                if (turn) {
                    #pragma unroll
                    for (int r = 0; r < R; r++) {
                        row[r] = metal::min(first + (l + 1) * uint(R) + uint(r), uint(O - 1));
                        if (PAIR) row[Q - R + r] = row[r] + uint(O);
                    }
                }
                load_rows<FORM, BITS, GROUP, K>(
                    w, s, z, row, k < uint(K) ? k : 0, p1, scale1, zero1
                );
                simdgroup_barrier(mem_flags::mem_none);
                rows_meet<T, FORM, BITS, PLACES>(
                    p, scale, zero, j + lane * 32, one, &table[0], &xs[0], &sums[0], acc
                );
                take_rows(p, scale, zero, p1, scale1, zero1);
            }
            if (k0 + TILE >= uint(K)) {
                #pragma unroll
                for (int m = 0; m < M; m++) {
                    #pragma unroll
                    for (int r = 0; r < Q; r++) {
                        float whole = simd_sum(acc[m][r]);
                        if (lane == 0) part[m][(sg * uint(LOOPS) + l) * uint(Q) + uint(r)] = whole;
                        acc[m][r] = 0.0f;
                    }
                }
            }
        }
    }
    if (NORM) {
        #pragma unroll
        for (int m = 0; m < M; m++) {
            float whole = simd_sum(squares[m]);
            if (lane == 0) norms[m][sg] = whole;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint MINE = SG * LOOPS * R;
    for (uint i = t; i < uint(M) * MINE; i += uint(SG * 32)) {
        uint m = i / MINE;
        uint j = i % MINE;
        uint o = threadgroup_position_in_grid.x * MINE + j;
        if (o < uint(O)) {
            uint at = j / uint(R) * uint(Q) + j % uint(R);
            float a = part[m][at];
            float u = PAIR ? part[m][at + uint(Q - R)] : 0.0f;
            if (NORM) {
                float total = 0.0f;
                for (int c = 0; c < SG; c++) total += norms[m][c];
                float inv = metal::rsqrt(total / float(K) + as_type<float>(uint(EPS)));
                a *= inv;
                u *= inv;
            }
            if (BIAS) {
                a += float(bias[o]);
                if (PAIR) u += float(bias[O + o]);
            }
            if (PAIR) {
                a = gated<ACT>(a, u);
            } else if (ACT > 0) {
                a = gated<ACT>(a, TIMES ? float(other[m * O + o]) : 1.0f);
            }
            if (RES) a += float(other[m * O + o]);
            y[m * O + o] = static_cast<T>(capped<CAP>(a));
        }
    }
}
