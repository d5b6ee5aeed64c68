// How a matrix is stored, the FORM of a kernel: MLX's affine groups, MXFP4, plain values of type T, or indices of centroids,
// which lie in a table in threadgroup memory.
enum QuantForm { AFFINE = 0, MXFP4 = 1, DENSE = 2, LUT = 3 };

template <typename T, typename P>
FN void load8(P p, uint i, thread float* y) {
    const int U = 4 / sizeof(T);
    #pragma unroll
    for (uint c = 0; c < sizeof(T) / 2; c++) {
        auto v = ((const device uint4*)(p))[i * (sizeof(T) / 2) + c];
        unpack2<T>(v.x, y + 4 * U * c);
        unpack2<T>(v.y, y + 4 * U * c + U);
        unpack2<T>(v.z, y + 4 * U * c + 2 * U);
        unpack2<T>(v.w, y + 4 * U * c + 3 * U);
    }
}

// Words N i ... N i + N - 1: of a packed row 32 numbers, as many words as a number has bits.
template <int N, typename P>
FN void load_words(P w, uint i, thread uint (&p)[N]) {
    if (N % 4 == 0) {
        #pragma unroll
        for (int c = 0; c < N / 4; c++) {
            auto v = ((const device uint4*)(w))[i * (N / 4) + c];
            p[4 * c] = v.x;
            p[(4 * c + 1) % N] = v.y;
            p[(4 * c + 2) % N] = v.z;
            p[(4 * c + 3) % N] = v.w;
        }
    } else if (N % 2 == 0) {
        #pragma unroll
        for (int c = 0; c < N / 2; c++) {
            auto v = ((const device uint2*)(w))[i * (N / 2) + c];
            p[2 * c] = v.x;
            p[(2 * c + 1) % N] = v.y;
        }
    } else {
        #pragma unroll
        for (int c = 0; c < N; c++) p[c] = ((const device uint*)(w))[i * N + c];
    }
}

template <int BITS, int N>
FN uint code(const thread uint (&p)[N], int n) {
    int word = n * BITS / 32;
    int bit = n * BITS % 32;
    uint v = p[word] >> bit;
    if (bit + BITS > 32) v |= p[(word + 1) % N] << ((32 - bit) % 32);
    return v & ((1u << BITS) - 1u);
}

// A code plus 2^BITS, as a float: the code is put into the mantissa, which costs no conversion. Those are slow on GPUs.
// `one` is 2^BITS, from lift_of: its argument is always 0, but no compiler knows it, so the number stays in a register
// instead of being made anew for every code.
template <int BITS>
FN uint lift_of(uint nil) {
    return (uint(127 + BITS) + nil) << 23;
}

template <int BITS, int N>
FN float lifted(const thread uint (&p)[N], int n, uint one) {
    const int TOP = 23 - BITS;
    const uint MASK = ((1u << BITS) - 1u) << TOP;
    int word = n * BITS / 32;
    int bit = n * BITS % 32;
    if (bit + BITS > 32) return as_type<float>((code<BITS>(p, n) << TOP) | one);
    uint v = bit > TOP ? p[word] >> ((bit - TOP) % 32) : p[word] << ((TOP - bit) % 32);
    return as_type<float>((v & MASK) | one);
}

// e2m1: a sign, two bits of exponent, one of fraction.
FN float small_float(uint c) {
    float m = float(c & 1u);
    uint e = (c >> 1) & 3u;
    float v = e == 0u ? 0.5f * m : (1.0f + 0.5f * m) * float(1u << (e - 1u));
    return (c & 8u) != 0u ? -v : v;
}

// The levels of codes where every lane finds them: before the first barrier of a kernel, by SIZE threads.
template <int FORM, int LEVELS, int SIZE, typename L, typename P>
FN void lay_levels(L levels, uint t, P table) {
    if (FORM == LUT) {
        for (uint i = t; i < uint(LEVELS); i += uint(SIZE)) table[i] = float(levels[i]);
    }
}

// A number is `number` times its group's scale plus what `zero_at` gives for it.
template <int FORM, int BITS, int N, typename P>
FN float number(const thread uint (&p)[N], int n, uint one, P table) {
    return FORM == LUT     ? table[code<BITS>(p, n)]
           : FORM == MXFP4 ? small_float(code<BITS>(p, n))
                           : lifted<BITS>(p, n, one);
}

template <int FORM, int BITS, typename Z>
FN float zero_at(Z z, uint i, float scale) {
    return FORM == AFFINE ? float(z[i]) - float(1u << BITS) * scale : 0.0f;
}

template <int FORM, typename S>
FN float scale_at(S s, uint i) {
    return FORM == MXFP4 ? as_type<float>(uint(s[i]) << 23) : float(s[i]);
}
