// metal_math, metal_integer, metal_limits, metal_type_traits. fast:: and precise:: are the same here: libm.
#pragma once
#include "vectors.hpp"

namespace metal {
using std::bool_constant;
using std::enable_if;
template <class T>
using remove_addrspace_t = T;
using std::add_const;
using std::conditional;
using std::conditional_t;
using std::decay;
using std::decay_t;
using std::declval;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_arithmetic;
using std::is_base_of;
using std::is_class;
using std::is_const;
using std::is_const_v;
using std::is_constructible;
using std::is_convertible;
using std::is_convertible_v;
using std::is_enum;
using std::is_enum_v;
using std::is_integral;
using std::is_integral_v;
using std::is_pointer;
using std::is_pointer_v;
using std::is_reference;
using std::is_same;
using std::is_same_v;
using std::is_scalar;
using std::is_signed;
using std::is_signed_v;
using std::is_trivially_constructible;
using std::is_trivially_copyable;
using std::is_unsigned;
using std::is_unsigned_v;
using std::is_void;
using std::is_void_v;
using std::make_signed;
using std::make_unsigned;
using std::make_unsigned_t;
using std::remove_const;
using std::remove_const_t;
using std::remove_cv;
using std::remove_cv_t;
using std::remove_reference;
using std::remove_reference_t;
using std::true_type;
using std::underlying_type;
using std::underlying_type_t;
template <class T>
struct is_floating_point
    : std::bool_constant<std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>> {};
template <class T>
constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
struct numeric_limits : std::numeric_limits<T> {};
#define MSL_FLIM(T, MAX, MIN, EPS, INF, NANV, LOW)                        \
  template <>                                                             \
  struct numeric_limits<T> {                                              \
    static constexpr bool is_specialized = true;                          \
    static constexpr T max() { return as_type<T>(uint16_t(MAX)); }        \
    static constexpr T min() { return as_type<T>(uint16_t(MIN)); }        \
    static constexpr T epsilon() { return as_type<T>(uint16_t(EPS)); }    \
    static constexpr T infinity() { return as_type<T>(uint16_t(INF)); }   \
    static constexpr T quiet_NaN() { return as_type<T>(uint16_t(NANV)); } \
    static constexpr T lowest() { return as_type<T>(uint16_t(LOW)); }     \
  };
MSL_FLIM(half, 0x7bff, 0x0400, 0x1400, 0x7c00, 0x7e00, 0xfbff)
MSL_FLIM(bfloat, 0x7f7f, 0x0080, 0x3c00, 0x7f80, 0x7fc0, 0xff7f)

#define MSL_MAP1(name)                                          \
  METAL_FUNC half name(half x) { return half(name(float(x))); } \
  template <class T, int N>                                     \
  METAL_FUNC vec<T, N> name(const vec<T, N>& v) {               \
    vec<T, N> r;                                                \
    for (int i = 0; i < N; i++) r[i] = T(name(v[i]));           \
    return r;                                                   \
  }
#define MSL_F1(name, expr)                        \
  METAL_FUNC float name(float x) { return expr; } \
  MSL_MAP1(name)
#define MSL_F2(name, expr)                                                        \
  METAL_FUNC float name(float x, float y) { return expr; }                        \
  METAL_FUNC half name(half x, half y) { return half(name(float(x), float(y))); } \
  template <class T, int N>                                                       \
  METAL_FUNC vec<T, N> name(const vec<T, N>& a, const vec<T, N>& b) {             \
    vec<T, N> r;                                                                  \
    for (int i = 0; i < N; i++) r[i] = T(name(a[i], b[i]));                       \
    return r;                                                                     \
  }
#define MSL_ALL_F1                                  \
  MSL_F1(exp, __builtin_expf(x))                    \
  MSL_F1(exp2, __builtin_exp2f(x))                  \
  MSL_F1(exp10, __builtin_powf(10.0f, x))           \
  MSL_F1(log, __builtin_logf(x))                    \
  MSL_F1(log2, __builtin_log2f(x))                  \
  MSL_F1(log10, __builtin_log10f(x))                \
  MSL_F1(sin, __builtin_sinf(x))                    \
  MSL_F1(cos, __builtin_cosf(x))                    \
  MSL_F1(tan, __builtin_tanf(x))                    \
  MSL_F1(asin, __builtin_asinf(x))                  \
  MSL_F1(acos, __builtin_acosf(x))                  \
  MSL_F1(atan, __builtin_atanf(x))                  \
  MSL_F1(sinh, __builtin_sinhf(x))                  \
  MSL_F1(cosh, __builtin_coshf(x))                  \
  MSL_F1(tanh, __builtin_tanhf(x))                  \
  MSL_F1(asinh, __builtin_asinhf(x))                \
  MSL_F1(acosh, __builtin_acoshf(x))                \
  MSL_F1(atanh, __builtin_atanhf(x))                \
  MSL_F1(sqrt, __builtin_sqrtf(x))                  \
  MSL_F1(rsqrt, 1.0f / __builtin_sqrtf(x))          \
  MSL_F1(floor, __builtin_floorf(x))                \
  MSL_F1(ceil, __builtin_ceilf(x))                  \
  MSL_F1(round, __builtin_roundf(x))                \
  MSL_F1(rint, __builtin_nearbyintf(x))             \
  MSL_F1(trunc, __builtin_truncf(x))                \
  MSL_F1(fabs, __builtin_fabsf(x))                  \
  MSL_F1(fract, x - __builtin_floorf(x))            \
  MSL_F1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f) \
  MSL_F1(saturate, x < 0 ? 0.0f : x > 1 ? 1.0f : x) \
  MSL_F2(pow, __builtin_powf(x, y))                 \
  MSL_F2(powr, __builtin_powf(x, y))                \
  MSL_F2(fmod, __builtin_fmodf(x, y))               \
  MSL_F2(atan2, __builtin_atan2f(x, y))             \
  MSL_F2(fmin, __builtin_fminf(x, y))               \
  MSL_F2(fmax, __builtin_fmaxf(x, y))               \
  MSL_F2(copysign, __builtin_copysignf(x, y))       \
  MSL_F2(fdim, __builtin_fdimf(x, y))               \
  MSL_F2(divide, x / y)                             \
  MSL_F2(step, y < x ? 0.0f : 1.0f)
MSL_ALL_F1
namespace precise {
MSL_ALL_F1
}
namespace fast {
MSL_ALL_F1
}

#define MSL_MINMAX(T)                                  \
  METAL_FUNC T min(T a, T b) { return b < a ? b : a; } \
  METAL_FUNC T max(T a, T b) { return a < b ? b : a; } \
  METAL_FUNC T clamp(T v, T lo, T hi) { return min(max(v, lo), hi); }
#define MSL_INTS(M) M(char) M(uchar) M(short) M(ushort) M(int) M(uint) M(long) M(ulong) M(int8_t)
MSL_INTS(MSL_MINMAX)
METAL_FUNC float min(float a, float b) { return __builtin_fminf(a, b); }
METAL_FUNC float max(float a, float b) { return __builtin_fmaxf(a, b); }
METAL_FUNC half min(half a, half b) { return half(__builtin_fminf(a, b)); }
METAL_FUNC half max(half a, half b) { return half(__builtin_fmaxf(a, b)); }
METAL_FUNC float clamp(float v, float lo, float hi) { return min(max(v, lo), hi); }
METAL_FUNC half clamp(half v, half lo, half hi) { return min(max(v, lo), hi); }
namespace precise {
using metal::clamp;
using metal::max;
using metal::min;
}  // namespace precise
namespace fast {
using metal::clamp;
using metal::max;
using metal::min;
}  // namespace fast
template <class T, int N>
METAL_FUNC vec<T, N> min(const vec<T, N>& a, const vec<T, N>& b) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = min(a[i], b[i]);
  return r;
}
template <class T, int N>
METAL_FUNC vec<T, N> max(const vec<T, N>& a, const vec<T, N>& b) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = max(a[i], b[i]);
  return r;
}
template <class T, int N>
METAL_FUNC vec<T, N> clamp(const vec<T, N>& v, const vec<T, N>& a, const vec<T, N>& b) {
  return min(max(v, a), b);
}
template <class T, int N>
METAL_FUNC vec<T, N> clamp(const vec<T, N>& v, T a, T b) {
  return min(max(v, vec<T, N>(a)), vec<T, N>(b));
}
METAL_FUNC float abs(float x) { return __builtin_fabsf(x); }
METAL_FUNC half abs(half x) { return half(__builtin_fabsf(x)); }
METAL_FUNC int abs(int x) { return x < 0 ? -x : x; }
METAL_FUNC long abs(long x) { return x < 0 ? -x : x; }
METAL_FUNC short abs(short x) { return short(x < 0 ? -x : x); }
METAL_FUNC char abs(char x) { return char(x < 0 ? -x : x); }
METAL_FUNC uint abs(uint x) { return x; }
METAL_FUNC ulong abs(ulong x) { return x; }
template <class T, int N>
METAL_FUNC vec<T, N> abs(const vec<T, N>& a) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = abs(a[i]);
  return r;
}
METAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
METAL_FUNC half fma(half a, half b, half c) { return half(__builtin_fmaf(a, b, c)); }
template <class T, int N>
METAL_FUNC vec<T, N> fma(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = fma(a[i], b[i], c[i]);
  return r;
}
METAL_FUNC float mix(float a, float b, float t) { return a + (b - a) * t; }
METAL_FUNC float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
METAL_FUNC bool isnan(float x) { return x != x; }
METAL_FUNC bool isinf(float x) { return __builtin_fabsf(x) == INFINITY; }
METAL_FUNC bool isfinite(float x) { return __builtin_isfinite(x); }
METAL_FUNC bool signbit(float x) { return as_type<uint>(x) >> 31; }
template <class T>
  requires msl_scalar<T>
METAL_FUNC T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N>
METAL_FUNC vec<T, N> select(const vec<T, N>& a, const vec<T, N>& b, const vec<bool, N>& c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}
template <class T, int N>
METAL_FUNC T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T s = a[0] * b[0];
  for (int i = 1; i < N; i++) s = T(s + a[i] * b[i]);
  return s;
}
template <class T, int N>
METAL_FUNC T length(const vec<T, N>& a) {
  return sqrt(dot(a, a));
}
template <int N>
METAL_FUNC bool all(const vec<bool, N>& a) {
  bool r = true;
  for (int i = 0; i < N; i++) r &= a[i];
  return r;
}
template <int N>
METAL_FUNC bool any(const vec<bool, N>& a) {
  bool r = false;
  for (int i = 0; i < N; i++) r |= a[i];
  return r;
}
#define MSL_BITS(T)                                                                                 \
  METAL_FUNC T popcount(T x) { return T(__builtin_popcountll((ulong)(std::make_unsigned_t<T>)x)); } \
  METAL_FUNC T clz(T x) {                                                                           \
    auto u = (std::make_unsigned_t<T>)x;                                                            \
    return T(u ? __builtin_clzll((ulong)u) - (64 - 8 * (int)sizeof(T)) : 8 * sizeof(T));            \
  }                                                                                                 \
  METAL_FUNC T ctz(T x) { return T(x ? __builtin_ctzll((ulong)x) : 8 * sizeof(T)); }                \
  METAL_FUNC T mulhi(T a, T b) { return T(((__int128)a * (__int128)b) >> (8 * sizeof(T))); }        \
  METAL_FUNC T extract_bits(T x, uint off, uint n) {                                                \
    if (!n) return 0;                                                                               \
    T m = T(x << (8 * sizeof(T) - off - n));                                                        \
    return T(m >> (8 * sizeof(T) - n));                                                             \
  }                                                                                                 \
  METAL_FUNC T rotate(T x, T n) {                                                                   \
    auto u = (std::make_unsigned_t<T>)x;                                                            \
    uint k = uint(n) & (8 * sizeof(T) - 1);                                                         \
    return k ? T(u << k | u >> (8 * sizeof(T) - k)) : x;                                            \
  }
MSL_BITS(uint)
MSL_BITS(int)
MSL_BITS(ushort)
MSL_BITS(short)
MSL_BITS(uchar)
MSL_BITS(ulong)
MSL_BITS(long)
}  // namespace metal
