// Atomics and metal::array. The runtime hears of each access; nothing else can happen in between on one CPU thread.
#pragma once
#include "simd.hpp"

namespace metal {
enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T v_;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
#define MSL_RAW __attribute__((no_sanitize("thread"), noinline))
template <class T>
MSL_RAW T atomic_load_explicit(const atomic<T>* a, memory_order) {
  msim_atomic_access((void*)a, sizeof(T), MSIM_LOAD);
  return a->v_;
}
template <class T>
MSL_RAW void atomic_store_explicit(atomic<T>* a, std::type_identity_t<T> x, memory_order) {
  msim_atomic_access(a, sizeof(T), MSIM_STORE);
  a->v_ = x;
}
template <class T>
MSL_RAW T atomic_exchange_explicit(atomic<T>* a, std::type_identity_t<T> x, memory_order) {
  msim_atomic_access(a, sizeof(T), MSIM_UPDATE);
  T o = a->v_;
  a->v_ = x;
  return o;
}
template <class T>
MSL_RAW bool atomic_compare_exchange_weak_explicit(atomic<T>* a, T* e, std::type_identity_t<T> x, memory_order,
                                                   memory_order) {
  msim_atomic_access(a, sizeof(T), MSIM_UPDATE);
  if (__builtin_memcmp(&a->v_, e, sizeof(T)) == 0) {
    a->v_ = x;
    return true;
  }
  *e = a->v_;
  return false;
}
#define MSL_ATOM(name, expr)                                                                        \
  template <class T>                                                                                \
  MSL_RAW T atomic_fetch_##name##_explicit(atomic<T>* a, std::type_identity_t<T> x, memory_order) { \
    msim_atomic_access(a, sizeof(T), MSIM_UPDATE);                                                  \
    T o = a->v_;                                                                                    \
    a->v_ = T(expr);                                                                                \
    return o;                                                                                       \
  }
MSL_ATOM(add, o + x)
MSL_ATOM(sub, o - x)
MSL_ATOM(max, o < x ? x : o)
MSL_ATOM(min, x < o ? x : o)
MSL_ATOM(or, o | x)
MSL_ATOM(and, o& x)
MSL_ATOM(xor, o ^ x)
template <class T, size_t N>
struct array {
  T d_[N];
  constexpr T& operator[](size_t i) { return d_[i]; }
  constexpr const T& operator[](size_t i) const { return d_[i]; }
  constexpr size_t size() const { return N; }
};
}  // namespace metal
