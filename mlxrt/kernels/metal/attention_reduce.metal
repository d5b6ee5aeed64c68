// Combines the splits of paged_attention.metal. For every head of every row `parts` has the results [SPLITS, HEAD_DIM], then
// the largest scores and the sums of exponentials, one a split. A threadgroup has one head.
[[kernel]] void mlxrt_attention_reduce(MLX_ARGUMENTS) {
    uint head = threadgroup_position_in_grid.x;
    uint t = thread_position_in_threadgroup.x;
    uint results = head * (SPLITS * (HEAD_DIM + 2));
    uint tops = results + SPLITS * HEAD_DIM;
    threadgroup float weight[SPLITS];
    if (t < 32) {
        float sink = SINKS ? float(sinks[head % NUM_HEADS]) : -1e30f;
        float top = sink;
        float sum_exp = 0.0f;
        for (uint s = t; s < uint(SPLITS); s += 32) top = metal::max(top, parts[tops + s]);
        top = simd_max(top);
        for (uint s = t; s < uint(SPLITS); s += 32) {
            weight[s] = metal::exp(parts[tops + s] - top);
            sum_exp += parts[tops + SPLITS + s] * weight[s];
        }
        sum_exp = simd_sum(sum_exp);
        if (SINKS) sum_exp += metal::exp(sink - top);
        for (uint s = t; s < uint(SPLITS); s += 32) weight[s] /= sum_exp;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = t; d < uint(HEAD_DIM); d += uint(THREADS)) {
        float result = 0.0f;
        #pragma unroll
        for (int s = 0; s < SPLITS; s++)
            result += parts[results + s * HEAD_DIM + d] * weight[s];
        out[head * HEAD_DIM + d] = static_cast<T>(result);
    }
}
