// y [N, A + B + C + D] = the columns of a, of b and, where there are such, of c and d.
[[kernel]] void mlxrt_concat_columns(MLX_ARGUMENTS) {
    uint i = threadgroup_position_in_grid.x * uint(THREADS) + thread_position_in_threadgroup.x;
    const uint ALL = A + B + C + D;
    if (i < uint(N) * ALL) {
        uint row = i / ALL;
        uint column = i % ALL;
        if (column < uint(A)) {
            y[i] = a[row * uint(A) + column];
        } else if (column < uint(A + B)) {
            y[i] = b[row * uint(B) + column - uint(A)];
        } else if (column < uint(A + B + C)) {
            y[i] = c[row * uint(C) + column - uint(A + B)];
        } else {
            y[i] = d[row * uint(D) + column - uint(A + B + C)];
        }
    }
}
