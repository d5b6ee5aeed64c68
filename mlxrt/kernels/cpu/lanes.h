/* Q4_K, Q5_K and Q6_K with LANES rows side by side, times x by dot products of bytes; with AVX-512 Q8_0, Q4_0 and Q4_1, too.
 *
 * A lane is a row's: a vector has four bytes of each row, which meet the same four numbers of x, and nothing is moved or added
 * across lanes. LANES rows have for every 256 weights: their float16s, one of each row; their groups' scales, a byte of each
 * row; of Q4_K and Q5_K minima, too, four bytes of each row; then the codes in the file's order, four bytes of each row.
 *
 * Short blocks are as dot.h has them: 32 weights of every row, float16s first.
 *
 * x is integers of 20 to 23 bits times a scale for every 256 of them, or a short block's 32, an integer three signed digits of
 * a byte each (dot.h).
 * Sums of a group are exact; in between they may run over, which adding up takes back. Groups are added in float32, in
 * one order. */
#ifndef MLXRT_LANES_H
#define MLXRT_LANES_H
#include "dot.h"
#if LANES
#include <math.h>

enum { LANE_TILES = 8, LANE_COLUMNS = 8 }; /* tiles of eight columns that share the opened codes */

INLINE int has_minima(int format) { return format == Q4_K || format == Q5_K; }
INLINE int lane_group(int format) { return format == Q6_K ? 16 : 32; }
INLINE int lane_span(int format) { return has_short_blocks(format) ? 32 : 256; } /* numbers of x that share a scale */
/* How much higher codes are than what they stand for. */
INLINE int lane_offset(int format) { return format == Q6_K ? 32 : format == Q8_0 ? 128 : format == Q4_0 ? 8 : 0; }
INLINE int head_bytes(int format) { return format == Q6_K ? 18 : 20; } /* of a row, before its codes: float16s, scales, minima */
INLINE int lane_row_bytes(int format) { return format == Q4_K ? 148 : format == Q5_K ? 180 : 210; } /* of 256 weights */

/* A column: digits of every block of 32, the highest first; a scale for every span; for every group what its sum adds, where
 * there are minima four digits of the sum, those of a span's eight groups together. Columns that are multiplied together lie
 * side by side: sixteen digits of each, a number of each, 32 digits of sums of each. */
INLINE int64_t lane_column_floats(const matrix *a) {
    return a->width / 4 * DIGITS + a->width / lane_span(a->format) + a->width / lane_group(a->format);
}

INLINE float largest_of_span(const float *x, int span) {
    uint32_t largest = 0; /* floats without sign are ordered as integers, and what is not finite is the largest */
    for (int i = 0; i < span; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float found;
    memcpy(&found, &largest, 4);
    return found;
}

/* A span of one of C columns. Where codes are higher than what they stand for, a group's sum takes that back. */
INLINE void split_lane_span(const int format, const float *x, int C, int8_t *digits, float *scale, float *sums) {
    const int size = lane_group(format), span = lane_span(format);
    const float codes = format == Q5_K ? 31 : format == Q4_K || format == Q4_1 ? 15 : (float)lane_offset(format);
    const float limit = DIGITS == 1 ? 127 : fminf(8355000, 2.147e9f / (codes * (float)size)), largest = largest_of_span(x, span);
    const int empty = !(largest >= 1e-30f && largest < INFINITY);
    const float factor = empty ? 0 : limit / largest;
    int32_t q[256];
    *scale = empty ? largest < INFINITY ? 0 : NAN : largest / limit;
    for (int i = 0; i < span; i++) q[i] = empty ? 0 : (int32_t)rintf(x[i] * factor);
    for (int g = 0; g < span / size; g++) {
        int32_t sum = 0;
        for (int i = 0; i < size; i++) sum += q[size * g + i];
        if (has_minima(format))
            for (int d = 3; d >= 0; d--, sum = (sum - (int8_t)sum) >> 8) ((int8_t *)sums)[8 * d + g] = (int8_t)sum;
        else if (lane_offset(format)) sum = (int32_t)(-(uint32_t)lane_offset(format) * (uint32_t)sum), memcpy(sums + g * C, &sum, 4);
        else sums[g * C] = empty ? *scale : (float)sum * *scale;
    }
    for (int d = DIGITS - 1; d >= 0; d--)
        for (int chunk = 0; chunk < span / 16; chunk++) {
            int8_t *to = digits + 16 * C * ((chunk / 2 * DIGITS + d) * 2 + chunk % 2);
            for (int i = 0; i < 16; i++) to[i] = (int8_t)q[16 * chunk + i];
            for (int i = 16 * chunk; i < 16 * chunk + 16; i++) q[i] = (q[i] - (int8_t)q[i]) >> 8;
        }
}

INLINE void split_spans(const matrix *a, const int format, const float *x, int C, float *to) {
    const int span = lane_span(format), groups = span / lane_group(format);
    const int64_t spans = a->width / span;
    float *scales = to + a->width / 4 * DIGITS * C, *sums = scales + spans * C;
    for (int64_t n = 0; n < spans; n++)
        for (int c = 0; c < C; c++)
            split_lane_span(format, x + c * a->width + span * n, C, (int8_t *)to + n * span * DIGITS * C + 16 * c,
                            scales + n * C + c, sums + n * groups * C + (has_minima(format) ? 8 : 1) * c);
}

static void split_lane_columns(const matrix *a, const float *x, int C, float *to) {
    switch (a->format) { /* compilers know how long the loops of each are */
    case Q4_K: split_spans(a, Q4_K, x, C, to); break;
    case Q5_K: split_spans(a, Q5_K, x, C, to); break;
    case Q6_K: split_spans(a, Q6_K, x, C, to); break;
    case Q8_0: split_spans(a, Q8_0, x, C, to); break;
    case Q4_0: split_spans(a, Q4_0, x, C, to); break;
    default: split_spans(a, Q4_1, x, C, to);
    }
}

typedef shifted shifted_lanes __attribute__((vector_size(4 * LANES)));
INLINE lane_bytes lane_bits(const uint8_t *p, int shift, int mask) {
    return (lane_bytes)((shifted_lanes)load_lanes(p) >> (shifted)shift) & (uint8_t)mask;
}
INLINE lane_bytes lane_bits_moved(const uint8_t *p, int from, int to, int mask) {
    const shifted_lanes v = (shifted_lanes)load_lanes(p);
    return (lane_bytes)(from > to ? v >> (shifted)(from - to) : v << (shifted)(to - from)) & (uint8_t)(mask << to);
}

/* Codes of block b: four numbers of each row, the next four ... The same bytes as block_codes reads. */
INLINE void open_lanes(const uint8_t *codes, int format, int b, lane_bytes to[8]) {
    const int half = b / 4, third = b % 4;
    UNROLL for (int i = 0; i < 8; i++) {
        const uint8_t *p = codes + 4 * LANES * i;
        if (format == Q4_K) to[i] = lane_bits(p + LANES * (b / 2 * 32), b % 2 * 4, 15);
        else if (format == Q5_K) to[i] = lane_bits(p + LANES * (32 + b / 2 * 32), b % 2 * 4, 15) | lane_bits_moved(p, b, 4, 1);
        else
            to[i] = lane_bits(p + LANES * (half * 64 + third % 2 * 32), third / 2 * 4, 15) |
                    lane_bits_moved(p + LANES * (128 + half * 32), 2 * third, 4, 3);
    }
}

/* Sums of 16 * chunks products of each row and C columns; the digits of a block lie 32 * C bytes apart. Few columns have a sum for
 * each digit, so that no dot product waits for the one before; for more there are no registers. */
INLINE void dot_lanes(const lane_bytes *w, int chunks, const int C, const int8_t *x, lane_ints total[]) {
    const int apart = C <= 4;
    lane_ints digit[DIGITS][LANE_COLUMNS];
    UNROLL for (int d = 0; d < DIGITS; d++) {
        UNROLL for (int c = 0; c < C; c++) digit[d][c] = apart || !d ? (lane_ints){0} : digit[d - 1][c] << 8;
        UNROLL for (int k = 0; k < chunks; k++) {
            const int8_t *at = x + C * (32 * d + 16 * k);
#define QUARTER(i) UNROLL for (int c = 0; c < C; c++) digit[d][c] = ADD_FOUR(digit[d][c], w[4 * k + i], at + 16 * c, i);
            QUARTER(0) QUARTER(1) QUARTER(2) QUARTER(3)
#undef QUARTER
        }
    }
    UNROLL for (int c = 0; c < C; c++) {
        total[c] = digit[apart ? 0 : DIGITS - 1][c];
        UNROLL for (int d = 1; apart && d < DIGITS; d++) total[c] = (total[c] << 8) + digit[d][c];
    }
}

/* Minima of eight groups times sums of x. */
INLINE lane_floats dot_minima(const lane_bytes minima[2], const int8_t *sums) {
    lane_ints high = {0}, low = {0};
#define DIGIT(total, d) total = ADD_FOUR(total, minima[0], sums + 16 * ((d) / 2), (d) % 2 * 2), total = ADD_FOUR(total, minima[1], sums + 16 * ((d) / 2), (d) % 2 * 2 + 1)
    DIGIT(high, 0), high <<= 8, DIGIT(high, 1);
    DIGIT(low, 2), low <<= 8, DIGIT(low, 3);
#undef DIGIT
    return add_lane_products(to_lane_floats(high), all_lanes(65536), to_lane_floats(low));
}

/* LANES rows from `row` times `tiles` times C columns, into y[column * stride + row]. */
INLINE void multiply_lanes(const matrix *a, const int format, const int C, int tiles, int64_t row, const float *x, float *y, int64_t stride) {
    const int size = lane_group(format), groups = 256 / size, bytes_of_span = LANES * lane_row_bytes(format);
    const int64_t column = lane_column_floats(a), width = a->width, spans = width / 256;
    const uint8_t *p = a->weight + row * a->row_bytes;
    lane_floats acc[LANE_TILES * LANE_COLUMNS];
    for (int c = 0; c < tiles * C; c++) acc[c] = (lane_floats){0};
    for (int64_t n = 0; n < spans; n++, p += bytes_of_span) {
        const uint8_t *scales = p + (head_bytes(format) - 16) * LANES, *codes = p + head_bytes(format) * LANES;
        lane_floats part[LANE_TILES * LANE_COLUMNS];
        for (int c = 0; c < tiles * C; c++) part[c] = (lane_floats){0};
#define BLOCK \
    { \
        lane_bytes w[8]; \
        for (int i = 0; i < bytes_of_span / 8; i += 64) __builtin_prefetch(p + bytes_of_span / 8 * b + i + AHEAD / 2); \
        open_lanes(codes, format, b, w); \
        for (int t = 0; t < tiles; t++) { \
            const float *tile = x + t * C * column, *sums = tile + (width / 4 * DIGITS + spans + n * groups) * C; \
            const int8_t *digits = (const int8_t *)tile + 32 * DIGITS * C * (8 * n + b); \
            KEEP_ORDER; \
            UNROLL for (int k = 0; k < 32 / size; k++) { \
                const int g = 32 / size * b + k; \
                const lane_floats scale = lane_numbers(scales + LANES * g, format == Q6_K); \
                lane_ints total[LANE_COLUMNS]; \
                dot_lanes(w + size / 4 * k, size / 16, C, digits + 16 * C * k, total); \
                UNROLL for (int c = 0; c < C; c++) { \
                    if (!has_minima(format)) total[c] += four_bytes((const int8_t *)(sums + g * C + c)); \
                    part[t * C + c] = add_lane_products(to_lane_floats(total[c]), scale, part[t * C + c]); \
                } \
            } \
        } \
    }
        if (C == 1) {
            UNROLL for (int b = 0; b < 8; b++) BLOCK
        } else
            for (int b = 0; b < 8; b++) BLOCK
#undef BLOCK
        const lane_floats d = lane_halves(p), least = has_minima(format) ? -lane_halves(p + 2 * LANES) : d;
        lane_bytes minima[2];
        UNROLL for (int i = 0; i < 2; i++) minima[i] = load_lanes(scales + LANES * (8 + 4 * i));
        for (int t = 0; t < tiles; t++) {
            const float *tile = x + t * C * column, *factors = tile + (width / 4 * DIGITS + n) * C;
            const float *sums = tile + (width / 4 * DIGITS + spans + n * groups) * C;
            UNROLL for (int c = 0; c < C; c++) {
                lane_floats total = add_lane_products(part[t * C + c], d * factors[c], acc[t * C + c]);
                if (has_minima(format))
                    total = add_lane_products(dot_minima(minima, (const int8_t *)sums + 32 * c), least * factors[c], total);
                acc[t * C + c] = total;
            }
        }
    }
    for (int c = 0; c < tiles * C; c++) memcpy(y + c * stride, &acc[c], sizeof acc[c]);
}

/* The same for short blocks. */
INLINE void multiply_short_lanes(const matrix *a, const int format, const int C, int tiles, int64_t row, const float *x, float *y, int64_t stride) {
    const int size = LANES * block_bytes(format) / 8;
    const int64_t column = lane_column_floats(a), width = a->width, blocks = width / 32;
    const uint8_t *p = a->weight + row * a->row_bytes;
    lane_floats acc[LANE_TILES * LANE_COLUMNS];
    for (int c = 0; c < tiles * C; c++) acc[c] = (lane_floats){0};
    UNROLL_TWICE for (int64_t b = 0; b < blocks; b++, p += size) {
        const uint8_t *codes = p + LANES * float_bytes(format);
        const lane_floats d = lane_halves(p), least = format == Q4_1 ? lane_halves(p + 2 * LANES) : d;
        lane_bytes w[8];
        for (int i = 0; i < size; i += 64) __builtin_prefetch(p + i + AHEAD / 2);
        UNROLL for (int i = 0; i < 8; i++)
            w[i] = format == Q8_0 ? load_lanes(codes + 4 * LANES * i) ^ (uint8_t)128 : lane_bits(codes + 4 * LANES * (i % 4), i / 4 * 4, 15);
        for (int t = 0; t < tiles; t++) {
            const float *tile = x + t * C * column, *scales = tile + (width / 4 * DIGITS + b) * C, *sums = scales + blocks * C;
            lane_ints total[LANE_COLUMNS];
            KEEP_ORDER;
            dot_lanes(w, 2, C, (const int8_t *)tile + 32 * DIGITS * C * b, total);
            UNROLL for (int c = 0; c < C; c++) {
                if (lane_offset(format)) total[c] += four_bytes((const int8_t *)(sums + c));
                acc[t * C + c] = add_lane_products(to_lane_floats(total[c]), d * scales[c], acc[t * C + c]);
                if (format == Q4_1) acc[t * C + c] = add_lane_products(least, all_lanes(sums[c]), acc[t * C + c]);
            }
        }
    }
    for (int c = 0; c < tiles * C; c++) memcpy(y + c * stride, &acc[c], sizeof acc[c]);
}

/* One of the rows as floats: its bytes are put together as a file has them. */
INLINE void unpack_lane(const matrix *a, const int format, int64_t row, float *to) {
    const int head = head_bytes(format), lane = (int)(row % LANES), codes_at = format == Q6_K ? 0 : 16;
    const uint8_t *p = a->weight + (row - lane) * a->row_bytes;
    uint8_t block[210];
    for (int64_t n = 0; n < a->width / 256; n++, p += LANES * lane_row_bytes(format), to += 256) {
        const uint8_t *numbers = p + (head - 16) * LANES + lane, *minima = p + (head - 8) * LANES + 4 * lane;
        const float d = float_at(p, lane, FLOAT16), least = has_minima(format) ? float_at(p, LANES + lane, FLOAT16) : 0;
        for (int i = 0; i < lane_row_bytes(format) - head; i += 4) memcpy(block + codes_at + i, p + LANES * (head + i) + 4 * lane, 4);
        for (int chunk = 0; chunk < 16; chunk++) {
            const int g = has_minima(format) ? chunk / 2 : chunk, number = numbers[LANES * g];
            const float scale = d * (float)(has_minima(format) ? number : (int8_t)number);
            const float bias = has_minima(format) ? -least * (float)minima[LANES * (g / 4 * 4) + g % 4] : -32 * scale;
            const floats codes = from_bytes(to_bytes(block_codes(block, format, chunk)));
            store(to + 16 * chunk, multiply_add(codes, all(scale), all(bias)));
        }
    }
}
#endif
#endif
