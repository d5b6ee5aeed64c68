// y [N, O] = each token's weighted sum of its C parts, plus the residual.
[[kernel]] void mlxrt_moe_combine(MLX_ARGUMENTS) {
    uint i = threadgroup_position_in_grid.x * uint(SIZE) + thread_position_in_threadgroup.x;
    if (i < uint(N * O)) {
        uint n = i / O;
        float a = RES ? float(residual[i]) : 0.0f;
        for (uint c = 0; c < uint(C); c++)
            a += float(weights[n * C + c]) * parts[(n * C + c) * O + i % O];
        y[i] = static_cast<T>(a);
    }
}
