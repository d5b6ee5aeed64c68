#pragma once
#include <metal_stdlib>
using namespace metal;
template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T r, T i) : real(r), imag(i) {}
  constexpr complex_t() : real(0), imag(0) {}
};
typedef complex_t<float> complex64_t;
template <typename T>
static constexpr bool is_complex_v = false;
template <typename T>
static constexpr bool is_complex_v<complex_t<T>> = true;
