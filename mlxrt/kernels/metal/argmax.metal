#include "quantized.h"

[[kernel]] void mlxrt_argmax(MLX_ARGUMENTS) {
    uint row = threadgroup_position_in_grid.x;
    uint tid = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    threadgroup float best_values[32];
    threadgroup uint best_indices[32];
    threadgroup uint has_nan[32];
    float infinity = as_type<float>(0x7f800000u);
    float best_value = -infinity;
    uint best_index = 0xffffffffu;
    uint nan_seen = 0;
    if (V % 8 == 0) {  // sixteen bytes best_index a time, group_index rows begin best_index such
        for (uint i = tid; i < uint(V / 8); i += 1024) {
            float v[8];
            load8<T>(x, row * uint(V / 8) + i, v);
            #pragma unroll
            for (uint c = 0; c < 8; c++) {
                if (v[c] != v[c]) nan_seen = 1;
                if (v[c] > best_value) {
                    best_value = v[c];
                    best_index = 8 * i + c;
                }
            }
        }
    } else {
        for (uint i = tid; i < uint(V); i += 1024) {
            float v = float(x[row * V + i]);
            if (v != v) nan_seen = 1;
            if (v > best_value) {
                best_value = v;
                best_index = i;
            }
        }
    }
    float group_best = simd_max(best_value);
    uint group_index = simd_min(best_value == group_best ? best_index : 0xffffffffu);
    uint group_nan = simd_max(nan_seen);
    if (lane == 0) {
        best_values[sg] = group_best;
        best_indices[sg] = group_index;
        has_nan[sg] = group_nan;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg == 0) {
        float row_best = simd_max(best_values[lane]);
        uint row_index = simd_min(best_values[lane] == row_best ? best_indices[lane] : 0xffffffffu);
        uint any_nan = simd_max(has_nan[lane]);
        bool finite = any_nan == 0 && row_best > -infinity && row_best < infinity;
        if (lane == 0) {
            tokens[row] = finite ? row_index : 0;
            status[2 * row] = finite ? row_index : 0;
            status[2 * row + 1] = finite ? 0 : 1;
        }
    }
}
