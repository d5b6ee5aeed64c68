"""A 4-bit matvec in Metal: small, but with simd sums, threadgroup memory, guards and packed words to go wrong in."""

import mlx.core as mx

# y[M] = W[M, K] (affine 4 bit, groups of GS) @ x[K]. A threadgroup of NSG simdgroups works on ROWS rows; K is split
# over the simdgroups, whose sums meet in threadgroup memory.
SOURCE = """
    constexpr int PACK = 8;                       // nibbles in a word
    constexpr int VPT = 8;                        // values per thread and step
    constexpr int BLOCK = 32 * VPT * NSG;
    threadgroup float part[NSG][ROWS];
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    uint row0 = threadgroup_position_in_grid.y * ROWS;
    uint b = threadgroup_position_in_grid.z;
    const device T* xb = x + b * K;

    float acc[ROWS];
    for (int r = 0; r < ROWS; r++) {
        acc[r] = 0.0f;
    }
    for (int k0 = 0; k0 < K; k0 += BLOCK) {
        int k = k0 + (sg * 32 + lane) * VPT;
        if (k < K) {
            float xv[VPT];
            float xs = 0.0f;
            for (int i = 0; i < VPT; i++) {
                xv[i] = static_cast<float>(xb[k + i]);
                xs += xv[i];
            }
            for (int r = 0; r < ROWS; r++) {
                uint row = row0 + r;
                if (row < uint(M)) {
                    uint packed = w[row * (K / PACK) + k / PACK];
                    float s = static_cast<float>(scales[row * (K / GS) + k / GS]);
                    float z = static_cast<float>(biases[row * (K / GS) + k / GS]);
                    float d = 0.0f;
                    for (int i = 0; i < VPT; i++) {
                        d = metal::fma(float((packed >> (4 * i)) & 0xf), xv[i], d);
                    }
                    acc[r] += s * d + z * xs;
                }
            }
        }
    }
    for (int r = 0; r < ROWS; r++) {
        float v = simd_sum(acc[r]);
        if (lane == 0) {
            part[sg][r] = v;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg == 0 && lane < ROWS && row0 + lane < uint(M)) {
        float v = 0.0f;
        for (int i = 0; i < NSG; i++) {
            v += part[i][lane];
        }
        y[b * M + row0 + lane] = static_cast<T>(v);
    }
"""
INPUTS, OUTPUTS, GROUP = ("x", "w", "scales", "biases"), ("y",), 64


def operands(rows: int, width: int, batch: int, dtype: mx.Dtype, seed: int = 3) -> tuple[list[mx.array], mx.array]:
    """Inputs, and the product in float32."""
    mx.random.seed(seed)
    x = mx.random.normal((batch, width)).astype(dtype)
    packed = mx.quantize((mx.random.normal((rows, width)) * 0.05).astype(dtype), group_size=GROUP, bits=4)
    whole = mx.dequantize(*packed, group_size=GROUP, bits=4).astype(mx.float32)
    return [x, *packed], x.astype(mx.float32) @ whole.T


def matvec(make, inputs: list[mx.array], source: str = SOURCE) -> mx.array:
    (batch, width), rows, per_group, simdgroups = inputs[0].shape, inputs[1].shape[0], 4, 2
    kernel = make(name="qmv4", input_names=INPUTS, output_names=OUTPUTS, source=source)
    template = {"T": inputs[0].dtype, "M": rows, "K": width, "GS": GROUP, "ROWS": per_group, "NSG": simdgroups}
    return kernel(
        inputs=inputs,
        template=list(template.items()),
        grid=(32 * simdgroups, (rows + per_group - 1) // per_group, batch),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[(batch, rows)],
        output_dtypes=[inputs[0].dtype],
    )[0]
