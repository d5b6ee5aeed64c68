/* From a row's logits to its token, and log probabilities. kernels/ops/draw.py says what is computed and is the definition:
 * tokens weigh whole numbers, so the token is the very same. */
#include "calls.h"
#include "threads.h"
#include <math.h>
#include <stdlib.h>

/* A row of the table that draw_rows.py packs. */
typedef struct {
    uint32_t top_k;
    float sharpness; /* log2(e) / temperature; 0: the best token */
    uint32_t top_p;  /* of 2^32; 0: all */
    float max_gap;
    uint32_t seed[2], position, recent;
    float repeated_above, repeated_below, presence, frequency;
    uint32_t prompts, outputs, biases, unused;
    uint32_t lists[];
} draw_row;

enum { BITS = 11, BINS = 1 << BITS };
#define LOWEST_KEY 0x007fffffu /* of minus infinity */
#define INFINITE_KEY 0xff800000u
#define IN_PROMPT 0x80000000u

typedef struct {
    const draw_call *c;
    int failed;
} draw_job;

/* A float as an integer of the same order; both zeros are one. */
INLINE uint32_t key_of(float y) {
    uint32_t bits;
    y = y == 0 ? 0 : y;
    memcpy(&bits, &y, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

INLINE float logit_of(uint32_t key) {
    const uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* 2^(40 - gap), by whole numbers alone, and without a branch: compilers make vectors of it. */
INLINE uint64_t weigh(float gap) {
    const int counts = gap < 41;
    const uint32_t fixed = (uint32_t)(int32_t)((counts ? gap : 0) * 0x1p24f);
    const uint64_t g = (fixed & 0xffffff) << 8;
    uint64_t p = 0x003decd9;
    p = 0x025b4fa8 - (p * g >> 32);
    p = 0x0e27f7b7 - (p * g >> 32);
    p = 0x3d7c7222 - (p * g >> 32);
    p = 0xb171ddee - (p * g >> 32);
    const uint64_t weight = (((1ull << 31) - (p * g >> 33)) << 9) >> (fixed >> 24);
    return counts ? weight : 0;
}

/* Philox 4x32-10 of a row's seed and position. */
static uint64_t random_bits(const draw_row *r, uint32_t offset) {
    uint32_t a = r->position + offset, b = 0, c = 0, d = 0, low = r->seed[0], high = r->seed[1];
    for (int i = 0; i < 10; i++, low += 0x9e3779b9u, high += 0xbb67ae85u) {
        const uint64_t first = 0xd2511f53ull * a, second = 0xcd9e8d57ull * c;
        a = (uint32_t)(second >> 32) ^ b ^ low, b = (uint32_t)second;
        c = (uint32_t)(first >> 32) ^ d ^ high, d = (uint32_t)first;
    }
    return (uint64_t)b << 32 | a;
}

INLINE void count_token(uint32_t *times, int64_t width, uint32_t id, int in_prompt) {
    if (id < width) times[id] = in_prompt ? times[id] | IN_PROMPT : times[id] + 1;
}

INLINE void penalise_token(const draw_row *r, float *y, uint32_t *times, int64_t width, uint32_t id) {
    if (id >= width || !times[id]) return;
    const uint32_t count = times[id] & ~IN_PROMPT;
    y[id] *= y[id] < 0 ? r->repeated_below : r->repeated_above;
    if (count) y[id] = y[id] - r->frequency * (float)count - r->presence;
    times[id] = 0;
}

/* Penalties, bias and mask. `times` is zero, before and afterwards. */
static void adjust(const draw_call *c, int64_t row, const draw_row *r, float *y, uint32_t *times) {
    uint32_t *after = c->after ? c->after + row * c->recents : NULL, newest = 0;
    if (after) {
        newest = r->recent + c->offset[0];
        memcpy(after, c->recent + row * c->recents, (size_t)c->recents * sizeof *after);
        if (newest > 0 && newest <= c->recents) after[newest - 1] = c->newest[row];
        if (newest > c->recents) newest = (uint32_t)c->recents;
    }
    const uint32_t listed = r->prompts + r->outputs;
    for (uint32_t i = 0; i < listed; i++) count_token(times, c->width, r->lists[i], i < r->prompts);
    for (uint32_t i = 0; i < newest; i++) count_token(times, c->width, after[i], 0);
    for (uint32_t i = 0; i < listed; i++) penalise_token(r, y, times, c->width, r->lists[i]);
    for (uint32_t i = 0; i < newest; i++) penalise_token(r, y, times, c->width, after[i]);
    for (uint32_t i = 0; i < r->biases; i++) {
        const uint32_t id = r->lists[listed + i];
        float bias;
        memcpy(&bias, r->lists + listed + r->biases + i, 4);
        if (id < c->width) y[id] += bias;
    }
    if (!c->mask) return;
    const uint32_t *mask = c->mask + row * ((c->width + 31) / 32);
    for (int64_t i = 0; i < c->width; i++)
        if (!(mask[i / 32] >> i % 32 & 1)) y[i] = -INFINITY;
}

/* The least key that fewer than `limit` of the mass lie above; `above`: how much does. `masses` NULL: each key counts 1. */
static uint32_t select_key(const uint32_t *keys, const uint64_t *masses, int64_t width, uint64_t limit, uint64_t *above) {
    static const int shifts[] = {32 - BITS, 32 - 2 * BITS, 0};
    uint32_t known = 0, prefix = 0;
    *above = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level], bits = level < 2 ? BITS : 32 - 2 * BITS;
        uint64_t bins[BINS] = {0};
        for (int64_t i = 0; i < width; i++)
            if ((keys[i] & known) == prefix) bins[keys[i] >> shift & ((1u << bits) - 1)] += masses ? masses[i] : 1;
        int bin = (1 << bits) - 1;
        for (; bin > 0 && *above + bins[bin] < limit; bin--) *above += bins[bin];
        prefix |= (uint32_t)bin << shift, known |= ((1u << bits) - 1) << shift;
    }
    return prefix;
}

/* What the tokens that stay weigh, into `weights`; their sum. */
static uint64_t weigh_kept(const draw_row *r, const float *y, const uint32_t *keys, int64_t width, float peak, uint64_t *weights) {
    uint64_t above, total = 0;
    const uint32_t cut = r->top_k && r->top_k < width ? select_key(keys, NULL, width, r->top_k, &above) : 0;
    const float sharpness = r->sharpness, max_gap = r->max_gap;
    for (int64_t i = 0; i < width; i++) {
        const uint64_t weight = weigh((peak - y[i]) * sharpness);
        total += weights[i] = keys[i] >= cut ? weight : 0;
    }
    uint32_t nucleus = LOWEST_KEY + 1;
    uint64_t ties = UINT64_MAX;
    if (r->top_p) {
        uint64_t limit = (total >> 32) * r->top_p + ((total & UINT32_MAX) * r->top_p >> 32);
        limit = limit ? limit : 1;
        nucleus = select_key(keys, weights, width, limit, &above);
        const uint64_t each = weigh((peak - logit_of(nucleus)) * sharpness), one = each ? each : 1;
        ties = (limit - above + one - 1) / one;
    }
    total = 0;
    for (int64_t i = 0; i < width; i++) {
        const int stays = (keys[i] >= nucleus) & ((peak - y[i]) * sharpness <= max_gap);
        total += weights[i] = stays ? weights[i] : 0;
    }
    for (int64_t i = 0; r->top_p && i < width; i++) {
        if (keys[i] != nucleus) continue;
        if (ties)
            ties--;
        else
            total -= weights[i], weights[i] = 0;
    }
    return total;
}

static void draw_token(void *given, int row) {
    draw_job *j = given;
    const draw_call *c = j->c;
    const draw_row *r = (const draw_row *)(c->table + row * c->words);
    const int64_t width = c->width;
    float *y = c->y + row * width;
    uint64_t *weights = malloc((size_t)width * (sizeof *weights + sizeof(uint32_t)));
    uint32_t *keys = (uint32_t *)(weights + width);
    if (!weights) {
        j->failed = 1;
        return;
    }
    memcpy(y, c->x + row * width, (size_t)width * sizeof *y);
    memset(keys, 0, (size_t)width * sizeof *keys);
    adjust(c, row, r, y, keys);
    uint32_t best = 0, token = 0;
    int nan = 0;
    for (int64_t i = 0; i < width; i++) {
        keys[i] = key_of(y[i]);
        best = keys[i] > best ? keys[i] : best;
        nan |= y[i] != y[i];
    }
    const int bad = nan || best <= LOWEST_KEY || best >= INFINITE_KEY;
    if (!bad && !(r->sharpness > 0)) {
        while (keys[token] != best) token++;
    } else if (!bad) {
        const uint64_t total = weigh_kept(r, y, keys, width, logit_of(best), weights);
        const uint64_t target = (uint64_t)((unsigned __int128)total * random_bits(r, c->offset[0]) >> 64);
        for (uint64_t upto = weights[0]; upto <= target && token + 1 < width;) upto += weights[++token];
    }
    free(weights);
    c->tokens[row] = c->status[2 * row] = token, c->status[2 * row + 1] = (uint32_t)bad;
}

int run_draw(const draw_call *c, int threads) {
    draw_job j = {c, 0};
    parallel_for(threads, (int)c->rows, draw_token, &j);
    return j.failed ? NO_MEMORY : 0;
}

/* Whether token a comes before token b: with a larger logit, or with the same one and a lower id. */
INLINE int is_before(const float *x, uint32_t a, uint32_t b) {
    const uint32_t one = key_of(x[a]), other = key_of(x[b]);
    return one > other || (one == other && a < b);
}

static void rank_tokens(void *given, int row) {
    const logprobs_call *c = given;
    const float *x = c->x + row * c->width;
    const int64_t n = c->count;
    float worst = -INFINITY; /* of those found, when they are enough */
    uint32_t *result = c->result + row * (2 + n), *best = result + 2;
    float *logprobs = c->logprobs + row * (1 + n);
    memcpy(result, c->status + 2 * row, 2 * sizeof *result);
    int64_t found = 0;
    for (int64_t i = 0; i < c->width; i++) {
        if (x[i] < worst || (found == n && !is_before(x, (uint32_t)i, best[n - 1]))) continue;
        int64_t at = found < n ? found++ : n - 1;
        for (; at > 0 && is_before(x, (uint32_t)i, best[at - 1]); at--) best[at] = best[at - 1];
        best[at] = (uint32_t)i;
        if (found == n) worst = x[best[n - 1]];
    }
    const float most = x[best[0]];
    double sum = 0;
    for (int64_t i = 0; i < c->width; i++) sum += (double)expf(x[i] - most);
    const float total = most + (float)log(sum);
    for (int64_t i = 0; i <= n; i++) logprobs[i] = x[i ? best[i - 1] : result[0]] - total;
}

int run_logprobs(const logprobs_call *c, int threads) {
    parallel_for(threads, (int)c->rows, rank_tokens, (void *)c);
    return 0;
}
