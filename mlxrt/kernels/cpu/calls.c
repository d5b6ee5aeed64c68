/* The way in: runs a list of calls, one after another. */
#include "calls.h"

/* 0, or the first call's error. */
int mlxrt_run(const call *calls, int64_t count, int threads) {
    int failed = 0;
    for (int64_t i = 0; i < count && !failed; i++) {
        const void *c = calls[i].arguments;
        switch (calls[i].kind) {
        case MATMUL: failed = run_matmul(c, threads); break;
        case EMBED: failed = run_embed(c, threads); break;
        case NORM: failed = run_norm(c, threads); break;
        case ATTENTION: failed = run_attention(c, threads); break;
        case ARGMAX: failed = run_argmax(c, threads); break;
        case CONCAT: failed = run_concat(c); break;
        case EXPERTS: failed = run_experts(c, threads); break;
        case DRAW: failed = run_draw(c, threads); break;
        case LOGPROBS: failed = run_logprobs(c, threads); break;
        case ROUTER: failed = run_router(c, threads); break;
        case SORT: failed = run_sort(c); break;
        case COMBINE: failed = run_combine(c, threads); break;
        case ENCODE_KV: failed = run_encode_kv(c, threads); break;
        default: failed = UNKNOWN_CALL;
        }
    }
    return failed;
}

const char *mlxrt_vector_name(void) { return VECTOR_NAME; }
