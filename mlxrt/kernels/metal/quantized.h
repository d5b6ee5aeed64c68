// How a matrix is stored, the FORM of a kernel: MLX's affine groups, MXFP4, plain values of type T, or indices of centroids,
// which lie in a table in threadgroup memory. GGUF's K-quants have blocks of 256 elements with one or two float16, and in them
// groups whose scales are small integers: K_MIN groups of 32 with a scale and a minimum, K_SIGNED groups of 16 with a signed
// scale of signed values, K_NIBBLE groups of 16 with scale and minimum in one byte, K_LUT groups of 32 with a signed scale of
// centroids.
enum QuantForm {
    AFFINE = 0,
    MXFP4 = 1,
    DENSE = 2,
    LUT = 3,
    K_MIN = 4,
    K_SIGNED = 5,
    K_NIBBLE = 6,
    K_LUT = 7
};

template <int FORM>
FN constexpr bool is_k_quant() {
    return FORM >= K_MIN;
}

// Groups of 32 neighbours.
template <int FORM>
FN constexpr int num_parts() {
    return FORM == K_SIGNED || FORM == K_NIBBLE ? 2 : 1;
}

// How many neighbours in x are added up for a product: those that share what unpack_value adds to their weights. 0: none are.
template <int FORM>
FN constexpr int sum_width() {
    return FORM == AFFINE || FORM == K_MIN ? 32 : num_parts<FORM>() == 2 ? 16 : 0;
}

template <int FORM, int BITS>
FN constexpr int lut_size() {
    return FORM == LUT || FORM == K_LUT ? 1 << BITS : 1;
}

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
    uint magnitude = n < 3 ? word << (9 - 4 * (n % 3)) : word >> 3;
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
    if (LUT_SIZE > 1) {
        for (uint i = t; i < uint(LUT_SIZE); i += uint(SIZE)) table[i] = float(lut[i]);
    }
}

// An element is unpack_value times its group's scale, plus its zero.
template <int FORM, int BITS, int N, typename P>
FN float unpack_value(const thread uint (&p)[N], int n, uint magic, P table) {
    return lut_size<FORM, BITS>() > 1 ? table[quantized_value<BITS>(p, n)]
           : FORM == MXFP4            ? e2m1_value(p, n) * E2M1_UNIT
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

// What is read of the scales of elements 32 at ... 32 at + 31: scale and zero. Of K-quants the bits of their groups' integers
// and of the block's float16, which group_scale and group_zero read: fewer registers than what comes of them.
template <int FORM, int BITS, int GROUP, typename S, typename Z>
FN void load_scales(S s, Z z, uint at, thread float& scale, thread float& zero) {
    if (is_k_quant<FORM>()) {
        scale = as_type<float>(uint(s[at]));
        zero = as_type<float>(uint(z[at / 8]));
    } else {
        uint group = at / uint(GROUP / 32);
        scale = FORM == DENSE ? 1.0f : scale_at<FORM>(s, group);
        zero = zero_at<FORM, BITS>(z, group, scale);
    }
}

// An integer below 2^23 as a float, without a conversion.
FN float small_float(uint v) {
    return as_type<float>(0x4b000000u | v) - 8388608.0f;
}

// The scale of half `part` of those elements, or of all where they are one group.
template <int FORM>
FN float group_scale(float scale, float zero, int part) {
    uint integers = as_type<uint>(scale);
    float halves[2];
    unpack2<FLOAT16>(as_type<uint>(zero), halves);
    uint own = integers >> (8 * part) & (FORM == K_NIBBLE ? 15u : 255u);
    float number = FORM == K_SIGNED || FORM == K_LUT ? small_float(own) - 128.0f : small_float(own);
    return is_k_quant<FORM>() ? halves[0] * number : scale;
}

// What is taken from a scaled value of K_MIN and K_NIBBLE.
template <int FORM>
FN float group_min(float scale, float zero, int part) {
    uint integers = as_type<uint>(scale);
    float halves[2];
    unpack2<FLOAT16>(as_type<uint>(zero), halves);
    return halves[1]
           * small_float(
               integers >> (FORM == K_NIBBLE ? 8 * part + 4 : 8) & (FORM == K_NIBBLE ? 15u : 255u)
           );
}

// What is added to a product with group_scale of a value from magic_float.
template <int FORM, int BITS>
FN float group_zero(float scale, float zero, int part) {
    if (!is_k_quant<FORM>()) return zero;
    if (FORM == K_LUT) return 0.0f;
    float lift = float(1u << BITS) * group_scale<FORM>(scale, zero, part);
    return FORM == K_SIGNED ? -1.5f * lift : -group_min<FORM>(scale, zero, part) - lift;
}

// Elements 8 i ... 8 i + 7 of all rows, exactly. They may begin in the middle of a word, but lie in two.
template <int FORM, int BITS, int GROUP, typename W, typename S, typename Z, typename L>
FN void dequantize8(W packed, S scales, Z biases, L lut, uint i, thread float (&y)[8]) {
    uint word = i * uint(BITS) / 4;
    uint shift = i * uint(BITS) % 4 * 8;
    uint second = shift + 8 * BITS > 32 ? packed[word + 1] : 0u;
    // Shifted in two steps: by 32 in one is not defined.
    uint p[2];
    p[0] = (packed[word] >> shift) | (second << (31 - shift) << 1);
    p[1] = second >> shift;
    float scale;
    float zero;
    load_scales<FORM, BITS, GROUP>(scales, biases, i / 4, scale, zero);
    int part = int(i % 4) * num_parts<FORM>() / 4;
    float by = group_scale<FORM>(scale, zero, part);
    float least = FORM == AFFINE ? -float(biases[i / uint(GROUP / 8)]) : 0.0f;
    if (FORM == K_MIN || FORM == K_NIBBLE) least = group_min<FORM>(scale, zero, part);
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        uint value = quantized_value<BITS>(p, n);
        y[n] = lut_size<FORM, BITS>() > 1 ? by * float(lut[value])
               : FORM == MXFP4            ? by * (e2m1_value(p, n) * E2M1_UNIT)
               : FORM == K_SIGNED         ? by * (float(value) - float(1u << (BITS - 1)))
                                          : by * float(value) - least;
    }
}

// Stores eight numbers at y[8 i].
template <typename T, typename Y>
FN void store_row8(const thread float (&v)[8], uint i, Y y) {
    const int U = 4 / sizeof(T);
    uint p[8 / U];
    #pragma unroll
    for (int c = 0; c < 8 / U; c++) {
        p[c] = pack_pair<T>(
            float(static_cast<T>(v[U * c])), float(static_cast<T>(v[(U * c + U - 1) % 8]))
        );
    }
    #pragma unroll
    for (int c = 0; c < 2 / U; c++) {
        ((device float4*)(y))[i * (2 / U) + c] = four(
            as_type<float>(p[4 * c]), as_type<float>(p[4 * c + 1]), as_type<float>(p[4 * c + 2]),
            as_type<float>(p[4 * c + 3])
        );
    }
}
