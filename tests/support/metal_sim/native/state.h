// The one grid that is running: its threads, its memory, what was found. Decides nothing.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <string>
#include <unordered_map>
#include <vector>
#include "abi.h"
#include "switch.h"

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

static const u32 LANES = 32, MOST_SIMDGROUPS = 32, WIDEST = MSIM_SHARED / LANES;  // WIDEST: bytes a lane may bring to a simd op
static const size_t STACK = 256 << 10, PAGE = 4096, GUARD = 64 << 10;
static const size_t KEPT = 64 << 20;  // bytes of the arena that stay mapped between runs
static const size_t ARENA = (size_t)24 << 30;  // address space, not memory

// Who touched an element last, for one thread's view of order. A thread id is 1024 * threadgroup + index + 1; 0:
// nobody.
enum {
  WRITTEN = 1,
  WRITTEN_ATOMIC = 2,
  READ_BY_MANY = 4,
  READ_BY_SIMDGROUPS = 8,
  READ_ATOMIC = 16,
  READ_BY_GROUPS = 32
};
struct Cell {
  u32 writer, write_epoch, write_simd_epoch, reader, read_epoch, read_simd_epoch, flags;
};
enum Kind { INPUT = 0, OUTPUT = 1, CONSTANT = 2, THREADGROUP = 3 };
static const u32 NO_SHIFT = ~0u;
struct Region {
  u8* base;
  size_t size;
  u32 kind, element;
  std::string name;
  Cell* cells;  // null: only bounds are checked
  size_t cell_count;
  u32 shift;  // of an element of 2^shift bytes; NO_SHIFT: of another size
  // Asked for at every access, where a division is most of the cost.
  size_t index(size_t offset) const { return shift == NO_SHIFT ? offset / element : offset >> shift; }
};

enum Wait { RUNNING = 0, DONE, AT_SIMD_OP, AT_SIMD_BARRIER, AT_BARRIER };
struct Fiber {
  void* sp;
  u8* stack;
  Wait wait;
  u32 site, flags, size;
  alignas(16) u8 value[WIDEST];
  msim_attrs attrs;
  u32 index, simdgroup;
};

static u8* arena;
static size_t arena_used;
static uint16_t* page_region;  // per page of the arena: region number + 1
static std::vector<Region> regions;
static std::vector<Fiber> fibers;
static Fiber* current;
static void* scheduler_sp;
static msim_entry_fn entry;
static void** entry_buffers;
static u32 entry_buffer_count, group_number, thread_count, device_epoch, threadgroup_epoch;
static u32 simd_device_epoch[MOST_SIMDGROUPS], simd_threadgroup_epoch[MOST_SIMDGROUPS];
static u8 snapshot[MOST_SIMDGROUPS][MSIM_SHARED + MSIM_SHARED_BYTES];
static u32 snapshot_mask[MOST_SIMDGROUPS];
static uintptr_t code_low, code_high;  // where the kernel's own constants may lie
static bool checking, aborted;
static u32 first_threadgroup_region;
static size_t threadgroup_bytes, threadgroup_peak;
static msim_stats stats;

struct Found {
  std::string kind, text;
  u64 pc, count;
};
static std::vector<Found> findings;
static std::unordered_map<u64, u32> seen;

[[gnu::cold, gnu::noinline]] static std::string where() {
  if (!current) return "";
  const msim_attrs& a = current->attrs;
  char b[160];
  snprintf(b, sizeof b, "thread(%u,%u,%u) threadgroup(%u,%u,%u) lane %u", a.thread_position_in_grid[0],
           a.thread_position_in_grid[1], a.thread_position_in_grid[2], a.threadgroup_position_in_grid[0],
           a.threadgroup_position_in_grid[1], a.threadgroup_position_in_grid[2], a.thread_index_in_simdgroup);
  return b;
}
// The same thing at the same place is one finding with a count.
[[gnu::cold, gnu::noinline]] static void report(const char* kind, u64 pc, u64 key, const char* format, ...) {
  u64 hash = (pc * 1000003u) ^ (key * 7919u) ^ std::hash<std::string>{}(kind);
  auto it = seen.find(hash);
  if (it != seen.end()) {
    findings[it->second].count++;
    return;
  }
  char b[512];
  va_list args;
  va_start(args, format);
  vsnprintf(b, sizeof b, format, args);
  va_end(args);
  seen[hash] = findings.size();
  findings.push_back({kind, std::string(b) + (current ? "; " + where() : ""), pc, 1});
}
static void leave() { msim_switch(&current->sp, scheduler_sp); }
[[noreturn]] static void abort_kernel() {
  aborted = true;
  current->wait = DONE;
  leave();
  __builtin_trap();
}
extern "C" void msim_fiber_main() {
  entry(entry_buffers, &current->attrs);
  current->wait = DONE;
  leave();
}
