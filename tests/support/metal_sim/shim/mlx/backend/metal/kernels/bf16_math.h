#pragma once
// bfloat overloads that MLX adds to metal:: (see MLX's own bf16_math.h)
namespace metal {
#define MSL_BF1(name) \
  METAL_FUNC bfloat name(bfloat x) { return bfloat(name(float(x))); }
#define MSL_BF2(name) \
  METAL_FUNC bfloat name(bfloat x, bfloat y) { return bfloat(name(float(x), float(y))); }
#define MSL_BF_ALL \
  MSL_BF1(exp)     \
  MSL_BF1(exp2)    \
  MSL_BF1(log)     \
  MSL_BF1(log2)    \
  MSL_BF1(log10)   \
  MSL_BF1(sin)     \
  MSL_BF1(cos)     \
  MSL_BF1(tan)     \
  MSL_BF1(tanh)    \
  MSL_BF1(sinh)    \
  MSL_BF1(cosh)    \
  MSL_BF1(asin)    \
  MSL_BF1(acos)    \
  MSL_BF1(atan)    \
  MSL_BF1(sqrt)    \
  MSL_BF1(rsqrt)   \
  MSL_BF1(floor)   \
  MSL_BF1(ceil)    \
  MSL_BF1(round)   \
  MSL_BF1(rint)    \
  MSL_BF1(trunc)   \
  MSL_BF1(fabs)    \
  MSL_BF2(pow)     \
  MSL_BF2(fmin)    \
  MSL_BF2(fmax)    \
  MSL_BF2(atan2)
MSL_BF_ALL
MSL_BF2(min)
MSL_BF2(max)
MSL_BF1(abs)
METAL_FUNC bfloat clamp(bfloat v, bfloat lo, bfloat hi) { return min(max(v, lo), hi); }
METAL_FUNC bfloat fma(bfloat a, bfloat b, bfloat c) { return bfloat(__builtin_fmaf(a, b, c)); }
METAL_FUNC bool isnan(bfloat x) { return isnan(float(x)); }
METAL_FUNC bool isinf(bfloat x) { return isinf(float(x)); }
namespace fast {
MSL_BF_ALL
}
namespace precise {
MSL_BF_ALL
}
}  // namespace metal
