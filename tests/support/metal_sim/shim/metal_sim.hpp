// The Metal Shading Language on a C++20 compiler. Not a complete metal_stdlib: what is missing fails to compile.
#pragma once
#include "atomics.hpp"
#include "matrix.hpp"

#define device
#define constant
#define thread
#define kernel
#ifndef MSIM_KEEP_THREADGROUP  // kept while a text with #include is preprocessed: declarations are rewritten after that
#define threadgroup
#endif
#define MSL_NOT_IN_METAL(what) MSL_error_##what##_is_not_available_in_Metal
#define double MSL_NOT_IN_METAL(double)
#define std MSL_NOT_IN_METAL(std)
#define printf MSL_NOT_IN_METAL(printf)
