// Prefill of a Gated DeltaNet layer: the delta rule, token by token, for every row of a packed batch.
//     S = e^g S;  S = S + k (beta (v - k S));  o = q S
// Inputs are those gated_delta_inputs.metal makes, and state [R, V_HEADS, K_DIM, V_DIM]. o [N, V_HEADS, V_DIM]; state_out
// [slots, V_HEADS, K_DIM, V_DIM] has the states after the tokens that have a slot.
//
// Columns of a state do not meet: a threadgroup has a strip of one head's and goes through its row's tokens with them in
// registers, COLS columns a lane, of which LANES lanes have the rows. What q reads of a correction u is (q k) u, so k and
// q read the old state at once and are summed over the lanes together. Fused products are written as such and tokens follow
// one another whatever their tile: a text gives the same bits however it is cut into chunks.
//
// TOKENS tokens at a time lie in threadgroup memory; the next are loaded into registers while these are computed.
[[kernel]] void mlxrt_gated_delta_scan(MLX_ARGUMENTS) {
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x;
    const int THREADS = SIMDGROUPS * 32;
    const int STRIP = THREADS / LANES * COLS;
    const int STRIPS = V_DIM / STRIP;
    const int VECS = K_DIM / 4;     // of a token's q or k
    const int EACH = VECS / LANES;  // of those, a lane's
    const int QK_LOADS = TOKENS * 2 * VECS / THREADS;
    const int V_LOADS = TOKENS * STRIP / THREADS;
    threadgroup float4 qk_tile[TOKENS * 2 * VECS];
    threadgroup float v_tile[TOKENS * STRIP];
    threadgroup float4 gate_tile[TOKENS];  // decay, beta, q k
    threadgroup int slot_tile[TOKENS];
    uint head = threadgroup_position_in_grid.x / STRIPS;
    uint strip = threadgroup_position_in_grid.x % STRIPS * STRIP;
    uint row = threadgroup_position_in_grid.y;
    uint k_head = head / uint(V_HEADS / K_HEADS);
    uint first = uint(spans[2 * row]);
    uint end = uint(spans[2 * row + 1]);

    uint part = lane % LANES;
    uint col = (sg * (32 / LANES) + lane / LANES) * COLS;
    uint at = part * 4 * V_DIM + strip + col;  // in one head's state
    uint from = (row * V_HEADS + head) * K_DIM * V_DIM + at;
    float s[4 * EACH][COLS];
    #pragma unroll
    for (int r = 0; r < 4 * EACH; r++) {
        #pragma unroll
        for (int c = 0; c < COLS; c++) {
            s[r][c] = state[from + (r / 4 * LANES * 4 + r % 4) * V_DIM + c];
        }
    }

    // The first pass only loads, the last one only computes.
    for (uint ahead = first; ahead < end + TOKENS; ahead += TOKENS) {
        float4 qk_next[QK_LOADS];
        T v_next[V_LOADS];
        float4 gate_next = four(0.0f, 0.0f, 0.0f, 0.0f);
        int slot_next = -1;
        #pragma unroll
        for (int i = 0; i < QK_LOADS; i++) {
            uint j = i * THREADS + t;
            uint n = metal::min(ahead + j / (2 * VECS), end - 1);
            qk_next[i] =
                ((const device float4*)(qk))[(n * K_HEADS + k_head) * 2 * VECS + j % (2 * VECS)];
        }
        #pragma unroll
        for (int i = 0; i < V_LOADS; i++) {
            uint j = i * THREADS + t;
            uint n = metal::min(ahead + j / STRIP, end - 1);
            v_next[i] = v[(n * V_HEADS + head) * V_DIM + strip + j % STRIP];
        }
        if (t < uint(TOKENS)) {
            uint n = metal::min(ahead + t, end - 1);
            uint gate = 2 * (n * V_HEADS + head);
            gate_next = four(gates[gate], gates[gate + 1], dots[n * K_HEADS + k_head], 0.0f);
            slot_next = tokens[2 * n + 1];
        }

        uint now = ahead - TOKENS;
        uint count = ahead == first ? 0 : metal::min(uint(TOKENS), end - now);
        for (uint j = 0; j < count; j++) {
            float4 gate = gate_tile[j];
            float k[4 * EACH];
            float k_dot[COLS];
            float q_dot[COLS];
            #pragma unroll
            for (int c = 0; c < COLS; c++) {
                k_dot[c] = 0.0f;
                q_dot[c] = 0.0f;
            }
            #pragma unroll
            for (int i = 0; i < EACH; i++) {
                float4 q4 = qk_tile[2 * j * VECS + i * LANES + part];
                float4 k4 = qk_tile[(2 * j + 1) * VECS + i * LANES + part];
                float q[4] = {q4.x, q4.y, q4.z, q4.w};
                k[4 * i] = k4.x;
                k[4 * i + 1] = k4.y;
                k[4 * i + 2] = k4.z;
                k[4 * i + 3] = k4.w;
                #pragma unroll
                for (int r = 0; r < 4; r++) {
                    #pragma unroll
                    for (int c = 0; c < COLS; c++) {
                        k_dot[c] = metal::fma(k[4 * i + r], s[4 * i + r][c], k_dot[c]);
                        q_dot[c] = metal::fma(q[r], s[4 * i + r][c], q_dot[c]);
                    }
                }
            }
            #pragma unroll
            for (int m = 1; m < LANES; m *= 2) {
                #pragma unroll
                for (int c = 0; c < COLS; c++) {
                    k_dot[c] += simd_shuffle_xor(k_dot[c], uint(m));
                    q_dot[c] += simd_shuffle_xor(q_dot[c], uint(m));
                }
            }
            #pragma unroll
            for (int c = 0; c < COLS; c++) {
                float u = gate.y * metal::fma(-gate.x, k_dot[c], v_tile[j * STRIP + col + c]);
                #pragma unroll
                for (int r = 0; r < 4 * EACH; r++) {
                    s[r][c] = metal::fma(k[r], u, multiply(gate.x, s[r][c]));
                }
                float read = metal::fma(gate.z, u, multiply(gate.x, q_dot[c]));
                uint to = ((now + j) * V_HEADS + head) * V_DIM + strip + col + c;
                if (part == 0) o[to] = static_cast<T>(read);
            }
            int slot = slot_tile[j];
            if (slot >= 0) {
                uint to = (uint(slot) * V_HEADS + head) * K_DIM * V_DIM + at;
                #pragma unroll
                for (int r = 0; r < 4 * EACH; r++) {
                    #pragma unroll
                    for (int c = 0; c < COLS; c++) {
                        state_out[to + (r / 4 * LANES * 4 + r % 4) * V_DIM + c] = s[r][c];
                    }
                }
            }
        }

        threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma unroll
        for (int i = 0; i < QK_LOADS; i++) qk_tile[i * THREADS + t] = qk_next[i];
        #pragma unroll
        for (int i = 0; i < V_LOADS; i++) v_tile[i * THREADS + t] = float(v_next[i]);
        if (t < uint(TOKENS)) {
            gate_tile[t] = gate_next;
            slot_tile[t] = slot_next;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
