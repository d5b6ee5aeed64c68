// y [N, K] = the rows of a quantized matrix that the tokens name, dequantized, times a factor.
#include "quantized.h"

[[kernel]] void mlxrt_embedding(MLX_ARGUMENTS) {
    uint column = threadgroup_position_in_grid.x * 256 + thread_position_in_threadgroup.x;
    uint index = threadgroup_position_in_grid.y;
    if (column < uint(K)) {
        uint element = uint(tokens[index]) * uint(K) + column;
        float value = dequantize_at<FORM, BITS, GROUP>(packed, scales, biases, lut, element);
        y[index * K + column] = static_cast<T>(value * as_type<float>(uint(TIMES)));
    }
}
