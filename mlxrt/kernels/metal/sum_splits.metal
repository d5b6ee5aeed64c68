// y [M, O] = the sum of SPLITS parts [M, O], plus a bias, plus the residual.
[[kernel]] void mlxrt_sum_splits(MLX_ARGUMENTS) {
    uint index = threadgroup_position_in_grid.x * uint(SIZE) + thread_position_in_threadgroup.x;
    if (index < uint(M * O)) {
        float sum = BIAS ? float(bias[index % uint(O)]) : 0.0f;
        #pragma unroll
        for (int s = 0; s < SPLITS; s++) sum += parts[s * M * O + index];
        if (RES) sum += float(residual[index]);
        y[index] = static_cast<T>(sum);
    }
}
