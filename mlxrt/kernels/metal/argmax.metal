#include "quantized.h"

[[kernel]] void mlxrt_argmax(MLX_ARGUMENTS) {
    uint n = threadgroup_position_in_grid.x;
    uint t = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    threadgroup float tops[32];
    threadgroup uint wheres[32];
    threadgroup uint odd[32];
    float huge = as_type<float>(0x7f800000u);
    float best = -huge;
    uint at = 0xffffffffu;
    uint nan = 0;
    if (V % 8 == 0) {  // sixteen bytes at a time, where rows begin at such
        for (uint i = t; i < uint(V / 8); i += 1024) {
            float v[8];
            load8<T>(x, n * uint(V / 8) + i, v);
            #pragma unroll
            for (uint c = 0; c < 8; c++) {
                if (v[c] != v[c]) nan = 1;
                if (v[c] > best) {
                    best = v[c];
                    at = 8 * i + c;
                }
            }
        }
    } else {
        for (uint i = t; i < uint(V); i += 1024) {
            float v = float(x[n * V + i]);
            if (v != v) nan = 1;
            if (v > best) {
                best = v;
                at = i;
            }
        }
    }
    float top = simd_max(best);
    uint where = simd_min(best == top ? at : 0xffffffffu);
    uint any = 1 - simd_min(1 - nan);
    if (lane == 0) {
        tops[sg] = top;
        wheres[sg] = where;
        odd[sg] = any;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 0) {
        uint wrong = 0;
        for (int s = 0; s < 32; s++) {
            wrong |= odd[s];
            if (tops[s] > top || (tops[s] == top && wheres[s] < where)) {
                top = tops[s];
                where = wheres[s];
            }
        }
        bool fine = wrong == 0 && top > -huge && top < huge;
        tokens[n] = fine ? where : 0;
        told[2 * n] = fine ? where : 0;
        told[2 * n + 1] = fine ? 0 : 1;
    }
}
