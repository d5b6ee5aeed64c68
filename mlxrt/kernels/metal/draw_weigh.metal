#include "draw.h"

// What the tokens of a slice weigh, by bins from the row's best logit down; and how wide a bin of the row is.
[[kernel]] void mlxrt_draw_weigh(MLX_ARGUMENTS) {
    uint slice = threadgroup_position_in_grid.x;
    uint row = threadgroup_position_in_grid.y;
    uint tid = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    threadgroup atomic_uint low[BINS];
    threadgroup atomic_uint high[BINS];
    float sharpness = as_type<float>(rows[row * uint(N) + SHARPNESS]);
    RowPeak best = find_peak<S>(slices, row, lane);
    float peak = key_logit(best.key);
    bool drawn = sharpness > 0.0f;
    float width = metal::min(peak - key_logit(best.lowest), LAST_GAP / sharpness);
    float scale = float(BINS - 1) / metal::max(width, SMALLEST_WIDTH);
    if (slice == 0 && tid == 0) scales[row] = scale;
    atomic_store_explicit(&low[tid], 0u, memory_order_relaxed);
    atomic_store_explicit(&high[tid], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint begin = slice * SLICE + 8 * tid;
    if (drawn) {
        float v[8];
        load_logits8<float, V>(y, row, begin, v);
        for (uint c = 0; c < 8; c++) {
            float distance = peak - v[c];
            ulong weight = weigh(distance * sharpness);
            if (weight != 0) add64(low, high, bin_of(distance, scale), weight);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint at = 2 * ((row * uint(S) + slice) * BINS + tid);
    masses[at] = atomic_load_explicit(&low[tid], memory_order_relaxed);
    masses[at + 1] = atomic_load_explicit(&high[tid], memory_order_relaxed);
}
