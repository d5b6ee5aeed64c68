#include "draw.h"

// The sum of exp over a slice of the vocabulary, relative to its best logit, and the best logit of each of its parts.
[[kernel]] void mlxrt_logprob_slices(MLX_ARGUMENTS) {
    uint slice = threadgroup_position_in_grid.x;
    uint row = threadgroup_position_in_grid.y;
    uint tid = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    threadgroup uint keys[8];
    threadgroup float totals[8];
    float v[8];
    uint begin = slice * SLICE + 8 * tid;
    load_logits8<T, V>(x, row, begin, v);
    uint best = 0;
    for (uint c = 0; c < 8; c++) best = metal::max(best, sort_key(v[c]));
    best = simd_max(best);
    if (lane == 0) {
        parts[(row * uint(S) + slice) * 8 + sg] = best;
        keys[sg] = best;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < 8; i++) best = metal::max(best, keys[i]);
    float peak = key_logit(best);
    float total = 0.0f;
    for (uint c = 0; c < 8; c++) total += best > LOWEST_KEY ? metal::exp(v[c] - peak) : 0.0f;
    total = simd_sum(total);
    if (lane == 0) totals[sg] = total;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid == 0) {
        for (uint i = 1; i < 8; i++) total += totals[i];
        sums[2 * (row * uint(S) + slice)] = peak;
        sums[2 * (row * uint(S) + slice) + 1] = total;
    }
}
