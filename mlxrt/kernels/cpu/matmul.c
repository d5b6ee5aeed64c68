/* Rows of x times packed matrices, in float32: norm before; bias, gate and residual after.
 *
 * A product is sixteen sums of every sixteenth weight, added in one order. That order depends on nothing else: not on how
 * many rows of x are multiplied together, not on threads, not on the machine. Few rows of x are multiplied while weights
 * are unpacked; for more of them a tile of the matrix is unpacked first. */
#include "packed.h"
#include "threads.h"
#include <math.h>
#include <stdlib.h>

enum { UNPACKED_ROWS = 32, DIRECT_COLUMNS = 4, NO_GATE = 0, SILU = 1 };

typedef struct {
    const matrix *a;
    const float *x; /* [columns, width] */
    const float *bias, *residual; /* [rows], [columns, outputs] or NULL */
    float *y;                     /* [columns, outputs] */
    int64_t columns, outputs;     /* outputs: half of the rows with a gate */
    int64_t chunk;                /* outputs of a task */
    int gate;
    int failed; /* no memory */
} job;

/* R rows from `row` times C columns, into y[column * stride + row]. */
INLINE void multiply_rows(
    const matrix *a, const int format, const int bits, const int R, const int C, int64_t row, const float *x, float *y, int64_t stride) {
    const uint8_t *end = a->weight + a->rows * a->row_bytes;
    const int each = chunks_of_group(a, format), most = groups_of_span(format);
    int64_t left = groups_of_row(a, format);
    floats acc[4][4];
    span s[4];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = zeros();
    for (int64_t n = 0; left > 0; n++, left -= most) {
        const int groups = left < most ? (int)left : most;
        for (int r = 0; r < R; r++) open_span(a, format, bits, row + r, n, groups, &s[r]);
        for (int g = 0, i = 0; g < groups; g++) {
            floats scale[4], bias[4];
            for (int r = 0; r < R; r++) scale[r] = all(s[r].scale[g]), bias[r] = all(s[r].bias[g]);
            for (int e = 0; e < each; e++, i++, x += 16)
                for (int r = 0; r < R; r++) {
                    floats w = multiply_add(chunk_codes(&s[r], format, bits, i, end), scale[r], bias[r]);
                    for (int c = 0; c < C; c++) acc[r][c] = multiply_add(w, load(x + c * a->width), acc[r][c]);
                }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) y[c * stride + r] = sum(acc[r][c]);
}

/* Row `row` of the matrix as floats. */
INLINE void unpack_row(const matrix *a, const int format, const int bits, int64_t row, float *to) {
    const uint8_t *end = a->weight + a->rows * a->row_bytes;
    const int each = chunks_of_group(a, format), most = groups_of_span(format);
    int64_t left = groups_of_row(a, format);
    for (int64_t n = 0; left > 0; n++, left -= most) {
        const int groups = left < most ? (int)left : most;
        span s;
        open_span(a, format, bits, row, n, groups, &s);
        for (int g = 0, i = 0; g < groups; g++)
            for (int e = 0; e < each; e++, i++, to += 16)
                store(to, multiply_add(chunk_codes(&s, format, bits, i, end), all(s.scale[g]), all(s.bias[g])));
    }
}

#define DIRECT(name, F, B, R, C) \
    static void name##_##C(const matrix *a, int64_t first, int64_t end, const float *x, float *y, int64_t stride) { \
        int64_t row = first; \
        for (; row + R <= end; row += R) multiply_rows(a, F, B, R, C, row, x, y + row - first, stride); \
        for (; row < end; row++) multiply_rows(a, F, B, 1, C, row, x, y + row - first, stride); \
    }
#define FORMAT(name, F, B) \
    DIRECT(name, F, B, 4, 1) DIRECT(name, F, B, TILE_ROWS, 2) DIRECT(name, F, B, TILE_ROWS, 4) \
    static void name##_unpack(const matrix *a, int64_t row, float *to) { unpack_row(a, F, B, row, to); }
#define K_QUANTS(DO) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K)
FORMAT(affine4, AFFINE, 4)
FORMAT(affine8, AFFINE, 8)
FORMAT(affine, AFFINE, a->bits)
#define ONE(F) FORMAT(F##_, F, 0)
K_QUANTS(ONE)
#undef ONE

typedef void (*direct)(const matrix *, int64_t, int64_t, const float *, float *, int64_t);
typedef struct { direct one, two, four; void (*unpack)(const matrix *, int64_t, float *); } reader;

static const reader *reader_of(const matrix *a) {
#define AS(name) {name##_1, name##_2, name##_4, name##_unpack}
    static const reader narrow = AS(affine4), wide = AS(affine8), other = AS(affine), k_quants[] = {
#define ONE(F) [F] = AS(F##_),
        K_QUANTS(ONE)
#undef ONE
    };
    if (a->format == AFFINE) return a->bits == 4 ? &narrow : a->bits == 8 ? &wide : &other;
    return &k_quants[a->format];
}

/* Whether this library reads it. What is not checked here the caller computes from the arrays' shapes. */
static int is_readable(const matrix *a) {
    if (a->format != AFFINE) return a->format >= Q2_K && a->format <= Q6_K && a->width % 256 == 0;
    return a->bits >= 2 && a->bits <= 8 && a->group >= 32 && a->group % 32 == 0 && a->width % a->group == 0;
}

/* R unpacked rows times C columns: the same sums. */
INLINE void multiply_tile(const float *w, const int R, const int C, int64_t width, const float *x, float *y, int64_t stride) {
    floats acc[TILE_ROWS][6];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = zeros();
    for (int64_t k = 0; k < width; k += 16) {
        floats row[TILE_ROWS];
        for (int r = 0; r < R; r++) row[r] = load(w + r * width + k);
        for (int c = 0; c < C; c++) {
            floats column = load(x + c * width + k);
            for (int r = 0; r < R; r++) acc[r][c] = multiply_add(row[r], column, acc[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) y[c * stride + r] = sum(acc[r][c]);
}

static void multiply_tiles(const float *w, int64_t rows, int64_t columns, int64_t width, const float *x, float *y, int64_t stride) {
    int64_t c = 0;
#define COLUMNS(C) \
    for (; C <= TILE_COLUMNS && c + C <= columns; c += C) { \
        int64_t r = 0; \
        for (; r + TILE_ROWS <= rows; r += TILE_ROWS) \
            multiply_tile(w + r * width, TILE_ROWS, C, width, x + c * width, y + c * stride + r, stride); \
        for (; r < rows; r++) multiply_tile(w + r * width, 1, C, width, x + c * width, y + c * stride + r, stride); \
    }
    COLUMNS(6) COLUMNS(3) COLUMNS(2) COLUMNS(1)
#undef COLUMNS
}

/* y[column * stride + row - first] for rows from `first` to `end`. `tile` holds UNPACKED_ROWS rows, if there are more columns
 * than DIRECT_COLUMNS. */
static void multiply_range(const job *j, int64_t first, int64_t end, float *tile, float *y, int64_t stride) {
    const matrix *a = j->a;
    const reader *read = reader_of(a);
    if (j->columns <= DIRECT_COLUMNS) {
        static const int parts[DIRECT_COLUMNS + 1][2] = {{0, 0}, {1, 0}, {2, 0}, {2, 1}, {4, 0}};
        for (int64_t p = 0, c = 0; p < 2; c += parts[j->columns][p++]) {
            const int some = parts[j->columns][p];
            if (some) (some == 1 ? read->one : some == 2 ? read->two : read->four)(a, first, end, j->x + c * a->width, y + c * stride, stride);
        }
        return;
    }
    for (int64_t row = first; row < end; row += UNPACKED_ROWS) {
        const int64_t rows = end - row < UNPACKED_ROWS ? end - row : UNPACKED_ROWS;
        for (int64_t r = 0; r < rows; r++) read->unpack(a, row + r, tile + r * a->width);
        multiply_tiles(tile, rows, j->columns, a->width, j->x, y + row - first, stride);
    }
}

/* A thread's own memory, kept: fresh pages would cost more than what is computed in them. */
static float *scratch(int64_t count) {
    static _Thread_local float *kept;
    static _Thread_local int64_t size;
    if (count >= size) {
        free(kept);
        kept = malloc((size_t)(count + 1) * sizeof *kept);
        size = kept ? count + 1 : 0;
    }
    return kept;
}

static void run_chunk(void *given, int index) {
    job *j = given;
    const int64_t first = index * j->chunk, end = first + j->chunk < j->outputs ? first + j->chunk : j->outputs, n = end - first;
    const int64_t room = j->columns > DIRECT_COLUMNS ? UNPACKED_ROWS * j->a->width : 0;
    float *tile = scratch(room + (j->gate ? j->columns * n : 0)), *up = tile + room;
    if (!tile) {
        j->failed = 1; /* every task writes the same */
        return;
    }
    multiply_range(j, first, end, tile, j->y + first, j->outputs);
    if (j->gate) multiply_range(j, j->outputs + first, j->outputs + end, tile, up, n);
    for (int64_t c = 0; c < j->columns; c++) {
        float *y = j->y + c * j->outputs + first;
        if (j->bias)
            for (int64_t i = 0; i < n; i++) y[i] += j->bias[first + i];
        if (j->gate)
            for (int64_t i = 0; i < n; i++) {
                const float u = j->bias ? up[c * n + i] + j->bias[j->outputs + first + i] : up[c * n + i];
                y[i] = y[i] / (1 + expf(-y[i])) * u;
            }
        if (j->residual)
            for (int64_t i = 0; i < n; i++) y[i] += j->residual[c * j->outputs + first + i];
    }
}

/* RMSNorm: to = x / sqrt(mean(x^2) + eps) * weight. */
static void norm_row(const float *x, const float *weight, float eps, int64_t width, float *to) {
    floats squares = zeros();
    for (int64_t k = 0; k < width; k += 16) squares = multiply_add(load(x + k), load(x + k), squares);
    const floats factor = all(1 / sqrtf(sum(squares) / (float)width + eps));
    for (int64_t k = 0; k < width; k += 16) store(to + k, multiply(multiply(load(x + k), factor), load(weight + k)));
}

typedef struct { const float *x, *weight; float eps, *to; int64_t width; } norm_job;
static void run_norm(void *given, int row) {
    const norm_job *j = given;
    norm_row(j->x + row * j->width, j->weight, j->eps, j->width, j->to + row * j->width);
}

/* 0; 1: no memory; 2: a format that this library has no reader for. x is [columns, width], y [columns, outputs]. */
int mlxrt_matmul(const matrix *a, const float *x, int64_t columns, const float *norm, float eps, const float *bias, int gate,
                 const float *residual, float *y, int threads) {
    if (!is_readable(a)) return 2;
    float *normed = NULL;
    if (norm) {
        if (!(normed = malloc((size_t)(columns * a->width) * sizeof *normed))) return 1;
        norm_job n = {x, norm, eps, normed, a->width};
        parallel_for(columns < 16 ? 1 : threads, (int)columns, run_norm, &n);
        x = normed;
    }
    job j = {a, x, bias, residual, y, columns, gate ? a->rows / 2 : a->rows, 0, gate, 0};
    const int64_t tasks = 8 * threads; /* a thread that was interrupted leaves its share to the others */
    j.chunk = (j.outputs / tasks + 15) / 16 * 16;
    if (j.chunk < 16) j.chunk = 16;
    parallel_for(threads, (int)((j.outputs + j.chunk - 1) / j.chunk), run_chunk, &j);
    free(normed);
    return j.failed;
}

/* Rows of the matrix by their numbers, times `scale`: [count, width]. */
int mlxrt_unpack_rows(const matrix *a, const int64_t *rows, int64_t count, float scale, float *y) {
    if (!is_readable(a)) return 2;
    const reader *read = reader_of(a);
    for (int64_t i = 0; i < count; i++) {
        float *to = y + i * a->width;
        read->unpack(a, rows[i], to);
        if (scale != 1)
            for (int64_t k = 0; k < a->width; k++) to[k] *= scale;
    }
    return 0;
}

const char *mlxrt_vector_name(void) { return VECTOR_NAME; }
