// y [N, O] = each token's weighted sum of its C parts, plus the residual.
[[kernel]] void mlxrt_moe_combine(MLX_ARGUMENTS) {
    uint index = threadgroup_position_in_grid.x * uint(SIZE) + thread_position_in_threadgroup.x;
    if (index < uint(N * O)) {
        uint token = index / O;
        float sum = RES ? float(residual[index]) : 0.0f;
        for (uint c = 0; c < uint(C); c++)
            sum += float(weights[token * C + c]) * float(parts[(token * C + c) * O + index % O]);
        y[index] = static_cast<T>(sum);
    }
}
