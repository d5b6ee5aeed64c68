"""Address spaces and words: what Apple's compiler refuses and a C++ compiler does not notice."""

import mlx.core as mx
import pytest

from . import example, spaces
from .lint import lint
from .text import Definition

TAKES_DEVICE = "template <typename T> inline float ld(const device T* p, int i) { return p[i]; }\n"
TAKES_ANYTHING = "inline float ld(const float* p, int i) { return p[i]; }\n"
TAKES_THREAD = "inline float sum4(thread float* a) { return a[0] + a[3]; }\n"
SHARES = "inline float f(float a) { threadgroup float t[4]; return a; }\n"
NUMBER = "uint i = thread_position_in_grid.x; "
MANY, FEW = mx.zeros(64), mx.zeros(4)


def kernel(source, inputs=(MANY,), header="", dtype=mx.float32, atomic=False, template=()):
    names = ("x", "n")[: len(inputs)]
    definition = Definition("k", names, ("out",), NUMBER + source, header, atomic)
    return definition, definition.text(list(inputs), [dtype], list(template)).text


def typed_matvec():
    definition = Definition("qmv4", example.INPUTS, example.OUTPUTS, example.SOURCE)
    sizes = [("T", mx.bfloat16), ("M", 12), ("K", 64), ("GS", 64), ("ROWS", 4), ("NSG", 2)]
    return definition, definition.text(example.operands(12, 64, 2, mx.bfloat16)[0], [mx.bfloat16], sizes).text


VECTORS = """float4 v = float4(1, 2, 3, x[i]); v.xy += v.zw; uint2 u = as_type<uint2>(v.xy);
    auto w4 = *(const device float4*)(x + 4 * i); out[i] = dot(v, w4) + u.x;"""
MATRIX = """threadgroup float t[64]; simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, x, 8);
    simdgroup_store(m, t, 8); simdgroup_load(m, t, 8, ulong2(0, 0), true); simdgroup_store(m, out, 8);"""
GOOD = {
    "helper with a device pointer": kernel("out[i] = ld(x, i);", header=TAKES_DEVICE),
    "eight elements are device": kernel("out[i] = ld(x, i);", [mx.zeros(8)], TAKES_DEVICE),
    "auto pointer": kernel("auto p = x + 1; out[i] = p[i];"),
    "thread array": kernel("float t[4] = {1}; out[i] = sum4(t);", header=TAKES_THREAD),
    "vectors and casts": kernel(VECTORS),
    "simdgroup matrices": kernel(MATRIX),
    "the example": typed_matvec(),
}
BAD = {
    "helper without a space": kernel("out[i] = ld(x, i);", header=TAKES_ANYTHING),
    "four elements are constant": kernel("out[i] = ld(x, i);", [FEW], TAKES_DEVICE),
    "local pointer without a space": kernel("const float* p = x; out[i] = p[i];"),
    "threadgroup array for thread": kernel("threadgroup float t[4]; t[0] = 1; out[i] = sum4(t);", header=TAKES_THREAD),
    "write through const": kernel("x[i] = 1.0f; out[i] = 0;"),
    "variable length array": kernel("float t[n]; t[0] = x[i]; out[i] = t[0];", [MANY, mx.array(3)]),
    "ambiguous max": kernel("out[i] = max(x[i], 0);"),
    "simd_sum of 64 bits": kernel("out[i] = simd_sum(x[i]);", [mx.zeros(64, mx.int64)]),
    "atomic half": kernel(
        "atomic_fetch_add_explicit(&out[i], 1, memory_order_relaxed);", dtype=mx.float16, atomic=True
    ),
}
WORDS = {
    "cast that drops the space": kernel("out[i] = *(const float*)(x + i);"),
    "parameter without a space": kernel("out[i] = s4(x);", header="inline float s4(float* a) { return a[0]; }\n"),
    "exception": kernel("try { out[i] = x[i]; } catch (...) {}"),
    "standard library": kernel("out[i] = std::max(x[i], 0.0f);"),
    "double literal": kernel("out[i] = x[i] * 0.5;"),
    "double literal with an exponent": kernel("out[i] = x[i] * 1e-6;"),
    "double": kernel("double d = x[i]; out[i] = d;"),
    "lambda": kernel("auto f = [&](float a) { return a; }; out[i] = f(x[i]);"),
    "threadgroup variable in a helper": kernel("out[i] = f(x[i]);", header=SHARES),
}  # fmt: skip
needs_clang = pytest.mark.skipif(not spaces.available(), reason="no clang++ in PATH and no libclang wheel")


@needs_clang
@pytest.mark.parametrize("name", GOOD)
def test_sound_pointers_are_left_in_peace(name):
    assert not spaces.complaints(GOOD[name][1])


@needs_clang
@pytest.mark.parametrize("name", BAD)
def test_wrong_pointers_are_found(name):
    assert spaces.complaints(BAD[name][1])


@pytest.mark.parametrize("name", GOOD)
def test_lint_leaves_sound_words_in_peace(name):
    assert not lint(GOOD[name][0].header, GOOD[name][0].source)


@pytest.mark.parametrize("name", WORDS)
def test_lint_finds_words(name):
    assert lint(WORDS[name][0].header, WORDS[name][0].source)
