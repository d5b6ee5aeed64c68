// What a translated kernel and the runtime say to each other. Knows neither Metal nor how threads are run.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct msim_attrs {
  uint32_t thread_position_in_grid[3], thread_position_in_threadgroup[3], threadgroup_position_in_grid[3];
  uint32_t threads_per_grid[3], threads_per_threadgroup[3], dispatch_threads_per_threadgroup[3];
  uint32_t threadgroups_per_grid[3], grid_origin[3], grid_size[3];
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint32_t thread_index_in_quadgroup, quadgroup_index_in_threadgroup;
  uint32_t threads_per_simdgroup, thread_execution_width;
  uint32_t simdgroups_per_threadgroup, quadgroups_per_threadgroup;
  uint32_t dispatch_simdgroups_per_threadgroup, dispatch_quadgroups_per_threadgroup;
};
// The values all lanes brought to one simd op, `stride` bytes each, and which lanes came. Behind them, at MSIM_SHARED, what
// the first lane to go on computes for all: a flag that it has, and at MSIM_RESULT the value.
enum { MSIM_SHARED = 2048, MSIM_RESULT = 16, MSIM_SHARED_BYTES = MSIM_RESULT + 64 };
struct msim_snap {
  unsigned char* data;
  uint32_t stride;
  uint32_t mask;
};
struct msim_stats {
  uint64_t threads, threadgroups, switches, simd_ops, barriers, accesses, partial_simd, threadgroup_bytes;
};
typedef void (*msim_entry_fn)(void** buffers, const msim_attrs* attributes);

extern "C" {
void msim_barrier(int threadgroup_wide, unsigned flags, unsigned line, unsigned column);
msim_snap msim_collective(const void* value, unsigned size, unsigned op, unsigned line, unsigned column);
enum { MSIM_LOAD, MSIM_STORE, MSIM_UPDATE };
void msim_atomic_access(void* address, unsigned size, int access);
void* msim_threadgroup_memory(const char* name, size_t size, size_t element);
void msim_note(const char* kind, const char* text, unsigned line);
unsigned msim_lane();
}
