/* Products by dot products of bytes, of numbers that have almost as many bits as floats.
 *
 * x is split into groups of as many numbers as share a scale of the matrix, 16 or 32. A group is integers of 20 to 23 bits
 * times a scale, and an integer is three signed digits of a byte each. Bytes are what processors multiply fastest: six dot
 * products take the place of eight conversions, eight multiplications and eight additions of four floats each. Sums of a
 * group are exact; groups are added in float32, in one order. Four rows of the matrix are multiplied together, a lane
 * for each.
 *
 * Formats with short blocks may have these four interleaved: of every block first the float16s, one of each row, then codes,
 * four bytes of each row. A vector then has what four lanes multiply by the same four numbers of x, and nothing is left to
 * be moved or added across lanes. */
#ifndef MLXRT_DOT_H
#define MLXRT_DOT_H
#include "packed.h"
/* With one digit activations are rounded to 8 bits, a scale for every group, as llama.cpp does. */
#ifndef DIGITS
#define DIGITS 3
#endif
#if HAS_DOT
#include <math.h>

/* MAX_TILES: tiles of eight columns that share the opened weights. */
enum { MAX_COLUMNS = 8, MAX_TILES = 8 };

INLINE int group_size(int format) { return chunks_together(format) == 2 ? 32 : 16; }
/* Groups of a column, and empty ones up to a whole span. */
INLINE int64_t padded_groups(const matrix *a) { return (a->width + 255) / 256 * (256 / group_size(a->format)); }
/* A column: the digits of every group, the highest first; a scale for every group; a sum of every group. Columns that are
 * multiplied together lie side by side: sixteen digits of each, a scale of each. */
INLINE int64_t column_floats(const matrix *a) { return a->width / 4 * DIGITS + 2 * padded_groups(a); }
/* Whether sums of the lowest digit are converted by themselves: with large codes 32 bits hold two digits only. */
INLINE int is_wide(int format, int bits) {
    return DIGITS > 1 && (format == AFFINE ? bits > 5 : format == IQ4_XS || format == IQ4_NL || format == Q8_0);
}

/* The largest integer for a number of x: its digits hold it, and 32 bits its products with a group of codes. */
INLINE float largest_integer(const matrix *a) {
    static const float codes[] = {0, [Q2_K] = 3, [Q3_K] = 7, [Q4_K] = 15, [Q5_K] = 31, [Q6_K] = 32, [IQ2_XXS] = 43, [Q4_0] = 8, [Q4_1] = 15, [MXFP4] = 12};
    if (DIGITS == 1) return 127;
    if (is_wide(a->format, a->bits)) return 8355000;
    const float code = a->format == AFFINE ? (float)((1 << a->bits) - 1) : codes[a->format];
    return fminf(8355000, 2.147e9f / (code * (float)group_size(a->format)));
}

/* `digits`: of this group of the first of C columns; sixteen of each of the others come in between. */
INLINE void split_group(const matrix *a, const float *x, int C, int8_t *digits, float *scale, float *sum) {
    const int size = group_size(a->format), chunks = size / 16;
    const float largest = largest_magnitude(x, size), limit = largest_integer(a);
    const int empty = !(largest >= 1e-30f && largest < INFINITY);
    const float factor = empty ? 0 : limit / largest;
    four_ints q[8] = {0}, total = {0};
    if (!empty)
        for (int i = 0; i < size / 4; i++) q[i] = round_scaled(x + 4 * i, factor), total = add_ints(total, q[i]);
    for (int d = DIGITS - 1; d >= 0; d--) {
        bytes split[2];
        for (int k = 0; k < chunks; k++) split[k] = take_digit(q + 4 * k);
        if (is_stream(a->format) && a->bits == 4) { /* a byte of the matrix has codes 2i and 2i + 1 */
            const bytes even = even_bytes(split[0], split[1]), odd = odd_bytes(split[0], split[1]);
            split[0] = even, split[1] = odd;
        }
        for (int k = 0; k < chunks; k++) memcpy(digits + 16 * C * (d * chunks + k), &split[k], 16);
    }
    *scale = empty ? largest < INFINITY ? 0 : NAN : largest / limit;
    *sum = empty ? *scale : (float)sum_ints(total) * *scale;
}

/* C columns that are multiplied together. */
INLINE void split_columns(const matrix *a, const float *x, int C, float *to) {
    const int size = group_size(a->format);
    const int64_t groups = a->width / size, padded = padded_groups(a);
    float *scales = to + a->width / 4 * DIGITS * C, *sums = scales + padded * C;
    for (int64_t g = 0; g < groups; g++)
        for (int c = 0; c < C; c++)
            split_group(a, x + c * a->width + g * size, C, (int8_t *)to + g * DIGITS * size * C + 16 * c, scales + g * C + c,
                        sums + g * C + c);
    for (int64_t g = groups * C; g < padded * C; g++) scales[g] = sums[g] = 0;
}

/* Numbers for eight blocks, `together` of which share one. Those that a row's end has too many of are the next one's. */
INLINE void read_spread(const uint8_t *from, int64_t first, int type, int together, float *to) {
    float read[8];
    from += first * (type == FLOAT32 ? 4 : 2);
#define SPREAD(T) \
    read_floats(from, type, 8 / T, read); \
    for (int b = 0; b < 8; b++) to[b] = read[b / T]; \
    return
    switch (together) {
    case 1: SPREAD(1);
    case 2: SPREAD(2);
    case 4: SPREAD(4);
    default: SPREAD(8);
    }
#undef SPREAD
}

/* 256 weights from span n of a row, or `blocks` of 32 at its end: where they are, and a scale and a bias for every group. */
INLINE void open_dot_span(const matrix *a, int format, int bits, int64_t row, int64_t n, int blocks, span *to) {
    if (format != AFFINE) {
        open_span(a, format, bits, row, n, blocks, to); /* groups of 32 are blocks; others have whole spans */
        return;
    }
    const int64_t groups = a->width / a->group, first = row * groups;
    const int together = a->group / 32; /* blocks of a group */
    to->at = a->weight + row * a->row_bytes + 32 * bits * n;
    if (together * 32 == a->group && 8 % together == 0 && first + 8 * (n + 1) / together <= a->rows * groups) {
        read_spread(a->scales, first + 8 * n / together, a->scale_type, together, to->scale);
        read_spread(a->biases, first + 8 * n / together, a->scale_type, together, to->bias);
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

/* The scales of block b of four rows, or another float16 of it, in formats where a block is a group. */
INLINE four_floats block_floats(const span s[4], int format, int interleaved, int b, int which) {
    if (interleaved) return load_halves(s->at + block_bytes(format) / 2 * b + 8 * which);
    const int at = block_bytes(format) / 8 * b + 2 * which;
    return read_halves((const uint8_t *const[]){s[0].at + at, s[1].at + at, s[2].at + at, s[3].at + at});
}

/* Codes of 32 weights as signed bytes, in the order of the digits. */
INLINE void open_block(const span *s, int format, int bits, int b, const uint8_t *end, bytes to[2]) {
    UNROLL for (int k = 0; k < 2; k++) {
        if (format == MXFP4) to[k] = to_bytes(look_up_codes(e2m1_values, bits_at(s->at + 16 * b, 4 * k, 15)) - (uint8_t)code_offset(format));
        else if (format != AFFINE) to[k] = to_bytes(block_codes(s->at, format, 2 * b + k) - (uint8_t)code_offset(format));
        else if (bits == 4) to[k] = to_bytes(bits_at(s->at + 16 * b, 4 * k, 15));
        else {
            to[k] = stored_codes(s->at, bits, 2 * b + k, end);
            to[k] = bits == 8 ? to_bytes((byte_vector)to[k] ^ 128) : spread_codes(to[k], bits);
        }
    }
}

/* The same of four rows that are interleaved, as dot_columns reads them. */
INLINE void open_interleaved(const span *s, int format, int b, bytes to[8]) {
    const uint8_t *codes = s->at + block_bytes(format) / 2 * b + 4 * float_bytes(format);
    UNROLL for (int i = 0; i < 8; i++) {
        if (format == Q8_0) to[i] = to_bytes(load_bytes(codes + 16 * i));
        else {
            const byte_vector code = bits_at(codes + i % 4 * 16, i / 4 * 4, 15);
            if (format == IQ4_NL) to[i] = to_bytes(look_up_codes(iq4_values, code) - (uint8_t)code_offset(format));
            else to[i] = to_bytes(code - (uint8_t)code_offset(format));
        }
    }
}

/* Ask for what the next four rows have where block b is. */
INLINE void fetch_rows(const matrix *a, const span *s, int format, int bits, int b) {
    if (format == AFFINE && bits == 8) __builtin_prefetch(s->at + 32 * b + 4 * a->row_bytes);
    else if (b % 2 == 0)
        __builtin_prefetch(s->at + (format == AFFINE ? 32 * bits : block_bytes(format)) / 8 * b + 4 * a->row_bytes);
}

/* Ask for what comes a kilobyte later: four rows that are interleaved follow each other. */
INLINE void fetch_interleaved(const span *s, int format, int b) {
    const int size = block_bytes(format) / 2;
    for (int i = 0; i < size; i += 64) __builtin_prefetch(s->at + size * b + i + 1024);
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

/* The same for C columns, by bytes of four rows side by side: `w` has four rows' bytes 0 to 3, then 4 to 7 ... To put them
 * side by side costs more than to add up lanes, but once for all columns. */
INLINE void dot_columns(const bytes *w, int chunks, int wide, const int C, const int8_t *x, four_floats to[]) {
    four_ints total[MAX_COLUMNS];
    UNROLL for (int d = 0; d < DIGITS; d++) {
        const int apart = wide && d == DIGITS - 1;
        if (apart)
            UNROLL for (int c = 0; c < C; c++) to[c] = to_floats(total[c]);
        UNROLL for (int k = 0; k < chunks; k++) {
            bytes digits[MAX_COLUMNS];
            UNROLL for (int c = 0; c < C; c++)
                digits[c] = to_bytes(load_bytes((const uint8_t *)x + 16 * ((d * chunks + k) * C + c)));
            UNROLL for (int c = 0; c < C; c++) {
                if (k == 0 && (d == 0 || apart)) total[c] = first_lane_dots(w[0], digits[c]);
                else total[c] = ADD_LANE_DOTS(k ? total[c] : times_256(total[c]), w[4 * k], digits[c], 0);
            }
            UNROLL for (int c = 0; c < C; c++) total[c] = ADD_LANE_DOTS(total[c], w[4 * k + 1], digits[c], 1);
            UNROLL for (int c = 0; c < C; c++) total[c] = ADD_LANE_DOTS(total[c], w[4 * k + 2], digits[c], 2);
            UNROLL for (int c = 0; c < C; c++) total[c] = ADD_LANE_DOTS(total[c], w[4 * k + 3], digits[c], 3);
        }
    }
    UNROLL for (int c = 0; c < C; c++) to[c] = wide ? add_scaled(to[c], 256, to_floats(total[c])) : to_floats(total[c]);
}

/* Four rows from `row`, of which `rows` exist, times `tiles` times C columns, into y[column * stride + row]. */
INLINE void dot_rows(const matrix *a, const int format, const int bits, const int interleaved, const int C, int tiles,
                     int64_t row, int rows, const float *x, float *y, int64_t stride) {
    const uint8_t *end = a->weight + a->rows * a->row_bytes;
    const int size = group_size(format), groups = 256 / size;
    /* Not read in loops, which write nothing, but whose order is kept. */
    const int64_t column = column_floats(a), padded = padded_groups(a), width = a->width, spans = (width + 255) / 256;
    four_floats acc[MAX_TILES * MAX_COLUMNS];
    for (int c = 0; c < tiles * C; c++) acc[c] = (four_floats){0};
#define BLOCK \
    { \
        bytes w[4][2], side[8]; \
        if (interleaved) { \
            fetch_interleaved(s, format, b); \
            open_interleaved(s, format, b, side); \
        } else \
            UNROLL for (int r = 0; r < 4; r++) { \
                fetch_rows(a, &s[r], format, bits, b); \
                open_block(&s[r], format, bits, b, end, w[r]); \
            } \
        if (C > 1 && !interleaved) \
            UNROLL for (int k = 0; k < 2; k++) interleave_rows(w[0][k], w[1][k], w[2][k], w[3][k], side + 4 * k); \
        four_floats factor, least; \
        if (has_short_blocks(format)) factor = block_floats(s, format, interleaved, b, 0); \
        if (format == Q4_1) least = block_floats(s, format, interleaved, b, 1); \
        for (int t = 0; t < tiles; t++) { \
            const float *tile = x + t * C * column, *scales = tile + (width / 4 * DIGITS + n * groups) * C; \
            const int8_t *digits = (const int8_t *)tile + 32 * DIGITS * C * (8 * n + b); \
            KEEP_ORDER; \
            UNROLL for (int k = 0; k < 32 / size; k++) { \
                const int g = 32 / size * b + k; \
                four_floats sums[MAX_COLUMNS]; \
                if (C > 1 || interleaved) dot_columns(side + 4 * k, size / 16, is_wide(format, bits), C, digits + size * DIGITS * C * k, sums); \
                else sums[0] = dot_group(w, k, size / 16, is_wide(format, bits), digits + size * DIGITS * k); \
                UNROLL for (int c = 0; c < C; c++) { \
                    four_floats total = add_products(sums[c], scaled(has_short_blocks(format) ? factor : scale[g], scales[g * C + c]), acc[t * C + c]); \
                    if (!code_offset(format)) total = add_scaled(has_short_blocks(format) ? least : bias[g], scales[(padded + g) * C + c], total); \
                    acc[t * C + c] = total; \
                } \
            } \
        } \
    }
    if (has_short_blocks(format)) { /* a row is one run of blocks */
        const int64_t n = 0;
        const int run = (int)(width / 32);
        span s[4];
        four_floats scale[16], bias[16];
        UNROLL for (int r = 0; r < 4; r++) s[r].at = a->weight + (row + (r < rows ? r : rows - 1)) * a->row_bytes;
        UNROLL_TWICE for (int b = 0; b < run; b++) BLOCK
    } else
        for (int64_t n = 0; n < spans; n++) {
            const int64_t left = (width - 256 * n) / 32;
            const int blocks = !is_stream(format) || left > 8 ? 8 : (int)left;
            span s[4];
            four_floats scale[16], bias[16];
            open_four(a, format, bits, row, rows, n, blocks, s, scale, bias);
            if (blocks == 8 && C < 8) { /* eight columns are enough to hide what a block number costs that is not a constant */
                UNROLL for (int b = 0; b < 8; b++) BLOCK
            } else {
                for (int b = 0; b < blocks; b++) BLOCK
            }
        }
#undef BLOCK
    for (int c = 0; c < tiles * C; c++)
        for (int r = 0; r < rows; r++) y[c * stride + r] = acc[c][r];
}
#endif
#endif
