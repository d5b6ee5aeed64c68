// Metal's scalar types, constants and the two small floats, on a C++20 compiler. Knows no vectors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#define __METAL_VERSION__ 310
#define __METAL__ 1
#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.434294481903251827651f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.785398163397448309616f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

namespace msim {
constexpr float bits_f(uint32_t u) { return __builtin_bit_cast(float, u); }
constexpr uint32_t f_bits(float f) { return __builtin_bit_cast(uint32_t, f); }
constexpr uint16_t f2bf(float f) {
  uint32_t u = f_bits(f);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
constexpr uint16_t f2h(float f) {
  uint32_t u = f_bits(f), s = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return uint16_t(s | 0x7e00);
  if (a >= 0x47800000) return uint16_t(s | 0x7c00);  // >= 65536
  if (a >= 0x38800000) {                             // normal
    uint32_t r = a - 0x38000000;
    r += 0xfff + ((r >> 13) & 1);
    return uint16_t(s | (r >> 13));
  }
  if (a < 0x33000000) return uint16_t(s);
  uint32_t e = a >> 23, m = (a & 0x7fffff) | 0x800000, sh = 126 - e;  // subnormal
  uint32_t r = m >> sh, rem = m & ((1u << sh) - 1), half_ = 1u << (sh - 1);
  if (rem > half_ || (rem == half_ && (r & 1))) r++;
  return uint16_t(s | r);
}
constexpr float h2f(uint16_t h) {
  uint32_t s = uint32_t(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
  if (e == 31) return bits_f(s | 0x7f800000 | (m << 13));
  if (e) return bits_f(s | ((e + 112) << 23) | (m << 13));
  float r = float(m) * 5.9604644775390625e-8f;
  return s ? -r : r;
}
template <class T>
constexpr bool is_int = std::is_integral_v<T>;
template <class X, class Y>
concept same = std::is_same_v<X, Y>;
}  // namespace msim
#define MSL_SMALL_FLOAT_OPS(H)                                       \
  constexpr H operator+(H a, H b) { return H(float(a) + float(b)); } \
  constexpr H operator-(H a, H b) { return H(float(a) - float(b)); } \
  constexpr H operator*(H a, H b) { return H(float(a) * float(b)); } \
  constexpr H operator/(H a, H b) { return H(float(a) / float(b)); } \
  constexpr H operator-(H a) { return H(-float(a)); }                \
  constexpr H operator+(H a) { return a; }                           \
  MSL_MIXED(H, +)                                                    \
  MSL_MIXED(H, -)                                                    \
  MSL_MIXED(H, *)                                                    \
  MSL_MIXED(H, /)                                                    \
  MSL_CMP(H, ==)                                                     \
  MSL_CMP(H, !=)                                                     \
  MSL_CMP(H, <)                                                      \
  MSL_CMP(H, >)                                                      \
  MSL_CMP(H, <=)                                                     \
  MSL_CMP(H, >=)                                                     \
  MSL_ASSIGN(H, +)                                                   \
  MSL_ASSIGN(H, -)                                                   \
  MSL_ASSIGN(H, *)                                                   \
  MSL_ASSIGN(H, /)                                                   \
  constexpr H& operator++(H& a) {                                    \
    a = H(float(a) + 1.0f);                                          \
    return a;                                                        \
  }                                                                  \
  constexpr H& operator--(H& a) {                                    \
    a = H(float(a) - 1.0f);                                          \
    return a;                                                        \
  }
#define MSL_MIXED(H, op)                                              \
  constexpr float operator op(H a, float b) { return float(a) op b; } \
  constexpr float operator op(float a, H b) { return a op float(b); } \
  template <class I>                                                  \
    requires msim::is_int<I>                                          \
  constexpr H operator op(H a, I b) {                                 \
    return a op H(float(b));                                          \
  }                                                                   \
  template <class I>                                                  \
    requires msim::is_int<I>                                          \
  constexpr H operator op(I a, H b) {                                 \
    return H(float(a)) op b;                                          \
  }
#define MSL_CMP(H, op)                                                  \
  constexpr bool operator op(H a, H b) { return float(a) op float(b); } \
  template <class I>                                                    \
    requires(msim::is_int<I> || std::is_same_v<I, float>)               \
  constexpr bool operator op(H a, I b) {                                \
    return float(a) op float(b);                                        \
  }                                                                     \
  template <class I>                                                    \
    requires(msim::is_int<I> || std::is_same_v<I, float>)               \
  constexpr bool operator op(I a, H b) {                                \
    return float(a) op float(b);                                        \
  }
#define MSL_ASSIGN(H, op)                             \
  template <class R>                                  \
    requires(msim::is_int<R> || std::is_same_v<R, H>) \
  constexpr H& operator op## = (H & a, R b) {         \
    a = a op b;                                       \
    return a;                                         \
  }                                                   \
  constexpr H& operator op## = (H & a, float b) {     \
    a = H(float(a) op b);                             \
    return a;                                         \
  }                                                   \
  constexpr float& operator op## = (float& a, H b) {  \
    a = a op float(b);                                \
    return a;                                         \
  }

#if defined(__clang__) || __GNUC__ >= 13
typedef _Float16 half;
#define MSL_NATIVE_HALF 1
#else
struct half {
  uint16_t bits_;
  half() = default;
  constexpr half(float f) : bits_(msim::f2h(f)) {}
  template <class I>
    requires msim::is_int<I>
  constexpr half(I i) : bits_(msim::f2h(float(i))) {}
  template <class F>
    requires msim::same<F, float>
  constexpr operator F() const {
    return msim::h2f(bits_);
  }
  template <class I>
    requires msim::is_int<I>
  constexpr explicit operator I() const {
    return I(msim::h2f(bits_));
  }
};
MSL_SMALL_FLOAT_OPS(half)
#endif
// MSL 3.1: bfloat converts implicitly to float only; nothing converts implicitly to bfloat from float or half.
struct bfloat {
  uint16_t bits_;
  bfloat() = default;
  constexpr explicit bfloat(float f) : bits_(msim::f2bf(f)) {}
  constexpr explicit bfloat(half f) : bits_(msim::f2bf(float(f))) {}
  template <class I>
    requires msim::is_int<I>
  constexpr bfloat(I i) : bits_(msim::f2bf(float(i))) {}
  template <class F>
    requires msim::same<F, float>
  constexpr operator F() const {
    return msim::bits_f(uint32_t(bits_) << 16);
  }
  template <class I>
    requires(msim::is_int<I> || msim::same<I, half>)
  constexpr explicit operator I() const {
    return I(float(*this));
  }
};
MSL_SMALL_FLOAT_OPS(bfloat)
constexpr half operator""h(long double v) { return half(float(v)); }
constexpr half operator""h(unsigned long long v) { return half(float(v)); }
constexpr bfloat operator"" bf(long double v) { return bfloat(float(v)); }
