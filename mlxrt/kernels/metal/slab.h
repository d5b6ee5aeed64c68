// What matrix units are fed with in qmm.metal: a slab of x in threadgroup memory, and tiles of a quantized matrix.
// Both have k in an order that makes unpacking cheap: rows 2q and 2q + 1 of right tile j, and columns of left tile j, are
// numbers 32q + 8 (j / 4) + j % 4 and that plus 4, for four values of four bits and the four after them are one shift apart.

// A slab is 128 numbers of each of 8 columns by MT, as chunks of eight. Chunk 4q + c of a column are numbers 32q + 8c ... of
// it. Lanes that store chunks side by side, and lanes that read them for a tile, find them in different banks.

// The column of chunk i, counted along x.
FN uint slab_column(uint i) {
    return i / 16;
}

// Where chunk i lies.
FN uint slab_index(uint i) {
    uint c = i % 4;
    return i / 128 * 128 + c * 32 + ((i % 128 / 16 * 4 + i % 16 / 4) ^ (2 * c));
}

// The chunks that a thread of a slab's RG simdgroups copies, from number k of their columns on. Past a row's end they are
// zeros, where rows are not whole numbers of STEP; else k may be anywhere, for what it finds there is not used.
template <int K, int RG, int STEP, int N, typename X>
FN void fetch_slab(X x, const thread uint (&offset)[N], uint k, uint t, thread uint4* chunks) {
    #pragma unroll
    for (int c = 0; c < N; c++) {
        uint at = k + (uint(c * RG * 32) + t) % 16 * 8;
        bool inside = at < uint(K);
        if (K % STEP == 0) {
            chunks[c] = ((const device uint4*)(x))[(offset[c] + (inside ? at : 0u)) / 8];
        } else {
            chunks[c] = inside ? ((const device uint4*)(x))[(offset[c] + at) / 8]
                               : four_words(0u, 0u, 0u, 0u);
        }
    }
}

// Eight numbers in the order of tiles: each of the first four with the one four after it.
FN uint4 interleave_chunk(uint4 v) {
    return four_words(
        low_halves(v.x, v.z), high_halves(v.x, v.z), low_halves(v.y, v.w), high_halves(v.y, v.w)
    );
}

// Where a lane's 32 numbers of a row begin, of the 128 from k on: past the end the last there are, for which x is zero.
template <int K>
FN uint clamp_quarter(uint k, uint quarter) {
    return metal::min(k + quarter * 32, uint(K - 32));
}

// Elements k ... k + 31 of R rows, packed.
template <int K, int R, int N, typename W>
FN void load_row_words(W w, const thread uint (&row)[R], uint k, thread uint (&words)[R][N]) {
    #pragma unroll
    for (int r = 0; r < R; r++) load_words<N>(w, row[r] * uint(K / 32) + k / 32, words[r]);
}

template <int R, int N>
FN void copy_words(thread uint (&to)[R][N], const thread uint (&from)[R][N]) {
    #pragma unroll
    for (int r = 0; r < R; r++) {
        #pragma unroll
        for (int c = 0; c < N; c++) to[r][c] = from[r][c];
    }
}

// What dequantize_tiles takes as a group's scale and zero: the bits of two floats, zero as load_scales has it; PAIRED: as they
// are stored, each twice in a word.
template <
    int FORM, int BITS, int GROUP, int K, bool PAIRED, typename T, int R, typename S, typename Z>
FN void load_scale_bits(
    S s, Z z, const thread uint (&row)[R], uint k, thread uint (&scale)[R], thread uint (&zero)[R]
) {
    #pragma unroll
    for (int r = 0; r < R; r++) {
        uint at = row[r] * uint(K / 32) + k / 32;
        float by;
        float least;
        load_scales<FORM, BITS, GROUP>(s, z, at, by, least);
        if (PAIRED && FORM == AFFINE) least = float(z[at / uint(GROUP / 32)]);
        scale[r] = PAIRED ? pack_pair<T>(by, by) : as_type<uint>(by);
        zero[r] = PAIRED ? pack_pair<T>(least, least) : as_type<uint>(least);
    }
}

// Reading them for every 128 numbers costs more than reading the matrix: a row's scales of 128 numbers are two to eight bytes.
// So of each four steps of k the four lanes of a row read one each, in whole words, and hand them round.
template <int GROUP, int K, bool PAIRED>
FN constexpr bool shares_scales() {
    return PAIRED && K % 128 == 0 && GROUP <= 128;
}

// Words of a row's scales, or zeros, of a step.
template <int FORM, int GROUP>
FN constexpr int scale_words() {
    return FORM == AFFINE && GROUP == 32 ? 2 : 1;
}

// Those of 128 numbers from k on, as they are stored; past the end some that nobody uses.
template <int FORM, int GROUP, int K, int R, int N, typename S>
FN void load_step_scales(S s, const thread uint (&row)[R], uint k, thread uint (&held)[R][N]) {
    #pragma unroll
    for (int r = 0; r < R; r++) {
        uint step = row[r] * uint(K / 128) + metal::min(k, uint(K - 128)) / 128;
        if (FORM == AFFINE && GROUP == 128) {
            held[r][0] = uint(((const device ushort*)(s))[step]);
        } else {
            #pragma unroll
            for (int c = 0; c < N; c++) held[r][c] = ((const device uint*)(s))[step * N + c];
        }
    }
}

// A lane's own of them, twice in a word, out of what lane `from` holds.
template <int FORM, int GROUP, int N>
FN uint take_scale(const thread uint (&held)[N], uint from, uint quarter) {
    uint first = simd_shuffle(held[0], from);
    if (FORM == MXFP4) return (first >> (8 * quarter) & 255u) * 0x00800080u;
    uint second = N > 1 ? simd_shuffle(held[N - 1], from) : 0u;
    return GROUP == 32   ? repeat_half(quarter < 2 ? first : second, quarter % 2)
           : GROUP == 64 ? repeat_half(first, quarter / 2)
                         : repeat_half(first, 0u);
}

// Left tiles 4c ... 4c + 3 of such a row. PAIRED: two values at once in T's own arithmetic, which rounds once, as a float would.
template <int FORM, int BITS, bool PAIRED, typename T, int N, typename L>
FN void dequantize_tiles(
    const thread uint (&words)[N], int c, uint scale, uint zero, uint opaque_zero, L table,
    thread Tile<T> (&t)[4]
) {
    float by = as_type<float>(scale);
    float least = as_type<float>(zero);
    uint magic = magic_bits<BITS>(opaque_zero);
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        if (PAIRED && FORM == AFFINE) {
            set_affine4(t[j], words[c % N], j, scale, zero, opaque_zero);
        } else if (PAIRED) {
            set_e2m1(t[j], words[c % N], j, scale);
        } else {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                int n = 8 * c + j + 4 * i;
                int part = n * num_parts<FORM>() / 32;
                float value = unpack_value<FORM, BITS>(words, n, magic, table);
                value = value * group_scale<FORM>(by, least, part)
                        + group_zero<FORM, BITS>(by, least, part);
                set<T>(t[j], uint(i), static_cast<T>(value));
            }
        }
    }
}
