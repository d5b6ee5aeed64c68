// y = the elements of a packed matrix, or of a stack of them. A thread makes eight.
#include "quantized.h"

[[kernel]] void mlxrt_dequantize(MLX_ARGUMENTS) {
    uint t = thread_position_in_threadgroup.x;
    uint i = threadgroup_position_in_grid.x * uint(THREADS) + t;
    const int LUT_SIZE = lut_size<FORM, BITS>();
    threadgroup float lut_shared[LUT_SIZE];
    load_lut<FORM, LUT_SIZE, THREADS>(lut, t, &lut_shared[0]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i < uint(ELEMENTS / 8)) {
        float v[8];
        dequantize8<FORM, BITS, GROUP>(packed, scales, biases, &lut_shared[0], i, v);
        store_row8<OUT>(v, i, y);
    }
}
