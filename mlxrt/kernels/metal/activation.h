// The ACT of a kernel. GELU is the tanh approximation; CLAMPED is gpt-oss' SwiGLU, which clamps both sides and adds one to up.
enum Activation { NO_ACTIVATION = 0, SILU = 1, GELU = 2, CLAMPED = 3, SIGMOID_GATE = 4 };

template <int ACT>
FN float gated(float g, float u) {
    if (ACT == SILU) return g / (1.0f + metal::exp(-g)) * u;
    if (ACT == SIGMOID_GATE) return u / (1.0f + metal::exp(-g));
    if (ACT == GELU) {
        // Above 15 the exp would be infinite; far below it is 0, and t's tanh -1 as it should be.
        float t = metal::min(0.7978845608f * (g + 0.044715f * g * g * g), 15.0f);
        float e = metal::exp(2.0f * t);
        return 0.5f * g * (1.0f + (e - 1.0f) / (e + 1.0f)) * u;
    }
    g = metal::min(g, 7.0f);
    u = metal::max(metal::min(u, 7.0f), -7.0f);
    return g / (1.0f + metal::exp(-1.702f * g)) * (u + 1.0f);
}

template <int CAP>
FN float capped(float a) {
    return CAP != 0 ? metal::tanh(a / as_type<float>(uint(CAP))) * as_type<float>(uint(CAP)) : a;
}
