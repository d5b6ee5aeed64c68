// Runs one Metal grid on one CPU thread: threadgroups one after another, each GPU thread a fiber that runs until it
// meets the others (a barrier, a simd op). Every load and store is checked on the way. Knows no Metal text.
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include "callbacks.h"
#include "meeting.h"

enum Order { ASCENDING = 0, DESCENDING = 1, SHUFFLED = 2 };
static const size_t THREADGROUP_LIMIT = 32768;
static u8* stacks;
static u32 stack_count;

static void on_timer(int) {
  if (!current || aborted) return;
  report("timeout", 0, 0, "the kernel still ran at the time limit; aborted");
  abort_kernel();
}
static void on_fault(int signal_number, siginfo_t* info, void*) {
  if (!current) {
    signal(signal_number, SIG_DFL);
    return;
  }
  bool overflow = (u8*)info->si_addr >= current->stack && (u8*)info->si_addr < current->stack + PAGE;
  report("crash", 0, 0, overflow ? "thread stack overflow: thread-local arrays are too large" : "memory fault at %p",
         info->si_addr);
  abort_kernel();
}
// A kernel that never ends, or touches what it must not, becomes a finding; the old handlers come back afterwards.
struct Watch {
  struct sigaction timer, segv, bus;
  stack_t stack;
  explicit Watch(unsigned seconds) {
    static u8 signal_stack[65536];
    stack_t own = {};
    own.ss_sp = signal_stack;
    own.ss_size = sizeof signal_stack;
    sigaltstack(&own, &stack);
    struct sigaction on_time = {}, on_bad = {};
    on_time.sa_handler = on_timer;
    on_time.sa_flags = SA_NODEFER;
    on_bad.sa_sigaction = on_fault;
    on_bad.sa_flags = SA_NODEFER | SA_ONSTACK | SA_SIGINFO;
    sigaction(SIGVTALRM, &on_time, &timer);
    sigaction(SIGSEGV, &on_bad, &segv);
    sigaction(SIGBUS, &on_bad, &bus);
    set(seconds);
  }
  ~Watch() {
    set(0);
    sigaction(SIGVTALRM, &timer, nullptr);
    sigaction(SIGSEGV, &segv, nullptr);
    sigaction(SIGBUS, &bus, nullptr);
    if (!(stack.ss_flags & SS_DISABLE)) sigaltstack(&stack, nullptr);
  }
  static void set(unsigned seconds) {
    itimerval value = {{0, 0}, {(time_t)seconds, 0}};
    setitimer(ITIMER_VIRTUAL, &value, nullptr);
  }
};

static void* map(size_t n) {
  void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    perror("metal_sim: mmap");
    abort();
  }
  return p;
}
static void make_fibers(u32 count) {
  if (count <= stack_count) return;
  if (stacks) munmap(stacks, STACK * stack_count);
  stack_count = count;
  stacks = (u8*)map(STACK * count);
  fibers.resize(count);
  for (u32 i = 0; i < count; i++) mprotect(stacks + STACK * i, PAGE, PROT_NONE);
}
static int find_code(dl_phdr_info* info, size_t, void* function) {
  uintptr_t low = ~(uintptr_t)0, high = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    low = std::min<uintptr_t>(low, info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    high = std::max<uintptr_t>(high, info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
  }
  if ((uintptr_t)function < low || (uintptr_t)function >= high) return 0;
  code_low = low / PAGE * PAGE;
  code_high = high;
  return 1;
}

struct Grid {
  u32 size[3], group[3], groups[3];
  u64 total() const { return (u64)groups[0] * groups[1] * groups[2]; }
};
static void place_thread(const Grid& grid, const u32 at[3], const u32 size[3], u32 t) {
  Fiber& f = fibers[t];
  f.stack = stacks + STACK * t;
  f.sp = new_stack_pointer(f.stack, STACK - t % 64 * 192);  // not all in the same sets of the CPU's caches
  f.wait = RUNNING;
  f.index = t;
  f.simdgroup = t / LANES;
  msim_attrs& a = f.attrs;
  u32 position[3] = {t % size[0], t / size[0] % size[1], t / size[0] / size[1]};
  for (int d = 0; d < 3; d++) {
    a.thread_position_in_threadgroup[d] = position[d];
    a.threadgroup_position_in_grid[d] = at[d];
    a.thread_position_in_grid[d] = at[d] * grid.group[d] + position[d];
    a.threads_per_grid[d] = a.grid_size[d] = grid.size[d];
    a.grid_origin[d] = 0;
    a.threads_per_threadgroup[d] = size[d];
    a.dispatch_threads_per_threadgroup[d] = grid.group[d];
    a.threadgroups_per_grid[d] = grid.groups[d];
  }
  u32 full = grid.group[0] * grid.group[1] * grid.group[2];
  a.thread_index_in_threadgroup = t;
  a.thread_index_in_simdgroup = t % LANES;
  a.simdgroup_index_in_threadgroup = t / LANES;
  a.thread_index_in_quadgroup = t % 4;
  a.quadgroup_index_in_threadgroup = t / 4;
  a.threads_per_simdgroup = a.thread_execution_width = LANES;
  a.simdgroups_per_threadgroup = (thread_count + LANES - 1) / LANES;
  a.quadgroups_per_threadgroup = (thread_count + 3) / 4;
  a.dispatch_simdgroups_per_threadgroup = (full + LANES - 1) / LANES;
  a.dispatch_quadgroups_per_threadgroup = (full + 3) / 4;
}
static void fresh_threadgroup_memory() {
  threadgroup_bytes = 0;
  for (u32 i = first_threadgroup_region; i < regions.size(); i++) {
    Region& r = regions[i];
    memset(r.base, 0xff, r.size);
    if (r.cells) memset(r.cells, 0, r.cell_count * sizeof(Cell));
    threadgroup_bytes += (r.size + 15) / 16 * 16;
  }
}
static std::vector<u32> thread_order(int order, u64& random) {
  std::vector<u32> who(thread_count);
  for (u32 i = 0; i < thread_count; i++) who[i] = order == DESCENDING ? thread_count - 1 - i : i;
  if (order == SHUFFLED)
    for (u32 i = thread_count; i-- > 1;) {
      random = random * 6364136223846793005ull + 1;
      std::swap(who[i], who[(random >> 33) % (i + 1)]);
    }
  return who;
}
static bool run_until_waiting(const std::vector<u32>& order) {
  bool ran = false;
  for (u32 i : order) {
    if (aborted) break;
    if (fibers[i].wait != RUNNING) continue;
    ran = true;
    current = &fibers[i];
    stats.switches++;
    msim_switch(&scheduler_sp, current->sp);
    current = nullptr;
  }
  return ran;
}
static void run_threadgroup(const Grid& grid, u64 number, int order, u64& random) {
  u32 at[3] = {(u32)(number % grid.groups[0]), (u32)(number / grid.groups[0] % grid.groups[1]),
               (u32)(number / grid.groups[0] / grid.groups[1])};
  u32 size[3];
  for (int d = 0; d < 3; d++) size[d] = std::min(grid.group[d], grid.size[d] - at[d] * grid.group[d]);
  thread_count = size[0] * size[1] * size[2];
  group_number = (u32)number;
  device_epoch = threadgroup_epoch = 0;
  memset(simd_device_epoch, 0, sizeof simd_device_epoch);
  memset(simd_threadgroup_epoch, 0, sizeof simd_threadgroup_epoch);
  fresh_threadgroup_memory();
  for (u32 t = 0; t < thread_count; t++) place_thread(grid, at, size, t);
  std::vector<u32> who = thread_order(order, random);
  u32 simdgroups = (thread_count + LANES - 1) / LANES;
  while (!aborted && run_until_waiting(who)) {
    bool released = false;
    for (u32 s = 0; s < simdgroups; s++) released |= release_simdgroup(s);
    if (!released) release_threadgroup();
  }
  for (u32 i = 0; i < thread_count && !aborted; i++)
    if (fibers[i].wait != DONE) {
      report("deadlock", 0, 0, "threads never finish");
      break;
    }
  settle();
  stats.threadgroups++;
  stats.threads += thread_count;
}

extern "C" {
static const char PREFIX[] = "threadgroup ";
void* msim_threadgroup_memory(const char* name, size_t n, size_t element) {
  for (u32 i = first_threadgroup_region; i < regions.size(); i++)
    if (!strcmp(regions[i].name.c_str() + sizeof PREFIX - 1, name)) {  // without a new string: every thread asks
      if (n != regions[i].size)
        report("threadgroup-memory", PC, i, "%s declared with two sizes", regions[i].name.c_str());
      return regions[i].base;
    }
  u32 i = add_region((std::string(PREFIX) + name).c_str(), n, element, THREADGROUP, checking);
  memset(regions[i].base, 0xff, n);
  threadgroup_bytes += (n + 15) / 16 * 16;
  threadgroup_peak = std::max(threadgroup_peak, threadgroup_bytes);
  if (threadgroup_bytes > THREADGROUP_LIMIT)
    report("threadgroup-memory", PC, 0, "%zu bytes of threadgroup memory, the limit is %zu", threadgroup_bytes,
           THREADGROUP_LIMIT);
  return regions[i].base;
}
void msim_reset() {
  if (!arena) {
    arena = (u8*)map(ARENA);
    page_region = (uint16_t*)map(ARENA / PAGE * sizeof(uint16_t));
  }
  for (auto& r : regions) free(r.cells);
  regions.clear();
  findings.clear();
  seen.clear();
  if (arena_used > KEPT) madvise(arena, arena_used, MADV_DONTNEED);  // less is filled again faster than mapped again
  memset(page_region, 0, (arena_used / PAGE + 1) * sizeof(uint16_t));
  arena_used = threadgroup_peak = threadgroup_bytes = 0;
  stats = {};
  pending.open = false;
}
void* msim_buffer(const char* name, size_t n, unsigned element, unsigned kind, int tracked) {
  return regions[add_region(name, n, element, kind, tracked)].base;
}
void msim_mark_written(unsigned region) {
  for (size_t i = 0; i < regions[region].cell_count; i++) regions[region].cells[i].flags |= WRITTEN;
}
size_t msim_unwritten(unsigned region, size_t* first) {
  size_t n = 0;
  for (size_t i = 0; i < regions[region].cell_count; i++)
    if (!(regions[region].cells[i].flags & WRITTEN) && n++ == 0) *first = i;
  return n;
}
int msim_run(msim_entry_fn function, void** buffers, unsigned buffer_count, const unsigned* size, const unsigned* group,
             int check_memory, int order, unsigned seed, unsigned seconds, msim_stats* out) {
  entry = function;
  entry_buffers = buffers;
  entry_buffer_count = buffer_count;
  checking = check_memory;
  aborted = false;
  code_low = code_high = 0;
  dl_iterate_phdr(find_code, (void*)function);
  Grid grid;
  for (int d = 0; d < 3; d++) {
    grid.size[d] = size[d];
    grid.group[d] = group[d];
    grid.groups[d] = (size[d] + group[d] - 1) / group[d];
  }
  make_fibers(group[0] * group[1] * group[2]);
  first_threadgroup_region = regions.size();
  u64 random = seed * 6364136223846793005ull + 1442695040888963407ull;
  {
    Watch watch(seconds);
    for (u64 i = 0; i < grid.total() && !aborted; i++)
      run_threadgroup(grid, order == DESCENDING ? grid.total() - 1 - i : i, order, random);
  }
  current = nullptr;
  stats.threadgroup_bytes = threadgroup_peak;
  *out = stats;
  return aborted;
}
unsigned msim_finding_count() { return findings.size(); }
// "kind<tab>text"; `offset` is where in the kernel's library it happened, 0 when that is not known.
const char* msim_finding(unsigned i, u64* offset, u64* count) {
  static std::string s;
  const Found& f = findings[i];
  s = f.kind + "\t" + f.text;
  *offset = f.pc ? f.pc - code_low - 1 : 0;
  *count = f.count;
  return s.c_str();
}
}
