"""What attention's text has instead, where keys and values are codes: how they are read, and how a new token becomes some.

Codes are MLX's affine ones, made by the same rule as mx.quantize; coded_token.py says how a token's words lie. Its lines
are the key's scales and biases, then the value's.
"""

# Codes are whole numbers that half precision holds exactly.
HOLD = r"""
    const int KW = D * KB / 32; const int ALL = KW + D * VB / 32; const int G = D / GROUP; using Half = FLOAT16;
    const int IN_WORD = 4 / sizeof(T); const int LINES = 4 * G / IN_WORD; const int VEC = ALL + LINES;
    const device uint* held = pool; const device uint* recent = tail;
    threadgroup uint codes[2 * D]; threadgroup float fits[4 * G];
"""
# All of a token's lines at once: they are numbers of half precision, two in a word.
FETCH_LINES = r"""
            if (NEW && key == pos) {
                #pragma unroll
                for (int n = 0; n < 2 * G; n++) lw[c][n] = word_of<T>(&fits[0], uint(n));
            } else { pull<2 * G, VEC>(pooled ? held : recent, slot * VEC + ALL, lw[c]); }
"""
FETCH_WHOLE = r"""const device uint* all_lines = held + ((first + left_row(lane, 0)) * VEC + ALL);
            pull<2 * G, VEC>(all_lines, 0, lw[0]); pull<2 * G, VEC>(all_lines, 8 * VEC, lw[1]);"""
READ_LINES = r"""
        #pragma unroll
        for (int c = 0; c < 2; c++) {
            float line[4 * G];
            #pragma unroll
            for (int n = 0; n < 2 * G; n++) unpack2<T>(lw[c][n], line + 2 * n);
            #pragma unroll
            for (int g = 0; g < G; g++) {
                kf[c][g].by = line[g]; kf[c][g].plus = line[G + g]; vf[c][g].by = line[2 * G + g]; vf[c][g].plus = line[3 * G + g];
            }
        }
"""
READ_BOTH = r"""
            const device uint* words = pooled ? held : recent; const device T* line = (const device T*)(words);
            uint of = (slot * VEC + ALL) * IN_WORD + part * 16 / GROUP;
            next[u].kf = line_at(line, of, G); next[u].vf = line_at(line, of + 2 * G, G);
            pull<KTAKE, VEC>(words, slot * VEC + part * uint(KTAKE), next[u].k); pull<VTAKE, VEC>(words, slot * VEC + KW + part * uint(VTAKE), next[u].v);
"""
# The new token is not in memory yet.
FRESH = r"""
                next[u].kf = line_at(&fits[0], part * 16 / GROUP, G); next[u].vf = line_at(&fits[0], 2 * G + part * 16 / GROUP, G);
                #pragma unroll
                for (int i = 0; i < KTAKE; i++) next[u].k[i] = newest[part * uint(KTAKE) + uint(i)];
                #pragma unroll
                for (int i = 0; i < VTAKE; i++) next[u].v[i] = newest[KW + part * uint(VTAKE) + uint(i)];
"""
OPEN = r"""
            kf[u] = lifted_line<KB>(next[u].kf); vf[u] = lifted_line<VB>(next[u].vf);
            uint k_one = lift_of<KB>(nil); uint v_one = lift_of<VB>(nil);
            #pragma unroll
            for (int i = 0; i < 16; i++) { kk[u][i] = lifted<KB>(next[u].k, i, k_one); vv[u][i] = lifted<VB>(next[u].v, i, v_one); }
"""
# What the new token itself sees is what its codes say.
ENCODE = r"""
        if (v == uint(HG)) encode<T, D, GROUP, KB>(&vecs[v][0], &codes[0], &newest[0], &fits[0], lane);
        if (v == uint(HG + 1)) encode<T, D, GROUP, VB>(&vecs[v][0], &codes[D], &newest[KW], &fits[2 * G], lane);
"""
COPY = r"""
    if (last && sg >= uint(BUSY)) {
        uint first = (r * uint(KV) + kh) * TAIL * VEC; const uint MINE = (SG - BUSY) * 32;
        for (uint i = h0 % uint(H / KV) / uint(HG) * MINE + t - uint(BUSY * 32); i < uint(TAIL * VEC); i += MINE * uint(H / KV / HG)) {
            if (i / VEC != fresh) tail_out[first + i] = tail[first + i];
        }
    }
"""
APPEND = r"""
    if (last && h0 % uint(H / KV) == 0) {
        uint first = ((r * uint(KV) + kh) * TAIL + fresh) * VEC;
        for (uint n = t; n < uint(VEC); n += uint(SG * 32)) tail_out[first + n] = n < uint(ALL) ? newest[n] : word_of<T>(&fits[0], n - uint(ALL));
    }
"""
ENCODING = r"""
// The line a group's codes lie on; its bias is `apart` behind its scale.
template <typename S> FN Line line_at(S lines, uint at, uint apart) {
    Line f; f.by = float(lines[at]); f.plus = float(lines[at + apart]);
    return f;
}
template <int BITS> FN Line lifted_line(Line f) { f.plus -= float(1u << BITS) * f.by; return f; }
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
            c = metal::min(c, bins);  // none is below the edge it is counted from
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
