/* Rows of x times packed matrices, in float32: norm before; bias, activation, residual and softcap after.
 *
 * A product is sixteen sums of every sixteenth weight, added in one order; by dot products of bytes (dot.h) four sums of
 * every group. That order depends on the format alone, and on the instructions there are: not on how many rows of x are
 * multiplied together, not on threads. Few rows of x are multiplied while weights are unpacked; for more of them floats
 * are unpacked into a tile first, and bytes come from the nearest cache. */
#include "calls.h"
#include "lanes.h"
#include "panels.h"
#include "threads.h"
#include <math.h>
#include <stdlib.h>

enum { DIRECT_COLUMNS = 4, MOST_COLUMNS = LANES || HAS_DOT ? 8 : DIRECT_COLUMNS };

typedef struct {
    const matmul_call *call;
    const matrix *a;
    const float *x;           /* [columns, column_size], after the norm */
    int64_t column_size;
    int64_t columns, outputs; /* outputs: half of the rows of a pair */
    int64_t chunk;            /* outputs of a task */
    int failed;               /* no memory */
} job;

/* Rows side by side that lanes.h reads; where there is dot.h, it reads those of short blocks. */
INLINE int has_lanes(const matrix *a) { return LANES && a->interleaved && !(HAS_DOT && has_short_blocks(a->format)); }
/* Whether x is split into digits. */
INLINE int splits_columns(const matrix *a) { return (HAS_DOT && a->format != PLAIN) || has_lanes(a); }
/* Whether so many columns are multiplied by unpacked rows. */
INLINE int uses_panels(const matrix *a, int64_t columns) { return !splits_columns(a) && columns > DIRECT_COLUMNS; }

/* R rows of a plain matrix from `row` times C columns, as multiply_rows. */
INLINE void multiply_plain(const matrix *a, const int type, const int R, const int C, int64_t row, const float *x, float *y, int64_t stride) {
    floats acc[4][4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) acc[r][c] = zeros();
    for (int64_t k = 0; k < a->width; k += 16)
        UNROLL for (int r = 0; r < R; r++) {
            const uint8_t *at = a->weight + (row + r) * a->row_bytes;
            if (k % 32 == 0) __builtin_prefetch(at + k * (type == FLOAT32 ? 4 : 2) + AHEAD);
            const floats w = load_numbers(at, k, type);
            UNROLL for (int c = 0; c < C; c++) acc[r][c] = multiply_add(w, load(x + c * a->width + k), acc[r][c]);
        }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) y[c * stride + r] = sum(acc[r][c]);
}

#define PLAIN_COLUMNS(T, R, C) \
    static void T##_##C(const matrix *a, int tiles, int64_t first, int64_t end, const float *x, float *y, int64_t stride) { \
        (void)tiles; \
        int64_t row = first; \
        for (; row + R <= end; row += R) multiply_plain(a, T, R, C, row, x, y + row - first, stride); \
        for (; row < end; row++) multiply_plain(a, T, 1, C, row, x, y + row - first, stride); \
    }
#define PLAIN_TYPE(T) \
    PLAIN_COLUMNS(T, 4, 1) PLAIN_COLUMNS(T, TILE_ROWS, 2) PLAIN_COLUMNS(T, TILE_ROWS, 3) PLAIN_COLUMNS(T, TILE_ROWS, 4) \
    static void T##_unpack(const matrix *a, int64_t row, float *to) { \
        for (int64_t k = 0; k < a->width; k += 16) store(to + k, load_numbers(a->weight + row * a->row_bytes, k, T)); \
    }
PLAIN_TYPE(FLOAT32)
PLAIN_TYPE(FLOAT16)
PLAIN_TYPE(BFLOAT16)

#if !HAS_DOT
/* R rows from `row` times C columns, into y[column * stride + row]. */
INLINE void multiply_rows(
    const matrix *a, const int format, const int bits, const int R, const int C, int64_t row, const float *x, float *y, int64_t stride) {
    const uint8_t *end = a->weight + a->rows * a->row_bytes;
    const int each = chunks_of_group(a, format), most = groups_of_span(format), step = chunks_together(format);
    int64_t left = groups_of_row(a, format);
    floats acc[4][4];
    span s[4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) acc[r][c] = zeros();
    for (int64_t n = 0; left > 0; n++, left -= most) {
        const int groups = left < most ? (int)left : most;
        for (int r = 0; r < R; r++) open_span(a, format, bits, row + r, n, groups, &s[r]);
        for (int g = 0, i = 0; g < groups; g++) {
            group_values values[4];
            for (int r = 0; r < R; r++) values[r] = open_group(&s[r], format, bits, g);
            for (int e = 0; e < each; e += step, i += step)
                for (int k = 0; k < step; k++, x += 16)
                    UNROLL for (int r = 0; r < R; r++) {
                        if (k == 0) fetch_ahead(&s[r], format, bits, i);
                        floats w = chunk_values(&s[r], format, bits, i, k, values[r], end);
                        UNROLL for (int c = 0; c < C; c++) acc[r][c] = multiply_add(w, load(x + c * a->width), acc[r][c]);
                    }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) y[c * stride + r] = sum(acc[r][c]);
}
#endif

/* Row `row` of the matrix as floats, in the order in which products read it. */
INLINE void unpack_row(const matrix *a, const int format, const int bits, int64_t row, float *to) {
    const uint8_t *end = a->weight + a->rows * a->row_bytes;
    const int each = chunks_of_group(a, format), most = groups_of_span(format), step = chunks_together(format);
    int64_t left = groups_of_row(a, format);
    for (int64_t n = 0; left > 0; n++, left -= most) {
        const int groups = left < most ? (int)left : most;
        span s;
        open_span(a, format, bits, row, n, groups, &s);
        for (int g = 0, i = 0; g < groups; g++) {
            const group_values values = open_group(&s, format, bits, g);
            for (int e = 0; e < each; e += step, i += step)
                for (int k = 0; k < step; k++, to += 16) store(to, chunk_values(&s, format, bits, i, k, values, end));
        }
    }
}

/* The matrix with what a function was made for: compilers then know how long its loops are. */
INLINE matrix as_made_for(const matrix *a, int group, int scale_type) {
    matrix known = *a;
    if (group) known.group = group, known.scale_type = scale_type;
    return known;
}

#if HAS_DOT
#define MULTIPLY(F, B, R, C, interleaved) \
    for (; row < end; row += 4) dot_rows(a, F, B, interleaved, C, C < 8 ? 1 : tiles, row, end - row < 4 ? (int)(end - row) : 4, x, y + row - first, stride);
/* Not 2 and 3 columns: hardly faster than one at a time, and would take seconds to compile. */
#define DIRECT_MORE(name, F, B, G, T) DIRECT(name, F, B, G, T, 4, 8)
#define COLUMNS(name) 0, name##_1, 0, 0, name##_4, 0, 0, 0, name##_8
#else
#define MULTIPLY(F, B, R, C, interleaved) \
    for (; row + R <= end; row += R) multiply_rows(a, F, B, R, C, row, x, y + row - first, stride); \
    for (; row < end; row++) multiply_rows(a, F, B, 1, C, row, x, y + row - first, stride);
#define DIRECT_MORE(name, F, B, G, T) DIRECT(name, F, B, G, T, TILE_ROWS, 2) DIRECT(name, F, B, G, T, TILE_ROWS, 3)
#define COLUMNS(name) 0, name##_1, name##_2, name##_3, name##_4
INLINE int64_t column_floats(const matrix *a) { return a->width; }
#endif
INLINE int64_t column_size(const matrix *a) {
#if LANES
    if (has_lanes(a)) return lane_column_floats(a);
#endif
    return a->format == PLAIN ? a->width : column_floats(a);
}
/* How many of the columns that are left are multiplied together, and how often. */
INLINE int columns_together(const matrix *a, int64_t left) {
    if (splits_columns(a)) return left >= 8 ? 8 : left >= 4 ? 4 : 1;
    return left < DIRECT_COLUMNS ? (int)left : DIRECT_COLUMNS;
}
INLINE int tiles_together(const matrix *a, int64_t left) {
    return !splits_columns(a) || left < 16 ? 1 : left < 64 ? (int)(left / 8) : 8;
}
#define DIRECT(name, F, B, G, T, R, C) \
    static void name##_##C(const matrix *given, int tiles, int64_t first, int64_t end, const float *x, float *y, int64_t stride) { \
        (void)tiles; \
        const matrix known = as_made_for(given, G, T), *a = &known; \
        int64_t row = first; \
        MULTIPLY(F, B, R, C, 0) \
    }
#define FORMAT(name, F, B, G, T) \
    DIRECT(name, F, B, G, T, 4, 1) DIRECT_MORE(name, F, B, G, T) DIRECT(name, F, B, G, T, TILE_ROWS, 4) \
    static void name##_unpack(const matrix *given, int64_t row, float *to) { \
        const matrix known = as_made_for(given, G, T), *a = &known; \
        unpack_row(a, F, B, row, to); \
    }
#define SHORT(DO) DO(IQ4_NL) DO(Q8_0) DO(Q4_0) DO(Q4_1)
#define K_QUANTS(DO) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(IQ2_XXS) DO(IQ4_XS) SHORT(DO)
/* As most files have them: MLX's, and without dot products GGUF's. */
#if HAS_DOT
FORMAT(affine4_64, AFFINE, 4, 64, BFLOAT16)
FORMAT(affine8_64, AFFINE, 8, 64, BFLOAT16)
#define IS_COMMON(a) ((a)->group == 64 && (a)->scale_type == BFLOAT16)
#define COMMON {AS(affine4_64), AS(affine8_64)}
#else
FORMAT(affine4_32, AFFINE, 4, 32, FLOAT16)
FORMAT(affine8_32, AFFINE, 8, 32, FLOAT16)
#define IS_COMMON(a) ((a)->group == 32 && (a)->scale_type == FLOAT16)
#define COMMON {AS(affine4_32), AS(affine8_32)}
#endif
FORMAT(affine4, AFFINE, 4, 0, 0)
FORMAT(affine8, AFFINE, 8, 0, 0)
FORMAT(affine, AFFINE, a->bits, 0, 0)
FORMAT(mxfp4, MXFP4, 4, 32, 0)
#define ONE(F) FORMAT(F##_, F, 0, 0, 0)
K_QUANTS(ONE)
#undef ONE

typedef void (*direct)(const matrix *, int, int64_t, int64_t, const float *, float *, int64_t);
typedef struct { direct of_columns[MOST_COLUMNS + 1]; void (*unpack)(const matrix *, int64_t, float *); } reader;

static const reader *reader_of(const matrix *a);

#if HAS_DOT
#define INTERLEAVED(F, C) \
    static void F##_x4_##C(const matrix *a, int tiles, int64_t first, int64_t end, const float *x, float *y, int64_t stride) { \
        (void)tiles; \
        int64_t row = first; \
        MULTIPLY(F, 0, 4, C, 1) \
    }
#define ONE(F) INTERLEAVED(F, 1) INTERLEAVED(F, 4) INTERLEAVED(F, 8)
SHORT(ONE)
#undef ONE
#endif

/* As how many rows of a format side by side this library reads a matrix; none: as the file has it. */
int mlxrt_rows_together(int format) {
    if (format == Q4_K || format == Q5_K || format == Q6_K) return LANES;
    if (HAS_DOT) return has_short_blocks(format) ? 4 : 0;
    return LANES == 16 && (format == Q8_0 || format == Q4_0 || format == Q4_1) ? LANES : 0;
}

#if HAS_DOT || LANES == 16
/* Block by block: each is put together as a file has it. */
static void unpack_interleaved(const matrix *a, int64_t row, float *to) {
    uint8_t block[34];
    const int size = block_bytes(a->format) / 8, head = float_bytes(a->format), together = mlxrt_rows_together(a->format);
    const int r = (int)(row % together);
    const matrix alone = {block, NULL, NULL, 1, 32, size, a->format, a->bits, a->group, a->scale_type, 0};
    const uint8_t *rows = a->weight + (row - r) * a->row_bytes;
    for (int64_t b = 0; b < a->width / 32; b++, rows += together * size, to += 32) {
        for (int i = 0; i < head; i += 2) memcpy(block + i, rows + together * i + 2 * r, 2);
        for (int i = head; i < size; i += 4) memcpy(block + i, rows + together * i + 4 * r, 4);
        reader_of(&alone)->unpack(&alone, 0, to);
    }
}
#endif

#if LANES
#define IN_LANES(DO) DO(Q4_K) DO(Q5_K) DO(Q6_K)
#define COLUMNS_IN_LANES(multiply, F, C) \
    static void F##_lanes_##C(const matrix *a, int tiles, int64_t first, int64_t end, const float *x, float *y, int64_t stride) { \
        for (int64_t row = first; row < end; row += LANES) multiply(a, F, C, C < 8 ? 1 : tiles, row, x, y + row - first, stride); \
    }
#define ONE(F) \
    COLUMNS_IN_LANES(multiply_lanes, F, 1) COLUMNS_IN_LANES(multiply_lanes, F, 4) COLUMNS_IN_LANES(multiply_lanes, F, 8) \
    static void F##_lanes_unpack(const matrix *a, int64_t row, float *to) { unpack_lane(a, F, row, to); }
IN_LANES(ONE)
#undef ONE
#endif
#if LANES == 16
#define SHORT_IN_LANES(DO) DO(Q8_0) DO(Q4_0) DO(Q4_1)
#define ONE(F) COLUMNS_IN_LANES(multiply_short_lanes, F, 1) COLUMNS_IN_LANES(multiply_short_lanes, F, 4) COLUMNS_IN_LANES(multiply_short_lanes, F, 8)
SHORT_IN_LANES(ONE)
#undef ONE
#else
#define SHORT_IN_LANES(DO)
#endif

static const reader *reader_of(const matrix *a) {
#define AS(name) {{COLUMNS(name)}, name##_unpack}
    static const reader common[] = COMMON;
    static const reader narrow = AS(affine4), wide = AS(affine8), other = AS(affine), by_power = AS(mxfp4), k_quants[] = {
#define ONE(F) [F] = AS(F##_),
        K_QUANTS(ONE)
#undef ONE
    };
#if HAS_DOT
    static const reader interleaved[] = {
#define ONE(F) [F] = {{COLUMNS(F##_x4)}, unpack_interleaved},
        SHORT(ONE)
#undef ONE
    };
    if (a->interleaved && has_short_blocks(a->format)) return &interleaved[a->format];
#endif
#if LANES
    static const reader in_lanes[] = {
#define IN_COLUMNS(F) {0, F##_lanes_1, 0, 0, F##_lanes_4, 0, 0, 0, F##_lanes_8}
#define ONE(F) [F] = {IN_COLUMNS(F), F##_lanes_unpack},
        IN_LANES(ONE)
#undef ONE
#define ONE(F) [F] = {IN_COLUMNS(F), unpack_interleaved},
        SHORT_IN_LANES(ONE)
#undef ONE
    };
    if (a->interleaved) return &in_lanes[a->format];
#endif
    static const reader plain[] = {
#define ONE(T) [T] = {{0, T##_1, T##_2, T##_3, T##_4}, T##_unpack},
        ONE(FLOAT32) ONE(FLOAT16) ONE(BFLOAT16)
#undef ONE
    };
    if (a->format == PLAIN) return &plain[a->scale_type];
    if (a->format == MXFP4) return &by_power;
    if (a->format != AFFINE) return &k_quants[a->format];
    if (a->bits != 4 && a->bits != 8) return &other;
    if (IS_COMMON(a)) return &common[a->bits == 8];
    return a->bits == 4 ? &narrow : &wide;
}

/* Whether this library reads it. What is not checked here the caller computes from the arrays' shapes. */
static int is_readable(const matrix *a) {
    if (a->interleaved && (!mlxrt_rows_together(a->format) || a->rows % (2 * mlxrt_rows_together(a->format)))) return 0;
    if (has_short_blocks(a->format)) return a->width % 32 == 0;
    if (a->format == PLAIN) return a->scale_type >= FLOAT32 && a->scale_type <= BFLOAT16 && a->width % 16 == 0;
    if (a->format == MXFP4) return a->bits == 4 && a->group == 32 && a->width % 32 == 0;
    if (a->format != AFFINE) return a->format >= Q2_K && a->format <= IQ4_XS && a->width % 256 == 0;
    return a->bits >= 2 && a->bits <= 8 && a->group >= 32 && a->group % 32 == 0 && a->width % a->group == 0;
}

/* Rows from `first` to `end` times columns, while they are unpacked: as many at a time as there is a function for. */
static void multiply_direct(const job *j, int64_t first, int64_t end, float *y, int64_t stride) {
    const reader *read = reader_of(j->a);
    for (int64_t c = 0; c < j->columns;) {
        const int count = columns_together(j->a, j->columns - c), tiles = tiles_together(j->a, j->columns - c);
        read->of_columns[count](j->a, tiles, first, end, j->x + c * j->column_size, y + c * stride, stride);
        c += count * tiles;
    }
}

/* y[column * stride + row - first] for rows from `first` to `end`. `tile` holds UNPACKED_ROWS rows and one more, if they are
 * unpacked. */
static void multiply_range(const job *j, int64_t first, int64_t end, float *tile, float *y, int64_t stride) {
    const matrix *a = j->a;
    if (!uses_panels(a, j->columns)) {
        for (int64_t row = first, rows; row < end; row += rows) {
            rows = end - row < UNPACKED_ROWS ? end - row : UNPACKED_ROWS;
            multiply_direct(j, row, row + rows, y + row - first, stride);
        }
        return;
    }
    float *own = tile + UNPACKED_ROWS * a->width;
    for (int64_t row = first, rows; row < end; row += rows) {
        rows = end - row < UNPACKED_ROWS ? end - row : UNPACKED_ROWS;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t panel = r / TILE_ROWS * TILE_ROWS;
            const int alone = panel + TILE_ROWS > rows;
            reader_of(a)->unpack(a, row + r, own);
            if (alone) put_into_panel(own, a->width, tile + r * a->width, 1, 0);
            else put_into_panel(own, a->width, tile + panel * a->width, TILE_ROWS, (int)(r - panel));
        }
        multiply_panels(tile, rows, a->width, j->x, j->columns, y + row - first, stride);
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

/* The first whole line of the cache from there on: sixteen numbers at most are left out. */
INLINE float *align(float *p) { return (float *)(((uintptr_t)p + 63) & ~(uintptr_t)63); }

/* Gated MLPs: what an activation makes of gates, and of the other half. */
static void activate(int activation, float *restrict y, const float *restrict up, int64_t n) {
#define EACH(expression) \
    for (int64_t i = 0; i < n; i++) { \
        const float gate = y[i]; \
        y[i] = expression; \
    } \
    return
    switch (activation) {
    case SILU: EACH(gate / (1 + exponential(-gate)) * up[i]);
    case GELU: EACH(0.5f * gate * (1 + tanhf(0.7978845608f * (gate + 0.044715f * gate * gate * gate))) * up[i]);
    case CLAMPED: EACH(fminf(gate, 7) / (1 + exponential(-1.702f * fminf(gate, 7))) * (fminf(fmaxf(up[i], -7), 7) + 1));
    case SIGMOID: EACH(up[i] / (1 + exponential(-gate)));
    }
#undef EACH
}

static void run_chunk(void *given, int index) {
    job *j = given;
    const matmul_call *c = j->call;
    const int64_t first = index * j->chunk, end = first + j->chunk < j->outputs ? first + j->chunk : j->outputs, n = end - first;
    const int64_t room = uses_panels(j->a, j->columns) ? (UNPACKED_ROWS + 1) * j->a->width : 0;
    float *own = scratch(room + (c->pair ? j->columns * n : n) + 16);
    if (!own) {
        j->failed = 1; /* every task writes the same */
        return;
    }
    float *tile = align(own), *up = tile + room;
    multiply_range(j, first, end, tile, c->y + first, j->outputs);
    if (c->pair) multiply_range(j, j->outputs + first, j->outputs + end, tile, up, n);
    for (int64_t column = 0; column < j->columns; column++) {
        const int64_t at = column * j->outputs + first;
        float *y = c->y + at;
        if (c->bias)
            for (int64_t i = 0; i < n; i++) y[i] += c->bias[first + i];
        float *other = c->pair ? up + column * n : up;
        if (c->pair && c->bias)
            for (int64_t i = 0; i < n; i++) other[i] += c->bias[j->outputs + first + i];
        if (!c->pair && c->activation)
            for (int64_t i = 0; i < n; i++) other[i] = c->times ? c->times[at + i] : 1;
        activate(c->activation, y, other, n);
        if (c->residual)
            for (int64_t i = 0; i < n; i++) y[i] += c->residual[at + i];
        if (c->softcap > 0)
            for (int64_t i = 0; i < n; i++) y[i] = tanhf(y[i] / c->softcap) * c->softcap;
    }
}

typedef struct {
    const matrix *a;
    const float *from;
    float *to;
    int64_t columns;
} column_job;

/* Whether products read x in another form than it comes in. */
INLINE int changes_columns(const matrix *a, int64_t columns) {
    return splits_columns(a) || uses_table(a->format, a->bits) || uses_panels(a, columns);
}

/* Columns of a panel from `first` on; their order, where unpacked rows have another, too. */
static void put_columns(const column_job *j, int64_t first, int count) {
    const int64_t width = j->a->width;
    float *panel = j->to + first * width;
    for (int i = 0; i < count; i++) {
        const float *from = j->from + (first + i) * width;
        if (!uses_table(j->a->format, j->a->bits)) {
            put_into_panel(from, width, panel, count, i);
            continue;
        }
        for (int64_t k = 0; k < width; k += 32) {
            float both[32];
            order_columns(from + k, both);
            store(panel + (k * count + 16 * i), load(both)), store(panel + ((k + 16) * count + 16 * i), load(both + 16));
        }
    }
}

/* Columns from MOST_COLUMNS * index on, or the panel of this number. */
static void change_columns(void *given, int index) {
    const column_job *j = given;
    if (uses_panels(j->a, j->columns)) {
        int64_t first = (int64_t)index * TILE_COLUMNS;
        const int64_t end = first + TILE_COLUMNS < j->columns ? first + TILE_COLUMNS : j->columns;
        for (int count; first < end; first += count) put_columns(j, first, count = panel_columns(end - first));
        return;
    }
    const int64_t first = (int64_t)index * MOST_COLUMNS;
    const int64_t end = first + MOST_COLUMNS < j->columns ? first + MOST_COLUMNS : j->columns;
    for (int64_t c = first, count; c < end; c += count) {
        count = columns_together(j->a, end - c);
        const float *from = j->from + c * j->a->width;
        float *to = j->to + c * column_size(j->a);
#if LANES
        if (has_lanes(j->a)) {
            split_lane_columns(j->a, from, (int)count, to);
            continue;
        }
#endif
#if HAS_DOT
        split_columns(j->a, from, (int)count, to);
#else
        for (int64_t k = 0; k < count * j->a->width; k += 32) order_columns(from + k, to + k);
#endif
    }
}

INLINE int64_t changed_floats(const matmul_call *c) {
    return changes_columns(c->a, c->columns) ? c->columns * column_size(c->a) + 16 : 0; /* they are aligned */
}

/* x after the norm and as products read it: c->x itself, or `own`, which has room for `own_floats`. */
static const float *prepare_columns(const matmul_call *c, int threads, float *own) {
    const matrix *a = c->a;
    const float *x = c->x;
    if (c->norm) {
        float *to = own + changed_floats(c);
        run_norm(&(norm_call){c->x, c->norm, NULL, NULL, to, c->columns, a->width, 1, c->eps, 1}, threads);
        x = to;
    }
    if (!changed_floats(c)) return x;
    column_job j = {a, x, align(own), c->columns};
    const int64_t each = uses_panels(a, c->columns) ? TILE_COLUMNS : MOST_COLUMNS, tasks = (c->columns + each - 1) / each;
    parallel_for(c->columns < ROWS_TO_SHARE ? 1 : threads, (int)tasks, change_columns, &j);
    return j.to;
}

static int64_t own_floats(const matmul_call *c) { return changed_floats(c) + (c->norm ? c->columns * c->a->width : 0); }

int run_matmul(const matmul_call *c, int threads) {
    const matrix *a = c->a;
    if (!is_readable(a)) return UNREADABLE;
    float *own = NULL;
    if (own_floats(c) && !(own = malloc((size_t)own_floats(c) * sizeof *own))) return NO_MEMORY;
    job j = {c, a, prepare_columns(c, threads, own), column_size(a), c->columns, c->pair ? a->rows / 2 : a->rows, 0, 0};
    const int64_t tasks = 8 * threads; /* a thread that was interrupted leaves its share to the others */
    j.chunk = (j.outputs / tasks + 15) / 16 * 16;
    if (j.chunk < 16) j.chunk = 16;
    parallel_for(threads, (int)((j.outputs + j.chunk - 1) / j.chunk), run_chunk, &j);
    free(own);
    return j.failed ? NO_MEMORY : 0;
}

static matrix expert_of(const matrix *stack, int64_t e) {
    matrix a = *stack;
    a.weight += e * a.rows * a.row_bytes;
    if (a.format == AFFINE) {
        const int64_t bytes = a.rows * (a.width / a.group) * (a.scale_type == FLOAT32 ? 4 : 2);
        a.scales += e * bytes, a.biases += e * bytes;
    } else if (a.format == MXFP4) {
        a.scales += e * a.rows * (a.width / 32);
    }
    return a;
}

typedef struct {
    matmul_call call;
    matrix a;
    job j;
} expert_job;

typedef struct {
    expert_job *experts;
    int64_t chunks; /* of each */
} expert_jobs;

static void run_expert_chunk(void *given, int index) {
    expert_jobs *b = given;
    job *j = &b->experts[index / b->chunks].j;
    if (index % b->chunks * j->chunk < j->outputs) run_chunk(j, (int)(index % b->chunks));
}

/* The experts from `first` to `end`, whose pairs are `c->order` from c->bounds[first] on: their rows of x side by side, so that
 * a matrix is read once for all of its rows, and the matrices of all of them shared out among the threads at once. */
static int run_some_experts(const experts_call *c, int64_t first, int64_t end, int threads, expert_job *experts, float *own) {
    const int64_t rows = c->a->rows, width = c->a->width, outputs = c->pair ? rows / 2 : rows, from = c->bounds[first];
    const int64_t pairs = c->bounds[end] - from;
    float *made = own + pairs * width, *changed = made + pairs * outputs;
    int count = 0, failed = 0;
    for (int64_t i = 0; i < pairs; i++) memcpy(own + i * width, c->x + c->order[from + i] / c->each * width, (size_t)width * 4);
    for (int64_t e = first; e < end; e++) {
        const int64_t at = c->bounds[e] - from, n = c->bounds[e + 1] - c->bounds[e];
        if (!n) continue;
        expert_job *x = &experts[count++];
        x->a = expert_of(c->a, e);
        x->call = (matmul_call){&x->a, own + at * width, NULL, c->bias ? c->bias + e * rows : NULL, NULL, NULL, made + at * outputs, n, 0, 0, c->activation, c->pair};
        x->j = (job){&x->call, &x->a, prepare_columns(&x->call, threads, changed), column_size(&x->a), n, outputs, 0, 0};
        changed += own_floats(&x->call);
    }
    if (!count) return 0;
    const int64_t tasks = (8 * threads + count - 1) / count; /* as many in all as one matrix alone is given */
    int64_t chunk = (outputs / tasks + 15) / 16 * 16;
    chunk = chunk < 16 ? 16 : chunk;
    expert_jobs jobs = {experts, (outputs + chunk - 1) / chunk};
    for (int i = 0; i < count; i++) experts[i].j.chunk = chunk;
    parallel_for(threads, (int)(count * jobs.chunks), run_expert_chunk, &jobs);
    for (int i = 0; i < count; i++) failed |= experts[i].j.failed;
    for (int64_t i = 0; i < pairs; i++) memcpy(c->y + c->order[from + i] * outputs, made + i * outputs, (size_t)outputs * 4);
    return failed ? NO_MEMORY : 0;
}

/* As many experts together as have a few pairs; one with more is shared out by itself. */
int run_experts(const experts_call *c, int threads) {
    enum { PAIRS_TOGETHER = 64 };
    if (!is_readable(c->a)) return UNREADABLE;
    const int64_t outputs = c->pair ? c->a->rows / 2 : c->a->rows;
    int64_t most = PAIRS_TOGETHER;
    for (int64_t e = 0; e < c->count; e++)
        if (c->bounds[e + 1] - c->bounds[e] > most) most = c->bounds[e + 1] - c->bounds[e];
    most = most < c->pairs ? most : c->pairs;
    const int64_t each = c->a->width + outputs + column_size(c->a) + 16; /* numbers of a pair */
    float *own = malloc((size_t)(most * each + 1) * sizeof *own);
    expert_job *experts = malloc((size_t)(most + 1) * sizeof *experts);
    int failed = own && experts ? 0 : NO_MEMORY;
    for (int64_t first = 0, end; first < c->count && !failed; first = end) {
        for (end = first + 1; end < c->count && c->bounds[end + 1] - c->bounds[first] <= PAIRS_TOGETHER;) end++;
        failed = run_some_experts(c, first, end, threads, experts, own);
    }
    free(experts);
    free(own);
    return failed;
}

/* A number beyond the matrix reads its last row, as rows that idle may have one: nobody looks at them. */
static void embed_row(void *given, int index) {
    const embed_call *c = given;
    const matrix *a = c->a;
    float *to = c->y + index * a->width;
    reader_of(a)->unpack(a, c->tokens[index] < a->rows ? c->tokens[index] : a->rows - 1, to);
    if (uses_table(a->format, a->bits))
        for (int64_t k = 0; k < a->width; k += 32) restore_columns(to + k);
    if (c->scale != 1)
        for (int64_t k = 0; k < a->width; k++) to[k] *= c->scale;
}

int run_embed(const embed_call *c, int threads) {
    if (!is_readable(c->a)) return UNREADABLE;
    parallel_for(c->count < ROWS_TO_SHARE ? 1 : threads, (int)c->count, embed_row, (void *)c);
    return 0;
}

int mlxrt_activation_bits(void) { return HAS_DOT && DIGITS == 1 ? 8 : 32; }
