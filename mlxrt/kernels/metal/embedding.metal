// y [N, K] = the rows of a quantized matrix that the tokens name, dequantized, times a factor.
#include "quantized.h"

[[kernel]] void mlxrt_embedding(MLX_ARGUMENTS) {
    uint column = threadgroup_position_in_grid.x * 256 + thread_position_in_threadgroup.x;
    uint index = threadgroup_position_in_grid.y;
    if (column < uint(K)) {
        uint row = uint(tokens[index]);
        uint bit = column * BITS;
        uint word = row * uint(K / 32 * BITS) + bit / 32;
        uint shift = bit % 32;
        uint value = packed[word] >> shift;
        if (shift + BITS > 32) value |= packed[word + 1] << (32 - shift);
        value &= (1u << BITS) - 1u;
        const uint values[1] = {value};
        uint group = (row * K + column) / GROUP;
        float scale = scale_at<FORM>(scales, group);
        float result = FORM == MXFP4 ? e2m1_value(values, 0) * E2M1_UNIT * scale
                                     : float(value) * scale + float(biases[group]);
        y[index * K + column] = static_cast<T>(result * as_type<float>(uint(TIMES)));
    }
}
