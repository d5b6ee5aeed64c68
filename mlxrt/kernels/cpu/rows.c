/* What is done to every row by itself: RMSNorm, the best token, and columns side by side. */
#include "calls.h"
#include "threads.h"
#include <math.h>

static void norm_row(void *given, int row) {
    const norm_call *c = given;
    const float *x = c->x + row * c->width, *residual = c->residual ? c->residual + row * c->width : NULL;
    float *y = c->y + (row % c->groups * (c->rows / c->groups) + row / c->groups) * c->width;
    floats squares = zeros();
    for (int64_t k = 0; k < c->width; k += 16) squares = multiply_add(load(x + k), load(x + k), squares);
    const floats factor = all(1 / sqrtf(sum(squares) / (float)c->width + c->eps));
    const float scale = c->scalar ? c->scalar[0] * c->scale : c->scale;
    for (int64_t k = 0; k < c->width; k += 16) {
        floats v = multiply(multiply(load(x + k), factor), load(c->weight + k));
        if (residual) v = add(v, load(residual + k));
        store(y + k, scale == 1 ? v : multiply(v, all(scale)));
    }
}

int run_norm(const norm_call *c, int threads) {
    parallel_for(c->rows < ROWS_TO_SHARE ? 1 : threads, (int)c->rows, norm_row, (void *)c);
    return 0;
}

/* A float's bits as an integer of the same order; both zeros are one. */
INLINE int32_t order_of(float x) {
    int32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & INT32_MAX);
}

static void find_best(void *given, int row) {
    const argmax_call *c = given;
    const float *x = c->x + row * c->width;
    const int32_t infinite = 0x7f800000;
    int32_t most = INT32_MIN, largest = 0; /* the second: of the sizes, which a NaN has beyond infinity */
    for (int64_t i = 0; i < c->width; i++) {
        const int32_t order = order_of(x[i]);
        int32_t size;
        memcpy(&size, x + i, 4), size &= INT32_MAX;
        most = order > most ? order : most;
        largest = size > largest ? size : largest;
    }
    const int bad = largest > infinite || most >= infinite || most == order_of(-INFINITY);
    uint32_t token = 0;
    if (!bad)
        while (order_of(x[token]) != most) token++;
    c->tokens[row] = c->status[2 * row] = token, c->status[2 * row + 1] = (uint32_t)bad;
}

int run_argmax(const argmax_call *c, int threads) {
    parallel_for(threads, (int)c->rows, find_best, (void *)c);
    return 0;
}

int run_concat(const concat_call *c) {
    const float *from[4] = {c->a, c->b, c->c, c->d};
    const int64_t widths[4] = {c->a_width, c->b_width, c->c_width, c->d_width};
    float *to = c->y;
    for (int64_t row = 0; row < c->rows; row++)
        for (int i = 0; i < 4; to += widths[i++])
            if (from[i]) memcpy(to, from[i] + row * widths[i], (size_t)widths[i] * sizeof *to);
    return 0;
}
