// Metal's names as bare declarations with real address spaces, for a syntax-only pass of clang. Nothing here runs.
#pragma once
#define AS(n) __attribute__((address_space(n)))
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define M_PI_F 3.14159265f
#define M_LOG2E_F 1.44269504f
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef _Float16 half;
typedef __bf16 bfloat;
half operator""h(long double);
bfloat operator"" bf(long double);
namespace metal {
template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <class A, class B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B>
constexpr bool is_same_v = __is_same(A, B);
template <bool B, class T, class U>
struct conditional {
  using type = T;
};
template <class T, class U>
struct conditional<false, T, U> {
  using type = U;
};
template <bool B, class T, class U>
using conditional_t = typename conditional<B, T, U>::type;
template <class T, int N>
struct msl_vec_ {
  typedef T type __attribute__((ext_vector_type(N)));
};
template <class T, int N>
using vec = typename msl_vec_<T, N>::type;
template <class T>
struct numeric_limits {
  static constexpr T max() { return T(1); }
  static constexpr T min() { return T(0); }
  static constexpr T infinity() { return T(1); }
  static constexpr T quiet_NaN() { return T(1); }
  static constexpr T epsilon() { return T(1); }
  static constexpr T lowest() { return T(0); }
};
#define MSL_D1(f)           \
  float f(float);           \
  half f(half);             \
  bfloat f(bfloat);         \
  template <class T, int N> \
  vec<T, N> f(vec<T, N>);
#define MSL_D2(f)        \
  float f(float, float); \
  half f(half, half);    \
  bfloat f(bfloat, bfloat);
#define MSL_D      \
  MSL_D1(exp)      \
  MSL_D1(exp2)     \
  MSL_D1(exp10)    \
  MSL_D1(log)      \
  MSL_D1(log2)     \
  MSL_D1(log10)    \
  MSL_D1(sin)      \
  MSL_D1(cos)      \
  MSL_D1(tan)      \
  MSL_D1(tanh)     \
  MSL_D1(sinh)     \
  MSL_D1(cosh)     \
  MSL_D1(asin)     \
  MSL_D1(acos)     \
  MSL_D1(atan)     \
  MSL_D1(sqrt)     \
  MSL_D1(rsqrt)    \
  MSL_D1(floor)    \
  MSL_D1(ceil)     \
  MSL_D1(round)    \
  MSL_D1(rint)     \
  MSL_D1(trunc)    \
  MSL_D1(fabs)     \
  MSL_D1(fract)    \
  MSL_D1(sign)     \
  MSL_D1(saturate) \
  MSL_D2(pow)      \
  MSL_D2(fmin)     \
  MSL_D2(fmax)     \
  MSL_D2(fmod)     \
  MSL_D2(atan2)    \
  MSL_D2(copysign) \
  MSL_D2(divide)
MSL_D
namespace precise {
MSL_D
}
namespace fast {
MSL_D
}
#define MSL_M(T)    \
  T min(T, T);      \
  T max(T, T);      \
  T clamp(T, T, T); \
  T abs(T);
MSL_M(char)
MSL_M(uchar)
MSL_M(short)
MSL_M(ushort)
MSL_M(int)
MSL_M(uint)
MSL_M(long)
MSL_M(ulong)
MSL_M(float)
MSL_M(half)
MSL_M(bfloat)
float fma(float, float, float);
half fma(half, half, half);
float mix(float, float, float);
float ldexp(float, int);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
template <class T>
T select(T, T, bool);
float dot(vec<float, 4>, vec<float, 4>);
float dot(vec<float, 2>, vec<float, 2>);
float dot(vec<float, 3>, vec<float, 3>);
half dot(vec<half, 4>, vec<half, 4>);
template <class T>
T popcount(T);
template <class T>
T clz(T);
template <class T>
T ctz(T);
template <class T>
T extract_bits(T, uint, uint);
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#define MSL_S(T)                            \
  T simd_sum(T);                            \
  T simd_product(T);                        \
  T simd_min(T);                            \
  T simd_max(T);                            \
  T simd_prefix_inclusive_sum(T);           \
  T simd_prefix_exclusive_sum(T);           \
  T simd_shuffle(T, ushort);                \
  T simd_shuffle_xor(T, ushort);            \
  T simd_shuffle_up(T, ushort);             \
  T simd_shuffle_down(T, ushort);           \
  T simd_broadcast(T, ushort);              \
  T simd_broadcast_first(T);                \
  T simd_shuffle_and_fill_up(T, T, ushort); \
  T quad_sum(T);                            \
  T quad_shuffle_xor(T, ushort);            \
  T quad_broadcast(T, ushort);
MSL_S(float)
MSL_S(half)
MSL_S(bfloat)
MSL_S(int)
MSL_S(uint)
MSL_S(short)
MSL_S(ushort)
MSL_S(char)
MSL_S(uchar)
typedef vec<float, 4> msl_f4;
typedef vec<float, 2> msl_f2;
typedef vec<uint, 2> msl_u2;
MSL_S(msl_f4)
MSL_S(msl_f2)
MSL_S(msl_u2)
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
template <class T, int R, int C>
struct simdgroup_matrix {
  simdgroup_matrix();
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
  const vec<T, 2>& thread_elements() const;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int R, int C>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
#define MSL_LD(S)    \
  template <class T> \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const AS(S) T*, ulong = 8, vec<ulong, 2> = 0, bool = false);
MSL_LD(1)
MSL_LD(2)
MSL_LD(3)
#define MSL_ST(S)    \
  template <class T> \
  void simdgroup_store(const simdgroup_matrix<T, 8, 8>&, AS(S) T*, ulong = 8, vec<ulong, 2> = 0, bool = false);
MSL_ST(1)
MSL_ST(3)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&,
                                   const simdgroup_matrix<B, 8, 8>&, const simdgroup_matrix<C, 8, 8>&);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&, const simdgroup_matrix<B, 8, 8>&);
enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  static_assert(__is_same(T, int) || __is_same(T, uint) || __is_same(T, float) || __is_same(T, bool) ||
                    __is_same(T, ulong),
                "Metal atomics exist for int, uint, float, bool and ulong only");
  T v_;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
template <class T>
struct msl_id {
  using type = T;
};
#define MSL_A(f, S)  \
  template <class T> \
  T atomic_##f##_explicit(volatile AS(S) atomic<T>*, typename msl_id<T>::type, memory_order);
#define MSL_AA(f) \
  MSL_A(f, 1)     \
  MSL_A(f, 3)
MSL_AA(fetch_add)
MSL_AA(fetch_sub)
MSL_AA(fetch_max)
MSL_AA(fetch_min)
MSL_AA(fetch_or)
MSL_AA(fetch_and)
MSL_AA(exchange)
MSL_AA(store)
template <class T>
T atomic_load_explicit(const volatile AS(1) atomic<T>*, memory_order);
template <class T>
T atomic_load_explicit(const volatile AS(3) atomic<T>*, memory_order);
}  // namespace metal
using namespace metal;
#define MSL_VT(T)                \
  typedef metal::vec<T, 2> T##2; \
  typedef metal::vec<T, 3> T##3; \
  typedef metal::vec<T, 4> T##4;
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
template <class V, class... A>
V msl_make(A...);
#define MSL_C(T) T
template <class To, class From>
To as_type(From);
typedef half float16_t;
typedef bfloat bfloat16_t;
struct complex64_t {
  float real, imag;
};
// MLX utils that kernels use
template <typename U>
struct Limits {
  static constexpr U max = U(1), min = U(0), finite_max = U(1), finite_min = U(0);
};
template <typename IdxT = int64_t>
IdxT elem_to_loc(IdxT elem, AS(2) const int* shape, AS(2) const int64_t* strides, int ndim);
template <typename T, typename U>
inline T ceildiv(T N, U M) {
  return (N + M - 1) / M;
}
float log1p(float);
#define device AS(1)
#define constant AS(2)
#define thread
#define kernel
#define float2(...) msl_make<float2>(__VA_ARGS__)
#define float3(...) msl_make<float3>(__VA_ARGS__)
#define float4(...) msl_make<float4>(__VA_ARGS__)
#define half2(...) msl_make<half2>(__VA_ARGS__)
#define half3(...) msl_make<half3>(__VA_ARGS__)
#define half4(...) msl_make<half4>(__VA_ARGS__)
#define bfloat2(...) msl_make<bfloat2>(__VA_ARGS__)
#define bfloat3(...) msl_make<bfloat3>(__VA_ARGS__)
#define bfloat4(...) msl_make<bfloat4>(__VA_ARGS__)
#define int2(...) msl_make<int2>(__VA_ARGS__)
#define int3(...) msl_make<int3>(__VA_ARGS__)
#define int4(...) msl_make<int4>(__VA_ARGS__)
#define uint2(...) msl_make<uint2>(__VA_ARGS__)
#define uint3(...) msl_make<uint3>(__VA_ARGS__)
#define uint4(...) msl_make<uint4>(__VA_ARGS__)
#define short2(...) msl_make<short2>(__VA_ARGS__)
#define short3(...) msl_make<short3>(__VA_ARGS__)
#define short4(...) msl_make<short4>(__VA_ARGS__)
#define ushort2(...) msl_make<ushort2>(__VA_ARGS__)
#define ushort3(...) msl_make<ushort3>(__VA_ARGS__)
#define ushort4(...) msl_make<ushort4>(__VA_ARGS__)
#define char2(...) msl_make<char2>(__VA_ARGS__)
#define char3(...) msl_make<char3>(__VA_ARGS__)
#define char4(...) msl_make<char4>(__VA_ARGS__)
#define uchar2(...) msl_make<uchar2>(__VA_ARGS__)
#define uchar3(...) msl_make<uchar3>(__VA_ARGS__)
#define uchar4(...) msl_make<uchar4>(__VA_ARGS__)
#define long2(...) msl_make<long2>(__VA_ARGS__)
#define long3(...) msl_make<long3>(__VA_ARGS__)
#define long4(...) msl_make<long4>(__VA_ARGS__)
#define ulong2(...) msl_make<ulong2>(__VA_ARGS__)
#define ulong3(...) msl_make<ulong3>(__VA_ARGS__)
#define ulong4(...) msl_make<ulong4>(__VA_ARGS__)
