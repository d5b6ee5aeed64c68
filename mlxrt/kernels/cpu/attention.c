/* Decode attention over a paged KV cache, float32: norms of the heads, RoPE, the new token into the tail, softmax, values.
 *
 * A row's sums are taken key by key in the order of positions: they depend on nothing but the row. */
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

/* Keys or values of `head` from a position on that lie side by side; how many of `count` there are. NULL: positions that
 * the row does not hold. */
static const float *run_of(const attention_call *a, int64_t row, int64_t head, int64_t position, int64_t count, int64_t *length) {
    const int32_t *range = a->row_range + 3 * row;
    if (position >= range[1]) {
        *length = count;
        return a->tail + ((row * 2 * a->kv_heads + head) * a->tail_size + position - range[1]) * a->dim;
    }
    const int64_t slot = position < a->keep ? position : position - range[0];
    const int64_t tail = range[1] - position, full = a->size - slot % a->size;
    *length = count < tail ? count : tail;
    if (*length > full) *length = full;
    if (slot < 0 || slot >= a->row_blocks * a->size) return NULL;
    const int64_t block = a->table[row * a->row_blocks + slot / a->size];
    if (block < 0 || block >= a->pool_blocks) return NULL;
    return a->pool + ((block * 2 * a->kv_heads + head) * a->size + slot % a->size) * a->dim;
}

/* The same from the t-th of `count` keys on: `kept` of the first tokens, then those from position `first` on. */
static const float *run_from(
    const attention_call *a, int64_t row, int64_t head, int64_t first, int64_t kept, int64_t t, int64_t count, int64_t *length
) {
    return t < kept ? run_of(a, row, head, t, kept - t, length) : run_of(a, row, head, first + t - kept, count - t, length);
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

/* The queries of one key head of one row. */
static void attend_head(void *given, int index) {
    attention_job *j = given;
    const attention_call *a = j->a;
    const int64_t row = index / a->kv_heads, kv = index % a->kv_heads, each = a->heads / a->kv_heads, dim = a->dim;
    const int32_t *range = a->row_range + 3 * row;
    const int64_t last = (int64_t)range[1] + range[2], near = a->window ? last - a->window + 1 : 0;
    const int64_t first = near > range[0] ? near : range[0], kept = first < a->keep ? first : a->keep;
    const int64_t count = kept + last - first + 1; /* the first tokens that are kept, then the window */
    const float *in = a->qkv + row * (a->heads + a->new_heads) * dim, *turn = j->turns + row * 2 * a->pairs;
    if (range[2] < 0 || range[2] >= a->tail_size || count < 1) { /* a row that idles */
        memset(a->out + (row * a->heads + kv * each) * dim, 0, (size_t)(each * dim) * sizeof(float));
        return;
    }
    float *query = malloc((size_t)(each * (dim + count)) * sizeof *query), *scores = query + each * dim;
    if (!query) {
        j->failed = 1;
        return;
    }
    if (a->new_heads) {
        float *tail = a->tail + ((row * 2 * a->kv_heads + kv) * a->tail_size + range[2]) * dim;
        const float *k = in + (a->heads + kv) * dim, *v = a->tied ? k : k + a->kv_heads * dim;
        prepare_head(a, k, a->k_norm, turn, tail);
        tail += a->kv_heads * a->tail_size * dim;
        memcpy(tail, v, (size_t)dim * sizeof *tail);
        if (a->v_norm) norm_head(tail, NULL, a->eps, dim);
    }
    for (int64_t h = 0; h < each; h++) {
        float *q = query + h * dim;
        prepare_head(a, in + (kv * each + h) * dim, a->q_norm, turn, q);
        for (int64_t i = 0; i < dim; i++) q[i] *= a->scale;
    }
    for (int64_t t = 0, run; t < count; t += run) {
        const float *key = run_from(a, row, kv, first, kept, t, count, &run);
        for (int64_t h = 0; h < each; h++) score_run(query + h * dim, key, run, dim, scores + h * count + t);
    }
    for (int64_t h = 0; h < each; h++) softmax(a, scores + h * count, count, kv * each + h);
    float *out = a->out + (row * a->heads + kv * each) * dim;
    memset(out, 0, (size_t)(each * dim) * sizeof *out);
    for (int64_t t = 0, run; t < count; t += run) {
        const float *value = run_from(a, row, a->kv_heads + kv, first, kept, t, count, &run);
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
