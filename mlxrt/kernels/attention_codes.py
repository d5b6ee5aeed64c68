"""What attention's text has instead, where keys and values are codes: how they are read, and how a new token becomes some.

Codes are MLX's affine ones, made by the same rule as mx.quantize.
"""

CONSTANTS = r"""
    const int KW = D * KB / 32; const int VEC = KW + D * VB / 32; const int G = D / GROUP;
    uint nil = threadgroup_position_in_grid.z;
"""
ROOM = "threadgroup uint codes[2 * D]; threadgroup float fits[4 * G];"
# A token's words are its key's, then its value's; its lines are the key's scales and biases, then the value's.
READS = {
    "READ_KEY": r"""
            uint w[KW / 4]; const int KG = D / 4 > GROUP ? D / 4 / GROUP : 1; Line f[KG]; uint first = quarter * (D / 4) / GROUP;
            if (pooled) pull<KW / 4>(words, slot * VEC + quarter * (KW / 4), w); else pull<KW / 4>(tail_words, slot * VEC + quarter * (KW / 4), w);
            #pragma unroll
            for (int g = 0; g < KG; g++) {
                if (pooled) f[g] = line_at<KB>(lines, slot * 4 * G + first + g, G); else f[g] = line_at<KB>(tail_lines, slot * 4 * G + first + g, G);
            }
            #pragma unroll
            for (int n = 0; n < D / 4; n++) {
                set<T>(keys[c][n / 2], n % 2, static_cast<T>(lifted<KB>(w, n, lift_of<KB>(nil)) * f[n / GROUP].by + f[n / GROUP].plus));
            }""",
    "READ_VALUE": r"""
            const int OWN = LT * VB < 32 ? 1 : LT * VB / 32; uint w[OWN]; Line f; uint first = eighth * LT / GROUP;
            uint from_word = slot * VEC + KW + eighth * (LT * VB) / 32;
            if (pooled) { pull<OWN>(words, from_word, w); f = line_at<VB>(lines, (slot * 4 + 2) * G + first, G); }
            else { pull<OWN>(tail_words, from_word, w); f = line_at<VB>(tail_lines, (slot * 4 + 2) * G + first, G); }
            if (LT * VB < 32) w[0] >>= eighth * (LT * VB) % 32;
            #pragma unroll
            for (int j = 0; j < LT; j++) set<T>(values[c][j], i, static_cast<T>(lifted<VB>(w, j, lift_of<VB>(nil)) * f.by + f.plus));""",
    "READ_BOTH": r"""
            uint kw = slot * VEC + part * (KB / 2); uint vw = slot * VEC + KW + part * (VB / 2); uint of = slot * 4 * G + part * 16 / GROUP;
            if (pooled) {
                kf[u] = read_codes<KB>(words, lines, kw, of, G, nil, kk[u]); vf[u] = read_codes<VB>(words, lines, vw, of + 2 * G, G, nil, vv[u]);
            } else {
                kf[u] = read_codes<KB>(tail_words, tail_lines, kw, of, G, nil, kk[u]);
                vf[u] = read_codes<VB>(tail_words, tail_lines, vw, of + 2 * G, G, nil, vv[u]);
            }""",
}
# A new token's codes, made as mx.quantize makes them; what the token itself sees is what they say.
ENCODE = r"""
        if (v == uint(HG)) encode<T, D, GROUP, KB>(&vecs[v][0], &codes[0], &fits[0], lane);
        if (v == uint(HG + 1)) encode<T, D, GROUP, VB>(&vecs[v][0], &codes[D], &fits[2 * G], lane);
"""
ENCODING = r"""
template <typename T, int D, int GROUP, int BITS, typename V, typename C, typename F>
FN void encode(V vec, C codes, F fits, uint lane) {
    const float bins = float((1u << BITS) - 1u);
    for (uint g = 0; g < uint(D / GROUP); g++) {
        float lo = vec[g * GROUP + lane]; float hi = lo;
        for (uint i = lane + 32; i < uint(GROUP); i += 32) {
            lo = metal::min(lo, vec[g * GROUP + i]); hi = metal::max(hi, vec[g * GROUP + i]);
        }
        lo = -simd_max(-lo); hi = simd_max(hi);
        bool low = metal::abs(lo) > metal::abs(hi);
        float scale = metal::max((hi - lo) / bins, 1e-7f);
        scale = low ? scale : -scale;
        float edge = low ? lo : hi; float steps = metal::rint(edge / scale); float zero = 0.0f;
        if (steps != 0.0f) { scale = edge / steps; zero = edge; }
        float by = float(static_cast<T>(scale)); float plus = float(static_cast<T>(zero));
        for (uint i = lane; i < uint(GROUP); i += 32) {
            float c = metal::rint((vec[g * GROUP + i] - zero) / scale);
            c = metal::min(metal::max(c, 0.0f), bins);
            codes[g * GROUP + i] = uint(c); vec[g * GROUP + i] = float(static_cast<T>(c * by + plus));
        }
        if (lane == 0) { fits[g] = by; fits[D / GROUP + g] = plus; }
    }
}
"""
APPEND = r"""
    if (last && h0 % uint(H / KV) == 0) {
        uint at_word = (r * uint(KV) + kh) * TAIL * VEC; uint at_line = (r * uint(KV) + kh) * TAIL * 4 * G;
        for (uint i = t; i < uint(TAIL * VEC); i += uint(SG * 32)) {
            uint n = i % VEC; uint word = 0;
            if (i / VEC != fresh) { word = tail_words[at_word + i]; }
            else if (n < uint(KW)) { for (uint c = 0; c < 32 / KB; c++) word |= codes[n * (32 / KB) + c] << (c * KB); }
            else { for (uint c = 0; c < 32 / VB; c++) word |= codes[D + (n - KW) * (32 / VB) + c] << (c * VB); }
            words_out[at_word + i] = word;
        }
        for (uint i = t; i < uint(TAIL * 4 * G); i += uint(SG * 32)) {
            lines_out[at_line + i] = i / (4 * G) != fresh ? tail_lines[at_line + i] : static_cast<T>(fits[i % (4 * G)]);
        }
    }
"""
READ_CODES = r"""
// N words from word `at` on, which is a multiple of N or of four.
template <int N, typename P> FN void pull(P w, uint at, thread uint (&p)[N]) {
    if (N % 4 == 0) { load_words<N>(w + at, 0, p); }
    else {
        #pragma unroll
        for (int c = 0; c < N; c++) p[c] = w[at + c];
    }
}
// The line a group's lifted codes lie on; its bias is `apart` behind its scale.
template <int BITS, typename S> FN Line line_at(S lines, uint at, uint apart) {
    Line f; f.by = float(lines[at]); f.plus = float(lines[at + apart]) - float(1u << BITS) * f.by;
    return f;
}
// Sixteen numbers from word `at` on: each is y along the line that comes back.
template <int BITS, typename W, typename S>
FN Line read_codes(W w, S lines, uint at, uint line, uint apart, uint nil, thread float (&y)[16]) {
    uint p[BITS / 2]; uint one = lift_of<BITS>(nil);
    pull<BITS / 2>(w, at, p);
    #pragma unroll
    for (int n = 0; n < 16; n++) y[n] = lifted<BITS>(p, n, one);
    return line_at<BITS>(lines, line, apart);
}
"""
