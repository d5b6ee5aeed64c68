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

// load_rows; PAIRED: with zeros as they are stored.
template <
    int FORM, int BITS, int GROUP, int K, bool PAIRED, int R, int N, typename W, typename S,
    typename Z>
FN void load_blocks(
    W w, S s, Z z, const thread uint (&row)[R], uint k, thread uint (&words)[R][N],
    thread float (&scale)[R], thread float (&zero)[R]
) {
    load_rows<FORM, BITS, GROUP, K>(w, s, z, row, k, words, scale, zero);
    #pragma unroll
    for (int r = 0; r < R; r++) {
        uint group = (row[r] * uint(K / 32) + k / 32) / uint(GROUP / 32);
        if (PAIRED && FORM == AFFINE) zero[r] = float(z[group]);
    }
}

// Sixteen left tiles of such a row. PAIRED: two values at once in T's own arithmetic, which rounds once, as a float would.
template <int FORM, int BITS, bool PAIRED, typename T, int N, typename L>
FN void dequantize_tiles(
    const thread uint (&words)[N], float scale, float zero, uint opaque_zero, L table,
    thread Tile<T> (&t)[16]
) {
    uint scales = pack_pair<T>(scale, scale);
    uint zeros = pack_pair<T>(zero, zero);
    uint magic = magic_bits<BITS>(opaque_zero);
    #pragma unroll
    for (int j = 0; j < 16; j++) {
        int n = j / 4 * 8 + j % 4;
        if (PAIRED && FORM == AFFINE) {
            set_affine4(t[j], words[j / 4 % N], j % 4, scales, zeros, opaque_zero);
        } else if (PAIRED) {
            set_e2m1(t[j], words[j / 4 % N], j % 4, scales);
        } else {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                int part = (n + 4 * i) * num_parts<FORM>() / 32;
                float value = unpack_value<FORM, BITS>(words, n + 4 * i, magic, table);
                value = value * group_scale<FORM>(scale, zero, part)
                        + group_zero<FORM, BITS>(scale, zero, part);
                set<T>(t[j], uint(i), static_cast<T>(value));
            }
        }
    }
}
