// y = Walsh-Hadamard transform of each block of (x * signs), computed in float32. A threadgroup has one row of WIDTH
// elements; blocks are WIDTH's powers of two, the largest first, or with UNIFORM all of MAX_BLOCK elements. So an
// element and its butterfly partner differ in one bit of their index.

// True if elements i and i ^ distance are of one block. (i ^ WIDTH) has its highest bit where i's block of WIDTH's
// binary digits ends: it is the block's size or more, and less than twice that.
template <int WIDTH, int MAX_BLOCK, bool UNIFORM>
FN bool same_block(uint i, uint distance) {
    return UNIFORM ? distance < uint(MAX_BLOCK) : (i ^ uint(WIDTH)) >= 2 * distance;
}

template <bool SIGNS, typename X, typename S>
FN float load_signed(X x, S signs, uint row, uint i) {
    return SIGNS ? float(x[row + i]) * float(signs[i]) : float(x[row + i]);
}

FN void butterfly(thread float& a, thread float& b) {
    float sum = (a + b) * 0.70710678118f;
    b = (a - b) * 0.70710678118f;
    a = sum;
}

// Butterfly stages may run in any order. First the distances of THREADS and more, between elements that one thread
// holds; blocks that have none skip it and the exchange through threadgroup memory. Then 32 to 128, between the eight
// elements of a lane, and 1 to 16 between lanes.
[[kernel]] void mlxrt_hadamard(MLX_ARGUMENTS) {
    uint t = thread_position_in_threadgroup.x;
    uint row = threadgroup_position_in_grid.x * WIDTH;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    const int CHUNKS = (WIDTH + THREADS - 1) / THREADS;
    const bool EXCHANGE = MAX_BLOCK > THREADS;
    threadgroup float shared_row[EXCHANGE ? THREADS * CHUNKS : 1];
    if (EXCHANGE) {
        float strided[CHUNKS];
        #pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            uint i = t + uint(THREADS * j);
            strided[j] = i < uint(WIDTH) ? load_signed<SIGNS>(x, signs, row, i) : 0.0f;
        }
        #pragma unroll
        for (int h = 1; h < CHUNKS; h *= 2) {
            #pragma unroll
            for (int j = 0; j + h < CHUNKS; j++) {
                uint i = t + uint(THREADS * j);
                if ((j & h) == 0 && same_block<WIDTH, MAX_BLOCK, UNIFORM>(i, uint(THREADS * h)))
                    butterfly(strided[j], strided[j + h]);
            }
        }
        #pragma unroll
        for (int j = 0; j < CHUNKS; j++) shared_row[t + uint(THREADS * j)] = strided[j];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint chunk = sg; chunk < uint(CHUNKS); chunk += uint(THREADS / 32)) {
        float values[8];
        uint first = chunk * 256 + lane;
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            uint i = first + uint(32 * j);
            values[j] = i >= uint(WIDTH) ? 0.0f
                        : EXCHANGE       ? shared_row[i]
                                         : load_signed<SIGNS>(x, signs, row, i);
        }
        #pragma unroll
        for (int h = 1; h < 8; h *= 2) {
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                if ((j & h) == 0
                    && same_block<WIDTH, MAX_BLOCK, UNIFORM>(first + uint(32 * j), uint(32 * h)))
                    butterfly(values[j], values[(j + h) % 8]);
            }
        }
        #pragma unroll
        for (uint h = 1; h < 32; h *= 2) {
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                float partner = simd_shuffle_xor(values[j], h);
                if (same_block<WIDTH, MAX_BLOCK, UNIFORM>(first + uint(32 * j), h)) {
                    values[j] = ((lane & h) == 0 ? values[j] + partner : partner - values[j])
                                * 0.70710678118f;
                }
            }
        }
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            uint i = first + uint(32 * j);
            if (i < uint(WIDTH)) y[row + i] = static_cast<OUT>(values[j]);
        }
    }
}
