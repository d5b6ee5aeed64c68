/* Attention over a paged KV cache, float32 or quantised: norms of the heads, RoPE, softmax, values. Of decode steps, whose
 * new token goes into the tail first, and of steps with prompts, whose keys and values are made by a call of their own.
 *
 * A token's sums are the same bits in any step: a score adds up the head's numbers by sixteen lanes, the softmax its weights
 * by the lanes that positions say, the output its values key by key. So tokens that attend together, which read a key once
 * for all of them, get what each would get alone. Quantised keys and values are unpacked a block at a time; a slot has, as
 * kv_codec.py packs them, the words of the key and of the value, then the key's scales and biases, then the value's. */
#include "calls.h"
#include "threads.h"
#include <math.h>
#include <stdlib.h>

enum {
    HEADS_TOGETHER = 48,       /* query heads of a task: those of as many tokens of a prompt as share a key's head */
    MAX_SCORES = 1 << 21,      /* of a task with several tokens */
    ROWS = TILE_ROWS,          /* query heads whose sums are in registers ... */
    KEYS = TILE_ROWS,          /* ... with so many keys */
    COLUMNS = ROWS > 2 ? 4 : 2 /* ... or vectors of values */
};

/* Tokens that attend together: of one row, one after the other. */
typedef struct {
    int64_t first, count;
} tile;

typedef struct {
    const attention_call *a;
    float *turns; /* [rows, 2, pairs] cosines and sines of each token's position */
    const tile *tiles;
    int64_t num_tiles;
    int failed;
} attention_job;

INLINE int64_t position_of(const attention_call *a, int64_t token) {
    return (int64_t)a->row_range[3 * token + 1] + a->row_range[3 * token + 2];
}

static void norm_head(float *x, const float *weight, float eps, int64_t dim) {
    floats squares = zeros();
    for (int64_t k = 0; k < dim; k += 16) squares = multiply_add(load(x + k), load(x + k), squares);
    const floats factor = all(1 / sqrtf(sum(squares) / (float)dim + eps));
    for (int64_t k = 0; k < dim; k += 16) {
        floats v = multiply(load(x + k), factor);
        store(x + k, weight ? multiply(v, load(weight + k)) : v);
    }
}

static void rotate(float *x, const float *turn, float magnitude, int64_t pairs) {
    const float *cosine = turn, *sine = turn + pairs;
    for (int64_t i = 0; i < pairs; i++) {
        const float a = x[i] * magnitude, b = x[pairs + i] * magnitude;
        x[i] = a * cosine[i] - b * sine[i], x[pairs + i] = a * sine[i] + b * cosine[i];
    }
}

static void prepare_head(const attention_call *a, const float *from, const float *norm, const float *turn, float *to) {
    memcpy(to, from, (size_t)a->dim * sizeof *to);
    if (norm) norm_head(to, norm, a->eps, a->dim);
    if (a->inv_freq) rotate(to, turn, a->magnitude, a->pairs);
}

enum { KEY, VALUE };

/* A key head's first slot in a block or tail of so many; plain values have heads of their own, after those of the keys. */
INLINE int64_t first_slot(const attention_call *a, int64_t block, int64_t head, int which, int64_t slots) {
    const int64_t heads = a->key_bits ? a->kv_heads : 2 * a->kv_heads;
    return (block * heads + head + (which == VALUE && !a->key_bits ? a->kv_heads : 0)) * slots;
}

/* Slots of `head` from a position on that lie side by side; how many of `count` there are. NULL: positions that the row
 * does not hold. */
static const uint32_t *
run_of(const attention_call *a, int64_t row, int64_t head, int which, int64_t position, int64_t count, int64_t *length) {
    const int32_t *range = a->row_range + 3 * row;
    if (a->tail && position >= range[1]) {
        *length = count;
        return a->tail + (first_slot(a, row, head, which, a->tail_size) + position - range[1]) * a->words;
    }
    const int64_t slot = position < a->keep ? position : position - range[0];
    const int64_t tail = a->tail ? range[1] - position : count, full = a->size - slot % a->size;
    *length = count < tail ? count : tail;
    if (*length > full) *length = full;
    if (slot < 0 || slot >= a->row_blocks * a->size) return NULL;
    const int64_t block = a->table[(a->table_row ? a->table_row[row] : row) * a->row_blocks + slot / a->size];
    if (block < 0 || block >= a->pool_blocks) return NULL;
    return a->pool + (first_slot(a, block, head, which, a->size) + slot % a->size) * a->words;
}

INLINE void unpack_vectors(const attention_call *a, const uint32_t *slots, int64_t run, int which, const int bits, float *to) {
    const int64_t groups = a->dim / a->group, packed = a->dim * (a->key_bits + a->value_bits) / 32;
    const int64_t first = which == KEY ? 0 : a->dim * a->key_bits / 32, scales_at = packed + (which == KEY ? 0 : 2 * groups);
    for (int64_t t = 0; t < run; t++, slots += a->words, to += a->dim) {
        const uint8_t *codes = (const uint8_t *)(slots + first), *end = (const uint8_t *)(slots + a->words);
        const uint8_t *scales = (const uint8_t *)(slots + scales_at);
        for (int64_t g = 0, i = 0; g < groups; g++) {
            const floats scale = all(float_at(scales, g, FLOAT32)), bias = all(float_at(scales, groups + g, FLOAT32));
            for (int64_t stop = (g + 1) * a->group / 16; i < stop; i++) {
                const bytes v = stored_codes(codes, bits, (int)i, end);
                store(to + 16 * i, multiply_add(bits == 8 ? from_bytes(v) : from_codes(v, bits), scale, bias));
            }
        }
    }
}

/* Keys or values of a token's row from a position on that lie side by side, as floats; quantised ones are unpacked to `own`. */
static const float *
load_run(const attention_call *a, int64_t token, int64_t head, int which, int64_t position, int64_t count, int64_t *run,
         float *own) {
    const uint32_t *slots = run_of(a, token, head, which, position, count, run);
    if (!slots || !a->key_bits) return (const float *)slots;
    switch (which == KEY ? a->key_bits : a->value_bits) {
    case 2: unpack_vectors(a, slots, *run, which, 2, own); break;
    case 3: unpack_vectors(a, slots, *run, which, 3, own); break;
    case 4: unpack_vectors(a, slots, *run, which, 4, own); break;
    case 6: unpack_vectors(a, slots, *run, which, 6, own); break;
    default: unpack_vectors(a, slots, *run, which, 8, own);
    }
    return own;
}

/* As mx.quantize does it: a token that a prompt wrote has the same codes. */
static void pack_vector(const float *x, int64_t dim, int64_t group, int bits, uint8_t *codes, float *scales) {
    const float most = (float)((1 << bits) - 1);
    memset(codes, 0, (size_t)(dim * bits / 8));
    for (int64_t g = 0; g < dim / group; g++, x += group) {
        float low = INFINITY, high = -INFINITY;
        for (int64_t i = 0; i < group; i++) {
            high = high < x[i] ? x[i] : high;
            low = x[i] < low ? x[i] : low;
        }
        const int negative = fabsf(low) > fabsf(high);
        float scale = (high - low) / most, bias = 0;
        scale = scale < 1e-7f ? 1e-7f : scale;
        scale = negative ? scale : -scale;
        const float edge = negative ? low : high, steps = rintf(edge / scale);
        if (steps != 0) scale = edge / steps, bias = edge;
        for (int64_t i = 0, bit = g * group * bits; i < group; i++, bit += bits) {
            const float code = rintf((x[i] - bias) / scale);
            const unsigned c = code > 0 ? code < most ? (unsigned)code : (unsigned)most : 0, moved = c << bit % 8;
            codes[bit / 8] |= (uint8_t)moved;
            if (moved >> 8) codes[bit / 8 + 1] |= (uint8_t)(moved >> 8);
        }
        scales[g] = scale, scales[dim / group + g] = bias;
    }
}

/* scores[r][i] = query r times key i, for R queries side by side. */
INLINE void score_rows(const float *query, const float *key, int64_t run, int64_t dim, float *scores, int64_t stride,
                       const int R) {
    int64_t i = 0;
    for (; i + KEYS <= run; i += KEYS) {
        floats sums[KEYS * ROWS];
        UNROLL for (int s = 0; s < KEYS * ROWS; s++) sums[s] = zeros();
        for (int64_t k = 0; k < dim; k += 16) {
            floats x[ROWS];
            UNROLL for (int r = 0; r < R; r++) x[r] = load(query + r * dim + k);
            UNROLL for (int c = 0; c < KEYS; c++) {
                const floats y = load(key + (i + c) * dim + k);
                UNROLL for (int r = 0; r < R; r++) sums[c * ROWS + r] = multiply_add(x[r], y, sums[c * ROWS + r]);
            }
        }
        store_sums(sums, R, scores + i, stride);
    }
    for (; i < run; i++)
        for (int r = 0; r < R; r++) {
            floats s = zeros();
            for (int64_t k = 0; k < dim; k += 16) s = multiply_add(load(query + r * dim + k), load(key + i * dim + k), s);
            scores[r * stride + i] = sum(s);
        }
}

/* out[r] += weights[r] x values; C vectors of R heads at a time stay in registers. */
INLINE void add_columns(const float *weights, int64_t stride, const float *value, int64_t run, int64_t dim, float *out,
                        const int R, const int C) {
    floats sums[ROWS * COLUMNS];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) sums[r * C + c] = load(out + r * dim + 16 * c);
    for (int64_t i = 0; i < run; i++) {
        floats v[COLUMNS];
        UNROLL for (int c = 0; c < C; c++) v[c] = load(value + i * dim + 16 * c);
        UNROLL for (int r = 0; r < R; r++) {
            const floats weight = all(weights[r * stride + i]);
            UNROLL for (int c = 0; c < C; c++) sums[r * C + c] = multiply_add(weight, v[c], sums[r * C + c]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) store(out + r * dim + 16 * c, sums[r * C + c]);
}

INLINE void add_rows(const float *weights, int64_t stride, const float *value, int64_t run, int64_t dim, float *out,
                     const int R) {
    int64_t k = 0;
    for (; k + 16 * COLUMNS <= dim; k += 16 * COLUMNS) add_columns(weights, stride, value + k, run, dim, out + k, R, COLUMNS);
    for (; k < dim; k += 16) add_columns(weights, stride, value + k, run, dim, out + k, R, 1);
}

/* Up to ROWS query heads at a time: how many, as a constant. */
#define FOR_ROWS(rows, DO) \
    switch (rows) { \
    case 1: DO(1); break; \
    case 2: DO(2 < ROWS ? 2 : ROWS); break; \
    case 3: DO(3 < ROWS ? 3 : ROWS); break; \
    default: DO(ROWS); \
    }

static void score_group(int64_t rows, const float *query, const float *key, int64_t run, int64_t dim, float *scores,
                        int64_t stride) {
#define DO(R) score_rows(query, key, run, dim, scores, stride, R)
    FOR_ROWS(rows, DO)
#undef DO
}

static void add_group(int64_t rows, const float *weights, int64_t stride, const float *value, int64_t run, int64_t dim,
                      float *out) {
#define DO(R) add_rows(weights, stride, value, run, dim, out, R)
    FOR_ROWS(rows, DO)
#undef DO
}

/* The keys that a token sees: positions `begin` to `end`, twice: the first tokens that are kept, then the window. */
typedef struct {
    int64_t begin[2], end[2];
} range;

static range seen_by(const attention_call *a, int64_t token) {
    const int64_t last = position_of(a, token), near = a->window ? last - a->window + 1 : 0;
    const int64_t base = a->row_range[3 * token];
    const int64_t first = near > base ? near : base;
    return (range){{0, first}, {first < a->keep ? first : a->keep, last + 1}};
}

/* Scores of one query to weights, in vectors that begin at multiples of sixteen; a part's numbers are at its `at`, which
 * `origin` is the position of. What is left of the sum is the sink's. */
typedef struct {
    float *at[2];
    int64_t origin[2];
} score_row;

static void softmax(const attention_call *a, const score_row *row, const range *seen, int64_t head) {
    float lanes[16], most = a->sinks ? a->sinks[head] : -INFINITY, *from[2];
    int64_t count[2];
    for (int i = 0; i < 16; i++) lanes[i] = most;
    for (int part = 0; part < 2; part++) {
        const int64_t begin = seen->begin[part] & ~15LL, end = seen->end[part];
        float *x = from[part] = row->at[part] + begin - row->origin[part];
        count[part] = end > seen->begin[part] ? (end - begin + 15) & ~15LL : 0;
        if (!count[part]) continue;
        for (int64_t t = 0; t < seen->begin[part] - begin; t++) x[t] = -INFINITY;
        for (int64_t t = end - begin; t < count[part]; t++) x[t] = -INFINITY;
        for (int64_t t = 0; a->softcap > 0 && t < count[part]; t++)
            if (x[t] != -INFINITY) x[t] = tanhf(x[t] / a->softcap) * a->softcap;
        for (int64_t t = 0; t < count[part]; t += 16)
            for (int i = 0; i < 16; i++) lanes[i] = x[t + i] > lanes[i] ? x[t + i] : lanes[i];
    }
    for (int i = 0; i < 16; i++) most = lanes[i] > most ? lanes[i] : most;
    floats totals = zeros();
    for (int part = 0; part < 2; part++)
        for (float *x = from[part], *end = x + count[part]; x < end; x += 16) {
            for (int i = 0; i < 16; i++) x[i] = x[i] == -INFINITY ? 0 : exponential(x[i] - most);
            totals = add(totals, load(x));
        }
    float total = sum(totals);
    if (a->sinks) total += exponential(a->sinks[head] - most);
    for (int part = 0; part < 2; part++)
        for (int64_t t = 0; t < count[part]; t++) from[part][t] /= total;
}

static int all_finite(const float *x, int64_t dim) {
    float nothing = 0;
    for (int64_t i = 0; i < dim; i++) nothing += x[i] * 0;
    return nothing == 0;
}

/* The key and value of a token into its slot of the tail. */
static void write_token(const attention_call *a, int64_t token, int64_t head, const float *turn, float *own) {
    const float *k = a->qkv + (token * (a->heads + a->new_heads) + a->heads + head) * a->dim;
    const float *v = a->tied ? k : k + a->kv_heads * a->dim;
    const int64_t used = a->row_range[3 * token + 2], dim = a->dim;
    uint32_t *slots[2];
    for (int i = KEY; i <= VALUE; i++) slots[i] = a->tail + (first_slot(a, token, head, i, a->tail_size) + used) * a->words;
    float *key = a->key_bits ? own : (float *)slots[KEY], *value = a->key_bits ? own + dim : (float *)slots[VALUE];
    prepare_head(a, k, a->k_norm, turn, key);
    memcpy(value, v, (size_t)dim * sizeof *value);
    if (a->v_norm) norm_head(value, NULL, a->eps, dim);
    if (a->finite && !(all_finite(key, dim) && all_finite(value, dim))) a->finite[token] = 0;
    if (!a->key_bits) return;
    float *scales = (float *)(slots[KEY] + dim * (a->key_bits + a->value_bits) / 32);
    pack_vector(key, dim, a->group, a->key_bits, (uint8_t *)slots[KEY], scales);
    uint32_t *after = slots[KEY] + dim * a->key_bits / 32;
    pack_vector(value, dim, a->group, a->value_bits, (uint8_t *)after, scales + 2 * dim / a->group);
}

/* The values of a run, which begins at a position, for up to ROWS heads from the tile's head `first` on: each takes those that
 * its token sees. What all of them see they take together, what comes before and after it one by one. */
static void add_seen(const attention_call *a, const tile *t, int part, int64_t rows, int64_t first, const float *weights,
                     int64_t stride, const float *value, int64_t p, int64_t run, float *out) {
    const int64_t each = a->heads / a->kv_heads, dim = a->dim;
    int64_t begin[ROWS], end[ROWS], low = p, high = p + run;
    for (int64_t r = 0; r < rows; r++) {
        const range seen = seen_by(a, t->first + (first + r) / each);
        begin[r] = seen.begin[part] > p ? seen.begin[part] : p;
        end[r] = seen.end[part] < p + run ? seen.end[part] : p + run;
        low = begin[r] > low ? begin[r] : low;
        high = end[r] < high ? end[r] : high;
    }
    const float *of_rows = weights + first * stride;
    const int64_t middle = low < high;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t stop = middle ? low : end[r];
        const float *mine = of_rows + r * stride + begin[r];
        if (begin[r] < stop) add_group(1, mine, stride, value + (begin[r] - p) * dim, stop - begin[r], dim, out + r * dim);
    }
    if (!middle) return;
    add_group(rows, of_rows + low, stride, value + (low - p) * dim, high - low, dim, out);
    for (int64_t r = 0; r < rows; r++) {
        const float *mine = of_rows + r * stride + high;
        if (high < end[r]) add_group(1, mine, stride, value + (high - p) * dim, end[r] - high, dim, out + r * dim);
    }
}

/* The queries of one key head of a tile: scores, weights, values. `scores` has `stride` numbers for each. */
static void attend_queries(const attention_call *a, const tile *t, int64_t kv, int64_t rows, const float *query, float *scores,
                           int64_t stride, const range *all_seen, float *own, float *out) {
    const int64_t each = a->heads / a->kv_heads, dim = a->dim, kept = (all_seen->end[0] + 15) & ~15LL;
    const int64_t origin[2] = {0, all_seen->begin[1] & ~15LL};
    for (int part = 0; part < 2; part++)
        for (int64_t p = all_seen->begin[part], run; p < all_seen->end[part]; p += run) {
            const float *key = load_run(a, t->first, kv, KEY, p, all_seen->end[part] - p, &run, own);
            float *to = scores + (part ? kept : 0) + p - origin[part];
            for (int64_t r = 0; r < rows; r += ROWS) {
                const int64_t together = rows - r < ROWS ? rows - r : ROWS;
                if (key) score_group(together, query + r * dim, key, run, dim, to + r * stride, stride);
                else
                    for (int64_t i = 0; i < together * run; i++) to[(r + i / run) * stride + i % run] = -INFINITY;
            }
        }
    for (int64_t r = 0; r < rows; r++) {
        const range seen = seen_by(a, t->first + r / each);
        const score_row row = {{scores + r * stride, scores + r * stride + kept}, {0, origin[1]}};
        softmax(a, &row, &seen, kv * each + r % each);
    }
    for (int part = 0; part < 2; part++)
        for (int64_t p = all_seen->begin[part], run; p < all_seen->end[part]; p += run) {
            const float *value = load_run(a, t->first, kv, VALUE, p, all_seen->end[part] - p, &run, own);
            const float *weights = scores + (part ? kept : 0) - origin[part];
            for (int64_t r = 0; value && r < rows; r += ROWS)
                add_seen(a, t, part, rows - r < ROWS ? rows - r : ROWS, r, weights, stride, value, p, run, out + r * dim);
        }
}

/* One key head of a tile. */
static void attend_tile(void *given, int index) {
    attention_job *j = given;
    const attention_call *a = j->a;
    const tile *t = j->tiles + (j->num_tiles - 1 - index / a->kv_heads); /* those that see most first */
    const int64_t kv = index % a->kv_heads, each = a->heads / a->kv_heads, dim = a->dim, rows = t->count * each;
    const range first = seen_by(a, t->first), last = seen_by(a, t->first + t->count - 1);
    const range all_seen = {{0, first.begin[1]}, {last.end[0], last.end[1]}};
    const int32_t *ends = a->row_range + 3 * t->first;
    float *to = a->out + (t->first * a->heads + kv * each) * dim;
    if (ends[2] < 0 || (a->tail && ends[2] >= a->tail_size) || last.end[1] <= last.begin[1]) { /* a row that idles */
        memset(to, 0, (size_t)(each * dim) * sizeof(float));
        return;
    }
    const int64_t kept = (last.end[0] + 15) & ~15LL;
    const int64_t stride = kept + ((all_seen.end[1] + 15) & ~15LL) - (all_seen.begin[1] & ~15LL);
    const int64_t longest = !a->key_bits ? 0 : a->size > a->tail_size ? a->size : a->tail_size; /* run */
    float *query = malloc((size_t)(rows * (2 * dim + stride) + (longest + 1) * dim) * sizeof *query);
    float *out = query + rows * dim, *scores = out + rows * dim, *own = scores + rows * stride;
    if (!query) {
        j->failed = 1;
        return;
    }
    if (a->tail && a->new_heads) write_token(a, t->first, kv, j->turns + t->first * 2 * a->pairs, own);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = t->first + r / each;
        float *q = query + r * dim;
        const float *from = a->qkv + (token * (a->heads + a->new_heads) + kv * each + r % each) * dim;
        prepare_head(a, from, a->q_norm, j->turns + token * 2 * a->pairs, q);
        for (int64_t i = 0; i < dim; i++) q[i] *= a->scale;
    }
    memset(out, 0, (size_t)(rows * dim) * sizeof *out);
    attend_queries(a, t, kv, rows, query, scores, stride, &all_seen, own, out);
    for (int64_t i = 0; i < t->count; i++)
        memcpy(to + i * a->heads * dim, out + i * each * dim, (size_t)(each * dim) * sizeof *out);
    free(query);
}

static void turn_token(void *given, int token) {
    attention_job *j = given;
    const int64_t pairs = j->a->pairs;
    const float position = (float)position_of(j->a, token);
    float *cosines = j->turns + token * 2 * pairs, *sines = cosines + pairs;
    for (int64_t i = 0; i < pairs; i++) {
        const float angle = position * j->a->inv_freq[i];
        cosines[i] = cosf(angle), sines[i] = sinf(angle);
    }
}

static void encode_token(void *given, int token) {
    attention_job *j = given;
    const attention_call *a = j->a;
    float *own = a->key_bits ? malloc((size_t)(2 * a->dim) * sizeof *own) : NULL;
    if (a->key_bits && !own) {
        j->failed = 1;
        return;
    }
    a->finite[token] = 1;
    for (int64_t head = 0; head < a->kv_heads; head++) write_token(a, token, head, j->turns + token * 2 * a->pairs, own);
    free(own);
}

/* Tokens that follow one another in a row of the block table go together, as many as their scores allow; tokens with tails
 * of their own do not. */
static int64_t make_tiles(const attention_call *a, tile *tiles) {
    const int64_t each = a->heads / a->kv_heads, most = HEADS_TOGETHER < each ? 1 : HEADS_TOGETHER / each;
    int64_t count = 0;
    for (int64_t token = 0; token < a->rows; token++) {
        tile *last = tiles + count - 1;
        const int64_t position = position_of(a, token);
        const int same = count && !a->tail && a->table_row && a->table_row[token] == a->table_row[token - 1];
        const int follows = same && position == position_of(a, token - 1) + 1;
        if (follows && last->count < most && (last->count + 1) * each * position < MAX_SCORES) last->count++;
        else tiles[count++] = (tile){token, 1};
    }
    return count;
}

static int run_tokens(const attention_call *a, int threads, int encode) {
    float *turns = malloc((size_t)(a->rows * 2 * a->pairs + 1) * sizeof *turns);
    tile *tiles = malloc((size_t)(a->rows + 1) * sizeof *tiles);
    attention_job j = {a, turns, tiles, 0, !turns || !tiles};
    if (!j.failed) {
        if (a->inv_freq) parallel_for(a->rows < ROWS_TO_SHARE ? 1 : threads, (int)a->rows, turn_token, &j);
        if (encode) {
            parallel_for(a->rows < ROWS_TO_SHARE ? 1 : threads, (int)a->rows, encode_token, &j);
        } else {
            int64_t work = 0;
            for (int64_t token = 0; token < a->rows; token++) work += position_of(a, token) * a->heads * a->dim;
            j.num_tiles = make_tiles(a, tiles);
            parallel_for(work < 1 << 14 ? 1 : threads, (int)(j.num_tiles * a->kv_heads), attend_tile, &j);
        }
    }
    free(turns), free(tiles);
    return j.failed ? NO_MEMORY : 0;
}

int run_attention(const attention_call *a, int threads) { return run_tokens(a, threads, 0); }

int run_encode_kv(const attention_call *a, int threads) { return run_tokens(a, threads, 1); }
