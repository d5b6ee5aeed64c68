#include "draw.h"

#define THREADS 1024
#define CANDIDATES 512  // so few are compared with each other
#define SMALL_K 256

// The token of a row: a threadgroup for each. Where top-k keeps few tokens they are taken out of the parts of the vocabulary with
// the best logits; otherwise the histogram tells in which bin the last token is that top-p keeps, and only that bin is looked at.
[[kernel]] void mlxrt_draw(MLX_ARGUMENTS) {
    uint row = threadgroup_position_in_grid.x;
    uint tid = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    threadgroup atomic_uint low[THREADS];
    threadgroup atomic_uint high[THREADS];
    threadgroup atomic_uint smallest[THREADS];
    threadgroup atomic_uint largest[THREADS];
    threadgroup uint part_keys[S * 8];
    threadgroup uint keys[CANDIDATES];
    threadgroup uint ids[CANDIDATES];
    threadgroup ulong weights[CANDIDATES];
    threadgroup ulong sums[32];
    threadgroup ulong found[2];
    threadgroup uint found_at[1];
    threadgroup atomic_uint count[1];

    auto p = rows + row * uint(N);
    float sharpness = as_type<float>(p[SHARPNESS]);
    RowPeak best = find_peak<S>(slices, row, lane);
    if (best.usable == 0 || sharpness == 0.0f) {
        if (tid == 0) {
            uint token = best.usable != 0 ? best.token : 0;
            tokens[row] = token;
            status[2 * row] = token;
            status[2 * row + 1] = 1 - best.usable;
        }
        return;
    }
    float peak = key_logit(best.key);
    float max_gap = as_type<float>(p[MAX_GAP]);
    uint top_k = p[TOP_K];
    uint top_p = p[TOP_P];
    ulong random = random_bits(p[SEED], p[SEED + 1], p[POSITION] + offset[0]);
    ulong total = 0;
    if (tid == 0) {
        status[2 * row + 1] = 0;
        atomic_store_explicit(&count[0], 0u, memory_order_relaxed);
    }

    if (top_k != 0 && top_k <= metal::min(uint(SMALL_K), uint(S * 8))) {
        for (uint i = tid; i < uint(S * 8); i += THREADS)
            part_keys[i] = parts[row * uint(S * 8) + i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // The k-th best part: no token below its best one is among the k best.
        for (uint i = tid; i < uint(S * 8); i += THREADS) {
            uint key = part_keys[i];
            uint rank = 0;
            for (uint j = 0; j < uint(S * 8); j++)
                rank += part_keys[j] > key || (part_keys[j] == key && j < i) ? 1 : 0;
            if (rank + 1 == top_k) found_at[0] = metal::max(key, LOWEST_KEY + 1);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint least = found_at[0];
        for (uint part = sg; part < uint(S * 8); part += 32) {
            if (part_keys[part] >= least) {
                float v[8];
                uint begin = part * PART + 8 * lane;
                load_logits8<float, V>(y, row, begin, v);
                for (uint c = 0; c < 8; c++) {
                    uint key = sort_key(v[c]);
                    if (key >= least) {
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
            bool mine = tid < n;
            uint key = mine ? keys[tid] : 0;
            uint id = mine ? ids[tid] : 0;
            float gap = (peak - key_logit(key)) * sharpness;
            ulong weight = 0;
            if (mine) {
                uint rank = 0;
                for (uint i = 0; i < n; i++) rank += keys[i] > key ? 1 : 0;
                if (rank < top_k) weight = weigh(gap);
                weights[tid] = weight;
            }
            sum_before<32>(weight, lane, sg, sums, total);
            if (top_p != 0) {
                ulong before = 0;
                if (mine) {
                    for (uint i = 0; i < n; i++) {
                        bool better = keys[i] > key || (keys[i] == key && ids[i] < id);
                        before += better ? weights[i] : 0;
                    }
                }
                if (before >= share_of(total, top_p)) weight = 0;
            }
            if (!(gap <= max_gap)) weight = 0;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (mine) weights[tid] = weight;
            sum_before<32>(weight, lane, sg, sums, total);
            if (mine) {
                ulong target = multiply_high64(total, random);
                ulong before = 0;
                for (uint i = 0; i < n; i++) before += ids[i] < id ? weights[i] : 0;
                if (before <= target && target < before + weight) {
                    tokens[row] = id;
                    status[2 * row] = id;
                }
            }
            return;
        }
    }

    float scale = scales[row];
    uint cut = LOWEST_KEY;  // tokens above it stay, and `ties` of those at it, those with the lowest ids
    ulong ties = 0;
    for (uint by_mass = 0; by_mass < 2; by_mass++) {
        if ((by_mass == 0 ? top_k : top_p) == 0) continue;
        ulong limit = top_k;
        ulong above = 0;  // what tokens above `last` weigh
        uint least = best.lowest;
        uint last = best.key;
        uint bin = BINS;  // of the histogram; BINS: any
        if (by_mass == 1) {
            uint end = BINS;
            ulong rest = 0;
            if (cut > LOWEST_KEY) {  // what top-k keeps of the last bin
                end = bin_of(peak - key_logit(cut), scale);
                for (uint i = tid; i < uint((V + 7) / 8); i += THREADS) {
                    float v[8];
                    load_logits8<float, V>(y, row, 8 * i, v);
                    for (uint c = 0; c < 8; c++) {
                        float distance = peak - v[c];
                        if (sort_key(v[c]) >= cut && bin_of(distance, scale) == end)
                            rest += weigh(distance * sharpness);
                    }
                }
                sum_before<32>(rest, lane, sg, sums, rest);
            }
            // Four threads have a quarter of the slices of a bin each.
            ulong mass = 0;
            #pragma unroll
            for (uint i = 0; i < uint((S + 3) / 4); i++) {
                uint slice = 4 * i + tid / BINS;
                if (slice < uint(S)) mass += load_mass(masses, row * uint(S) + slice, tid % BINS);
            }
            atomic_store_explicit(&low[tid], uint(mass), memory_order_relaxed);
            atomic_store_explicit(&high[tid], uint(mass >> 32), memory_order_relaxed);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            mass = tid == end ? rest : 0;
            if (tid < metal::min(end, uint(BINS))) {
                for (uint i = 0; i < 4; i++) mass += load64(low, high, i * BINS + tid);
            }
            ulong before = sum_before<32>(mass, lane, sg, sums, total);
            limit = share_of(total, top_p);
            if (before < limit && limit <= before + mass) {
                found[0] = before;
                found_at[0] = tid;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            above = found[0];
            bin = found_at[0];
            // Keys of the bin, and of one more on both sides: rounding cannot lead farther.
            float width = scale > 0.0f ? 1.0f / scale : 0.0f;
            if (bin > 1) last = sort_key(peak - float(bin - 1) * width);
            if (bin < BINS - 1 && width > 0.0f)
                least = metal::max(least, sort_key(peak - float(bin + 2) * width));
            least = metal::max(least, cut);
        }
        while (least < last) {
            uint shift = 0;
            while ((last - least) >> shift >= THREADS) shift++;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            atomic_store_explicit(&low[tid], 0u, memory_order_relaxed);
            atomic_store_explicit(&high[tid], 0u, memory_order_relaxed);
            atomic_store_explicit(&smallest[tid], 0xffffffffu, memory_order_relaxed);
            atomic_store_explicit(&largest[tid], 0u, memory_order_relaxed);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = tid; i < uint((V + 7) / 8); i += THREADS) {
                float v[8];
                load_logits8<float, V>(y, row, 8 * i, v);
                for (uint c = 0; c < 8; c++) {
                    uint key = sort_key(v[c]);
                    float distance = peak - v[c];
                    if (key >= least && key <= last
                        && (bin == BINS || bin_of(distance, scale) == bin)) {
                        uint at = (last - key) >> shift;
                        ulong one = by_mass == 1 ? weigh(distance * sharpness) : 1;
                        add64(low, high, at, one);
                        atomic_fetch_min_explicit(&smallest[at], key, memory_order_relaxed);
                        atomic_fetch_max_explicit(&largest[at], key, memory_order_relaxed);
                    }
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            ulong mass = load64(low, high, tid);
            ulong before = above + sum_before<32>(mass, lane, sg, sums, total);
            if (before < limit && limit <= before + mass) {
                found[0] = before;
                found_at[0] = tid;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            bool all = above + total < limit;  // top-k of more than there are
            uint at = found_at[0];
            above = found[0];
            least = all ? LOWEST_KEY
                        : atomic_load_explicit(&smallest[at], memory_order_relaxed);
            last = all ? LOWEST_KEY : atomic_load_explicit(&largest[at], memory_order_relaxed);
            bin = BINS;
        }
        cut = least;
        ties = V;
        if (by_mass == 1) {
            ulong weight = weigh((peak - key_logit(cut)) * sharpness);
            ties = (limit - above + weight - 1) / weight;
        }
    }

    // Bins before `whole` stay as they are; up to `end` every token is looked at.
    uint whole = BINS;
    uint end = BINS;
    float cut_distance = peak - key_logit(cut);
    if (max_gap < cut_distance * sharpness) {  // min-p drops more than top-k and top-p
        cut = LOWEST_KEY;
        uint bin = bin_of(max_gap / sharpness, scale);
        whole = metal::max(bin, 1u) - 1;
        end = bin + 1;
    } else if (cut > LOWEST_KEY) {
        whole = bin_of(cut_distance, scale);
        end = whole;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_store_explicit(&smallest[tid], 0u, memory_order_relaxed);
    for (uint i = sg; i < uint(S); i += 32) {
        ulong mass = 0;
        #pragma unroll
        for (uint j = 0; j < BINS / 32; j++) {
            if (32 * j + lane < whole) mass += load_mass(masses, row * uint(S) + i, 32 * j + lane);
        }
        mass = simd_sum64(mass);
        if (lane == 0) {
            atomic_store_explicit(&low[i], uint(mass), memory_order_relaxed);
            atomic_store_explicit(&high[i], uint(mass >> 32), memory_order_relaxed);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (whole < BINS) {
        for (uint i = tid; i < uint((V + 7) / 8); i += THREADS) {
            float v[8];
            load_logits8<float, V>(y, row, 8 * i, v);
            for (uint c = 0; c < 8; c++) {
                float distance = peak - v[c];
                uint key = sort_key(v[c]);
                uint bin = bin_of(distance, scale);
                uint slice = 8 * i / SLICE;
                if (key > LOWEST_KEY && bin >= whole && bin <= end) {
                    float gap = distance * sharpness;
                    if (key > cut && gap <= max_gap) add64(low, high, slice, weigh(gap));
                    if (key == cut)
                        atomic_fetch_add_explicit(&smallest[slice], 1u, memory_order_relaxed);
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ulong cut_weight = cut > LOWEST_KEY ? weigh(cut_distance * sharpness) : 0;
    bool slice_here = tid < uint(S);
    ulong mass = slice_here ? load64(low, high, tid) : 0;
    ulong tied = slice_here ? atomic_load_explicit(&smallest[tid], memory_order_relaxed) : 0;
    ulong tied_before = sum_before<32>(tied, lane, sg, sums, total);
    ulong tied_end = tied_before + tied < ties ? tied_before + tied : ties;
    if (tied_before < ties) mass += (tied_end - tied_before) * cut_weight;
    ulong before = sum_before<32>(mass, lane, sg, sums, total);
    ulong target = multiply_high64(total, random);
    if (before <= target && target < before + mass) {
        found_at[0] = tid;
        found[0] = target - before;
        found[1] = tied_before;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint first = found_at[0] * SLICE + 2 * tid;
    target = found[0];
    ulong weight[2];
    bool is_tied[2];
    for (uint e = 0; e < 2; e++) {
        bool there = first + e < uint(V);
        float logit = there ? y[row * uint(V) + first + e] : as_type<float>(0xff800000u);
        uint key = sort_key(logit);
        float gap = (peak - logit) * sharpness;
        weight[e] = key > cut && gap <= max_gap ? weigh(gap) : 0;
        is_tied[e] = key == cut && cut > LOWEST_KEY;
    }
    tied = (is_tied[0] ? 1 : 0) + (is_tied[1] ? 1 : 0);
    tied_before = found[1] + sum_before<32>(tied, lane, sg, sums, total);
    if (is_tied[0] && tied_before < ties) weight[0] = cut_weight;
    if (is_tied[1] && tied_before + tied - 1 < ties) weight[1] = cut_weight;
    before = sum_before<32>(weight[0] + weight[1], lane, sg, sums, total);
    if (before <= target && target < before + weight[0] + weight[1]) {
        uint token = first + (target < before + weight[0] ? 0 : 1);
        tokens[row] = token;
        status[2 * row] = token;
    }
}
