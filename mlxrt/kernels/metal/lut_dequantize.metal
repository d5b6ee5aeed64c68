// y = scale of the row times lut[index], for indices of BITS bits that lie as one stream in packed uint32.
#include "quantized.h"

[[kernel]] void mlxrt_lut_dequantize(MLX_ARGUMENTS) {
    uint t = thread_position_in_threadgroup.x;
    uint i = threadgroup_position_in_grid.x * uint(THREADS) + t;
    const int LUT_SIZE = 1 << BITS;
    threadgroup float table[LUT_SIZE];
    load_lut<FORM, LUT_SIZE, THREADS>(lut, t, &table[0]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i < uint(ELEMENTS)) {
        uint bit = i % 32 * BITS;
        uint at = i / 32 * BITS + bit / 32;
        uint shift = bit % 32;
        uint index = packed[at] >> shift;
        if (shift + BITS > 32) index |= packed[at + 1] << (32 - shift);
        y[i] = static_cast<OUT>(float(scales[i / GROUP]) * table[index & ((1u << BITS) - 1u)]);
    }
}
