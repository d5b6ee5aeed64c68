// What decode and prefill of a Gated DeltaNet layer share: gates, convolution and the end of the gated norm.

FN float sigmoid(float v) {
    return 1.0f / (1.0f + metal::exp(-v));
}

// log(1 + e^v). Near 1 a GPU's log is exact to 4e-7 of one, which is much of a small decay: there a series is better.
FN float softplus(float v) {
    float e = metal::exp(-metal::abs(v));
    return metal::max(v, 0.0f)
           + (e < 0.03f ? e * (1.0f - e * (0.5f - e * 0.33333333f)) : metal::log(1.0f + e));
}

// e^g: what a token leaves of the state.
FN float state_decay(float a_log, float a, float dt_bias) {
    return metal::exp(-metal::exp(a_log) * softplus(a + dt_bias));
}

// One channel of the causal convolution, then SiLU. Summed in float32: half precision would round after each term.
template <typename T, int CONV, typename W>
FN T convolve(const thread T (&x)[CONV], W weight) {
    float sum = 0.0f;
    #pragma unroll
    for (int j = 0; j < CONV; j++) sum += float(x[j]) * float(weight[j]);
    sum = float(static_cast<T>(sum));
    return static_cast<T>(sum * sigmoid(sum));
}

// Gated RMSNorm of one number; `scale` is 1 / the root of the mean square.
template <typename T>
FN T gate_normed(float v, float scale, float gain, float gate) {
    return static_cast<T>(float(static_cast<T>(v * scale * gain)) * gate * sigmoid(gate));
}
