// What the compiler inserts for -fsanitize=thread and -fsanitize=undefined, answered by our own checks.
// Kernels are compiled with these flags but not linked with the sanitizers' libraries.
#pragma once
#include "memory.h"

#define PC ((u64)__builtin_return_address(0))
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define ACCESS(N)                                                              \
  void __tsan_read##N(void* a) {                                               \
    if (checking) check(a, N, false, false, PC);                               \
  }                                                                            \
  void __tsan_write##N(void* a) {                                              \
    if (checking) check(a, N, true, false, PC);                                \
  }                                                                            \
  void __tsan_unaligned_read##N(void* a) {                                     \
    if (checking) check(a, N, false, false, PC);                               \
  }                                                                            \
  void __tsan_unaligned_write##N(void* a) {                                    \
    if (checking) check(a, N, true, false, PC);                                \
  }                                                                            \
  void __tsan_read_write##N(void* a) {                                         \
    if (checking) check(a, N, false, false, PC), check(a, N, true, false, PC); \
  }                                                                            \
  void __tsan_unaligned_read_write##N(void* a) {                               \
    if (checking) check(a, N, false, false, PC), check(a, N, true, false, PC); \
  }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS
void __tsan_read_range(void* a, size_t n) {
  if (checking && n) check(a, n, false, false, PC);
}
void __tsan_write_range(void* a, size_t n) {
  if (checking && n) check(a, n, true, false, PC);
}
void* __tsan_memcpy(void* d, const void* s, size_t n) {
  if (checking && n) check(s, n, false, false, PC), check(d, n, true, false, PC);
  return memmove(d, s, n);
}
void* __tsan_memmove(void* d, const void* s, size_t n) {
  if (checking && n) check(s, n, false, false, PC), check(d, n, true, false, PC);
  return memmove(d, s, n);
}
void* __tsan_memset(void* d, int v, size_t n) {
  if (checking && n) check(d, n, true, false, PC);
  return memset(d, v, n);
}
// Atomic updates of one element may meet in any order. A load or a store beside them may not: which value it sees, or
// whether it survives, would depend on that order.
void msim_atomic_access(void* a, unsigned n, int access) {
  if (!checking) return;
  bool update = access == MSIM_UPDATE;
  if (access != MSIM_STORE) check(a, n, false, update, PC);
  if (access != MSIM_LOAD) check(a, n, true, update, PC);
}

// Every data block used here starts with the place in the source.
struct SourcePlace {
  const char* file;
  u32 line, column;
};
static void undefined(const char* kind, SourcePlace* at, const char* text, u64 value) {
  if (!checking) return;
  report(kind, 0, ((u64)at->line << 32) | at->column, "%s (%lld) at %s:%u:%u", text, (long long)value,
         at->file ? at->file : "?", at->line, at->column);
}
void __ubsan_handle_out_of_bounds(SourcePlace* at, u64 index) {
  undefined("array-bounds", at, "index out of range of a fixed-size array", index);
  if (current) abort_kernel();
}
void __ubsan_handle_shift_out_of_bounds(SourcePlace* at, u64, u64 amount) {
  undefined("shift", at, "shift amount out of range", amount);
}
void __ubsan_handle_divrem_overflow(SourcePlace* at, u64, u64 divisor) {
  undefined("div-zero", at, "integer division by zero or overflow", divisor);
  if (current) abort_kernel();
}
void __ubsan_handle_float_cast_overflow(SourcePlace* at, u64 value) {
  undefined("float-cast", at, "float to integer conversion out of range", value);
}
void __ubsan_handle_type_mismatch_v1(SourcePlace* at, u64 pointer) {
  undefined("misaligned", at, "misaligned or null pointer access", pointer);
}
}
