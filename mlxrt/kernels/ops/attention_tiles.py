"""Attention's keys and values met by matrix units: the text for half precision.

Scores are [16 keys, 8 queries], results [numbers, 8 queries]. Sums over numbers of a head may be taken in any order, and
so may its results be made: a lane takes neighbours of a key and of a value, and nothing is moved. Codes are multiplied
as they are; what a group of them has in common, its line, is put to the sums. Plain numbers are one group. Codes are so
few words that a lane asks for the next ones while it works on those it has.
"""

TILES = r"""
    const int GS = CODED ? D / GROUP : 1; const int WIDE = D / GS; const int LT = WIDE / 8; const int PAIR = 16 / KB; const int HALF = 16 / VB;
    const int KMINE = WIDE * KB / 128; const int VMINE = WIDE * VB / 256;  // words of a group a lane takes
    const float UNIT = 64.0f;  // keeps shares times scales of codes within half precision
    uint quarter = left_col(lane, 0) / 2; uint eighth = left_row(lane, 0);
    Tile<Half> q[GS][LT]; Tile<float> acc[GS][LT]; float all[GS][2]; float base[GS][2]; float m[2]; float l[2];
    #pragma unroll
    for (int g = 0; g < GS; g++) {
        Tile<float> sum[2]; Tile<Half> ones;
        #pragma unroll
        for (uint i = 0; i < 2; i++) {
            uint k = right_row(lane, i); uint head = right_col(lane, i); m[i] = -1e30f; l[i] = 0.0f; base[g][i] = 0.0f;
            set<float>(sum[0], i, 0.0f); set<float>(sum[1], i, 0.0f); set<Half>(ones, i, static_cast<Half>(1.0f));
            #pragma unroll
            for (int j = 0; j < LT; j++) {
                uint n = g * WIDE + k / 2 * (WIDE / 4) + j / PAIR * (2 * PAIR) + j % PAIR + k % 2 * PAIR;
                set<Half>(q[g][j], i, static_cast<Half>(head < uint(HG) ? vecs[head][n] : 0.0f)); set<float>(acc[g][j], i, 0.0f);
            }
        }
        #pragma unroll
        for (int j = 0; j < LT; j++) if (CODED) multiply2(sum[0], sum[1], ones, ones, q[g][j]);
        all[g][0] = at<float>(sum[0], 0); all[g][1] = at<float>(sum[0], 1);
    }
    uint kw[2][GS][KMINE]; uint vw[2][2][GS][VMINE]; KEPT_LINES
    int near = from + int(sg) * 16; bool whole = false; uint first = 0;  // the first of the keys to ask for, and where it is
    FIRST
    for (int k0 = near; k0 < to; k0 += SG * 16) {
        Tile<float> s[GS][2]; float p[2][2]; Line kf[2][GS]; Line vf[2][GS];
        NOW
        READ_LINES
        #pragma unroll
        for (int g = 0; g < GS; g++) {
            #pragma unroll
            for (uint i = 0; i < 2; i++) { set<float>(s[g][0], i, 0.0f); set<float>(s[g][1], i, 0.0f); }
            #pragma unroll
            for (int j = 0; j < LT; j++) {
                Tile<Half> keys[2];
                #pragma unroll
                for (int c = 0; c < 2; c++) set_numbers<Half, KB>(keys[c], kw[c][g][j / PAIR], j % PAIR);
                multiply2(s[g][0], s[g][1], keys[0], keys[1], q[g][j]);
            }
        }
        near += SG * 16;
        NEXT_KEYS
        #pragma unroll
        for (uint i = 0; i < 2; i++) {
            float top = m[i];
            #pragma unroll
            for (int c = 0; c < 2; c++) {
                float d = CODED ? 0.0f : at<float>(s[0][c], i);
                #pragma unroll
                for (int g = 0; g < GS; g++) if (CODED) d += at<float>(s[g][c], i) * kf[c][g].by + all[g][i] * kf[c][g].plus;
                d *= as_type<float>(uint(SCALE));
                if (CAP != 0) d = metal::tanh(d / as_type<float>(uint(CAP))) * as_type<float>(uint(CAP));
                p[c][i] = k0 + 8 * c + int(sum_row(lane, i)) < to ? d : -1e30f; top = metal::max(top, p[c][i]);
            }
            top = rows_max(top);
            float f = metal::exp(m[i] - top); m[i] = top;
            #pragma unroll
            for (int c = 0; c < 2; c++) p[c][i] = metal::exp(p[c][i] - top);
            l[i] = l[i] * f + p[0][i] + p[1][i];
            #pragma unroll
            for (int g = 0; g < GS; g++) {
                base[g][i] *= f;
                #pragma unroll
                for (int j = 0; j < LT; j++) set<float>(acc[g][j], i, at<float>(acc[g][j], i) * f);
            }
        }
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            #pragma unroll
            for (int g = 0; g < GS; g++) {
                Tile<Half> shares; float mine[2];
                #pragma unroll
                for (uint i = 0; i < 2; i++) {
                    mine[i] = CODED ? p[c][i] * (vf[c][g].by * UNIT) : p[c][i];
                    if (CODED) base[g][i] += p[c][i] * vf[c][g].plus;
                }
                #pragma unroll
                for (uint i = 0; i < 2; i++) {
                    uint head = right_col(lane, i); uint of = sum_lane(right_row(lane, i), head);
                    float even = simd_shuffle(mine[0], of); float odd = simd_shuffle(mine[1], of);
                    set<Half>(shares, i, static_cast<Half>(head % 2 == 0 ? even : odd));
                }
                #pragma unroll
                for (int j = 0; j < LT; j += 2) {
                    Tile<Half> values[2];
                    #pragma unroll
                    for (int e = 0; e < 2; e++) {
                        uint a = vw[c][0][g][(j + e) / HALF / 2]; uint b = vw[c][1][g][(j + e) / HALF / 2];
                        uint both = (j + e) / HALF % 2 == 0 ? (a & 0xffffu) | (b << 16) : (a >> 16) | (b & 0xffff0000u);
                        set_numbers<Half, VB>(values[e], both, (j + e) % HALF);
                    }
                    multiply2(acc[g][j], acc[g][(j + 1) % LT], values[0], values[1], shares);
                }
            }
        }
        NEXT_VALUES
    }
    #pragma unroll
    for (uint i = 0; i < 2; i++) {
        uint head = sum_col(lane, i); float den = rows_sum(l[i]);
        #pragma unroll
        for (int g = 0; g < GS; g++) {
            float same = CODED ? rows_sum(base[g][i]) : 0.0f;
            #pragma unroll
            for (int j = 0; j < LT; j++) {
                float v = at<float>(acc[g][j], i);
                if (head < uint(HG)) sums[sg][head][g * WIDE + sum_row(lane, i) * LT + j] = CODED ? v / UNIT + same : v;
            }
        }
        if (head < uint(HG) && sum_row(lane, i) == 0) { tops[sg][head] = m[i]; dens[sg][head] = den; }
    }
"""
# Where the sixteen keys from `near` on begin, if all of them lie in one block: then all addresses are one and constants.
PLACE = r"""
        whole = near + 16 <= metal::min(to, stop) && uint(near - begin) % uint(S) + 16 <= uint(S);
        if (whole) { int key = near; PAGE first = in_pool; }
"""
# What a lane takes of them, and of their values, as it lies in memory.
FETCH_KEYS = r"""
        if (whole) {
            const device uint* w = held + ((first + left_row(lane, 0)) * VEC + quarter * KMINE); FETCH_WHOLE
            #pragma unroll
            for (int c = 0; c < 2; c++) {
                #pragma unroll
                for (int g = 0; g < GS; g++) pull<KMINE, VEC>(w, 8 * c * VEC + g * (WIDE * KB / 32), kw[c][g]);
            }
        } else {
            #pragma unroll
            for (int c = 0; c < 2; c++) {
                int key = metal::min(near + 8 * c + int(left_row(lane, 0)), to - 1);
                SLOT
                FETCH_LINES
                #pragma unroll
                for (int g = 0; g < GS; g++) {
                    uint at_word = g * (WIDE * KB / 32) + quarter * KMINE;
                    if (NEW && key == pos) near_words<KMINE>(&newest[0], at_word, kw[c][g]); else pull<KMINE, VEC>(pooled ? held : recent, slot * VEC + at_word, kw[c][g]);
                }
            }
        }
"""
FETCH_VALUES = r"""
        if (whole) {
            uint apart = left_col(lane, 1) - left_col(lane, 0);
            const device uint* w = held + ((first + left_col(lane, 0)) * VEC + (CODED ? KW : KV * S * VEC) + eighth * VMINE);
            #pragma unroll
            for (int n = 0; n < 4 * GS; n++) {
                int c = n / GS / 2; uint i = n / GS % 2; int g = n % GS;
                pull<VMINE, VEC>(w, (8 * c + i * apart) * VEC + g * (WIDE * VB / 32), vw[c][i][g]);
            }
        } else {
            #pragma unroll
            for (int c = 0; c < 2; c++) {
                #pragma unroll
                for (uint i = 0; i < 2; i++) {
                    int key = metal::min(near + 8 * c + int(left_col(lane, i)), to - 1);
                    SLOT
                    uint behind = CODED ? slot * VEC + KW : (slot + uint(KV) * (pooled ? uint(S) : uint(TAIL))) * VEC;
                    #pragma unroll
                    for (int g = 0; g < GS; g++) {
                        uint at_word = g * (WIDE * VB / 32) + eighth * VMINE;
                        if (NEW && key == pos) near_words<VMINE>(&newest[0], KW + at_word, vw[c][i][g]); else pull<VMINE, VEC>(pooled ? held : recent, behind + at_word, vw[c][i][g]);
                    }
                }
            }
        }
"""
HOLD = r"""
    const int KW = D / 2; const int VEC = D / 2; using Half = T;
    const device uint* held = (const device uint*)(pool); const device uint* recent = (const device uint*)(tail);
"""
# The new token's words, as memory will have them.
STORE = r"""
        if (v >= uint(HG)) {
            simdgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = lane; i < uint(D / 2); i += 32) newest[(v - uint(HG)) * KW + i] = pair_of<T>(vecs[v][2 * i], vecs[v][2 * i + 1]);
        }
"""
WORDS = r"""
// N words from word `at` on, which is a multiple of N or of four but for vectors of VEC words that are none.
template <int N, int VEC, typename P> FN void pull(P w, uint at, thread uint (&p)[N]) {
    if (N % 4 == 0 && VEC % 4 != 0) {
        #pragma unroll
        for (int c = 0; c < N / 2; c++) {
            uint two[2]; load_words<2>(w + at, uint(c), two);
            p[2 * c] = two[0]; p[(2 * c + 1) % N] = two[1];
        }
    } else { load_words<N>(w + at, 0, p); }
}
template <int N, typename P> FN void near_words(P w, uint at, thread uint (&p)[N]) {
    #pragma unroll
    for (int c = 0; c < N; c++) p[c] = w[at + c];
}
// Two numbers of a word into a tile: those `k` places of BITS from where its halves begin.
template <typename U, int BITS> FN void set_numbers(thread Tile<U>& t, uint w, int k) {
    if (BITS == 16) { set_pair<U>(t, w); } else { set_codes<BITS % 16>(t, w, uint(k)); }
}
"""
