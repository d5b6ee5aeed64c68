/* Mixtures of experts, but for their products (matmul.c): which experts a token goes to, pairs of token and expert in the order
 * of their experts, and each token's weighted sum. kernels/ops has the definitions. */
#include "calls.h"
#include "threads.h"
#include <math.h>
#include <stdlib.h>

typedef struct {
    const router_call *c;
    const float *x; /* after the norm; NULL if the product is done */
    float *logits;  /* [rows, count] */
} router_job;

/* A row's products with a plain matrix: sixteen sums of every sixteenth weight. */
static void multiply_plain(const router_call *c, const float *x, float *logits) {
    const uint8_t *w = c->a->weight;
    for (int64_t e = 0; e < c->a->rows; e++, w += c->a->row_bytes) {
        floats sums = zeros();
        for (int64_t k = 0; k < c->a->width; k += 16) sums = multiply_add(load(x + k), load_numbers(w, k, c->a->scale_type), sums);
        logits[e] = sum(sums) + (c->bias ? c->bias[e] : 0);
    }
}

static void choose_experts(void *given, int row) {
    const router_job *j = given;
    const router_call *c = j->c;
    const int64_t count = c->a->rows, k = c->k;
    float *shares = j->logits + row * count, total = 0;
    uint32_t *experts = c->experts + row * k;
    float *weights = c->weights + row * k;
    if (j->x) multiply_plain(c, j->x + row * c->a->width, shares);
    float top = -INFINITY;
    for (int64_t e = 0; e < count; e++) top = shares[e] > top ? shares[e] : top;
    for (int64_t e = 0; e < count; e++) {
        shares[e] = c->sigmoid ? 1 / (1 + expf(-shares[e])) : expf(shares[e] - top);
        total += shares[e];
    }
    for (int64_t e = 0; e < count && !c->sigmoid; e++) shares[e] /= total;
    for (int64_t i = 0; i < k; i++) { /* `weights` has what the choice goes by, at first */
        experts[i] = 0, weights[i] = -INFINITY;
    }
    for (int64_t e = 0; e < count; e++) {
        const float score = shares[e] + (c->correction ? c->correction[e] : 0);
        if (e >= k && !(score > weights[k - 1])) continue;
        int64_t at = e < k ? e : k - 1;
        for (; at > 0 && score > weights[at - 1]; at--) weights[at] = weights[at - 1], experts[at] = experts[at - 1];
        weights[at] = score, experts[at] = (uint32_t)e;
    }
    total = 0;
    for (int64_t i = 0; i < k; i++) total += weights[i] = shares[experts[i]];
    for (int64_t i = 0; i < k; i++) {
        if (c->normalise) weights[i] /= total;
        if (c->scales) weights[i] *= c->scales[experts[i]];
    }
}

int run_router(const router_call *c, int threads) {
    const matrix *a = c->a;
    const int plain = a->format == PLAIN, normed = plain && c->norm;
    float *logits = malloc((size_t)(c->rows * (a->rows + (normed ? a->width : 0)) + 1) * sizeof *logits), *x = logits + c->rows * a->rows;
    if (!logits) return NO_MEMORY;
    int failed = 0;
    if (normed) failed = run_norm(&(norm_call){c->x, c->norm, NULL, NULL, x, c->rows, a->width, 1, c->eps, 1}, threads);
    else if (!plain) failed = run_matmul(&(matmul_call){a, c->x, c->norm, c->bias, NULL, NULL, logits, c->rows, c->eps, 0, 0, 0}, threads);
    router_job j = {c, !plain ? NULL : normed ? x : c->x, logits};
    if (!failed) parallel_for(c->rows < ROWS_TO_SHARE ? 1 : threads, (int)c->rows, choose_experts, &j);
    free(logits);
    return failed;
}

int run_sort(const sort_call *c) {
    memset(c->bounds, 0, (size_t)(c->count + 1) * sizeof *c->bounds);
    for (int64_t i = 0; i < c->pairs; i++) c->bounds[c->experts[i]]++;
    uint32_t before = 0;
    for (int64_t e = 0; e < c->count; e++) before += c->bounds[e], c->bounds[e] = before; /* where each one ends */
    c->bounds[c->count] = before;
    for (int64_t i = c->pairs; i-- > 0;) c->order[--c->bounds[c->experts[i]]] = (uint32_t)i;
    return 0;
}

static void combine_row(void *given, int row) {
    const combine_call *c = given;
    const float *parts = c->parts + row * c->k * c->width, *weights = c->weights + row * c->k;
    float *restrict y = c->y + row * c->width;
    for (int64_t i = 0; i < c->width; i++) y[i] = parts[i] * weights[0];
    for (int64_t p = 1; p < c->k; p++)
        for (int64_t i = 0; i < c->width; i++) y[i] += parts[p * c->width + i] * weights[p];
    for (int64_t i = 0; c->residual && i < c->width; i++) y[i] = c->residual[row * c->width + i] + y[i];
}

int run_combine(const combine_call *c, int threads) {
    parallel_for(c->rows < ROWS_TO_SHARE ? 1 : threads, (int)c->rows, combine_row, (void *)c);
    return 0;
}
