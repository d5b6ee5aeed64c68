// Leaving one stack for another: a GPU thread is a fiber. Knows nothing of kernels.
#pragma once
#include <cstdint>
#include <cstring>

extern "C" void msim_switch(void** from_sp, void* to_sp);
extern "C" void msim_boot();

#if defined(__aarch64__)
asm(R"(
.text
.global msim_switch
.type msim_switch,%function
msim_switch:
  sub sp, sp, #176
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8,  d9,  [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8,  d9,  [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #176
  ret
.global msim_boot
.type msim_boot,%function
msim_boot:
  bl msim_fiber_main
  brk #1
)");
static void* new_stack_pointer(uint8_t* stack, size_t size) {
  uint64_t* sp = (uint64_t*)((((uintptr_t)stack + size) & ~(uintptr_t)15) - 176);
  memset(sp, 0, 176);
  sp[11] = (uint64_t)&msim_boot;  // the saved x30: where msim_switch returns to
  return sp;
}
#elif defined(__x86_64__)
// A jump at the end: the CPU would predict that a ret goes back to the caller.
asm(R"(
.text
.global msim_switch
.type msim_switch,@function
msim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
.global msim_boot
.type msim_boot,@function
msim_boot:
  call msim_fiber_main
  ud2
)");
static void* new_stack_pointer(uint8_t* stack, size_t size) {
  uint64_t* top = (uint64_t*)(((uintptr_t)stack + size) & ~(uintptr_t)15);
  uint64_t* sp = top - 9;  // so that msim_boot begins at a multiple of 16, as its call must
  memset(sp, 0, 72);
  sp[6] = (uint64_t)&msim_boot;  // above six saved registers: where msim_switch returns to
  return sp;
}
#else
#error "metal_sim: write a context switch for this CPU in switch.h"
#endif
