// y [N, K] = (residual + RMSNorm(x) * g) * scalar.
[[kernel]] void mlxrt_add_norm(MLX_ARGUMENTS) {
    uint row = threadgroup_position_in_grid.x;
    uint tid = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    threadgroup float partial[8];
    float squares = 0.0f;
    for (uint i = tid; i < uint(K); i += 256) {
        float v = float(x[row * K + i]);
        squares += v * v;
    }
    squares = simd_sum(squares);
    if (lane == 0) partial[sg] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (int i = 0; i < 8; i++) total += partial[i];
    float inv_rms = metal::rsqrt(total / float(K) + as_type<float>(uint(EPS)));
    float factor = SCALED ? float(scalar[0]) : as_type<float>(uint(TIMES));
    for (uint i = tid; i < uint(K); i += 256) {
        float v = float(x[row * K + i]) * inv_rms * float(norm_weight[i])
                  + (RES ? float(residual[row * K + i]) : 0.0f);
        y[row * K + i] = static_cast<T>(v * factor);
    }
}
