/* Packed matrices, and how sixteen neighbours of a row become floats.
 *
 * Affine: MLX's layout, a row is a stream of codes from the low bits up; w = scale * code + bias, one of each for every
 * `group`. The others are GGUF's K-quants: blocks of 256 weights, whose scales are quantised themselves. IQ2_XXS has such
 * blocks, too; its codes are signed, and are kept 64 higher, so that they are bytes. IQ4_XS and IQ4_NL choose among sixteen
 * values, kept 128 higher; Q8_0's codes are signed bytes, kept 128 higher, too. Blocks of IQ4_NL, Q8_0, Q4_0 and Q4_1
 * are of 32 weights, and eight of them count as one here. MXFP4 is MLX's layout, too: a row is a stream of four-bit codes,
 * which choose among sixteen values, here their doubles, kept 12 higher; every 32 have a power of two, a byte, as scale.
 * A plain matrix is one of floats, whose type is `scale_type`. */
#ifndef MLXRT_PACKED_H
#define MLXRT_PACKED_H
#include "iq2_grid.h"
#include "vector.h"

enum { FLOAT32, FLOAT16, BFLOAT16 };
enum { AHEAD = 4096 }; /* bytes */
enum { AFFINE, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ4_XS, IQ4_NL, Q8_0, Q4_0, Q4_1, MXFP4, PLAIN };

typedef struct {
    const uint8_t *weight;
    const uint8_t *scales, *biases; /* affine only, and the scales of MXFP4 */
    int64_t rows, width, row_bytes;
    int32_t format, bits, group, scale_type;
    int32_t interleaved; /* four rows lie side by side, see dot.h; then there is a multiple of eight */
} matrix;

/* A piece of a row: up to sixteen groups with their scales and biases. A chunk is sixteen weights. */
typedef struct {
    const uint8_t *at;
    float scale[16], bias[16];
} span;

/* Whether a row is one stream of codes, whose scales lie elsewhere. */
INLINE int is_stream(int format) { return format == AFFINE || format == MXFP4; }
INLINE int has_groups_of_32(int format) { return format == Q4_K || format == Q5_K || format >= IQ2_XXS; }
INLINE int chunks_of_group(const matrix *a, int format) {
    return format == AFFINE ? a->group / 16 : has_groups_of_32(format) ? 2 : 1;
}
/* Chunks that every group of the format has a multiple of. */
INLINE int chunks_together(int format) { return format == AFFINE || has_groups_of_32(format) ? 2 : 1; }
INLINE int64_t groups_of_row(const matrix *a, int format) {
    return format == AFFINE ? a->width / a->group : has_groups_of_32(format) ? a->width / 32 : a->width / 16;
}
INLINE int groups_of_span(int format) { return has_groups_of_32(format) ? 8 : 16; }
INLINE int block_bytes(int format) {
    static const int sizes[] = {0, 84, 110, 144, 176, 210, 66, 136, 144, 272, 144, 160, 128};
    return sizes[format];
}

/* How much higher than signed codes the format's are; then groups have no bias of their own. */
INLINE int code_offset(int format) {
    static const int offsets[] = {0, [Q6_K] = 32, [IQ2_XXS] = 64, [IQ4_XS] = 128, [IQ4_NL] = 128, [Q8_0] = 128, [Q4_0] = 8, [Q4_1] = 0, [MXFP4] = 12};
    return offsets[format];
}

/* Formats whose rows may end with a part of a span. */
INLINE int has_short_blocks(int format) { return format >= IQ4_NL && format <= Q4_1; }

INLINE int float_bytes(int format) { return format == Q4_1 ? 4 : 2; } /* of a short block, before its codes */

INLINE float float_at(const uint8_t *p, int64_t i, int type) {
    if (type == FLOAT32) {
        float f;
        memcpy(&f, p + 4 * i, 4);
        return f;
    }
    uint16_t h;
    memcpy(&h, p + 2 * i, 2);
    return type == FLOAT16 ? half_to_float(h) : bfloat_to_float(h);
}

/* Sixteen bytes as floats, eight times `first` and eight times `second`. */
INLINE void scale_bytes(byte_vector v, float first, float second, float *to) {
    float factor[16];
    for (int i = 0; i < 8; i++) factor[i] = first, factor[8 + i] = second;
    store(to, multiply(from_bytes(to_bytes(v)), load(factor)));
}

/* The scales and minima of Q4_K and Q5_K: eight of six bits each in twelve bytes. */
INLINE byte_vector k_scales(const uint8_t *p) {
    uint32_t w[3];
    memcpy(w, p, 12);
    const uint64_t scales = (w[0] & 0x3f3f3f3f) | (uint64_t)((w[2] & 0x0f0f0f0f) | (w[0] >> 2 & 0x30303030)) << 32;
    const uint64_t minima = (w[1] & 0x3f3f3f3f) | (uint64_t)((w[2] >> 4 & 0x0f0f0f0f) | (w[1] >> 2 & 0x30303030)) << 32;
    return (byte_vector)(long_vector){scales, minima};
}

INLINE void open_k_scales(const uint8_t *p, float d, float least, span *to) {
    float both[16];
    scale_bytes(k_scales(p), d, -least, both);
    memcpy(to->scale, both, 32), memcpy(to->bias, both + 8, 32);
}

INLINE void read_floats(const uint8_t *p, int type, int count, float *to) {
    if (type == FLOAT32) {
        memcpy(to, p, 4 * (size_t)count);
        return;
    }
    uint16_t half[16];
    memcpy(half, p, 2 * (size_t)count);
    if (type == FLOAT16)
        for (int i = 0; i < count; i++) to[i] = half_to_float(half[i]);
    else
        for (int i = 0; i < count; i++) to[i] = bfloat_to_float(half[i]);
}

/* Sixteen floats of a plain matrix from the k-th of a row on. */
INLINE floats load_numbers(const uint8_t *row, int64_t k, int type) {
    if (type == FLOAT16) return load_float16(row + 2 * k);
    if (type == BFLOAT16) return load_bfloat16(row + 2 * k);
    float f[16];
    memcpy(f, row + 4 * k, sizeof f);
    return load(f);
}

/* Halves of powers of two, whose exponents the bytes are: codes of MXFP4 stand for doubles. */
INLINE void read_exponents(const uint8_t *p, int count, float *to) {
    uint32_t bits[8];
    for (int i = 0; i < count; i++) bits[i] = (uint32_t)p[i] << 23;
    memcpy(to, bits, 4 * (size_t)count);
    for (int i = 0; i < count; i++) to[i] *= 0.5f;
}

/* Span s of a row; `groups` of it: all but for the last one of a row that is a stream or has short blocks. */
INLINE void open_span(const matrix *a, int format, int bits, int64_t row, int64_t s, int groups, span *to) {
    const uint8_t *p = a->weight + row * a->row_bytes;
    if (format == AFFINE) {
        const int unit = a->scale_type == FLOAT32 ? 4 : 2;
        const int64_t first = (row * groups_of_row(a, format) + 16 * s) * unit;
        to->at = p + 16 * s * a->group * bits / 8;
        const int64_t size = a->rows * groups_of_row(a, format) * unit;
        if (first + 16 * unit <= size) { /* compilers know the count: vectors. Those beyond the row are not used */
            read_floats(a->scales + first, a->scale_type, 16, to->scale);
            read_floats(a->biases + first, a->scale_type, 16, to->bias);
        } else {
            read_floats(a->scales + first, a->scale_type, groups, to->scale);
            read_floats(a->biases + first, a->scale_type, groups, to->bias);
        }
        return;
    }
    to->at = p += s * block_bytes(format);
    if (format == MXFP4) {
        const uint8_t *scales = a->scales + row * groups_of_row(a, format) + 8 * s;
        if (groups == 8) { /* compilers know the count: vectors */
            read_exponents(scales, 8, to->scale);
        } else {
            memset(to->scale, 0, 32);
            read_exponents(scales, groups, to->scale);
        }
        for (int i = 0; i < 8; i++) to->bias[i] = -12 * to->scale[i];
    } else if (format == Q4_K || format == Q5_K) {
        open_k_scales(p + 4, float_at(p, 0, FLOAT16), float_at(p, 1, FLOAT16), to);
    } else if (format == IQ2_XXS) {
        const float d = float_at(p, 0, FLOAT16) * 0.25f;
        for (int i = 0; i < 8; i++)
            to->scale[i] = d * (0.5f + (float)(p[9 + 8 * i] >> 4)), to->bias[i] = -64 * to->scale[i];
    } else if (format == IQ4_XS) {
        const float d = float_at(p, 0, FLOAT16);
        for (int i = 0; i < 8; i++) {
            const int code = (p[4 + i / 2] >> (i % 2 * 4) & 15) | (p[2 + i / 4] >> (i % 4 * 2) & 3) << 4;
            to->scale[i] = d * (float)(code - 32), to->bias[i] = -128 * to->scale[i];
        }
    } else if (has_short_blocks(format)) {
        for (int i = 0; i < 8; i++) {
            const uint8_t *block = p + block_bytes(format) / 8 * i;
            to->scale[i] = i < groups ? float_at(block, 0, FLOAT16) : 0;
            to->bias[i] = format != Q4_1 ? -(float)code_offset(format) * to->scale[i] : i < groups ? float_at(block, 1, FLOAT16) : 0;
        }
    } else if (format == Q6_K) {
        const float d = float_at(p + 208, 0, FLOAT16);
        for (int i = 0; i < 16; i++) to->scale[i] = d * (float)(int8_t)p[192 + i], to->bias[i] = -32 * to->scale[i];
    } else if (format == Q2_K) {
        const float d = float_at(p + 80, 0, FLOAT16), least = float_at(p + 82, 0, FLOAT16);
        for (int i = 0; i < 16; i++) to->scale[i] = d * (float)(p[i] & 15), to->bias[i] = -least * (float)(p[i] >> 4);
    } else {
        const float d = float_at(p + 108, 0, FLOAT16);
        for (int i = 0; i < 16; i++) {
            int code = (p[96 + i % 8] >> (i / 8 * 4) & 15) | (p[104 + i % 4] >> (i / 4 * 2) & 3) << 4;
            to->scale[i] = d * (float)(code - 32), to->bias[i] = -4 * to->scale[i];
        }
    }
}

#ifdef __aarch64__ /* shifts bytes; others shift words, whose bits from the next byte are masked */
typedef uint8_t shifted;
#else
typedef uint16_t shifted;
#endif
typedef shifted shifted_vector __attribute__((vector_size(16)));
INLINE byte_vector bits_at(const uint8_t *p, int shift, int mask) { /* of sixteen bytes */
    return (byte_vector)((shifted_vector)load_bytes(p) >> (shifted)shift) & (uint8_t)mask;
}
INLINE byte_vector bits_moved(const uint8_t *p, int from, int to, int mask) { /* the same, then moved up */
    const shifted_vector v = (shifted_vector)load_bytes(p);
    return (byte_vector)(from > to ? v >> (shifted)(from - to) : v << (shifted)(to - from)) & (uint8_t)(mask << to);
}

/* Of IQ2_XXS: a group of 32 has four bytes that choose eight magnitudes each, and 28 bits of signs, seven for each of
 * them: the number of minus signs among eight is even. */
INLINE byte_vector grid_codes(const uint8_t *p, int part) {
    uint32_t signs;
    memcpy(&signs, p + 4, 4);
    const uint32_t low = signs >> 14 * part & 127, high = signs >> (14 * part + 7) & 127;
    const uint64_t each = 0x0101010101010101, bit = 0x8040201008040201;
    const long_vector spread = {
        (low | (uint32_t)__builtin_parity(low) << 7) * each & bit, (high | (uint32_t)__builtin_parity(high) << 7) * each & bit};
    const byte_vector minus = (byte_vector)((byte_vector)spread != 0);
    const byte_vector v = (byte_vector)(long_vector){iq2_grid[p[2 * part]], iq2_grid[p[2 * part + 1]]};
    return (v ^ minus) - minus + 64;
}

static const byte_vector iq4_values = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

/* Doubles of MXFP4's values. */
static const byte_vector e2m1_values = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* Sixteen codes of four bits, which follow each other. */
typedef uint16_t pair_vector __attribute__((vector_size(16)));
INLINE byte_vector follow_codes(const uint8_t *p) {
    const byte_vector twice = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    const pair_vector pairs = (pair_vector)look_up_codes(load_half(p), twice);
    return (byte_vector)((pairs & 0x000f) | (pairs >> 4 & 0x0f00));
}

/* Codes of chunk i of a span that is not affine. */
INLINE byte_vector block_codes(const uint8_t *p, int format, int i) {
    const int half = i / 8, part = i % 2, third = i / 2 % 4;
    switch (format) {
    case Q4_K: return bits_at(p + 16 + i / 4 * 32 + part * 16, third % 2 * 4, 15);
    case Q5_K:
        return bits_at(p + 48 + i / 4 * 32 + part * 16, third % 2 * 4, 15) | bits_moved(p + 16 + part * 16, i / 2, 4, 1);
    case Q6_K:
        return bits_at(p + half * 64 + third % 2 * 32 + part * 16, third / 2 * 4, 15) |
               bits_moved(p + 128 + half * 32 + part * 16, 2 * third, 4, 3);
    case Q2_K: return bits_at(p + 16 + half * 32 + part * 16, 2 * third, 3);
    case Q3_K: return bits_at(p + 32 + half * 32 + part * 16, 2 * third, 3) | bits_moved(p + part * 16, i / 2, 2, 1);
    case IQ4_XS: return look_up_codes(iq4_values, bits_at(p + 8 + i / 2 * 16, part * 4, 15));
    case IQ4_NL: return look_up_codes(iq4_values, bits_at(p + 2 + i / 2 * 18, part * 4, 15));
    case MXFP4: return look_up_codes(e2m1_values, follow_codes(p + 8 * i));
    case Q4_0: return bits_at(p + 2 + i / 2 * 18, part * 4, 15);
    case Q4_1: return bits_at(p + 4 + i / 2 * 20, part * 4, 15);
    case Q8_0: return load_bytes(p + 2 + i / 2 * 34 + part * 16) + 128;
    default: return grid_codes(p + 2 + i / 2 * 8, part); /* IQ2_XXS */
    }
}

/* Codes of chunk i of an affine span. `end`: of the matrix, beyond which nothing is read. */
INLINE bytes stored_codes(const uint8_t *p, int bits, int i, const uint8_t *end) {
    byte_vector v = {0};
    p += 2 * bits * i;
    if (bits == 4) v = load_half(p);
    else if (bits == 8 || p + 16 <= end) v = load_bytes(p);
    else memcpy(&v, p, 2 * bits);
    return to_bytes(v);
}

INLINE floats chunk_codes(const span *s, int format, int bits, int i, const uint8_t *end) {
    if (format != AFFINE) return from_bytes(to_bytes(block_codes(s->at, format, i)));
    const bytes v = stored_codes(s->at, bits, i, end);
    return bits == 8 ? from_bytes(v) : from_codes(v, bits);
}

/* What a code of a group stands for: scale * code + bias, or a table of it where one instruction looks sixteen up. */
typedef struct {
    floats scale, bias;
} group_values;

INLINE int uses_table(int format, int bits) { return HAS_LOOKUP && (format == MXFP4 || (format == AFFINE && bits == 4)); }

INLINE group_values open_group(const span *s, int format, int bits, int g) {
    static const float doubles[] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
    group_values v = {all(s->scale[g]), all(s->bias[g])};
    if (uses_table(format, bits))
        v.scale = format == MXFP4 ? multiply(load(doubles), v.scale) : multiply_add(counting(), v.scale, v.bias);
    return v;
}

/* Ask for what the row after next has where chunk i is. Processors fetch ahead by themselves, but not as far as memory
 * needs: 10 GB/s instead of 6 of 8-bit codes, 8.4 instead of 6.6 of 4-bit ones, one thread of a Xeon. */
INLINE void fetch_ahead(const span *s, int format, int bits, int i) {
    if (format == AFFINE) __builtin_prefetch(s->at + 2 * bits * i + AHEAD);
    else if (i % 4 == 0) __builtin_prefetch(s->at + block_bytes(format) / 4 * (i / 4) + AHEAD);
}

/* The weights of chunk i + k of a span; k is 0 or 1, i even where both occur. */
INLINE floats chunk_values(const span *s, int format, int bits, int i, int k, group_values v, const uint8_t *end) {
    if (uses_table(format, bits)) return look_up(s->at + 8 * i, k, v.scale);
    return multiply_add(chunk_codes(s, format, bits, i + k, end), v.scale, v.bias);
}
#endif
