"""Products with matrices of codes: a number is its row's norm times the level its code points at.

x is turned already (turn.py). A lane takes whole words of codes, so a row's last word may be part filled.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from .fields import WORD, pack_whole, unpack_fields, unpack_whole, words_for
from .matvec import ACTIVATE, ACTIVATIONS, activate
from .op import Case, Source, op

MANY = 64  # tokens up to which a matvec for each of their experts is the faster way
SIMDGROUPS = 8

READ = r"""
// A word's numbers of x; what lies beyond the row is zero.
template <int PER, int K, typename P> FN void numbers(P x, uint at, uint k, thread float (&v)[PER]) {
    #pragma unroll
    for (int c = 0; c < PER; c++) v[c] = K % PER == 0 || k + uint(c) < uint(K) ? float(x[at + k + uint(c)]) : 0.0f;
}
template <int BITS, int PER, typename L>
FN float dot_word(uint word, const thread float (&v)[PER], L levels, float sum) {
    #pragma unroll
    for (int c = 0; c < PER; c++) sum += v[c] * levels[(word >> (c * BITS)) & ((1u << BITS) - 1u)];
    return sum;
}
"""
TABLE = r"""
    threadgroup float table[1 << BITS];
    for (uint i = thread_position_in_threadgroup.x; i < (1u << BITS); i += uint(SG * 32)) table[i] = levels[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
"""
# One row or, with PAIR, a gate's and an up's.
ROWS = Source(
    "mlxrt_coded_rows",
    ("x", "experts", "w", "n", "w2", "n2", "levels"),
    ("y",),
    TABLE
    + r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint first = (threadgroup_position_in_grid.x * SG + sg) * R; uint p = threadgroup_position_in_grid.y;
    uint base = ROUTED ? uint(experts[p]) * uint(O) : 0u; uint at = (p / uint(C)) * uint(K);
    float acc[R]; float other[R]; uint row[R];
    #pragma unroll
    for (int r = 0; r < R; r++) {
        row[r] = base + metal::min(first + uint(r), uint(O - 1)); acc[r] = 0.0f; other[r] = 0.0f;
    }
    for (uint i = lane; i < uint(P); i += 32) {
        float v[PER];
        numbers<PER, K>(x, at, i * PER, v);
        #pragma unroll
        for (int r = 0; r < R; r++) {
            acc[r] = dot_word<BITS, PER>(w[row[r] * P + i], v, table, acc[r]);
            if (PAIR) other[r] = dot_word<BITS, PER>(w2[row[r] * P + i], v, table, other[r]);
        }
    }
    #pragma unroll
    for (int r = 0; r < R; r++) {
        float a = simd_sum(acc[r]); float u = PAIR ? simd_sum(other[r]) : 0.0f; uint o = first + uint(r);
        if (lane == 0 && o < uint(O)) {
            a *= float(n[base + o]);
            if (PAIR) a = gated<ACT>(a, u * float(n2[base + o]));
            y[p * O + o] = static_cast<OUT>(a);
        }
    }
""",
    ACTIVATE + READ,
)
DOWN = Source(
    "mlxrt_coded_down",
    ("x", "experts", "weights", "w", "n", "levels", "residual"),
    ("y",),
    TABLE
    + r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint first = (threadgroup_position_in_grid.x * SG + sg) * R; uint t = threadgroup_position_in_grid.y;
    float total[R];
    #pragma unroll
    for (int r = 0; r < R; r++) total[r] = 0.0f;
    for (uint c = 0; c < uint(C); c++) {
        uint p = t * uint(C) + c; uint base = uint(experts[p]) * uint(O); float f = float(weights[p]);
        float acc[R]; uint row[R];
        #pragma unroll
        for (int r = 0; r < R; r++) { row[r] = base + metal::min(first + uint(r), uint(O - 1)); acc[r] = 0.0f; }
        for (uint i = lane; i < uint(P); i += 32) {
            float v[PER];
            numbers<PER, K>(x, p * uint(K), i * PER, v);
            #pragma unroll
            for (int r = 0; r < R; r++) acc[r] = dot_word<BITS, PER>(w[row[r] * P + i], v, table, acc[r]);
        }
        #pragma unroll
        for (int r = 0; r < R; r++) total[r] += f * float(n[row[r]]) * acc[r];
    }
    #pragma unroll
    for (int r = 0; r < R; r++) {
        float a = simd_sum(total[r]); uint o = first + uint(r);
        if (lane == 0 && o < uint(O)) y[t * O + o] = static_cast<OUT>(RES ? a + float(residual[t * O + o]) : a);
    }
""",
    READ,
)
UNPACK = Source(
    "mlxrt_coded_unpack",
    ("w", "n", "levels"),
    ("y",),
    TABLE
    + r"""
    uint i = threadgroup_position_in_grid.x * uint(SG * 32) + thread_position_in_threadgroup.x;
    if (i < uint(WORDS)) {
        uint row = i / uint(P); uint k = (i % uint(P)) * PER; float f = float(n[row]); uint word = w[i];
        #pragma unroll
        for (int c = 0; c < PER; c++) {
            if (K % PER == 0 || k + uint(c) < uint(K)) {
                y[row * K + k + uint(c)] = static_cast<OUT>(f * table[(word >> (c * BITS)) & ((1u << BITS) - 1u)]);
            }
        }
    }
""",
)


@dataclass(frozen=True)
class Codes:
    """A matrix [O, K], or a stack [E, O, K], as words [.., O, W], norms [.., O] and levels [2 ** bits]."""

    words: mx.array
    norms: mx.array
    levels: mx.array
    bits: int
    width: int
    whole: bool = True  # no code crosses a word

    @property
    def rows(self) -> int:
        return self.words.shape[-2]

    def plain(self, words: mx.array | None = None) -> mx.array:
        """Levels without norms, float32; of some of the words, where given."""
        words = self.words if words is None else words
        codes = unpack_whole(words, self.bits, self.width) if self.whole else unpack_fields(words, self.bits)
        return self.levels[codes]

    def refused(self) -> str | None:
        """Why no kernel of ours reads these words."""
        if not self.whole and WORD % self.bits:
            return f"codes of {self.bits} bit across words"
        if self.words.size >= 1 << 32 or self.norms.size * self.width >= 1 << 32:
            return "a stack of 2^32 numbers or more"
        return "fewer than eight words, norms or levels" if min(self.words.size, self.norms.size) < 8 else None

    def constants(self) -> dict[str, int]:
        return {
            "BITS": self.bits,
            "PER": WORD // self.bits,
            "P": self.words.shape[-1],
            "K": self.width,
            "SG": SIMDGROUPS,
        }

    def table(self) -> mx.array:
        """At least eight numbers: fewer would lie in another address space."""
        return self.levels if self.levels.size >= 8 else mx.pad(self.levels, (0, 8 - self.levels.size))


def random_codes(shape: tuple[int, ...], bits: int, width: int, seed: int) -> Codes:
    mx.random.seed(seed)
    codes = mx.random.randint(0, 1 << bits, (*shape, width)).astype(mx.uint32)
    levels = mx.sort(mx.random.normal((1 << bits,))) * width**-0.5
    return Codes(pack_whole(codes, bits), (1 + mx.random.uniform(shape=shape)).astype(mx.float16), levels, bits, width)


def gathered(x: mx.array, matrix: Codes, experts: mx.array, *, ordered: bool = False) -> mx.array:
    """x [..., 1, K] by the matrices of `experts` [...], float32.

    Few pairs unpack the matrices they use; many would unpack most of them several times, so they unpack all once.
    """
    x = x.astype(mx.float32)
    if experts.size < matrix.words.shape[0]:
        y = x @ matrix.plain(matrix.words[experts]).swapaxes(-1, -2)
    else:
        y = mx.gather_mm(x, matrix.plain().swapaxes(-1, -2), rhs_indices=experts, sorted_indices=ordered)
    return y * matrix.norms.astype(mx.float32)[experts][..., None, :]


SHAPES = [(1, 2, 5, 96, 40), (2, 3, 4, 75, 9), (3, 4, 3, 64, 33), (1, 8, 3, 130, 16), (2, 1, 4, 100, 12)]


def rows_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, bits, _, width, outs in SHAPES:
        matrix = random_codes((outs,), bits, width, width)
        x = mx.random.normal((rows, width)).astype(dtype)
        yield Case(f"{bits} bit [{outs}, {width}] x{rows}", {"x": x}, {"matrix": matrix, "dtype": dtype})


def gate_up_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, bits, count, width, hidden in SHAPES:
        gate, up = (random_codes((count, hidden), bits, width, width + i) for i in (0, 1))
        up = Codes(up.words, up.norms, gate.levels, bits, width)
        experts = mx.random.randint(0, count, (rows, 2)).astype(mx.uint32)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype), "experts": experts}
        options = {"gate": gate, "up": up, "activation": "gelu" if bits == 4 else "silu"}
        yield Case(f"{bits} bit 2 of {count} [{hidden}, {width}] x{rows}", arrays, options)


def down_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, bits, count, width, outs in SHAPES:
        matrix = random_codes((count, outs), bits, width, outs)
        arrays = {
            "x": mx.random.normal((rows, 3, width)).astype(dtype),
            "experts": mx.random.randint(0, count, (rows, 3)).astype(mx.uint32),
            "weights": mx.random.uniform(0, 1, (rows, 3)),
        }
        if bits != 4:
            arrays["residual"] = mx.random.normal((rows, outs)).astype(dtype)
        yield Case(f"{bits} bit 3 of {count} [{outs}, {width}] x{rows}", arrays, {"matrix": matrix, "dtype": dtype})


def unpack_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for _, bits, count, width, outs in SHAPES:
        matrix = random_codes((count, outs), bits, width, outs + width)
        yield Case(f"{bits} bit {count} x [{outs}, {width}]", {}, {"matrix": matrix, "dtype": dtype})


@op(rows_cases)
def coded_rows(x, matrix, dtype):
    """Turned x [N, K] -> [N, O]."""
    y = (x.astype(mx.float32) @ matrix.plain().swapaxes(-1, -2)) * matrix.norms.astype(mx.float32)
    return y.astype(dtype)


@op(gate_up_cases, {"float16": 2e-5, "bfloat16": 2e-5})
def coded_gate_up(x, experts, gate, up, activation):
    """Turned x [N, K] -> float32 [N, k, I]: the activated gates times ups of each token's experts."""
    a, b = (gathered(x[:, None, None], m, experts)[:, :, 0] for m in (gate, up))
    return activate(activation, a, b)


@op(down_cases)
def coded_down(x, experts, weights, matrix, dtype, residual=None):
    """Turned x [N, k, I] -> [N, O]: the sum of what each token's experts make of it, by weight; + residual."""
    y = gathered(x[:, :, None], matrix, experts)[:, :, 0]
    y = (y * weights.astype(mx.float32)[..., None]).sum(axis=1)
    return (y if residual is None else residual.astype(mx.float32) + y).astype(dtype)


@op(unpack_cases)
def coded_unpack(matrix, dtype):
    """The matrices themselves in the turned basis, [.., O, K]: what many tokens are multiplied by."""
    return (matrix.plain() * matrix.norms.astype(mx.float32)[..., None]).astype(dtype)


def each(rows: int, tokens: int) -> int:
    """Rows a simdgroup takes at once: the more, the fewer times x is read."""
    return 4 if rows * tokens >= 4096 else 2 if rows * tokens >= 1024 else 1


@coded_rows.kernel(ROWS, refuses=lambda matrix, **rest: matrix.refused(), pays=lambda x, **rest: x.shape[0] <= MANY)
def launch_rows(gpu, x, matrix, dtype):
    n, outs = x.shape[0], matrix.rows
    r = each(outs, n)
    [y] = gpu(
        ROWS,
        [x, matrix.words, matrix.words, matrix.norms, matrix.words, matrix.norms, matrix.table()],
        (math.ceil(outs / (SIMDGROUPS * r)), n, 1),
        32 * SIMDGROUPS,
        [((n, outs), dtype)],
        OUT=dtype, C=1, O=outs, R=r, ROUTED=False, PAIR=False, ACT=0, **matrix.constants(),
    )  # fmt: skip
    return y


def refuses_pair(gate: Codes, up: Codes, **rest) -> str | None:
    if (gate.bits, gate.width, gate.words.shape) != (up.bits, up.width, up.words.shape):
        return "gates and ups of other bits"
    return gate.refused() or up.refused()


@coded_gate_up.kernel(ROWS, refuses=refuses_pair, pays=lambda x, **rest: x.shape[0] <= MANY)
def launch_gate_up(gpu, x, experts, gate, up, activation):
    (n, k), outs = experts.shape, gate.rows
    r = each(outs, n * k)
    [y] = gpu(
        ROWS,
        [x, experts, gate.words, gate.norms, up.words, up.norms, gate.table()],
        (math.ceil(outs / (SIMDGROUPS * r)), n * k, 1),
        32 * SIMDGROUPS,
        [((n, k, outs), mx.float32)],
        OUT=mx.float32, C=k, O=outs, R=r, ROUTED=True, PAIR=True, ACT=ACTIVATIONS[activation], **gate.constants(),
    )  # fmt: skip
    return y


@coded_down.kernel(DOWN, refuses=lambda matrix, **rest: matrix.refused(), pays=lambda x, **rest: x.shape[0] <= MANY)
def launch_down(gpu, x, experts, weights, matrix, dtype, residual=None):
    (n, k), outs = experts.shape, matrix.rows
    r = each(outs, n)
    [y] = gpu(
        DOWN,
        [x, experts, weights, matrix.words, matrix.norms, matrix.table(), residual],
        (math.ceil(outs / (SIMDGROUPS * r)), n, 1),
        32 * SIMDGROUPS,
        [((n, outs), dtype)],
        OUT=dtype, C=k, O=outs, R=r, RES=residual is not None, **matrix.constants(),
    )  # fmt: skip
    return y


@coded_unpack.kernel(UNPACK, refuses=lambda matrix, **rest: matrix.refused())
def launch_unpack(gpu, matrix, dtype):
    words = matrix.words.size
    [y] = gpu(
        UNPACK,
        [matrix.words, matrix.norms, matrix.table()],
        math.ceil(words / (32 * SIMDGROUPS)),
        32 * SIMDGROUPS,
        [((*matrix.words.shape[:-1], matrix.width), dtype)],
        OUT=dtype, WORDS=words, **matrix.constants(),
    )  # fmt: skip
    return y


def words_of(width: int, bits: int, whole: bool) -> int:
    """Words in a row."""
    return words_for(width, bits) if whole else width * bits // WORD
