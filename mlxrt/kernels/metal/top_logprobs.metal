#include "draw.h"

#define THREADS 1024
#define CANDIDATES 512

// A row's log probabilities: of the chosen token, and of the n best in order. A threadgroup for each row.
[[kernel]] void mlxrt_top_logprobs(MLX_ARGUMENTS) {
    uint row = threadgroup_position_in_grid.x;
    uint tid = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    threadgroup atomic_uint part_keys[S * 8];
    threadgroup atomic_uint listed[S * 8];
    threadgroup uint keys[CANDIDATES];
    threadgroup uint ids[CANDIDATES];
    threadgroup uint best_keys[32];
    threadgroup uint best_ids[32];
    threadgroup atomic_uint count[1];
    threadgroup atomic_uint kth[1];

    float peak = as_type<float>(0xff800000u);
    for (uint i = lane; i < uint(S); i += 32)
        peak = metal::max(peak, sums[2 * (row * uint(S) + i)]);
    peak = simd_max(peak);
    float total = 0.0f;
    for (uint i = lane; i < uint(S); i += 32) {
        uint at = 2 * (row * uint(S) + i);
        total += sums[at + 1] * metal::exp(sums[at] - peak);
    }
    float log_total = metal::log(simd_sum(total));
    uint chosen = status[2 * row];
    if (tid == 0) {
        result[row * uint(K + 2)] = chosen;
        result[row * uint(K + 2) + 1] = status[2 * row + 1];
        logprobs[row * uint(K + 1)] = float(x[row * uint(V) + chosen]) - peak - log_total;
    }
    for (uint i = tid; i < uint(S * 8); i += THREADS)
        atomic_store_explicit(&part_keys[i], parts[row * uint(S * 8) + i], memory_order_relaxed);
    uint least = kth_best_part<S>(part_keys, listed, count, kth, K, 0, tid);
    if (tid == 0) atomic_store_explicit(&count[0], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint part = sg; part < uint(S * 8); part += 32) {
        if (atomic_load_explicit(&part_keys[part], memory_order_relaxed) >= least) {
            float v[8];
            uint begin = part * PART + 8 * lane;
            load_logits8<T, V>(x, row, begin, v);
            for (uint c = 0; c < 8; c++) {
                uint key = sort_key(v[c]);
                if (key >= least) {  // past the row's end -inf, after all tokens
                    uint at = atomic_fetch_add_explicit(&count[0], 1u, memory_order_relaxed);
                    if (at < CANDIDATES) {
                        keys[at] = key;
                        ids[at] = begin + c;
                    }
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint n = atomic_load_explicit(&count[0], memory_order_relaxed);
    if (n <= CANDIDATES) {
        if (tid < n) {
            uint key = keys[tid];
            uint id = ids[tid];
            uint rank = 0;
            for (uint i = 0; i < n; i++)
                rank += keys[i] > key || (keys[i] == key && ids[i] < id) ? 1 : 0;
            if (rank < uint(K)) {
                result[row * uint(K + 2) + 2 + rank] = id;
                logprobs[row * uint(K + 1) + 1 + rank] = key_logit(key) - peak - log_total;
            }
        }
        return;
    }
    // So many are alike: the best one, then the best after it, and so on.
    uint last_key = 0xffffffffu;
    uint last_id = 0;
    for (uint rank = 0; rank < uint(K); rank++) {
        uint key = 0;
        uint id = 0xffffffffu;
        for (uint i = tid; i < uint(V); i += THREADS) {
            uint other = sort_key(float(x[row * uint(V) + i]));
            bool after = other < last_key || (other == last_key && i > last_id);
            if (after && other > key) {
                key = other;
                id = i;
            }
        }
        uint group_key = simd_max(key);
        uint group_id = simd_min(key == group_key ? id : 0xffffffffu);
        if (lane == 0) {
            best_keys[sg] = group_key;
            best_ids[sg] = group_id;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        last_key = simd_max(best_keys[lane]);
        last_id = simd_min(best_keys[lane] == last_key ? best_ids[lane] : 0xffffffffu);
        if (tid == 0) {
            result[row * uint(K + 2) + 2 + rank] = last_id;
            logprobs[row * uint(K + 1) + 1 + rank] = key_logit(last_key) - peak - log_total;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
