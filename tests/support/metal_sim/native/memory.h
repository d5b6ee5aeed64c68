// Every load and store of a kernel, judged before it happens: bounds, order between threads, first use.
#pragma once
#include <algorithm>
#include "state.h"

// Two unordered writes to one element are judged once the second has happened: the same value is no harm.
struct PendingWrite {
  u8* at;
  u32 size;
  u8 before[16];
  u64 pc;
  u32 region, other;
  size_t index;
  std::string who;
  bool open;
};
static PendingWrite pending;

[[gnu::cold, gnu::noinline]] static void settle() {
  if (!pending.open) return;
  pending.open = false;
  bool same = !memcmp(pending.at, pending.before, pending.size);
  report(same ? "benign-race" : "race-ww", pending.pc, pending.region,
         "%s[%zu] written by two unordered threads%s (other: thread %u of threadgroup %u); %s",
         regions[pending.region].name.c_str(), pending.index, same ? " with the same value" : "",
         (pending.other - 1) & 1023, (pending.other - 1) >> 10, pending.who.c_str());
}
static bool same_group(u32 a, u32 b) { return (a - 1) >> 10 == (b - 1) >> 10; }
static bool same_simdgroup(u32 a, u32 b) { return (a - 1) >> 5 == (b - 1) >> 5; }

struct Moment {  // who is touching memory, and after how many barriers
  u32 thread, epoch, simd_epoch;
};
static bool ordered(u32 thread, u32 epoch, u32 simd_epoch, const Moment& now) {
  if (thread == now.thread) return true;
  if (!same_group(thread, now.thread)) return false;  // nothing orders two threadgroups
  return epoch < now.epoch || (same_simdgroup(thread, now.thread) && simd_epoch < now.simd_epoch);
}
static bool reads_ordered(const Cell& c, const Moment& now) {
  if (c.flags & READ_BY_GROUPS) return false;
  if (!(c.flags & READ_BY_MANY)) return ordered(c.reader, c.read_epoch, c.read_simd_epoch, now);
  if (!same_group(c.reader, now.thread)) return false;
  bool within = !(c.flags & READ_BY_SIMDGROUPS) && same_simdgroup(c.reader, now.thread);
  return c.read_epoch < now.epoch || (within && c.read_simd_epoch < now.simd_epoch);
}
static void note_write(const Region& r, u32 region, size_t i, u8* p, size_t n, bool atomic, u64 pc, const Moment& now) {
  Cell& c = r.cells[i];
  bool both_atomic = atomic && (c.flags & WRITTEN_ATOMIC);
  if (c.writer && !both_atomic && !ordered(c.writer, c.write_epoch, c.write_simd_epoch, now)) {
    pending.open = true;
    pending.at = p;
    pending.size = std::min<size_t>(n, 16);
    memcpy(pending.before, p, pending.size);
    pending.pc = pc;
    pending.region = region;
    pending.index = i;
    pending.other = c.writer;
    pending.who = where();
  }
  if (c.reader && !(atomic && (c.flags & READ_ATOMIC)) && !reads_ordered(c, now))
    report("race-rw", pc, region + 1,
           "%s[%zu] overwritten while another thread (%u of threadgroup %u) reads it, no barrier between",
           r.name.c_str(), i, (c.reader - 1) & 1023, (c.reader - 1) >> 10);
  c.writer = now.thread;
  c.write_epoch = now.epoch;
  c.write_simd_epoch = now.simd_epoch;
  c.reader = 0;
  c.flags = WRITTEN | (atomic ? WRITTEN_ATOMIC : 0);
}
static void note_read(const Region& r, u32 region, size_t i, bool atomic, u64 pc, const Moment& now) {
  Cell& c = r.cells[i];
  if (!(c.flags & WRITTEN)) report("uninit-read", pc, region + 1, "read of %s[%zu], never written", r.name.c_str(), i);
  bool both_atomic = atomic && (c.flags & WRITTEN_ATOMIC);
  if (c.writer && !both_atomic && !ordered(c.writer, c.write_epoch, c.write_simd_epoch, now))
    report("race-wr", pc, region + 1,
           "%s[%zu] read with no barrier after another thread's write (%u of threadgroup %u)", r.name.c_str(), i,
           (c.writer - 1) & 1023, (c.writer - 1) >> 10);
  if (c.reader && !same_group(c.reader, now.thread)) c.flags |= READ_BY_GROUPS;
  else if (c.reader && c.read_epoch == now.epoch && c.reader != now.thread)
    c.flags |= READ_BY_MANY | (same_simdgroup(c.reader, now.thread) ? 0 : READ_BY_SIMDGROUPS);
  else if (!(c.reader && c.read_epoch == now.epoch)) c.flags &= ~(READ_BY_MANY | READ_BY_SIMDGROUPS);
  c.reader = now.thread;
  c.read_epoch = now.epoch;
  c.read_simd_epoch = now.simd_epoch;
  c.flags = atomic ? c.flags | READ_ATOMIC : c.flags & ~READ_ATOMIC;
}
static inline bool is_our_own(const u8* p) {  // constants in the kernel's code, simd values, attributes, the argument table
  auto within = [p](const void* low, size_t n) { return p >= (const u8*)low && p < (const u8*)low + n; };
  return ((uintptr_t)p >= code_low && (uintptr_t)p < code_high) || within(snapshot, sizeof snapshot) ||
         within(fibers.data(), fibers.size() * sizeof(Fiber)) ||
         within(entry_buffers, entry_buffer_count * sizeof(void*));
}
[[gnu::cold, gnu::noinline]] static void report_out_of_bounds(const u8* p, size_t n, bool write, u64 pc, u32 region) {
  const Region* nearest = nullptr;
  long long offset = 0;
  u64 shortest = ~0ull;
  for (auto& r : regions) {
    long long o = p - r.base;
    u64 distance = o < 0 ? (u64)-o : o >= (long long)r.size ? (u64)o - r.size + 1 : 0;
    if (distance < shortest) shortest = distance, nearest = &r, offset = o;
  }
  if (!nearest) return;
  long long e = nearest->element;
  report("oob", pc, region, "%s of %zu bytes out of bounds of %s (%zu x %u bytes): element index %lld",
         write ? "write" : "read", n, nearest->name.c_str(), nearest->size / nearest->element, nearest->element,
         offset >= 0 ? offset / e : -((-offset + e - 1) / e));
  if (shortest > GUARD) abort_kernel();
}
[[gnu::noinline]] static void check_shared(const void* address, size_t n, bool write, bool atomic, u64 pc) {
  u8* p = (u8*)address;
  if (pending.open) settle();
  stats.accesses++;
  if (p < arena || p >= arena + ARENA) {
    if (is_our_own(p)) return;
    report("oob", pc, 1, "%s of %zu bytes through a wild pointer %p; kernel aborted", write ? "write" : "read", n,
           address);
    abort_kernel();
  }
  u32 number = page_region[(p - arena) / PAGE];
  if (!number || p < regions[number - 1].base || p + n > regions[number - 1].base + regions[number - 1].size)
    return report_out_of_bounds(p, n, write, pc, number);
  const Region& r = regions[number - 1];
  if (write && r.kind != OUTPUT && r.kind != THREADGROUP)
    return report("write-input", pc, number, "write to read-only buffer %s", r.name.c_str());
  if (!r.cells) return;
  bool shared = r.kind == THREADGROUP;
  u32 sg = current->simdgroup;
  Moment now = {group_number * 1024 + current->index + 1, shared ? threadgroup_epoch : device_epoch,
                shared ? simd_threadgroup_epoch[sg] : simd_device_epoch[sg]};
  size_t last = r.index(p + n - 1 - r.base);
  for (size_t i = r.index(p - r.base); i <= last; i++)
    if (write) note_write(r, number - 1, i, p, n, atomic, pc, now);
    else note_read(r, number - 1, i, atomic, pc, now);
}
// Most accesses are to a thread's own variables: those are let through before anything is saved or looked up.
static inline void check(const void* address, size_t n, bool write, bool atomic, u64 pc) {
  if (!current || (size_t)((u8*)address - current->stack) < STACK) return;
  check_shared(address, n, write, atomic, pc);
}

static u8* take(size_t n) {
  size_t offset = (arena_used + GUARD + PAGE - 1) / PAGE * PAGE;
  arena_used = (offset + n + GUARD + PAGE - 1) / PAGE * PAGE;
  if (arena_used > ARENA || regions.size() > 65000) {
    fprintf(stderr, "metal_sim: the arena is full\n");
    abort();
  }
  return arena + offset;
}
static u32 add_region(const char* name, size_t n, u32 element, u32 kind, bool tracked) {
  Region r = {take(n), n, kind, element ? element : 1, name, nullptr, 0, NO_SHIFT};
  if (!(r.element & (r.element - 1))) r.shift = __builtin_ctz(r.element);
  memset(r.base - GUARD, 0xff, GUARD);
  memset(r.base + n, 0xff, GUARD);
  if (tracked) {
    r.cell_count = (n + r.element - 1) / r.element;
    r.cells = (Cell*)calloc(r.cell_count + 1, sizeof(Cell));
  }
  regions.push_back(r);
  size_t last = (r.base + (n ? n - 1 : 0) - arena) / PAGE;
  for (size_t page = (r.base - arena) / PAGE; page <= last; page++) page_region[page] = regions.size();
  return regions.size() - 1;
}
