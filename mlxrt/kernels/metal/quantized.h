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

// Words N i ... N i + N - 1: 32 elements of a packed row are as many words as an element has bits.
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
FN uint quantized_value(const thread uint (&p)[N], int n) {
    int word = n * BITS / 32;
    int bit = n * BITS % 32;
    uint v = p[word] >> bit;
    if (bit + BITS > 32) v |= p[(word + 1) % N] << ((32 - bit) % 32);
    return v & ((1u << BITS) - 1u);
}

// The bits of 2^BITS as a float: or'ed with a quantized value in the mantissa they are 2^BITS plus that value, without a
// conversion, which is slow on GPUs. The argument is always 0, but no compiler knows it, so the result stays in a register
// instead of being made anew for every value.
template <int BITS>
FN uint magic_bits(uint opaque_zero) {
    return (uint(127 + BITS) + opaque_zero) << 23;
}

template <int BITS, int N>
FN float magic_float(const thread uint (&p)[N], int n, uint magic) {
    const int TOP = 23 - BITS;
    const uint MASK = ((1u << BITS) - 1u) << TOP;
    int word = n * BITS / 32;
    int bit = n * BITS % 32;
    if (bit + BITS > 32) return as_type<float>((quantized_value<BITS>(p, n) << TOP) | magic);
    uint v = bit > TOP ? p[word] >> ((bit - TOP) % 32) : p[word] << ((TOP - bit) % 32);
    return as_type<float>((v & MASK) | magic);
}

// Values n and n + 4 of a word of eight e2m1 (a sign, two bits of exponent, one of fraction), as two halves that are 2^14
// times smaller: in a half's bits a sign, an exponent and a fraction lie in the same order, and its smallest numbers are
// as evenly spaced as those of e2m1. Four instructions for two values, where a table or a conversion takes four times that.
FN uint e2m1_halves(uint word, int n) {
    uint magnitude = n < 3 ? word << ((9 - 4 * n) & 31) : word >> 3;
    return (magnitude & 0x0e000e00u) | ((word << (12 - 4 * n)) & 0x80008000u);
}

#define E2M1_UNIT 16384.0f

// Value n of a row of e2m1, of which a unit is E2M1_UNIT.
template <int N>
FN float e2m1_value(const thread uint (&p)[N], int n) {
    float pair[2];
    unpack2<FLOAT16>(e2m1_halves(p[n / 8 % N], n % 4), pair);
    return pair[n / 4 % 2];
}

// Copies the lookup table to threadgroup memory, by SIZE threads, before the first barrier of a kernel.
template <int FORM, int LUT_SIZE, int SIZE, typename L, typename P>
FN void load_lut(L lut, uint t, P table) {
    if (FORM == LUT) {
        for (uint i = t; i < uint(LUT_SIZE); i += uint(SIZE)) table[i] = float(lut[i]);
    }
}

// An element is unpack_value times its group's scale, plus zero_at.
template <int FORM, int BITS, int N, typename P>
FN float unpack_value(const thread uint (&p)[N], int n, uint magic, P table) {
    return FORM == LUT     ? table[quantized_value<BITS>(p, n)]
           : FORM == MXFP4 ? e2m1_value(p, n) * E2M1_UNIT
                           : magic_float<BITS>(p, n, magic);
}

template <int FORM, int BITS, typename Z>
FN float zero_at(Z z, uint i, float scale) {
    return FORM == AFFINE ? float(z[i]) - float(1u << BITS) * scale : 0.0f;
}

template <int FORM, typename S>
FN float scale_at(S s, uint i) {
    return FORM == MXFP4 ? as_type<float>(uint(s[i]) << 23) : float(s[i]);
}
