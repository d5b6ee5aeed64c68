// Where threads wait for each other: threadgroup barriers, simdgroup barriers, simd ops. Runs no thread itself.
#pragma once
#include "memory.h"

extern "C" {
void msim_barrier(int threadgroup_wide, unsigned flags, unsigned line, unsigned column) {
  current->wait = threadgroup_wide ? AT_BARRIER : AT_SIMD_BARRIER;
  current->site = line << 10 | (column & 1023);
  current->flags = flags;
  leave();
}
msim_snap msim_collective(const void* value, unsigned size, unsigned, unsigned line, unsigned column) {
  Fiber* f = current;
  memcpy(f->value, value, size);
  f->size = size;
  f->wait = AT_SIMD_OP;
  f->site = line << 10 | (column & 1023);
  leave();
  return {snapshot[f->simdgroup], size, snapshot_mask[f->simdgroup]};
}
void msim_note(const char* kind, const char* text, unsigned line) {
  report(kind, 0, line, "%s (source line %u)", text, line);
}
unsigned msim_lane() { return current->attrs.thread_index_in_simdgroup; }
}

// Lanes waiting at the earliest place in the source go on together, once nobody of the simdgroup is still running.
static Fiber* earliest(u32 low, u32 high, bool& uniform) {
  Fiber* first = nullptr;
  for (u32 i = low; i < high; i++) {
    Fiber& f = fibers[i];
    if (f.wait == RUNNING) return nullptr;
    if (f.wait == DONE || f.wait == AT_BARRIER) {
      uniform = uniform && f.wait == DONE;
      continue;
    }
    if (first && (f.site != first->site || f.wait != first->wait)) uniform = false;
    if (!first || f.site < first->site) first = &f;
  }
  return first;
}
static u32 take_snapshot(const Fiber& first, u32 low, u32 high) {
  u32 mask = 0;
  for (u32 i = low; i < high; i++) {
    Fiber& f = fibers[i];
    if (f.wait != first.wait || f.site != first.site) continue;
    mask |= 1u << (i - low);
    if (f.wait != AT_SIMD_OP) continue;
    if (f.size != first.size) report("simd-mix", 0, f.site, "lanes of one simd op have different types");
    memcpy(snapshot[first.simdgroup] + (size_t)(i - low) * f.size, f.value, f.size);
  }
  return mask;
}
static bool release_simdgroup(u32 sg) {
  u32 low = sg * LANES, high = std::min(low + LANES, thread_count);
  bool uniform = true;
  Fiber* first = earliest(low, high, uniform);
  if (!first) return false;
  u32 mask = take_snapshot(*first, low, high), all = high - low == LANES ? ~0u : (1u << (high - low)) - 1;
  bool barrier = first->wait == AT_SIMD_BARRIER;
  if (mask != all) {
    current = first;
    stats.partial_simd++;
    report(barrier ? "divergent-barrier" : "partial-simd", 0, first->site,
           "%s at source line %u runs with only lanes 0x%08x of simdgroup %u (%s)",
           barrier ? "simdgroup_barrier" : "simd op", first->site >> 10, mask, sg,
           uniform ? "other lanes have returned" : "other lanes are elsewhere");
    current = nullptr;
  }
  if (barrier) {
    simd_device_epoch[sg] += first->flags & 1;
    simd_threadgroup_epoch[sg] += first->flags >> 1 & 1;
  } else {
    snapshot_mask[sg] = mask;
    snapshot[sg][MSIM_SHARED] = 0;
    stats.simd_ops++;
  }
  for (u32 i = low; i < high; i++)
    if (mask >> (i - low) & 1) fibers[i].wait = RUNNING;
  return true;
}
static bool release_threadgroup() {
  u32 waiting = 0, flags = 3;
  Fiber* first = nullptr;
  bool elsewhere = false;
  for (u32 i = 0; i < thread_count; i++) {
    Fiber& f = fibers[i];
    if (f.wait == DONE) continue;
    if (f.wait != AT_BARRIER) return false;
    if (!first) first = &f;
    elsewhere = elsewhere || f.site != first->site;
    flags &= f.flags;
    waiting++;
  }
  if (!waiting) return false;
  if (waiting < thread_count || elsewhere) {
    current = first;
    report("divergent-barrier", 0, first->site, "threadgroup_barrier at source line %u reached by %u of %u threads%s",
           first->site >> 10, waiting, thread_count,
           elsewhere ? ", and not all at the same barrier" : " (the others have returned)");
    current = nullptr;
  }
  device_epoch += flags & 1;
  threadgroup_epoch += flags >> 1 & 1;
  stats.barriers++;
  for (u32 i = 0; i < thread_count; i++)
    if (fibers[i].wait == AT_BARRIER) fibers[i].wait = RUNNING;
  return true;
}
