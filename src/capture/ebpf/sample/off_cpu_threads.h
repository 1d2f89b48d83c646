// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0

// Off-CPU time.
//
// Each time a thread of a sampled process is switched in, the interval since it was switched out is split into time
// blocked and time runnable (woken, or preempted, and waiting for a CPU). An interval of either kind that is as long as
// the sampling period is always taken, with its own length as its weight. The shorter ones of a thread, put end to end,
// are a clock of their own, with ticks at random distances of 0.5 to 1.5 periods: an interval with a tick in it is taken,
// and its weight is the distance from the previous tick. So no interval length is favored, at most two stacks are taken
// per period however often the thread switches, and the weights of a thread add up to its off-CPU time. (The time since
// the previously taken interval would be biased: long intervals continue for longer after their tick.)
//
// The length of a blocked interval is known when the thread is woken, so it is accounted for there, in the context of the
// waker. That is where the waker's stack can be taken too.
//
// The stack of the thread itself cannot be taken at the switch, as its memory is not mapped yet. Until the thread returns to user
// code, nothing in its user stack can change. So a task work takes it, which runs in the thread just before it returns; with
// LINUX_5_8 a kprobe at the kernel's first function that runs in the thread again, on the same CPU.
//
// A thread that waits for an interpreter lock (the GIL) wakes up every 5 ms to request it again (Python/ceval_gil.c,
// take_gil). These intervals are one wait: `pending` adds them up until a thread that releases the lock ends the wait, or
// the lock is found released.
//
// A thread that is switched out and still wants to run may be throttled: its control group, or one around it, has used up its
// CPU time of this period. The kernel keeps for how long each queue of a group was throttled, with the groups around it
// (kernel/sched/fair.c, v6.6 and later), and throttles threads before they return to user code (v6.18 and later): the difference
// between switch-out and switch-in is the part of the interval that was throttled, the rest is runnable.

enum { RUNNING, RUNNABLE, BLOCKED };
// include/linux/sched.h; TASK_DEAD v4.14 and later, TASK_FROZEN v6.1 and later
#define TASK_STOPPED_OR_TRACED 0xc
#define TASK_DEAD 0x80
#define TASK_FROZEN 0x8000
#define JOBCTL_TRAP_FREEZE (1 << 23) // include/linux/sched/jobctl.h, v5.2 and later: of the freezer of cgroup v2
#define FUTEX_WAKES 0x43a        // its operations that wake: WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAKE_BITSET, as bits
#define SELECT_WORDS 16          // of a set of descriptors (FD_SETSIZE in glibc's sys/select.h, 2.36), of 64 bits
// include/uapi/asm-generic/poll.h, v6.18
#define POLLIN 1ULL
#define POLLPRI 2ULL
#define POLLOUT 4ULL

#ifndef LINUX_5_8
// Of the same name and size as in the kernel (include/uapi/linux/bpf.h, v6.18), which finds it by its name.
struct bpf_task_work {
	__u64 opaque;
} __attribute__((aligned(8)));
#endif

// A thread of a sampled process. Times in ns.
struct thread {
	__u64 since;              // when it came into this state, or when sampling started
	__u64 woken;              // when the blocked thread was woken, 0: not yet
	__u64 cpu;                // time on the CPU since the last sample
	__s64 until_runnable, until_blocked; // time of short intervals left until the next tick of each kind
	__u64 step_runnable, step_blocked;   // from the last tick to the next
	__u64 take_runnable, take_blocked;   // weights of the sample that is to be taken
	__u64 runnable_length, blocked_length; // of the intervals that it is taken for
	__u64 take_woken;         // when the latter ended
	__u64 futex;              // address of the futex that the blocked thread waits on, 0: none
	__u64 next_futex;         // LINUX_5_8: the same, if it is blocked; it may want to run as well
	__u64 selected;           // what the blocked thread selects, as `polled` of `struct head`
	__u64 pending;            // time in this wait for an interpreter lock so far, not accounted for yet
	__u64 late;               // time in such waits that are over, but that no sample represents yet
	__u64 began;              // when the blocked thread began to wait, for such a wait with all its parts
	__u64 got_lock;           // when it last began to run after such a wait
	// Of time in which its control group had used up its CPU time, as of time runnable.
	__s64 until_throttled;
	__u64 step_throttled, take_throttled, throttled_length;
	__u64 queue;              // of the group on the CPU that the runnable thread was on, 0: not known
	__u64 queue_throttled;    // how long that queue had been throttled when the thread was switched out
	__u32 state, scheduled;
	__u32 tgid, waker;        // waker: the thread that woke it
	__u32 waker_pid, take_waker, take_waker_pid;
	__u32 timed_out;          // it was woken by a timer while it waited for an interpreter lock
	__u32 kernel;
	__u32 wants_lock;         // it was woken while it waited for an interpreter lock, and has not run since
	__u32 suspended;          // STOPPED or FROZEN if the blocked thread is
	__u32 take_suspended;
#ifndef LINUX_5_8
	__u64 stack[MAX_KERNEL + 1]; // kernel return addresses of the sample that is scheduled
	struct bpf_task_work work;
#endif
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);   // the loader sets it
	__uint(map_flags, HASH_FLAGS);
	__type(key, __u32);       // thread id
	__type(value, struct thread);
} THREADS SEC(".maps");

// Scratch areas for task works and wakers: 1 if in use; with LINUX_5_8, those in use. They follow those of the CPUs.
struct {
#ifdef LINUX_5_8
	__uint(type, BPF_MAP_TYPE_HASH);
#else
	__uint(type, BPF_MAP_TYPE_ARRAY);
#endif
	__uint(max_entries, MAX_WORKS);
	__type(key, __u32);
	__type(value, __u32);
} SLOTS SEC(".maps");

// All zero, to make entries of THREADS from. Without the task work, which this kind of map cannot hold.
struct new_thread {
	char bytes[sizeof(struct thread)];
} __attribute__((aligned(8)));

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct new_thread);
} NEW_THREAD SEC(".maps");

// The CPU time that a sample represents: what its thread has used since the last one.
static __always_inline void used_cpu(struct head *h, __u32 tid)
{
	struct thread *t = bpf_map_lookup_elem(&THREADS, &tid);

	if (!t)
		return;
	h->cpu = t->cpu + (h->time - t->since);
	t->cpu = 0;
	t->since = h->time;
}
