/* What the library computes: a list of calls, each with its arguments. A decode step is one such list.
 *
 * Arrays are float32 and without gaps, if nothing else is said. */
#ifndef MLXRT_CALLS_H
#define MLXRT_CALLS_H
#include "packed.h"

enum { NO_MEMORY = 1, UNREADABLE, UNKNOWN_CALL }; /* errors; UNREADABLE: a matrix that the library has no reader for */
enum { MATMUL, EMBED, NORM, ATTENTION, ARGMAX, CONCAT, EXPERTS, DRAW, LOGPROBS, ROUTER, SORT, COMBINE, ENCODE_KV };
enum { NO_ACTIVATION, SILU, GELU, CLAMPED, SIGMOID };
enum { ROWS_TO_SHARE = 16 }; /* fewer are done sooner than another thread wakes up */

/* y = activation(a @ RMSNorm(x) + bias) + residual, capped. A pair's first half is the gate of its second; another gate's
 * other half is `times`. */
typedef struct {
    const matrix *a;
    const float *x;                              /* [columns, width] */
    const float *norm, *bias, *times, *residual; /* [width], [rows], [columns, outputs] twice; or NULL */
    float *y;                                    /* [columns, outputs]: as many as rows, of a pair half of them */
    int64_t columns;
    float eps, softcap;
    int32_t activation, pair;
} matmul_call;

/* Products of a stack of `count` matrices: y[p] = activation(a_e @ x[p / each] + bias_e), e the expert of pair p. `order`: the
 * pairs by their experts, those of expert e from bounds[e] to bounds[e + 1]. */
typedef struct {
    const matrix *a; /* the first of them; the others follow */
    const float *x;  /* [pairs / each, width] */
    const uint32_t *order, *bounds;
    const float *bias; /* [count, rows], or NULL */
    float *y;          /* [pairs, outputs] */
    int64_t pairs, count, each;
    int32_t activation, pair;
} experts_call;

/* y[i] = row tokens[i] of the matrix, times `scale`. */
typedef struct {
    const matrix *a;
    const uint32_t *tokens;
    float *y;
    int64_t count;
    float scale;
} embed_call;

/* y = (RMSNorm(x) + residual) * scalar * scale; of the groups that x's rows belong to by turns, y has one after the other. */
typedef struct {
    const float *x, *weight, *residual, *scalar; /* [rows, width], [width], like x or NULL, [1] or NULL */
    float *y;
    int64_t rows, width, groups;
    float eps, scale;
} norm_call;

typedef struct {
    /* The rows are tokens: one of each row of the batch, or without a tail any number. */
    const float *qkv;         /* [rows, heads + new heads, dim] */
    const uint32_t *pool;     /* [blocks, 2 kv heads, size, dim] floats, keys' heads first; quantised [blocks, kv heads, size, words] */
    uint32_t *tail;           /* [rows, .., tail size, ..] like the pool's; gets the new token. NULL: it is in the pool */
    const int32_t *table;     /* [rows of the batch, blocks of a row] */
    const int32_t *table_row; /* [rows] a token's row of the table; NULL: its own */
    const int32_t *row_range; /* [rows, 3] position of the table's first slot, of the tail's first slot, tokens in the tail;
                               * the sum of the last two is the token's position */
    const float *q_norm, *k_norm, *inv_freq, *sinks; /* or NULL */
    float *out;               /* [rows, heads, dim] */
    uint8_t *finite;          /* [rows] whether a token's key and value are; NULL: it is not asked */
    int64_t rows, heads, kv_heads, dim, words, pool_blocks, size, row_blocks, tail_size, pairs, window, keep, new_heads;
    float eps, magnitude, scale, softcap;
    int32_t v_norm, tied, key_bits, value_bits, group; /* the last three 0: plain */
} attention_call;

/* The first of a row's largest numbers; 0 and `bad` if it is not finite. */
typedef struct {
    const float *x; /* [rows, width] */
    uint32_t *tokens; /* [rows] */
    uint32_t *status; /* [rows, 2] the token, bad */
    int64_t rows, width;
} argmax_call;

/* Columns of up to four arrays side by side: of products whose matrices have different formats. */
typedef struct {
    const float *a, *b, *c, *d; /* [rows, its width], or NULL */
    float *y;
    int64_t rows, a_width, b_width, c_width, d_width;
} concat_call;

/* The op draw. `table` has `words` numbers for each row, made `offset` steps ago; `newest` and `recent` are tokens since. */
typedef struct {
    const float *x; /* [rows, width] */
    const uint32_t *table, *offset, *newest, *recent; /* [rows, words], [1], [rows] and [rows, recents] or NULL */
    const uint32_t *mask; /* [rows, width / 32] a bit for each token that may be chosen, or NULL */
    float *y; /* [rows, width] logits after penalties, bias and mask */
    uint32_t *tokens, *status; /* as those of argmax */
    uint32_t *after; /* [rows, recents] with the newest token; or NULL */
    int64_t rows, width, words, recents;
} draw_call;

/* The op top_logprobs. */
typedef struct {
    const float *x; /* [rows, width] */
    const uint32_t *status; /* [rows, 2] */
    uint32_t *result; /* [rows, 2 + count] */
    float *logprobs; /* [rows, 1 + count] */
    int64_t rows, width, count;
} logprobs_call;

/* The op moe_router. */
typedef struct {
    const matrix *a; /* may be plain */
    const float *x;  /* [rows, width] */
    const float *norm, *bias, *correction, *scales; /* or NULL */
    uint32_t *experts; /* [rows, k] */
    float *weights;    /* [rows, k] */
    int64_t rows, k;
    float eps;
    int32_t sigmoid, normalise;
} router_call;

/* The op moe_sort. */
typedef struct {
    const uint32_t *experts; /* [pairs] */
    uint32_t *order, *bounds; /* [pairs], [count + 1] */
    int64_t pairs, count;
} sort_call;

/* The op moe_combine. */
typedef struct {
    const float *parts, *weights, *residual; /* [rows * k, width], [rows, k], [rows, width] or NULL */
    float *y;                                /* [rows, width] */
    int64_t rows, k, width;
} combine_call;

typedef struct {
    int32_t kind;
    const void *arguments;
} call;

int run_matmul(const matmul_call *c, int threads);
int run_experts(const experts_call *c, int threads);
int run_embed(const embed_call *c, int threads);
int run_norm(const norm_call *c, int threads);
int run_attention(const attention_call *c, int threads);
int run_encode_kv(const attention_call *c, int threads); /* the keys and values of tokens into `tail` */
int run_argmax(const argmax_call *c, int threads);
int run_concat(const concat_call *c);
int run_draw(const draw_call *c, int threads);
int run_router(const router_call *c, int threads);
int run_sort(const sort_call *c);
int run_combine(const combine_call *c, int threads);
int run_logprobs(const logprobs_call *c, int threads);

int mlxrt_rows_together(int format); /* rows side by side that it reads a matrix as, or none */
int mlxrt_activation_bits(void); /* of products: 8, or 32 for those of float32 */
#endif
