// y [N, K] = the rows of a quantized matrix that the tokens name, dequantized, times a factor. A thread makes eight columns.
#include "quantized.h"

[[kernel]] void mlxrt_embedding(MLX_ARGUMENTS) {
    uint chunk = threadgroup_position_in_grid.x * uint(THREADS) + thread_position_in_threadgroup.x;
    uint index = threadgroup_position_in_grid.y;
    if (chunk < uint(K / 8)) {
        float v[8];
        dequantize8<FORM, BITS, GROUP>(
            packed, scales, biases, lut, uint(tokens[index]) * uint(K / 8) + chunk, v
        );
        #pragma unroll
        for (int n = 0; n < 8; n++) v[n] *= as_type<float>(uint(TIMES));
        store_row8<T>(v, index * uint(K / 8) + chunk, y);
    }
}
