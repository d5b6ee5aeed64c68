#include "draw.h"

// Logits after penalties, bias and mask, in slices of the vocabulary: a threadgroup for each, and what its best one is.
[[kernel]] void mlxrt_draw_adjust(MLX_ARGUMENTS) {
    uint slice = threadgroup_position_in_grid.x;
    uint row = threadgroup_position_in_grid.y;
    uint tid = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    threadgroup atomic_uint
        counts[SLICE];  // twice those in the output, and 1 for one in the prompt
    threadgroup float added[SLICE];
    threadgroup uint best_keys[8];
    threadgroup uint best_tokens[8];
    threadgroup uint lowest_keys[8];
    threadgroup uint has_nan[8];
    float infinity = as_type<float>(0x7f800000u);
    auto p = rows + row * uint(N);
    uint first = slice * SLICE;
    uint prompts = p[NUM_PROMPT];
    uint outputs = p[NUM_OUTPUT];
    uint biases = p[NUM_BIAS];
    #if HISTORY
    uint recents = p[RECENT] + offset[0];
    #else
    uint recents = 0;
    #endif
    bool edited = prompts + outputs + biases + recents != 0;
    if (edited) {
        for (uint i = tid; i < SLICE; i += 256) {
            atomic_store_explicit(&counts[i], 0u, memory_order_relaxed);
            added[i] = 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        auto list = p + LISTS;
        for (uint i = tid; i < prompts; i += 256) {
            uint at = list[i] - first;
            if (at < SLICE) atomic_fetch_or_explicit(&counts[at], 1u, memory_order_relaxed);
        }
        list += prompts;
        for (uint i = tid; i < outputs; i += 256) {
            uint at = list[i] - first;
            if (at < SLICE) atomic_fetch_add_explicit(&counts[at], 2u, memory_order_relaxed);
        }
        list += outputs;
        for (uint i = tid; i < biases; i += 256) {
            uint at = list[i] - first;
            if (at < SLICE) added[at] = as_type<float>(list[biases + i]);
        }
        #if HISTORY
        for (uint i = tid; i < recents; i += 256) {
            uint at = (i + 1 == recents ? tokens[row] : recent[row * uint(M) + i]) - first;
            if (at < SLICE) atomic_fetch_add_explicit(&counts[at], 2u, memory_order_relaxed);
        }
        #endif
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    #if HISTORY
    if (slice == 0) {
        for (uint i = tid; i < uint(M); i += 256)
            next[row * uint(M) + i] = i + 1 == recents ? tokens[row] : recent[row * uint(M) + i];
    }
    #endif
    float v[8];
    uint begin = first + 8 * tid;
    load_logits8<T, V>(x, row, begin, v);
    uint bits = 0xffu;
    if (MASKED && begin < uint(V))
        bits = mask[row * uint((V + 31) / 32) + begin / 32] >> (begin % 32);
    uint best = 0;
    uint best_token = 0xffffffffu;
    uint lowest = 0xffffffffu;
    uint nans = 0;
    for (uint c = 0; c < 8; c++) {
        if (begin + c < uint(V)) {
            float a = v[c];
            if (edited) {
                uint count = atomic_load_explicit(&counts[8 * tid + c], memory_order_relaxed);
                uint times = count >> 1;
                uint factor = a < 0.0f ? p[REPEATED_BELOW] : p[REPEATED_ABOVE];
                if (count != 0) a = multiply(a, as_type<float>(factor));
                if (times != 0) {
                    a = a - multiply(as_type<float>(p[FREQUENCY]), float(times));
                    a = a - as_type<float>(p[PRESENCE]);
                }
                a = a + added[8 * tid + c];
            }
            if (((bits >> c) & 1u) == 0) a = -infinity;
            y[row * uint(V) + begin + c] = a;
            uint key = sort_key(a);
            if (a != a) nans = 1;
            if (key > best) {
                best = key;
                best_token = begin + c;
            }
            if (key > LOWEST_KEY) lowest = metal::min(lowest, key);
        }
    }
    uint group_best = simd_max(best);
    uint group_token = simd_min(best == group_best ? best_token : 0xffffffffu);
    uint group_lowest = simd_min(lowest);
    uint group_nans = simd_max(nans);
    if (lane == 0) {
        parts[(row * uint(S) + slice) * 8 + sg] = group_best;
        best_keys[sg] = group_best;
        best_tokens[sg] = group_token;
        lowest_keys[sg] = group_lowest;
        has_nan[sg] = group_nans;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid == 0) {
        for (uint i = 1; i < 8; i++) {
            if (best_keys[i] > group_best) {
                group_best = best_keys[i];
                group_token = best_tokens[i];
            }
            group_lowest = metal::min(group_lowest, lowest_keys[i]);
            group_nans |= has_nan[i];
        }
        uint at = 4 * (row * uint(S) + slice);
        slices[at] = group_best;
        slices[at + 1] = group_token;
        slices[at + 2] = group_lowest;
        slices[at + 3] = group_nans;
    }
}
