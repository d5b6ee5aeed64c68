/* Decode attention over a paged KV cache, float32 or quantised: norms of the heads, RoPE, the new token into the tail,
 * softmax, values.
 *
 * A row's sums are taken key by key in the order of positions: they depend on nothing but the row. Quantised keys and values
 * are unpacked a block at a time; a slot has, as kv_codec.py packs them, the words of the key and of the value, then the key's
 * scales and biases, then the value's. */
#include "calls.h"
#include "threads.h"
#include <math.h>
#include <stdlib.h>

typedef struct {
    const attention_call *a;
    const float *turns; /* [rows, 2, pairs] cosines and sines of the row's position */
    int failed;
} attention_job;

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
    if (position >= range[1]) {
        *length = count;
        return a->tail + (first_slot(a, row, head, which, a->tail_size) + position - range[1]) * a->words;
    }
    const int64_t slot = position < a->keep ? position : position - range[0];
    const int64_t tail = range[1] - position, full = a->size - slot % a->size;
    *length = count < tail ? count : tail;
    if (*length > full) *length = full;
    if (slot < 0 || slot >= a->row_blocks * a->size) return NULL;
    const int64_t block = a->table[row * a->row_blocks + slot / a->size];
    if (block < 0 || block >= a->pool_blocks) return NULL;
    return a->pool + (first_slot(a, block, head, which, a->size) + slot % a->size) * a->words;
}

/* Where a head's query is: the row, the key head, and which keys it sees: `kept` of the first tokens, then those from
 * position `first` on. */
typedef struct {
    int64_t row, head, first, kept, count;
} place;

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

/* Keys or values of a place from the t-th on that lie side by side, as floats; quantised ones are unpacked to `own`. */
static const float *load_run(const attention_call *a, const place *at, int which, int64_t t, int64_t *run, float *own) {
    const int64_t position = t < at->kept ? t : at->first + t - at->kept, count = (t < at->kept ? at->kept : at->count) - t;
    const uint32_t *slots = run_of(a, at->row, at->head, which, position, count, run);
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

INLINE float dot(const float *x, const float *y, int64_t dim) {
    floats s = zeros();
    for (int64_t k = 0; k < dim; k += 16) s = multiply_add(load(x + k), load(y + k), s);
    return sum(s);
}

/* The scores of a query and `run` keys; NULL: none of them counts. */
static void score_run(const float *query, const float *key, int64_t run, int64_t dim, float *scores) {
    for (int64_t i = 0; i < run; i++) scores[i] = key ? dot(query, key + i * dim, dim) : -INFINITY;
}

/* out += weights x values; C vectors of a head at a time stay in registers. */
INLINE void add_columns(const float *weights, const float *value, int64_t run, int64_t dim, float *out, const int C) {
    floats sums[4];
    for (int c = 0; c < C; c++) sums[c] = load(out + 16 * c);
    for (int64_t i = 0; i < run; i++)
        for (int c = 0; c < C; c++) sums[c] = multiply_add(all(weights[i]), load(value + i * dim + 16 * c), sums[c]);
    for (int c = 0; c < C; c++) store(out + 16 * c, sums[c]);
}

static void add_run(const float *weights, const float *value, int64_t run, int64_t dim, float *out) {
    int64_t k = 0;
    for (; k + 64 <= dim; k += 64) add_columns(weights, value + k, run, dim, out + k, 4);
    for (; k < dim; k += 16) add_columns(weights, value + k, run, dim, out + k, 1);
}

/* Scores of one query to weights; what is left of the sum is the sink's. */
static void softmax(const attention_call *a, float *scores, int64_t count, int64_t head) {
    float most = a->sinks ? a->sinks[head] : -INFINITY, total = 0;
    for (int64_t t = 0; t < count; t++) {
        if (a->softcap > 0) scores[t] = tanhf(scores[t] / a->softcap) * a->softcap;
        if (scores[t] > most) most = scores[t];
    }
    for (int64_t t = 0; t < count; t++) total += scores[t] = expf(scores[t] - most);
    if (a->sinks) total += expf(a->sinks[head] - most);
    for (int64_t t = 0; t < count; t++) scores[t] /= total;
}

/* The new token's key and value into the tail. */
static void write_token(const attention_call *a, const place *at, const float *in, const float *turn, float *own) {
    const float *k = in + (a->heads + at->head) * a->dim, *v = a->tied ? k : k + a->kv_heads * a->dim;
    const int64_t used = a->row_range[3 * at->row + 2], dim = a->dim;
    uint32_t *slots[2];
    for (int i = KEY; i <= VALUE; i++) slots[i] = a->tail + (first_slot(a, at->row, at->head, i, a->tail_size) + used) * a->words;
    float *key = a->key_bits ? own : (float *)slots[KEY], *value = a->key_bits ? own + dim : (float *)slots[VALUE];
    prepare_head(a, k, a->k_norm, turn, key);
    memcpy(value, v, (size_t)dim * sizeof *value);
    if (a->v_norm) norm_head(value, NULL, a->eps, dim);
    if (!a->key_bits) return;
    float *scales = (float *)(slots[KEY] + dim * (a->key_bits + a->value_bits) / 32);
    pack_vector(key, dim, a->group, a->key_bits, (uint8_t *)slots[KEY], scales);
    uint32_t *after = slots[KEY] + dim * a->key_bits / 32;
    pack_vector(value, dim, a->group, a->value_bits, (uint8_t *)after, scales + 2 * dim / a->group);
}

/* The queries of one key head of one row. */
static void attend_head(void *given, int index) {
    attention_job *j = given;
    const attention_call *a = j->a;
    const int64_t row = index / a->kv_heads, kv = index % a->kv_heads, each = a->heads / a->kv_heads, dim = a->dim;
    const int32_t *range = a->row_range + 3 * row;
    const int64_t last = (int64_t)range[1] + range[2], near = a->window ? last - a->window + 1 : 0;
    const int64_t first = near > range[0] ? near : range[0], kept = first < a->keep ? first : a->keep;
    const int64_t count = kept + last - first + 1; /* the first tokens that are kept, then the window */
    const place at = {row, kv, first, kept, count};
    const float *in = a->qkv + row * (a->heads + a->new_heads) * dim, *turn = j->turns + row * 2 * a->pairs;
    if (range[2] < 0 || range[2] >= a->tail_size || count < 1) { /* a row that idles */
        memset(a->out + (row * a->heads + kv * each) * dim, 0, (size_t)(each * dim) * sizeof(float));
        return;
    }
    const int64_t longest = !a->key_bits ? 0 : a->size > a->tail_size ? a->size : a->tail_size; /* run */
    float *query = malloc((size_t)(each * (dim + count) + (longest + 1) * dim) * sizeof *query);
    float *scores = query + each * dim, *own = scores + each * count;
    if (!query) {
        j->failed = 1;
        return;
    }
    if (a->new_heads) write_token(a, &at, in, turn, own);
    for (int64_t h = 0; h < each; h++) {
        float *q = query + h * dim;
        prepare_head(a, in + (kv * each + h) * dim, a->q_norm, turn, q);
        for (int64_t i = 0; i < dim; i++) q[i] *= a->scale;
    }
    for (int64_t t = 0, run; t < count; t += run) {
        const float *key = load_run(a, &at, KEY, t, &run, own);
        for (int64_t h = 0; h < each; h++) score_run(query + h * dim, key, run, dim, scores + h * count + t);
    }
    for (int64_t h = 0; h < each; h++) softmax(a, scores + h * count, count, kv * each + h);
    float *out = a->out + (row * a->heads + kv * each) * dim;
    memset(out, 0, (size_t)(each * dim) * sizeof *out);
    for (int64_t t = 0, run; t < count; t += run) {
        const float *value = load_run(a, &at, VALUE, t, &run, own);
        for (int64_t h = 0; value && h < each; h++) add_run(scores + h * count + t, value, run, dim, out + h * dim);
    }
    free(query);
}

int run_attention(const attention_call *a, int threads) {
    float *turns = malloc((size_t)(a->rows * 2 * a->pairs + 1) * sizeof *turns);
    if (!turns) return NO_MEMORY;
    int64_t work = 0;
    for (int64_t row = 0; row < a->rows; row++) {
        const float position = (float)(a->row_range[3 * row + 1] + a->row_range[3 * row + 2]);
        work += (int64_t)position * a->heads * a->dim;
        for (int64_t i = 0; a->inv_freq && i < a->pairs; i++) {
            const float angle = position * a->inv_freq[i];
            turns[row * 2 * a->pairs + i] = cosf(angle), turns[(row * 2 + 1) * a->pairs + i] = sinf(angle);
        }
    }
    attention_job j = {a, turns, 0};
    parallel_for(work < 1 << 14 ? 1 : threads, (int)(a->rows * a->kv_heads), attend_head, &j);
    free(turns);
    return j.failed ? NO_MEMORY : 0;
}
