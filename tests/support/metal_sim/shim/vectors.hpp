// Metal's vectors and the swizzles kernels use; a swizzle that is missing fails to compile.
#pragma once
#include "scalars.hpp"

namespace metal {
template <class T, int N>
struct vec;
template <class T>
struct msl_is_vec {
  static constexpr bool value = false;
  static constexpr int n = 1;
};
template <class T, int N>
struct msl_is_vec<vec<T, N>> {
  static constexpr bool value = true;
  static constexpr int n = N;
};
template <class T>
concept msl_scalar = std::is_arithmetic_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
// a scalar operand joins a vector of T if that loses nothing by rank, as in Metal
template <class S, class T>
concept msl_joins = msl_scalar<S> && (std::is_same_v<S, T> || std::is_integral_v<S> ||
                                      (std::is_same_v<T, float> && !std::is_integral_v<S>));

template <class T, int N, int... I>
struct swz {
  T d[N == 3 ? 4 : N];
  static constexpr int M = sizeof...(I);
  constexpr operator vec<T, M>() const { return vec<T, M>(d[I]...); }
  template <class V>
  constexpr swz& operator=(const V& v0) {
    vec<T, M> v(v0);
    int k = 0;
    ((d[I] = v[k++]), ...);
    return *this;
  }
  constexpr swz& operator=(const swz& o) { return *this = vec<T, M>(o); }
  template <class V>
  constexpr swz& operator+=(const V& v) {
    return *this = vec<T, M>(*this) + v;
  }
  template <class V>
  constexpr swz& operator-=(const V& v) {
    return *this = vec<T, M>(*this) - v;
  }
  template <class V>
  constexpr swz& operator*=(const V& v) {
    return *this = vec<T, M>(*this) * v;
  }
  template <class V>
  constexpr swz& operator/=(const V& v) {
    return *this = vec<T, M>(*this) / v;
  }
};
#define MSL_SW(N, name, ...) swz<T, N, __VA_ARGS__> name;
template <class T>
struct alignas(2 * sizeof(T)) vec_store2 {
  union {
    T d[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
    MSL_SW(2, xy, 0, 1)
    MSL_SW(2, yx, 1, 0)
    MSL_SW(2, xx, 0, 0)
    MSL_SW(2, yy, 1, 1)
  };
};
template <class T>
struct alignas(4 * sizeof(T)) vec_store3 {
  union {
    T d[4];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
    MSL_SW(3, xy, 0, 1)
    MSL_SW(3, yz, 1, 2)
    MSL_SW(3, xz, 0, 2)
    MSL_SW(3, xyz, 0, 1, 2)
    MSL_SW(3, zyx, 2, 1, 0)
    MSL_SW(3, yx, 1, 0)
    MSL_SW(3, xxx, 0, 0, 0)
    MSL_SW(3, yzx, 1, 2, 0)
    MSL_SW(3, zxy, 2, 0, 1)
  };
};
template <class T>
struct alignas(4 * sizeof(T)) vec_store4 {
  union {
    T d[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
    MSL_SW(4, xy, 0, 1)
    MSL_SW(4, zw, 2, 3)
    MSL_SW(4, xz, 0, 2)
    MSL_SW(4, yw, 1, 3)
    MSL_SW(4, yz, 1, 2)
    MSL_SW(4, yx, 1, 0)
    MSL_SW(4, xw, 0, 3)
    MSL_SW(4, xyz, 0, 1, 2)
    MSL_SW(4, yzw, 1, 2, 3)
    MSL_SW(4, xyzw, 0, 1, 2, 3)
    MSL_SW(4, wzyx, 3, 2, 1, 0)
    MSL_SW(4, yxwz, 1, 0, 3, 2)
    MSL_SW(4, zwxy, 2, 3, 0, 1)
    MSL_SW(4, xxxx, 0, 0, 0, 0)
    MSL_SW(4, xxyy, 0, 0, 1, 1)
    MSL_SW(4, xyxy, 0, 1, 0, 1)
    MSL_SW(4, xzyw, 0, 2, 1, 3)
    MSL_SW(4, yzwx, 1, 2, 3, 0)
  };
};
template <class T, int N>
using vec_store = std::conditional_t<N == 2, vec_store2<T>, std::conditional_t<N == 3, vec_store3<T>, vec_store4<T>>>;

template <class T, int N>
struct vec : vec_store<T, N> {
  static_assert(N >= 2 && N <= 4);
  using vec_store<T, N>::d;
  vec() = default;
  template <class S>
    requires msl_scalar<S>
  constexpr vec(S s) {
    for (int i = 0; i < N; i++) d[i] = T(s);
  }
  template <class U>
    requires(!std::is_same_v<T, U>)
  constexpr explicit vec(const vec<U, N>& o) {
    for (int i = 0; i < N; i++) d[i] = T(o[i]);
  }
  template <class... A>
    requires(sizeof...(A) >= 2 && (msl_is_vec<A>::n + ... + 0) == N)
  constexpr vec(const A&... a) {
    int k = 0;
    (put(k, a), ...);
  }
  constexpr vec(const vec& o) {
    for (int i = 0; i < N; i++) d[i] = o.d[i];
  }
  constexpr vec& operator=(const vec& o) {
    for (int i = 0; i < N; i++) d[i] = o.d[i];
    return *this;
  }
  template <class S>
    requires msl_scalar<S>
  constexpr void put(int& k, S s) {
    d[k++] = T(s);
  }
  template <class U, int M>
  constexpr void put(int& k, const vec<U, M>& v) {
    for (int i = 0; i < M; i++) d[k++] = T(v[i]);
  }
  template <int SN, int... I>
  constexpr void put(int& k, const swz<T, SN, I...>& v) {
    put(k, vec<T, sizeof...(I)>(v));
  }
  template <int SN, int... I>
    requires(sizeof...(I) == N)
  constexpr vec(const swz<T, SN, I...>& v) {
    int k = 0;
    ((d[k++] = v.d[I]), ...);
  }
  constexpr T& operator[](int i) { return d[i]; }
  constexpr const T& operator[](int i) const { return d[i]; }
};
template <class T, int SN, int... I>
struct msl_is_vec<swz<T, SN, I...>> {
  static constexpr bool value = true;
  static constexpr int n = sizeof...(I);
};
#define MSL_VBIN(op)                                                        \
  template <class T, int N>                                                 \
  constexpr vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<T, N> r;                                                            \
    for (int i = 0; i < N; i++) r[i] = T(a[i] op b[i]);                     \
    return r;                                                               \
  }                                                                         \
  template <class T, int N, class S>                                        \
    requires msl_joins<S, T>                                                \
  constexpr vec<T, N> operator op(const vec<T, N>& a, S b) {                \
    vec<T, N> r;                                                            \
    for (int i = 0; i < N; i++) r[i] = T(a[i] op T(b));                     \
    return r;                                                               \
  }                                                                         \
  template <class T, int N, class S>                                        \
    requires msl_joins<S, T>                                                \
  constexpr vec<T, N> operator op(S a, const vec<T, N>& b) {                \
    vec<T, N> r;                                                            \
    for (int i = 0; i < N; i++) r[i] = T(T(a) op b[i]);                     \
    return r;                                                               \
  }
#define MSL_VASG(op)                                                         \
  MSL_VBIN(op)                                                               \
  template <class T, int N>                                                  \
  constexpr vec<T, N>& operator op## = (vec<T, N> & a, const vec<T, N>& b) { \
    for (int i = 0; i < N; i++) a[i] = T(a[i] op b[i]);                      \
    return a;                                                                \
  }                                                                          \
  template <class T, int N, class S>                                         \
    requires msl_joins<S, T>                                                 \
  constexpr vec<T, N>& operator op## = (vec<T, N> & a, S b) {                \
    for (int i = 0; i < N; i++) a[i] = T(a[i] op T(b));                      \
    return a;                                                                \
  }
MSL_VASG(+)
MSL_VASG(-)
MSL_VASG(*)
MSL_VASG(/)
MSL_VASG(%)
MSL_VASG(&)
MSL_VASG(|)
MSL_VASG(^)
MSL_VASG(<<)
MSL_VASG(>>)
#define MSL_VCMP(op)                                                           \
  template <class T, int N>                                                    \
  constexpr vec<bool, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<bool, N> r;                                                            \
    for (int i = 0; i < N; i++) r[i] = a[i] op b[i];                           \
    return r;                                                                  \
  }                                                                            \
  template <class T, int N, class S>                                           \
    requires msl_joins<S, T>                                                   \
  constexpr vec<bool, N> operator op(const vec<T, N>& a, S b) {                \
    vec<bool, N> r;                                                            \
    for (int i = 0; i < N; i++) r[i] = a[i] op T(b);                           \
    return r;                                                                  \
  }
MSL_VCMP(==)
MSL_VCMP(!=)
MSL_VCMP(<)
MSL_VCMP(>)
MSL_VCMP(<=)
MSL_VCMP(>=)
template <class X>
struct msl_is_swz : std::false_type {};
template <class T, int N, int... I>
struct msl_is_swz<swz<T, N, I...>> : std::true_type {};
template <class T, int N, int... I>
constexpr auto msl_v(const swz<T, N, I...>& s) {
  return vec<T, (int)sizeof...(I)>(s);
}
template <class X>
  requires(!msl_is_swz<X>::value)
constexpr const X& msl_v(const X& x) {
  return x;
}
#define MSL_SWZ_OP(op)                                     \
  template <class A, class B>                              \
    requires(msl_is_swz<A>::value || msl_is_swz<B>::value) \
  constexpr auto operator op(const A& a, const B& b) {     \
    return msl_v(a) op msl_v(b);                           \
  }
MSL_SWZ_OP(+)
MSL_SWZ_OP(-)
MSL_SWZ_OP(*)
MSL_SWZ_OP(/)
MSL_SWZ_OP(&)
MSL_SWZ_OP(|)
MSL_SWZ_OP(^)
MSL_SWZ_OP(<<)
MSL_SWZ_OP(>>)
#define MSL_SWZ_ASG(op)                                              \
  template <class T, int N, class B>                                 \
    requires msl_is_swz<B>::value                                    \
  constexpr vec<T, N>& operator op## = (vec<T, N> & a, const B& b) { \
    return a op## = msl_v(b);                                        \
  }
MSL_SWZ_ASG(+)
MSL_SWZ_ASG(-)
MSL_SWZ_ASG(*)
MSL_SWZ_ASG(/)
template <class T, int N>
constexpr vec<T, N> operator-(const vec<T, N>& a) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = T(-a[i]);
  return r;
}
template <class T, int N>
constexpr vec<T, N> operator~(const vec<T, N>& a) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = T(~a[i]);
  return r;
}
template <int N>
constexpr vec<bool, N> operator!(const vec<bool, N>& a) {
  vec<bool, N> r;
  for (int i = 0; i < N; i++) r[i] = !a[i];
  return r;
}
template <class T, int N>
struct packed_vec {
  T d[N];
  packed_vec() = default;
  constexpr packed_vec(const vec<T, N>& v) {
    for (int i = 0; i < N; i++) d[i] = v[i];
  }
  constexpr operator vec<T, N>() const {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r[i] = d[i];
    return r;
  }
  constexpr T& operator[](int i) { return d[i]; }
  constexpr const T& operator[](int i) const { return d[i]; }
};
}  // namespace metal
#define MSL_VT(T)                                \
  typedef metal::vec<T, 2> T##2;                 \
  typedef metal::vec<T, 3> T##3;                 \
  typedef metal::vec<T, 4> T##4;                 \
  typedef metal::packed_vec<T, 2> packed_##T##2; \
  typedef metal::packed_vec<T, 3> packed_##T##3; \
  typedef metal::packed_vec<T, 4> packed_##T##4;
MSL_VT(float)
MSL_VT(half)
MSL_VT(bfloat)
MSL_VT(int)
MSL_VT(uint)
MSL_VT(short)
MSL_VT(ushort)
MSL_VT(char)
MSL_VT(uchar)
MSL_VT(long)
MSL_VT(ulong)
MSL_VT(bool)

template <class To, class From>
constexpr To as_type(const From& f) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  if constexpr (std::is_trivially_copyable_v<To> && std::is_trivially_copyable_v<From>)
    return __builtin_bit_cast(To, f);
  else {
    To t;
    __builtin_memcpy((void*)&t, (const void*)&f, sizeof t);
    return t;
  }
}
