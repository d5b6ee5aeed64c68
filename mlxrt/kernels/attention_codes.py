"""What attention's text has instead, where keys and values are codes: how they are read, and how a new token becomes some.

Codes are MLX's affine ones, made by the same rule as mx.quantize. A token's words are its key's, then its value's; its
lines are the key's scales and biases, then the value's.
"""

# Codes are whole numbers that half precision holds exactly.
HOLD = r"""
    const int KW = D * KB / 32; const int VEC = KW + D * VB / 32; const int G = D / GROUP; using Half = FLOAT16;
    const device uint* held = words; const device uint* recent = tail_words;
    threadgroup uint codes[2 * D]; threadgroup float fits[4 * G];
"""
# All of a token's lines at once: they are numbers of half precision, two in a word.
READ_LINES = r"""
            float line[4 * G];
            if (NEW && key == pos) {
                #pragma unroll
                for (int n = 0; n < 4 * G; n++) line[n] = fits[n];
            } else {
                uint w[2 * G];
                if (pooled) pull<2 * G>((const device uint*)(lines), slot * 2 * G, w); else pull<2 * G>((const device uint*)(tail_lines), slot * 2 * G, w);
                #pragma unroll
                for (int n = 0; n < 2 * G; n++) unpack2<T>(w[n], line + 2 * n);
            }
            #pragma unroll
            for (int g = 0; g < G; g++) {
                kf[c][g].by = line[g]; kf[c][g].plus = line[G + g]; vf[c][g].by = line[2 * G + g]; vf[c][g].plus = line[3 * G + g];
            }
"""
READ_BOTH = r"""
                uint kw = slot * VEC + part * (KB / 2); uint vw = slot * VEC + KW + part * (VB / 2); uint of = slot * 4 * G + part * 16 / GROUP;
                if (pooled) {
                    kf[u] = lifted_line<KB>(line_at(lines, of, G)); vf[u] = lifted_line<VB>(line_at(lines, of + 2 * G, G));
                } else {
                    kf[u] = lifted_line<KB>(line_at(tail_lines, of, G)); vf[u] = lifted_line<VB>(line_at(tail_lines, of + 2 * G, G));
                }
                read_codes<KB>(pooled ? held : recent, kw, nil, kk[u]); read_codes<VB>(pooled ? held : recent, vw, nil, vv[u]);
"""
# What the new token itself sees is what its codes say.
ENCODE = r"""
        if (v == uint(HG)) encode<T, D, GROUP, KB>(&vecs[v][0], &codes[0], &newest[0], &fits[0], lane);
        if (v == uint(HG + 1)) encode<T, D, GROUP, VB>(&vecs[v][0], &codes[D], &newest[KW], &fits[2 * G], lane);
"""
APPEND = r"""
    if (last && h0 % uint(H / KV) == 0) {
        uint at_word = (r * uint(KV) + kh) * TAIL * VEC; uint at_line = (r * uint(KV) + kh) * TAIL * 4 * G;
        for (uint i = t; i < uint(TAIL * VEC); i += uint(SG * 32)) {
            words_out[at_word + i] = i / VEC != fresh ? tail_words[at_word + i] : newest[i % VEC];
        }
        for (uint i = t; i < uint(TAIL * 4 * G); i += uint(SG * 32)) {
            lines_out[at_line + i] = i / (4 * G) != fresh ? tail_lines[at_line + i] : static_cast<T>(fits[i % (4 * G)]);
        }
    }
"""
ENCODING = r"""
// The line a group's codes lie on; its bias is `apart` behind its scale.
template <typename S> FN Line line_at(S lines, uint at, uint apart) {
    Line f; f.by = float(lines[at]); f.plus = float(lines[at + apart]);
    return f;
}
template <int BITS> FN Line lifted_line(Line f) { f.plus -= float(1u << BITS) * f.by; return f; }
// Sixteen lifted codes from word `at` on.
template <int BITS, typename W> FN void read_codes(W w, uint at, uint nil, thread float (&y)[16]) {
    uint p[BITS / 2]; uint one = lift_of<BITS>(nil);
    pull<BITS / 2>(w, at, p);
    #pragma unroll
    for (int n = 0; n < 16; n++) y[n] = lifted<BITS>(p, n, one);
}
// A vector's codes, group by group as mx.quantize makes them, packed; in its place what they say.
template <typename T, int D, int GROUP, int BITS, typename V, typename C, typename N, typename F>
FN void encode(V vec, C codes, N packed, F fits, uint lane) {
    const float bins = float((1u << BITS) - 1u); const uint EACH = 32 / BITS;
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
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = lane; i < uint(D) / EACH; i += 32) {
        uint word = 0;
        for (uint c = 0; c < EACH; c++) word |= codes[i * EACH + c] << (c * BITS);
        packed[i] = word;
    }
}
"""
