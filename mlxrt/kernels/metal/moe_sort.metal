// Pairs of token and expert in the order of their experts, and where each expert's begin.
[[kernel]] void mlxrt_moe_sort(MLX_ARGUMENTS) {
    uint tid = thread_position_in_threadgroup.x;
    threadgroup uint keys[P];  // no two pairs have the same: expert, then where it comes
    for (uint i = tid; i < uint(P); i += uint(THREADS)) keys[i] = uint(experts[i]) * uint(P) + i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Where an expert's pairs begin, and where a pair comes: how many are before it.
    for (uint i = tid; i < uint(E + 1 + P); i += uint(THREADS)) {
        uint limit = i <= uint(E) ? i * uint(P) : keys[i - uint(E + 1)];
        uint before = 0;
        for (uint j = 0; j < uint(P); j++) before += keys[j] < limit ? 1 : 0;
        if (i <= uint(E))
            bounds[i] = before;
        else
            order[before] = i - uint(E + 1);
    }
}
