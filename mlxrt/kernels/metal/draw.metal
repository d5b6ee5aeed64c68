#include "draw.h"

#define THREADS 1024
#define CANDIDATES 512  // so few are compared with each other
#define SMALL_K 256
#define MAX_PARTS 1536
#define MAX_LISTED 3968  // tokens of a bin: of 262,144 normally distributed logits the fullest has 3,700

// The token of a row: a threadgroup for each. Where top-k keeps few tokens they are taken out of the parts of the vocabulary with
// the best logits; otherwise the histogram tells in which bin the last token is that top-p keeps. Then one pass over the row lists
// the tokens of that bin, and only those are looked at again. They are not weighed in that pass, because few of 32 lanes have one
// and the others would wait.
[[kernel]] void mlxrt_draw(MLX_ARGUMENTS) {
    uint row = threadgroup_position_in_grid.x;
    uint tid = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    threadgroup atomic_uint low[THREADS];
    threadgroup atomic_uint high[THREADS];
    threadgroup atomic_uint words[2 * THREADS + MAX_LISTED];  // for one of two ways to use them
    threadgroup ulong sums[32];
    threadgroup ulong found[2];
    threadgroup uint found_at[1];
    threadgroup atomic_uint count[1];
    threadgroup atomic_uint kth[1];
    auto part_keys = words;
    auto listed = words + MAX_PARTS;
    auto keys = words + 2 * MAX_PARTS;
    auto ids = words + 2 * MAX_PARTS + CANDIDATES;
    auto smallest = words;
    auto largest = words + THREADS;
    auto bin_ids = words + 2 * THREADS;

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
    if (tid == 0) status[2 * row + 1] = 0;

    if (top_k != 0 && top_k <= SMALL_K) {
        for (uint i = tid; i < uint(S * 8); i += THREADS)
            atomic_store_explicit(
                &part_keys[i], parts[row * uint(S * 8) + i], memory_order_relaxed
            );
        uint least = kth_best_part<S>(part_keys, listed, count, kth, top_k, LOWEST_KEY + 1, tid);
        if (tid == 0) atomic_store_explicit(&count[0], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint part = sg; part < uint(S * 8); part += 32) {
            if (atomic_load_explicit(&part_keys[part], memory_order_relaxed) >= least) {
                float v[8];
                uint begin = part * PART + 8 * lane;
                load_logits8<float, V>(y, row, begin, v);
                for (uint c = 0; c < 8; c++) {
                    uint key = sort_key(v[c]);
                    if (key >= least) {
                        uint at = atomic_fetch_add_explicit(&count[0], 1u, memory_order_relaxed);
                        if (at < CANDIDATES) {
                            atomic_store_explicit(&keys[at], key, memory_order_relaxed);
                            atomic_store_explicit(&ids[at], begin + c, memory_order_relaxed);
                        }
                    }
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint n = atomic_load_explicit(&count[0], memory_order_relaxed);
        if (n <= CANDIDATES) {
            bool mine = tid < n;
            uint key = mine ? atomic_load_explicit(&keys[tid], memory_order_relaxed) : 0;
            uint id = mine ? atomic_load_explicit(&ids[tid], memory_order_relaxed) : 0;
            float gap = (peak - key_logit(key)) * sharpness;
            ulong weight = 0;
            if (mine) {
                if (count_from(keys, n, key + 1) < top_k) weight = weigh(gap);
                store64(low, high, tid, weight);
            }
            sum_before(weight, lane, sg, sums, total);
            if (top_p != 0) {
                ulong before = 0;
                if (mine) {
                    for (uint i = 0; i < n; i++) {
                        uint other = atomic_load_explicit(&keys[i], memory_order_relaxed);
                        uint other_id = atomic_load_explicit(&ids[i], memory_order_relaxed);
                        bool better = other > key || (other == key && other_id < id);
                        before += better ? load64(low, high, i) : 0;
                    }
                }
                if (before >= share_of(total, top_p)) weight = 0;
            }
            if (!(gap <= max_gap)) weight = 0;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (mine) store64(low, high, tid, weight);
            sum_before(weight, lane, sg, sums, total);
            if (mine) {
                ulong target = multiply_high64(total, random);
                ulong before = 0;
                for (uint i = 0; i < n; i++) {
                    uint other_id = atomic_load_explicit(&ids[i], memory_order_relaxed);
                    before += other_id < id ? load64(low, high, i) : 0;
                }
                if (points_at(target, before, weight)) {
                    tokens[row] = id;
                    status[2 * row] = id;
                }
            }
            return;
        }
    }

    float scale = scales[row];
    uint cut =
        LOWEST_KEY;  // tokens above it stay, and `ties` of those at it, those with the lowest ids
    ulong ties = 0;
    uint num_loads = (V + 7) / 8;  // of eight tokens, or of one of those listed
    bool is_listed = false;
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
            if (top_k != 0) {  // what it keeps of the last bin
                end = bin_of(peak - key_logit(cut), scale);
                for (uint i = tid; i < num_loads; i += THREADS) {
                    float v[8];
                    load_logits8<float, V>(y, row, 8 * i, v);
                    for (uint c = 0; c < 8; c++) {
                        float distance = peak - v[c];
                        if (sort_key(v[c]) >= cut && bin_of(distance, scale) == end)
                            rest += weigh(distance * sharpness);
                    }
                }
                sum_before(rest, lane, sg, sums, rest);
            }
            // Four threads have a quarter of the slices of a bin each.
            ulong mass = 0;
            #pragma unroll
            for (uint i = 0; i < uint((S + 3) / 4); i++) {
                uint slice = 4 * i + tid / BINS;
                if (slice < uint(S)) mass += load_mass(masses, row * uint(S) + slice, tid % BINS);
            }
            store64(low, high, tid, mass);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            mass = tid == end ? rest : 0;
            if (tid < end) {
                for (uint i = 0; i < 4; i++) mass += load64(low, high, i * BINS + tid);
            }
            ulong before = sum_before(mass, lane, sg, sums, total);
            limit = share_of(total, top_p);
            if (before < limit && limit <= before + mass) {
                found[0] = before;
                found_at[0] = tid;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            above = found[0];
            bin = found_at[0];
            last = sort_key(bin_ceiling(peak, bin, scale));
            least = metal::max(least, sort_key(bin_floor(peak, bin, scale)));
            if (tid == 0) atomic_store_explicit(&count[0], 0u, memory_order_relaxed);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = tid; i < num_loads; i += THREADS) {
                float v[8];
                load_logits8<float, V>(y, row, 8 * i, v);
                for (uint c = 0; c < 8; c++) {
                    if (is_in_bins((peak - v[c]) * scale, bin, bin)) {
                        uint at = atomic_fetch_add_explicit(&count[0], 1u, memory_order_relaxed);
                        if (at < MAX_LISTED)
                            atomic_store_explicit(&bin_ids[at], 8 * i + c, memory_order_relaxed);
                    }
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            uint n = atomic_load_explicit(&count[0], memory_order_relaxed);
            is_listed = n <= MAX_LISTED;
            if (is_listed) num_loads = n;
        }
        while (least < last) {
            uint shift = 0;
            while ((last - least) >> shift >= THREADS) shift++;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            store64(low, high, tid, 0);
            atomic_store_explicit(&smallest[tid], 0xffffffffu, memory_order_relaxed);
            atomic_store_explicit(&largest[tid], 0u, memory_order_relaxed);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            float floor = key_logit(least);
            float ceiling = key_logit(last);
            for (uint i = tid; i < num_loads; i += THREADS) {
                float v[8];
                load_tokens<V>(y, row, i, is_listed, bin_ids, v);
                for (uint c = 0; c < 8; c++) {
                    float distance = peak - v[c];
                    if (v[c] >= floor && v[c] <= ceiling
                        && (is_listed || bin == BINS || bin_of(distance, scale) == bin)) {
                        uint key = sort_key(v[c]);
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
            ulong before = above + sum_before(mass, lane, sg, sums, total);
            if (before < limit && limit <= before + mass) {
                found[0] = before;
                found_at[0] = tid;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (above + total < limit) {  // top-k of more than there are
                least = LOWEST_KEY;
                last = LOWEST_KEY;
            } else {
                uint at = found_at[0];
                above = found[0];
                least = atomic_load_explicit(&smallest[at], memory_order_relaxed);
                last = atomic_load_explicit(&largest[at], memory_order_relaxed);
            }
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
    bool by_min_p = max_gap < cut_distance * sharpness;  // it drops more than top-k and top-p
    if (by_min_p) cut = LOWEST_KEY;
    bool has_cut = cut > LOWEST_KEY;
    if (by_min_p) {
        uint bin = bin_of(max_gap / sharpness, scale);
        whole = metal::max(bin, 1u) - 1;
        end = bin + 1;
        is_listed = false;
        num_loads = (V + 7) / 8;
    } else if (has_cut) {
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
        if (lane == 0) store64(low, high, i, mass);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (whole < BINS) {
        for (uint i = tid; i < num_loads; i += THREADS) {
            float v[8];
            uint first = load_tokens<V>(y, row, i, is_listed, bin_ids, v);
            for (uint c = 0; c < 8; c++) {
                float distance = peak - v[c];
                if (is_in_bins(distance * scale, whole, end)) {
                    uint key = sort_key(v[c]);
                    uint slice = first / SLICE;
                    float gap = distance * sharpness;
                    if (key > cut && gap <= max_gap) add64(low, high, slice, weigh(gap));
                    if (key == cut)
                        atomic_fetch_add_explicit(&smallest[slice], 1u, memory_order_relaxed);
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ulong cut_weight = has_cut ? weigh(cut_distance * sharpness) : 0;
    bool slice_here = tid < uint(S);
    ulong mass = slice_here ? load64(low, high, tid) : 0;
    ulong tied = slice_here ? atomic_load_explicit(&smallest[tid], memory_order_relaxed) : 0;
    ulong tied_before = 0;
    if (has_cut) {
        tied_before = sum_before(tied, lane, sg, sums, total);
        mass += (metal::min(tied_before + tied, ties) - metal::min(tied_before, ties)) * cut_weight;
    }
    ulong before = sum_before(mass, lane, sg, sums, total);
    ulong target = multiply_high64(total, random);
    if (points_at(target, before, mass)) {
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
        is_tied[e] = key == cut;
    }
    if (has_cut) {
        tied = (is_tied[0] ? 1 : 0) + (is_tied[1] ? 1 : 0);
        tied_before = found[1] + sum_before(tied, lane, sg, sums, total);
        if (is_tied[0] && tied_before < ties) weight[0] = cut_weight;
        if (is_tied[1] && tied_before + tied - 1 < ties) weight[1] = cut_weight;
    }
    before = sum_before(weight[0] + weight[1], lane, sg, sums, total);
    if (points_at(target, before, weight[0] + weight[1])) {
        uint token = first + (points_at(target, before, weight[0]) ? 0 : 1);
        tokens[row] = token;
        status[2 * row] = token;
    }
}
