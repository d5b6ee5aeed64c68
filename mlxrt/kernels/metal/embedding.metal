// y [N, K] = the rows of a quantized matrix that the tokens name, dequantized, times a factor.
#include "quantized.h"

[[kernel]] void mlxrt_embedding(MLX_ARGUMENTS) {
    uint i = threadgroup_position_in_grid.x * 256 + thread_position_in_threadgroup.x;
    uint n = threadgroup_position_in_grid.y;
    if (i < uint(K)) {
        uint row = uint(tokens[n]);
        uint bit = i * BITS;
        uint at = row * uint(K / 32 * BITS) + bit / 32;
        uint shift = bit % 32;
        uint v = w[at] >> shift;
        if (shift + BITS > 32) v |= w[at + 1] << (32 - shift);
        v &= (1u << BITS) - 1u;
        uint group = (row * K + i) / GROUP;
        float scale = scale_at<FORM>(s, group);
        float y0 = FORM == 1 ? small_float(v) * scale : float(v) * scale + float(z[group]);
        y[n * K + i] = static_cast<T>(y0 * as_type<float>(uint(TIMES)));
    }
}
