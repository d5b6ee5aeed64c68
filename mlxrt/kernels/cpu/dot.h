/* Products by dot products of bytes, of numbers that have almost as many bits as floats.
 *
 * x is split into groups of as many numbers as share a scale of the matrix, 16 or 32. A group is integers of 20 to 23 bits
 * times a scale, and an integer is three signed digits of a byte each. Bytes are what processors multiply fastest: six dot
 * products take the place of eight conversions, eight multiplications and eight additions of four floats each. Sums of a
 * group are exact; groups are added in float32, in one order. Four rows of the matrix are multiplied together, a lane
 * for each. */
#ifndef MLXRT_DOT_H
#define MLXRT_DOT_H
#include "packed.h"
#if HAS_DOT
#include <math.h>

enum { DIGITS = 3 };

INLINE int group_size(int format) { return chunks_together(format) == 2 ? 32 : 16; }
/* Groups of a column, and empty ones up to a whole span. */
INLINE int64_t padded_groups(const matrix *a) { return (a->width + 255) / 256 * (256 / group_size(a->format)); }
/* A column: the digits of every group, the highest first; a scale for every group; a sum of every group. */
INLINE int64_t column_floats(const matrix *a) { return a->width / 4 * DIGITS + 2 * padded_groups(a); }

/* Whether sums of the lowest digit are converted by themselves: with large codes 32 bits hold two digits only. */
INLINE int is_wide(int format, int bits) { return format == AFFINE ? bits > 5 : format == IQ4_XS || format == IQ4_NL; }

/* The largest integer for a number of x: three digits hold it, and 32 bits its products with a group of codes. */
INLINE float largest_integer(const matrix *a) {
    static const float codes[] = {0, [Q2_K] = 3, [Q3_K] = 7, [Q4_K] = 15, [Q5_K] = 31, [Q6_K] = 32, [IQ2_XXS] = 43};
    if (is_wide(a->format, a->bits)) return 8355000;
    const float code = a->format == AFFINE ? (float)((1 << a->bits) - 1) : codes[a->format];
    return fminf(8355000, 2.147e9f / (code * (float)group_size(a->format)));
}

/* Where number i of a group of 32 lies: a byte has codes 2j and 2j + 1 of an affine matrix of 4 bits. */
INLINE int digit_place(const matrix *a, int i) { return a->format == AFFINE && a->bits == 4 ? i % 2 * 16 + i / 2 : i; }

INLINE void split_group(const matrix *a, const float *x, int8_t *digits, float *scale, float *sum) {
    const int size = group_size(a->format);
    float largest = 0;
    int finite = 1;
    for (int i = 0; i < size; i++) largest = fmaxf(largest, fabsf(x[i])), finite &= fabsf(x[i]) < INFINITY;
    memset(digits, 0, (size_t)(DIGITS * size));
    *scale = *sum = finite ? 0 : NAN;
    if (!finite || largest < 1e-30f) return;
    const float limit = largest_integer(a), factor = limit / largest;
    int32_t total = 0, q[32];
    for (int i = 0; i < size; i += 4) {
        four_floats v;
        memcpy(&v, x + i, 16);
        const four_ints whole = round_floats(v * factor);
        memcpy(q + i, &whole, 16);
    }
    for (int i = 0; i < size; i++) {
        const int place = digit_place(a, i);
        const int8_t low = (int8_t)q[i], middle = (int8_t)((q[i] - low) >> 8);
        digits[2 * size + place] = low, digits[size + place] = middle;
        digits[place] = (int8_t)((((q[i] - low) >> 8) - middle) >> 8);
        total += q[i];
    }
    *scale = largest / limit;
    *sum = (float)total * *scale;
}

INLINE void split_column(const matrix *a, const float *x, float *to) {
    const int size = group_size(a->format);
    const int64_t groups = a->width / size, padded = padded_groups(a);
    float *scales = to + a->width / 4 * DIGITS, *sums = scales + padded;
    for (int64_t g = 0; g < groups; g++)
        split_group(a, x + g * size, (int8_t *)to + g * DIGITS * size, scales + g, sums + g);
    for (int64_t g = groups; g < padded; g++) scales[g] = sums[g] = 0;
}

/* 256 weights from span n of a row, or `blocks` of 32 at its end: where they are, and a scale and a bias for every group. */
INLINE void open_dot_span(const matrix *a, int format, int bits, int64_t row, int64_t n, int blocks, span *to) {
    if (format != AFFINE) {
        open_span(a, format, bits, row, n, blocks, to); /* groups of 32 are blocks; others have whole spans */
        return;
    }
    const int unit = a->scale_type == FLOAT32 ? 4 : 2;
    const int64_t groups = a->width / a->group, first = row * groups;
    to->at = a->weight + row * a->row_bytes + 32 * bits * n;
    if (a->group == 32 && blocks == 8) {
        read_floats(a->scales + (first + 8 * n) * unit, a->scale_type, 8, to->scale);
        read_floats(a->biases + (first + 8 * n) * unit, a->scale_type, 8, to->bias);
    } else {
        for (int b = 0; b < 8; b++) {
            const int64_t g = first + (256 * n + 32 * b) / a->group;
            to->scale[b] = b < blocks ? float_at(a->scales, g, a->scale_type) : 0;
            to->bias[b] = b < blocks ? float_at(a->biases, g, a->scale_type) : 0;
        }
    }
    if (bits == 8) /* bytes are signed */
        for (int b = 0; b < 8; b++) to->bias[b] += 128 * to->scale[b];
}

/* How much higher than signed codes the format's are; then groups have no bias. */
INLINE int code_offset(int format) {
    return format == Q6_K ? 32 : format == IQ2_XXS ? 64 : format == IQ4_XS || format == IQ4_NL ? 128 : 0;
}

/* The spans of four rows; a scale and a bias for every group, a lane for each row. */
INLINE void open_four(const matrix *a, int format, int bits, int64_t row, int rows, int64_t n, int blocks, span s[4],
                      four_floats scale[16], four_floats bias[16]) {
    const int block = block_bytes(format), groups = 256 / group_size(format);
    if (format == Q4_K || format == Q5_K || format == Q6_K) {
        const uint8_t *d[4], *least[4];
        bytes stored[4];
        four_floats v[16];
        UNROLL for (int r = 0; r < 4; r++) {
            const uint8_t *p = s[r].at = a->weight + (row + (r < rows ? r : rows - 1)) * a->row_bytes + n * block;
            stored[r] = to_bytes(format == Q6_K ? load_bytes(p + 192) ^ 128 : k_scales(p + 4));
            d[r] = format == Q6_K ? p + 208 : p, least[r] = p + 2;
        }
        transpose_bytes(stored, v);
        const four_floats factor = read_halves(d);
        if (format == Q6_K) {
            UNROLL for (int g = 0; g < 16; g++) scale[g] = (v[g] - (BYTES_FROM + 128.0f)) * factor;
            return;
        }
        const four_floats offset = factor * -(float)BYTES_FROM, minus = -read_halves(least), back = minus * -(float)BYTES_FROM;
        UNROLL for (int g = 0; g < 8; g++)
            scale[g] = add_products(v[g], factor, offset), bias[g] = add_products(v[8 + g], minus, back);
        return;
    }
    UNROLL for (int r = 0; r < 4; r++) open_dot_span(a, format, bits, row + (r < rows ? r : rows - 1), n, blocks, &s[r]);
    UNROLL for (int g = 0; g < groups; g += 4) {
        transpose_four((const float *const[]){s[0].scale + g, s[1].scale + g, s[2].scale + g, s[3].scale + g}, scale + g);
        if (code_offset(format)) continue;
        transpose_four((const float *const[]){s[0].bias + g, s[1].bias + g, s[2].bias + g, s[3].bias + g}, bias + g);
    }
}

/* Codes of 32 weights as signed bytes, in the order of the digits. */
INLINE void open_block(const span *s, int format, int bits, int b, const uint8_t *end, bytes to[2]) {
    UNROLL for (int k = 0; k < 2; k++) {
        if (format != AFFINE) to[k] = to_bytes(block_codes(s->at, format, 2 * b + k) - (uint8_t)code_offset(format));
        else if (bits == 4) to[k] = to_bytes(bits_at(s->at + 16 * b, 4 * k, 15));
        else {
            to[k] = stored_codes(s->at, bits, 2 * b + k, end);
            to[k] = bits == 8 ? to_bytes((byte_vector)to[k] ^ 128) : spread_codes(to[k], bits);
        }
    }
}

/* Ask for what the next four rows have where block b is. */
INLINE void fetch_rows(const matrix *a, const span *s, int format, int bits, int b) {
    if (format == AFFINE && bits == 8) __builtin_prefetch(s->at + 32 * b + 4 * a->row_bytes);
    else if (b % 2 == 0)
        __builtin_prefetch(s->at + (format == AFFINE ? 32 * bits : block_bytes(format)) / 8 * b + 4 * a->row_bytes);
}

/* The sums of a group of four rows: of `chunks` of sixteen codes from chunk `first` on, times x. */
INLINE four_floats dot_group(const bytes w[4][2], int first, int chunks, int wide, const int8_t *x) {
    four_ints total;
    UNROLL for (int d = 0; d < DIGITS; d++) {
        four_ints rows[4];
        UNROLL for (int k = 0; k < chunks; k++) {
            const bytes digits = to_bytes(load_bytes((const uint8_t *)x + 16 * (d * chunks + k)));
            UNROLL for (int r = 0; r < 4; r++)
                rows[r] = k ? add_dots(rows[r], w[r][first + k], digits) : first_dots(w[r][first], digits);
        }
        const four_ints sums = sum_each(rows[0], rows[1], rows[2], rows[3]);
        if (wide && d == DIGITS - 1) return add_scaled(to_floats(total), 256, to_floats(sums));
        total = d ? add_to_256_times(total, sums) : sums;
    }
    return to_floats(total);
}

/* Four rows from `row`, of which `rows` exist, times C columns, into y[column * stride + row]. */
INLINE void dot_rows(const matrix *a, const int format, const int bits, const int C, int64_t row, int rows, const float *x,
                     float *y, int64_t stride) {
    const uint8_t *end = a->weight + a->rows * a->row_bytes;
    const int size = group_size(format), groups = 256 / size;
    const int64_t column = column_floats(a), padded = padded_groups(a), spans = (a->width + 255) / 256;
    four_floats acc[4];
    UNROLL for (int c = 0; c < C; c++) acc[c] = (four_floats){0};
    for (int64_t n = 0; n < spans; n++) {
        const int64_t left = (a->width - 256 * n) / 32;
        const int blocks = (format != AFFINE && format != IQ4_NL) || left > 8 ? 8 : (int)left;
        span s[4];
        four_floats scale[16], bias[16];
        open_four(a, format, bits, row, rows, n, blocks, s, scale, bias);
#define BLOCK \
    { \
        bytes w[4][2]; \
        UNROLL for (int r = 0; r < 4; r++) { \
            fetch_rows(a, &s[r], format, bits, b); \
            open_block(&s[r], format, bits, b, end, w[r]); \
        } \
        UNROLL for (int c = 0; c < C; c++) { \
            const float *scales = x + c * column + a->width / 4 * DIGITS + n * groups; \
            const int8_t *digits = (const int8_t *)(x + c * column) + 32 * DIGITS * (8 * n + b); \
            KEEP_ORDER; \
            UNROLL for (int k = 0; k < 32 / size; k++) { \
                const int g = 32 / size * b + k; \
                const four_floats sums = dot_group(w, k, size / 16, is_wide(format, bits), digits + size * DIGITS * k); \
                acc[c] = add_products(sums, scaled(scale[g], scales[g]), acc[c]); \
                if (!code_offset(format)) acc[c] = add_scaled(bias[g], scales[padded + g], acc[c]); \
            } \
        } \
    }
        if (blocks == 8) {
            UNROLL for (int b = 0; b < 8; b++) BLOCK
        } else {
            for (int b = 0; b < blocks; b++) BLOCK
        }
#undef BLOCK
    }
    UNROLL for (int c = 0; c < C; c++)
        for (int r = 0; r < rows; r++) y[c * stride + r] = acc[c][r];
}
#endif
#endif
