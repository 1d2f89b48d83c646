// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0

// The CPU: words of the kernel's `struct pt_regs` and which of them hold what; the same in arch/ as SAVED_REGS_WORDS,
// SYSTEM_CALL_WORD.
#ifndef __TARGET_ARCH_arm64
#define REGS 21
#define EVENT_REGS REGS
#define SP 19
#define SYSTEM_CALL_OF(regs) ((__s64)(regs)[15])
#define PROBE_PC(r) ((r)->rip)
#define CALL_NUMBER(r) ((r)->orig_rax)
#define CALL_FIRST(r) ((r)->rdi)
#define CALL_SECOND(r) ((r)->rsi)
#define CALL_THIRD(r) ((r)->rdx)
#define CALL_FOURTH(r) ((r)->r10)
#define GENERAL_REGS 15           // at the start, the stack pointer excepted
#define IN_USER_MODE(regs) (((regs)[17] & 0xffff & 3) == 3 && ((regs)[20] & 3) == 3) // cs, ss
#define EVENT_IN_USER_MODE(ctx) (((ctx)->regs.cs & 3) == 3)
#define EVENT_SP(ctx) ((ctx)->regs.rsp)
#define PLACES 2
#define PLACE(i) (REGS * 8 + 16 * (i)) // 16 bytes lower on kernels with FRED (TOP_OF_KERNEL_STACK_PADDING)
#define INHERITED 6               // registers of its creator that a new thread begins with: r15 to r12, rbp, rbx
#define INHERITED_AT 0
#define ADDRESS_BITS 47
#define MAIN_STACKS (1ULL << 34)  // the highest addresses: no others than main threads' stacks (arch/x86/mm/mmap.c, Linux 6.18)
#define DESCRIPTOR(lay) 0
#define BEGINS_WITH_ADDRESS 1     // a descriptor, with its own (glibc: tcbhead_t.tcb; musl: pthread.self)
#define GOROUTINE(h) user_word((h)->thread_pointer - 8) // Go's `g` (runtime/asm_amd64.s, runtime/asm_arm64.s)
#define TLS_VECTOR 8              // thread pointer -> vector of thread-local blocks
#define FUTEX 202                 // numbers of system calls (arch/x86/entry/syscalls/syscall_64.tbl)
#define IS_POLL(call) ((call) == 7 || (call) == 271)     // poll, ppoll
#define IS_SELECT(call) ((call) == 23 || (call) == 270)  // select, pselect6
#define MMAP 9
#define MUNMAP 11
#define BRK 12
#define MREMAP 25
#define MADVISE 28
#define MLOCK 149
#define MLOCKALL 151
#define MLOCK2 325
#define RED_ZONE 128              // below the stack pointer; functions and their epilogues still use it
#else
#define REGS 36                   // x0 to x30, sp, pc, pstate, first argument, number of the system call (32 bits)
#define EVENT_REGS 34             // those of them that a perf event has (struct user_pt_regs)
#define SP 31
#define SYSTEM_CALL_OF(regs) ((__s32)(regs)[35])
#define PROBE_PC(r) (((struct user_pt_regs *)(r))->pc)
#define CALL_NUMBER(r) (((struct user_pt_regs *)(r))->regs[8])
#define CALL_FIRST(r) (((struct user_pt_regs *)(r))->regs[0])
#define CALL_SECOND(r) (((struct user_pt_regs *)(r))->regs[1])
#define CALL_THIRD(r) (((struct user_pt_regs *)(r))->regs[2])
#define CALL_FOURTH(r) (((struct user_pt_regs *)(r))->regs[3])
#define GENERAL_REGS 31           // at the start
#define IN_USER_MODE(regs) (!((regs)[33] >> 32) && !((regs)[33] & 0x1f)) // pstate: EL0, 64-bit (asm/ptrace.h)
#define EVENT_IN_USER_MODE(ctx) (!((ctx)->regs.pstate & 0x1f))
#define EVENT_SP(ctx) ((ctx)->regs.sp)
#define PLACES 2                  // sizes that `struct pt_regs` has; it ends where the kernel stack does
#define PLACE(i) (336 - 16 * (i)) // 336 in Linux 5.10 to 6.12, less where fields are gone
#define INHERITED 11              // registers of its creator that a new thread begins with: x19 to x29
#define INHERITED_AT 19
#define ADDRESS_BITS 48
#define MAIN_STACKS (1ULL << 30)  // as above (mm/util.c, Linux 6.18)
#define DESCRIPTOR(lay) ((lay)->descriptor)
#define BEGINS_WITH_ADDRESS 0
#define GOROUTINE(h) ((h)->regs[28])
#define TLS_VECTOR 0              // thread pointer -> vector of thread-local blocks
#define FUTEX 98                  // numbers of system calls (include/uapi/asm-generic/unistd.h)
#define IS_POLL(call) ((call) == 73)                     // ppoll
#define IS_SELECT(call) ((call) == 72)                   // pselect6
#define MMAP 222
#define MUNMAP 215
#define BRK 214
#define MREMAP 216
#define MADVISE 233
#define MLOCK 228
#define MLOCKALL 230
#define MLOCK2 284
#define RED_ZONE 0
#endif
#define USER_END (1ULL << ADDRESS_BITS)
