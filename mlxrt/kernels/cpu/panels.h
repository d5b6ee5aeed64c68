/* Unpacked rows of a matrix times many columns of x, in float32.
 *
 * Both are laid out in panels: of TILE_ROWS rows, or of up to TILE_COLUMNS columns, sixteen numbers of each in turn, then
 * the next sixteen. So a product reads two runs of memory; side by side, rows of 1,024 numbers would share one set of the
 * cache. A panel goes through the cache in parts of PART steps, and each sum waits meanwhile: the sums are those of rows
 * that are multiplied one by one, in the same order. */
#ifndef MLXRT_PANELS_H
#define MLXRT_PANELS_H
#include "vector.h"

enum { UNPACKED_ROWS = 32, PART = 32 }; /* rows that are unpacked together; steps of sixteen numbers */

/* How many columns a panel has of `left` that are not in one yet. */
INLINE int panel_columns(int64_t left) { return left >= TILE_COLUMNS ? TILE_COLUMNS : left >= 3 ? 3 : left >= 2 ? 2 : 1; }

/* A row, or column, as one of `count` of a panel. */
INLINE void put_into_panel(const float *from, int64_t width, float *panel, int count, int index) {
    for (int64_t k = 0; k < width; k += 16) store(panel + (k * count + 16 * index), load(from + k));
}

/* Sums of R rows times C columns go on by so many steps: sums[T * T * (c / T) + T * r + c % T], as store_sums takes them. */
INLINE void add_part(const float *w, const int R, const float *x, const int C, int64_t steps, floats *sums) {
    enum { T = TILE_ROWS };
    floats acc[TILE_ROWS][TILE_COLUMNS];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) acc[r][c] = sums[c / T * T * T + r * T + c % T];
    for (int64_t k = 0; k < steps; k++, w += 16 * R, x += 16 * C) {
        floats row[TILE_ROWS];
        UNROLL for (int r = 0; r < R; r++) row[r] = load(w + 16 * r);
        UNROLL for (int c = 0; c < C; c++) {
            const floats column = load(x + 16 * c);
            UNROLL for (int r = 0; r < R; r++) acc[r][c] = multiply_add(row[r], column, acc[r][c]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) sums[c / T * T * T + r * T + c % T] = acc[r][c];
}

/* `rows` unpacked rows, in panels of TILE_ROWS and those that are left in panels of one, times a panel of C columns. */
INLINE void multiply_panel(const float *w, int64_t rows, int64_t width, const float *x, const int C, float *y, int64_t stride) {
    enum { T = TILE_ROWS, EACH = (TILE_COLUMNS + T - 1) / T * T * T };
    floats sums[UNPACKED_ROWS / T + T][EACH];
    const int64_t panels = rows / T, all = panels + rows % T;
    for (int64_t p = 0; p < all; p++)
        for (int i = 0; i < EACH; i++) sums[p][i] = zeros();
    for (int64_t k = 0; k < width; k += 16 * PART) {
        const int64_t steps = (width - k < 16 * PART ? width - k : 16 * PART) / 16;
        int64_t p = 0;
        for (; p < panels; p++) add_part(w + T * (p * width + k), T, x + C * k, C, steps, sums[p]);
        for (; p < all; p++) add_part(w + (T * panels + p - panels) * width + k, 1, x + C * k, C, steps, sums[p]);
    }
    for (int64_t p = 0; p < all; p++)
        for (int c = 0; c < C; c++) {
            const floats *s = sums[p] + c / T * T * T;
            if (p >= panels) y[c * stride + T * panels + p - panels] = sum(s[c % T]);
            else if (c % T == 0) store_sums(s, C - c < T ? C - c : T, y + c * stride + T * p, stride);
        }
}

/* y[column * stride + row] for unpacked rows and columns, both in panels. */
static void multiply_panels(const float *w, int64_t rows, int64_t width, const float *x, int64_t columns, float *y, int64_t stride) {
    for (int64_t c = 0, count; c < columns; c += count, x += count * width, y += count * stride) {
        switch (count = panel_columns(columns - c)) {
        case 1: multiply_panel(w, rows, width, x, 1, y, stride); break;
        case 2: multiply_panel(w, rows, width, x, 2, y, stride); break;
        case 3: multiply_panel(w, rows, width, x, 3, y, stride); break;
        default: multiply_panel(w, rows, width, x, TILE_COLUMNS, y, stride);
        }
    }
}
#endif
