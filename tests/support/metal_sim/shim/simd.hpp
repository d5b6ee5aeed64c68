// Barriers, simd and quad ops. Each meets the other threads in the runtime, told apart by its place in the source.
#pragma once
#include <source_location>
#include "../native/abi.h"
#include "math.hpp"

namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
using msl_loc = std::source_location;
#define MSL_AT msl_loc at = msl_loc::current()
METAL_FUNC void threadgroup_barrier(mem_flags f, MSL_AT) { msim_barrier(1, uint(f), at.line(), at.column()); }
METAL_FUNC void simdgroup_barrier(mem_flags f, MSL_AT) { msim_barrier(0, uint(f), at.line(), at.column()); }

template <class T>
struct msl_lanes {
  msim_snap s;
  uint me;
  msl_loc at;
  T get(uint l) const {
    T v;
    __builtin_memcpy((void*)&v, s.data + l * sizeof(T), sizeof(T));
    return v;
  }
  bool on(uint l) const { return l < 32 && (s.mask >> l & 1); }
  T from(uint l) const {
    if (!on(l)) {
      msim_note("inactive-lane", "simd op reads a lane that is inactive or out of range", at.line());
      T v;
      __builtin_memset(&v, 0xff, sizeof v);
      return v;
    }
    return get(l);
  }
};
template <class T>
METAL_FUNC msl_lanes<T> msl_gather(const T& v, uint op, const msl_loc& at) {
  return {msim_collective(&v, sizeof(T), op, at.line(), at.column()), msim_lane(), at};
}
template <class T, class F>
METAL_FUNC T msl_reduce(const msl_lanes<T>& l, F f) {
  unsigned char* shared = l.s.data + MSIM_SHARED;
  T t[32];
  if (*shared) {
    __builtin_memcpy((void*)t, shared + MSIM_RESULT, sizeof(T));
    return t[0];
  }
  uint n = 0;
  for (uint i = 0; i < 32; i++)
    if (l.on(i)) t[n++] = l.get(i);
  // Neighbours meet, as in a butterfly of xor 1, 2, 4, 8, 16: every lane gets the same.
  for (; n > 1; n = (n + 1) / 2) {
    for (uint i = 0; i + 1 < n; i += 2) t[i / 2] = f(t[i], t[i + 1]);
    if (n % 2) t[n / 2] = t[n - 1];
  }
  __builtin_memcpy(shared + MSIM_RESULT, (void*)t, sizeof(T));
  *shared = 1;
  return t[0];
}
#define MSL_RED(name, expr)                                                    \
  template <class T>                                                           \
  METAL_FUNC T name(T v, MSL_AT) {                                             \
    return msl_reduce(msl_gather(v, 1, at), [](T a, T b) { return T(expr); }); \
  }
MSL_RED(simd_sum, a + b)
MSL_RED(simd_product, a* b)
MSL_RED(simd_min, a < b ? a : b)
MSL_RED(simd_max, a > b ? a : b)
MSL_RED(simd_and, a& b)
MSL_RED(simd_or, a | b)
MSL_RED(simd_xor, a ^ b)
#define MSL_SCAN(name, op, init)                           \
  template <class T>                                       \
  METAL_FUNC T simd_prefix_inclusive_##name(T v, MSL_AT) { \
    auto l = msl_gather(v, 2, at);                         \
    T r = T(init);                                         \
    for (uint i = 0; i <= l.me; i++)                       \
      if (l.on(i)) r = T(r op l.get(i));                   \
    return r;                                              \
  }                                                        \
  template <class T>                                       \
  METAL_FUNC T simd_prefix_exclusive_##name(T v, MSL_AT) { \
    auto l = msl_gather(v, 3, at);                         \
    T r = T(init);                                         \
    for (uint i = 0; i < l.me; i++)                        \
      if (l.on(i)) r = T(r op l.get(i));                   \
    return r;                                              \
  }
MSL_SCAN(sum, +, 0)
MSL_SCAN(product, *, 1)
template <class T>
METAL_FUNC T simd_shuffle(T v, ushort lane, MSL_AT) {
  return msl_gather(v, 4, at).from(lane);
}
template <class T>
METAL_FUNC T simd_broadcast(T v, ushort lane, MSL_AT) {
  return msl_gather(v, 5, at).from(lane);
}
template <class T>
METAL_FUNC T simd_broadcast_first(T v, MSL_AT) {
  auto l = msl_gather(v, 6, at);
  return l.get(__builtin_ctz(l.s.mask));
}
template <class T>
METAL_FUNC T simd_shuffle_xor(T v, ushort m, MSL_AT) {
  auto l = msl_gather(v, 7, at);
  return l.from(l.me ^ m);
}
template <class T>
METAL_FUNC T simd_shuffle_down(T v, ushort d, MSL_AT) {
  auto l = msl_gather(v, 8, at);
  return l.me + d < 32 ? l.from(l.me + d) : v;
}
template <class T>
METAL_FUNC T simd_shuffle_up(T v, ushort d, MSL_AT) {
  auto l = msl_gather(v, 9, at);
  return l.me >= d ? l.from(l.me - d) : v;
}
template <class T>
METAL_FUNC T simd_shuffle_rotate_down(T v, ushort d, MSL_AT) {
  auto l = msl_gather(v, 10, at);
  return l.from((l.me + d) & 31);
}
template <class T>
METAL_FUNC T simd_shuffle_rotate_up(T v, ushort d, MSL_AT) {
  auto l = msl_gather(v, 11, at);
  return l.from((l.me - d) & 31);
}
template <class T>
struct msl_filled {
  T v, fill;
};
template <class T>
METAL_FUNC T simd_shuffle_and_fill_up(T v, T fill, ushort d, MSL_AT) {
  auto l = msl_gather(msl_filled<T>{v, fill}, 12, at);
  return l.me >= d ? l.from(l.me - d).v : l.from(32 + l.me - d).fill;
}
template <class T>
METAL_FUNC T simd_shuffle_and_fill_down(T v, T fill, ushort d, MSL_AT) {
  auto l = msl_gather(msl_filled<T>{v, fill}, 13, at);
  return l.me + d < 32 ? l.from(l.me + d).v : l.from(l.me + d - 32).fill;
}
METAL_FUNC bool simd_all(bool b, MSL_AT) {
  auto l = msl_gather<uint>(b, 14, at);
  bool r = true;
  for (uint i = 0; i < 32; i++)
    if (l.on(i)) r &= bool(l.get(i));
  return r;
}
METAL_FUNC bool simd_any(bool b, MSL_AT) {
  auto l = msl_gather<uint>(b, 15, at);
  bool r = false;
  for (uint i = 0; i < 32; i++)
    if (l.on(i)) r |= bool(l.get(i));
  return r;
}
struct simd_vote {
  ulong v;
  explicit operator ulong() const { return v; }
  bool all() const { return v == 0xffffffffu; }
  bool any() const { return v != 0; }
};
METAL_FUNC simd_vote simd_ballot(bool b, MSL_AT) {
  auto l = msl_gather<uint>(b, 16, at);
  ulong r = 0;
  for (uint i = 0; i < 32; i++)
    if (l.on(i) && l.get(i)) r |= 1ul << i;
  return {r};
}
METAL_FUNC simd_vote simd_active_threads_mask(MSL_AT) { return {msl_gather<uint>(1, 17, at).s.mask}; }
METAL_FUNC bool simd_is_first(MSL_AT) {
  auto l = msl_gather<uint>(1, 18, at);
  return uint(__builtin_ctz(l.s.mask)) == l.me;
}
#define MSL_QRED(name, expr)         \
  template <class T>                 \
  METAL_FUNC T name(T v, MSL_AT) {   \
    auto l = msl_gather(v, 20, at);  \
    uint q = l.me & ~3u;             \
    bool first = true;               \
    T a{};                           \
    for (uint i = q; i < q + 4; i++) \
      if (l.on(i)) {                 \
        T b = l.get(i);              \
        a = first ? b : T(expr);     \
        first = false;               \
      }                              \
    return a;                        \
  }
MSL_QRED(quad_sum, a + b)
MSL_QRED(quad_max, a > b ? a : b)
MSL_QRED(quad_min, a < b ? a : b)
MSL_QRED(quad_product, a* b)
template <class T>
METAL_FUNC T quad_shuffle_xor(T v, ushort m, MSL_AT) {
  auto l = msl_gather(v, 21, at);
  return l.from((l.me & ~3u) | ((l.me ^ m) & 3));
}
template <class T>
METAL_FUNC T quad_broadcast(T v, ushort k, MSL_AT) {
  auto l = msl_gather(v, 22, at);
  return l.from((l.me & ~3u) | k);
}
template <class T>
METAL_FUNC T quad_shuffle(T v, ushort k, MSL_AT) {
  auto l = msl_gather(v, 23, at);
  return l.from((l.me & ~3u) | k);
}
}  // namespace metal
