// y [N, K] = (residual + RMSNorm(x) * g) * scalar.
[[kernel]] void mlxrt_add_norm(MLX_ARGUMENTS) {
    uint n = threadgroup_position_in_grid.x;
    uint t = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    threadgroup float part[8];
    float ss = 0.0f;
    for (uint i = t; i < uint(K); i += 256) {
        float v = float(x[n * K + i]);
        ss += v * v;
    }
    ss = simd_sum(ss);
    if (lane == 0) part[sg] = ss;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (int i = 0; i < 8; i++) total += part[i];
    float inv = metal::rsqrt(total / float(K) + as_type<float>(uint(EPS)));
    float f = SCALED ? float(scalar[0]) : as_type<float>(uint(TIMES));
    for (uint i = t; i < uint(K); i += 256) {
        float v =
            float(x[n * K + i]) * inv * float(g[i]) + (RES ? float(residual[n * K + i]) : 0.0f);
        y[n * K + i] = static_cast<T>(v * f);
    }
}
