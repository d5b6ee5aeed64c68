// y = x W^T, where W[row, VECTOR j + i] = codebook[indices[row, j], i]. A simdgroup makes ROWS outputs of one row of x.
// With ROUTED, output pair p reads row p / TOP_K of x and the matrix of expert experts[p].
[[kernel]] void mlxrt_codebook(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint first = (threadgroup_position_in_grid.x * SIMDGROUPS + sg) * ROWS;
    uint pair = threadgroup_position_in_grid.y;
    uint base = ROUTED ? uint(experts[pair]) * uint(OUTPUTS) : 0u;
    uint x_row = (pair / uint(TOP_K)) * uint(VECTORS * VECTOR);
    float acc[ROWS];
    uint row[ROWS];
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        row[r] = base + metal::min(first + uint(r), uint(OUTPUTS - 1));
        acc[r] = 0.0f;
    }
    for (uint j = lane; j < uint(VECTORS); j += 32) {
        float v[VECTOR];
        #pragma unroll
        for (int i = 0; i < VECTOR; i++) v[i] = float(x[x_row + j * VECTOR + uint(i)]);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            uint entry = uint(indices[row[r] * VECTORS + j]) * uint(VECTOR);
            #pragma unroll
            for (int i = 0; i < VECTOR; i++) acc[r] += v[i] * float(codebook[entry + uint(i)]);
        }
    }
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = simd_sum(acc[r]);
        uint output = first + uint(r);
        if (lane == 0 && output < uint(OUTPUTS)) y[pair * OUTPUTS + output] = static_cast<OUT>(sum);
    }
}
