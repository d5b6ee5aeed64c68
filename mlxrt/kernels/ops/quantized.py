"""Matrices as kernels see them: which layout, and the Metal functions that read 32 numbers of a row at a time.

32 numbers of any width are a whole number of words, and lie in one group of every layout we take: that is what a
lane reads at once, whatever the bits.
"""

from dataclasses import dataclass

import mlx.core as mx

from .lut_matrix import Codes

AFFINE, MXFP4, DENSE, CODED = 0, 1, 2, 3
FORMS = {"affine": AFFINE, "mxfp4": MXFP4, "dense": DENSE, "codes": CODED}
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Matrix:
    """A matrix [O, K], or a stack [E, O, K]: plain, packed as MLX packs it, or codes.

    A row of codes is its norm, which is its only scale, times the levels they point at. They lie in words as MLX's do.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 16
    group: int = 32
    mode: str = "dense"
    levels: mx.array | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[-2]

    @property
    def width(self) -> int:
        return self.weight.shape[-1] * 32 // self.bits if self.packed else self.weight.shape[-1]

    @property
    def packed(self) -> bool:
        return self.scales is not None

    @property
    def codes(self) -> Codes | None:
        """Itself as codes, if that is what it is."""
        if self.levels is None or self.scales is None:
            return None
        return Codes(self.weight, self.scales, self.levels, self.bits, self.width, whole=False)

    def multiply(self, x: mx.array) -> mx.array:
        """x [..., K] -> [..., O]: the meaning of every product here."""
        if self.scales is None:
            return x @ self.weight.swapaxes(-1, -2)
        if self.codes is not None:
            return self.codes.multiply(x).astype(x.dtype)
        return mx.quantized_matmul(x, self.weight, self.scales, self.biases, True, self.group, self.bits, self.mode)

    def plain(self) -> mx.array:
        """The numbers themselves, float32."""
        if self.scales is None:
            return self.weight.astype(mx.float32)
        if self.codes is not None:
            return self.codes.numbers()
        scales, biases = self.scales, self.biases
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(self.weight, scales, biases, self.group, self.bits, self.mode, dtype=mx.float32)

    def refused(self, x: mx.array, norm: mx.array | None = None) -> str | None:
        """Why no kernel of ours can read this matrix with such an x, and a norm's weight for it."""
        if x.dtype not in FLOATS:
            return f"activations are {x.dtype}"
        if norm is not None and norm.dtype != x.dtype:  # both are read eight at a time, as words
            return f"the norm is {norm.dtype}, activations {x.dtype}"
        if not self.packed:
            if self.weight.dtype != x.dtype:
                return f"plain weights are {self.weight.dtype}, activations {x.dtype}"
        elif self.mode not in FORMS:
            return f"{self.mode} weights"
        elif self.group % 32:
            return f"groups of {self.group}"
        if self.weight.nbytes >= 1 << 34:
            return "2^32 words or more"  # they are counted in 32 bits
        if self.width % 32 or self.weight.size < 8:
            return f"rows of {self.width} numbers"
        return None

    def inputs(self) -> list[mx.array | None]:
        """Words, scales, biases, levels, as far as the layout has them."""
        return [self.weight, self.scales, self.biases, self.levels]

    def constants(self) -> dict[str, int]:
        return {"FORM": FORMS[self.mode], "BITS": self.bits if self.packed else 1, "GROUP": self.group}


# FORM: 0 affine, 1 mxfp4, 2 plain numbers of type T, 3 codes of levels, which lie in a table in threadgroup memory.
READ = r"""
template <typename T, typename P> FN void load8(P p, uint i, thread float* y) {
    const int U = 4 / sizeof(T);
    #pragma unroll
    for (uint c = 0; c < sizeof(T) / 2; c++) {
        auto v = ((const device uint4*)(p))[i * (sizeof(T) / 2) + c];
        unpack2<T>(v.x, y + 4 * U * c); unpack2<T>(v.y, y + 4 * U * c + U);
        unpack2<T>(v.z, y + 4 * U * c + 2 * U); unpack2<T>(v.w, y + 4 * U * c + 3 * U);
    }
}
// Words N i ... N i + N - 1: of a packed row 32 numbers, as many words as a number has bits.
template <int N, typename P> FN void load_words(P w, uint i, thread uint (&p)[N]) {
    if (N % 4 == 0) {
        #pragma unroll
        for (int c = 0; c < N / 4; c++) {
            auto v = ((const device uint4*)(w))[i * (N / 4) + c];
            p[4 * c] = v.x; p[(4 * c + 1) % N] = v.y; p[(4 * c + 2) % N] = v.z; p[(4 * c + 3) % N] = v.w;
        }
    } else if (N % 2 == 0) {
        #pragma unroll
        for (int c = 0; c < N / 2; c++) {
            auto v = ((const device uint2*)(w))[i * (N / 2) + c];
            p[2 * c] = v.x; p[(2 * c + 1) % N] = v.y;
        }
    } else {
        #pragma unroll
        for (int c = 0; c < N; c++) p[c] = ((const device uint*)(w))[i * N + c];
    }
}
template <int BITS, int N> FN uint code(const thread uint (&p)[N], int n) {
    int word = n * BITS / 32; int bit = n * BITS % 32;
    uint v = p[word] >> bit;
    if (bit + BITS > 32) v |= p[(word + 1) % N] << ((32 - bit) % 32);
    return v & ((1u << BITS) - 1u);
}
// A code plus 2^BITS, as a float: the code is put into the mantissa, which costs no conversion. Those are slow on GPUs.
// `one` is 2^BITS, from lift_of: its argument is always 0, but no compiler knows it, so the number stays in a register
// instead of being made anew for every code.
template <int BITS> FN uint lift_of(uint nil) { return (uint(127 + BITS) + nil) << 23; }
template <int BITS, int N> FN float lifted(const thread uint (&p)[N], int n, uint one) {
    const int TOP = 23 - BITS; const uint MASK = ((1u << BITS) - 1u) << TOP;
    int word = n * BITS / 32; int bit = n * BITS % 32;
    if (bit + BITS > 32) return as_type<float>((code<BITS>(p, n) << TOP) | one);
    uint v = bit > TOP ? p[word] >> ((bit - TOP) % 32) : p[word] << ((TOP - bit) % 32);
    return as_type<float>((v & MASK) | one);
}
// e2m1: a sign, two bits of exponent, one of fraction.
FN float small_float(uint c) {
    float m = float(c & 1u); uint e = (c >> 1) & 3u;
    float v = e == 0u ? 0.5f * m : (1.0f + 0.5f * m) * float(1u << (e - 1u));
    return (c & 8u) != 0u ? -v : v;
}
// The levels of codes where every lane finds them: before the first barrier of a kernel, by SIZE threads.
template <int FORM, int LEVELS, int SIZE, typename L, typename P> FN void lay_levels(L levels, uint t, P table) {
    if (FORM == 3) {
        for (uint i = t; i < uint(LEVELS); i += uint(SIZE)) table[i] = float(levels[i]);
    }
}
// A number is `number` times its group's scale plus what `zero_at` gives for it.
template <int FORM, int BITS, int N, typename P> FN float number(const thread uint (&p)[N], int n, uint one, P table) {
    return FORM == 3 ? table[code<BITS>(p, n)] : FORM == 1 ? small_float(code<BITS>(p, n)) : lifted<BITS>(p, n, one);
}
template <int FORM, int BITS, typename Z> FN float zero_at(Z z, uint i, float scale) {
    return FORM == 0 ? float(z[i]) - float(1u << BITS) * scale : 0.0f;
}
template <int FORM, typename S> FN float scale_at(S s, uint i) {
    return FORM == 1 ? as_type<float>(uint(s[i]) << 23) : float(s[i]);
}
"""
