// simdgroup_matrix: 8x8, two elements a lane, the layout MLX's own steel kernels rely on.
#pragma once
#include "simd.hpp"

namespace metal {
template <class T, int R, int C>
struct simdgroup_matrix;
template <class T>
struct simdgroup_matrix<T, 8, 8> {
  vec<T, 2> e;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diag) {
    uint l = msim_lane();
    for (int k = 0; k < 2; k++) e[k] = row(l) == col(l) + k ? diag : T(0);
  }
  vec<T, 2>& thread_elements() { return e; }
  const vec<T, 2>& thread_elements() const { return e; }
  static uint row(uint l) {
    uint q = l / 4;
    return (q & 4) + (l / 2) % 4;
  }
  static uint col(uint l) {
    uint q = l / 4;
    return (q & 2) * 2 + (l % 2) * 2;
  }
  // Who holds the elements at row r and columns c, c + 1; c is even.
  static uint lane(uint r, uint c) { return (r & 4) * 4 + (c & 4) * 2 + (r & 3) * 2 + (c & 2) / 2; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int R, int C>
METAL_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.e = vec<T, 2>(v);
  return m;
}
template <class T>
METAL_FUNC void msl_need_full(const msl_lanes<T>& l) {
  if (l.s.mask != 0xffffffffu)
    msim_note("partial-simdgroup-matrix", "simdgroup matrix op without all 32 lanes", l.at.line());
}
template <class T>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* p, ulong epr = 8, ulong2 origin = ulong2(0),
                               bool tr = false, MSL_AT) {
  auto l = msl_gather<uint>(0, 30, at);
  msl_need_full(l);
  ulong r = m.row(l.me), c = m.col(l.me);
  for (int k = 0; k < 2; k++)
    m.e[k] = tr ? p[(origin.y + c + k) * epr + origin.x + r] : p[(origin.y + r) * epr + origin.x + c + k];
}
template <class T>
METAL_FUNC void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* p, ulong epr = 8, ulong2 origin = ulong2(0),
                                bool tr = false, MSL_AT) {
  auto l = msl_gather<uint>(0, 31, at);
  msl_need_full(l);
  ulong r = m.row(l.me), c = m.col(l.me);
  for (int k = 0; k < 2; k++)
    (tr ? p[(origin.y + c + k) * epr + origin.x + r] : p[(origin.y + r) * epr + origin.x + c + k]) = m.e[k];
}
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                              MSL_AT) {
  uint me = msim_lane(), r = d.row(me), c0 = d.col(me);
  A fa[8];  // row r of a
  vec<B, 2> fb[8];  // columns c0 and c0 + 1 of b
  auto l = msl_gather(a.e, 32, at);
  msl_need_full(l);
  for (uint j = 0; j < 8; j += 2) {
    auto v = l.get(a.lane(r, j));
    fa[j] = v[0];
    fa[j + 1] = v[1];
  }
  auto other = msl_gather(b.e, 32, at);
  msl_need_full(other);
  for (uint j = 0; j < 8; j++) fb[j] = other.get(b.lane(j, c0));
  for (int k = 0; k < 2; k++) {
    float s = float(c.e[k]);
    for (int j = 0; j < 8; j++) s = __builtin_fmaf(float(fa[j]), float(fb[j][k]), s);
    d.e[k] = D(s);
  }
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b, MSL_AT) {
  simdgroup_matrix<D, 8, 8> z;
  z.e = vec<D, 2>(D(0));
  simdgroup_multiply_accumulate(d, a, b, z, at);
}
}  // namespace metal
