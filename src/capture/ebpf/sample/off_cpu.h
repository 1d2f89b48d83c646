// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Programs at context switches: the samples of threads that were off the CPU.

// A system call and its first four arguments.
struct system_call {
	__u64 number, first, second, third, fourth;
};

#ifdef LINUX_5_8
static __always_inline void user_registers(struct head *h, struct kernel_facts *facts)
{
	if (registers_at_entry(facts, h->regs, sizeof(h->regs)))
		h->flags |= REGS_OK;
}

#ifndef __TARGET_ARCH_arm64
// The end of the user registers at the entry to the kernel, as in struct pt_regs.
struct entry {
	__u64 r10, r9, r8, rax, rcx, rdx, rsi, rdi, orig_rax, rip, cs, flags, rsp, ss;
};

// (Not inlined: the caller has not much stack left.)
static __noinline void last_call(struct kernel_facts *facts, struct system_call *call)
{
	struct entry e = {};
	__u64 top = 0;

	if (!facts->stack || bpf_probe_read_kernel(&top, 8, (void *)(bpf_get_current_task() + facts->stack)) || !top)
		return;
	top += KERNEL_STACK - sizeof(e);
	if (bpf_probe_read_kernel(&e, sizeof(e), (void *)top) || (e.cs & 0xffff & 3) != 3 || (e.ss & 3) != 3)
		if (bpf_probe_read_kernel(&e, sizeof(e), (void *)(top - 16)))
			return;
	call->number = e.orig_rax;
	call->first = e.rdi;
	call->second = e.rsi;
	call->third = e.rdx;
	call->fourth = e.r10;
}
#else
static __always_inline void last_call(struct kernel_facts *facts, struct system_call *call)
{
	struct user_pt_regs *regs;
	__u64 top = 0, pstate;
	int i;

	if (!facts->stack || bpf_probe_read_kernel(&top, 8, (void *)(bpf_get_current_task() + facts->stack)) || !top)
		return;
	for (i = 0; i < PLACES; i++) {
		regs = (void *)(top + KERNEL_STACK - PLACE(i));
		if (bpf_probe_read_kernel(&pstate, 8, &regs->pstate) || pstate >> 32 || pstate & 0x1f)
			continue;
		if (bpf_probe_read_kernel(&call->number, 8, &regs->regs[8]) ||
		    bpf_probe_read_kernel(&call->first, 32, &regs->regs[0]))
			call->number = 0;
		return;
	}
}
#endif
#else
// The user registers of the current thread, at the top of its kernel stack.
static __always_inline void user_registers(struct head *h, struct kernel_facts *facts)
{
	if (!bpf_probe_read_kernel(h->regs, sizeof(h->regs), (void *)bpf_task_pt_regs(bpf_get_current_task_btf())) &&
	    IN_USER_MODE(h->regs))
		h->flags |= REGS_OK;
}

static __always_inline void last_call(struct kernel_facts *facts, struct system_call *call)
{
	struct pt_regs *regs = (void *)bpf_task_pt_regs(bpf_get_current_task_btf());

	call->number = CALL_NUMBER(regs);
	call->first = CALL_FIRST(regs);
	call->second = CALL_SECOND(regs);
	call->third = CALL_THIRD(regs);
	call->fourth = CALL_FOURTH(regs);
}
#endif

// The futex that a system call is about, 0: none.
static __always_inline __u64 futex_of(struct system_call *call)
{
	return call->number == FUTEX ? call->first : 0;
}

// What is in a set of descriptors: 0: nothing, 1: the last one below `count` and no other, 2: others. (Not static: as walk_chain.
// Without a loop over words that are read one by one, which takes the verifier a hundred times as long.)
__noinline int members(__u64 set, __u64 count)
{
	__u64 words[SELECT_WORDS - 1] = {}, last = 0, others, at = (count - 1) / 64;
	int i;

	if (at >= SELECT_WORDS)
		return 2;
	if (!set)
		return 0;
	BOUND(at, SELECT_WORDS - 1);
	if (bpf_probe_read_user(words, 8 * at, (void *)set) || bpf_probe_read_user(&last, 8, (void *)(set + 8 * at)))
		return 2;
	others = last & ~(1ULL << ((count - 1) & 63));
#pragma unroll
	for (i = 0; i < SELECT_WORDS - 1; i++)
		others |= words[i];
	return others ? 2 : last != 0;
}

// What a select waits for, as `polled` of `struct head`. The sets are read before the thread is woken: the kernel then writes its
// answer into them.
static __always_inline __u64 selected_by(struct system_call *call)
{
	__u64 reading, writing, exceptional;

	if (!IS_SELECT(call->number))
		return 0;
	reading = members(call->second, call->first);
	writing = members(call->third, call->first);
	exceptional = members(call->fourth, call->first);
	if ((reading | writing | exceptional) & 2)
		return 0;
	return (reading * POLLIN | writing * POLLOUT | exceptional * POLLPRI) << 32 | (call->first - 1);
}

// The same of a poll, whose list stays as it is.
static __always_inline __u64 polled_by(struct system_call *call)
{
	__u64 polled = 0;

	if (IS_POLL(call->number) && call->second == 1)
		bpf_probe_read_user(&polled, 8, (void *)call->first);
	return polled & ((1ULL << 48) - 1); // without the events that were found last
}

// The thread is blocked since `now`, and waits on this futex.
static __always_inline void begin_wait(struct thread *t, __u64 futex, __u64 now)
{
	// Another wait than the one before: that one ended between the check in `end_timed_out` and the thread's own.
	// A condition variable has several futexes, close together.
	if (t->pending && futex - t->futex + 64 > 128) {
		t->late += t->pending;
		t->pending = 0;
	}
	if (!t->pending)
		t->began = now;
	t->futex = futex;
}

// Runs in a thread that a timer woke while it waited for an interpreter lock. If no thread holds the lock any more, its wait
// is over. Returns the last holder.
static __always_inline __u64 end_timed_out(struct thread *t, struct kernel_facts *facts, __u32 pid, __u64 now)
{
	struct gils *gils = bpf_map_lookup_elem(&INTERPRETER_LOCKS, &pid);
	__u64 holder = 0, lock = interpreter_lock(pid, t->futex);
	__u32 locked = 1;

	t->timed_out = 0;
	if (gils && lock) {
		bpf_probe_read_user(&holder, 8, (void *)(lock + gils->last_holder));
		bpf_probe_read_user(&locked, 4, (void *)(lock + gils->last_holder + 8));
	}
	if (gils && lock && holder)
		note_holder(gils, lock, t->futex, holder | THREAD_STATE | (locked == 1 ? HOLDS : 0), holder, 0, now);
	// Released, and not by a thread that has woken this one from its wait: the wait is over. (A thread that signals
	// one which a timer has woken, and which has no CPU yet, does not wake it.)
	if (locked != 1) {
		t->waker = t->waker_pid = 0;
		account_blocked(t, facts, t->pending, now);
		t->pending = 0;
	}
	return holder;
}

// Begins the record of the current thread, which was off the CPU. Its kernel stack and user registers are still missing.
static __always_inline void begin_record(__u32 slot, struct head *h, struct thread *t, struct kernel_facts *facts, __u64 now,
					 __u64 holder)
{
	struct system_call call = {};
	__u64 id = bpf_get_current_pid_tgid();
	__u32 pid = id >> 32;

	h->time = now;
	h->pid = pid;
	h->tid = id;
	h->flags = IN_KERNEL | OFF_CPU;
	h->polled = 0;
	if (t->take_blocked) {
		h->flags |= t->take_suspended;
		last_call(facts, &call);
		h->polled = IS_SELECT(call.number) ? t->selected : polled_by(&call);
	}
	h->kernel = 0;
	h->cpu = 0;
	h->runnable = t->take_runnable;
	h->blocked = t->take_blocked;
	h->runnable_length = t->runnable_length;
	h->throttled = t->take_throttled;
	h->throttled_length = t->throttled_length;
	h->blocked_length = t->blocked_length;
	h->waker = t->take_waker;
	h->waker_pid = t->take_waker_pid;
	h->woken = t->take_woken;
	h->holder = holder;
	__builtin_memset(h->holders, 0, sizeof(h->holders));
	if (t->take_blocked && t->futex) {
		__u64 lock = interpreter_lock(pid, t->futex);

		if (lock)
			find_holders(slot, lock, t->began, t->take_woken);
	}
	t->take_runnable = t->take_blocked = t->take_throttled = 0;
}

#ifdef LINUX_5_8

// At the start of finish_task_switch (kernel/sched/core.c), which runs in the thread that was switched in, with its address space.
// Interrupts are off, and other programs at probes and ticks do not run meanwhile (`bpf_prog_active` of the kernel): the CPU's scratch
// area is free.
SEC("kprobe/finish_task_switch")
int switched_in(struct pt_regs *ctx)
{
	__u32 zero = 0, slot, pid, tid;
	struct turn *turn = bpf_map_lookup_elem(&TURN, &zero);
	struct kernel_facts *facts;
	__u64 holder = 0, now, id;
	struct layout *lay;
	struct thread *t;
	struct cache *c;
	struct head *h;
	char *area;
	long n;

	if (!turn || !turn->selected)
		return 0;
	turn->selected = 0;
	id = bpf_get_current_pid_tgid();
	tid = id;
	pid = id >> 32;
	facts = bpf_map_lookup_elem(&FACTS, &zero);
	t = bpf_map_lookup_elem(&THREADS, &tid);
	lay = bpf_map_lookup_elem(&PROCS, &pid);
	slot = bpf_get_smp_processor_id();
	area = scratch(slot);
	c = cache(slot);
	if (!facts || !t || !lay || !area || !c)
		return 0;
	h = (void *)area;
	now = bpf_ktime_get_ns();
	if (t->timed_out)
		holder = end_timed_out(t, facts, pid, now);
	if (!(t->take_runnable | t->take_blocked))
		return 0;
	begin_record(slot, h, t, facts, now, holder);
	if (facts->want_kernel) {
		// Without this function.
		n = bpf_get_stack(ctx, area + HEAD, MAX_KERNEL * 8, 1);
		if (n > 0)
			h->kernel = n / 8;
	}
	user_registers(h, facts);
	snapshot(slot, area, c, lay, facts, turn, now, 0);
	return 0;
}

// Forgets a thread that has ended. (At its end, a switch here does not show that it will not run again.)
SEC("raw_tp/sched_process_free")
int freed(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 zero = 0, tid = 0;
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);

	if (!facts || !facts->ids || !facts->period)
		return 0;
	bpf_probe_read_kernel(&tid, sizeof(tid), (void *)(ctx->args[0] + facts->ids));
	bpf_map_delete_elem(&THREADS, &tid);
	return 0;
}

#else

// Runs in the thread that was switched in, before it returns to user code.
static int resumed(void *map, __u32 *tid, struct thread *t)
{
	__u32 zero = 0, slot, pid = bpf_get_current_pid_tgid() >> 32;
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct turn *turn = bpf_map_lookup_elem(&TURN, &zero);
	__u64 holder = 0, now;
	struct cache *c;
	struct head *h;
	char *area;

	t->scheduled = 0;
	if (!lay || !facts || !turn)
		return 0;
	now = bpf_ktime_get_ns();
	if (t->timed_out)
		holder = end_timed_out(t, facts, pid, now);
	if (!(t->take_runnable | t->take_blocked | t->take_throttled))
		return 0;
	slot = claim_any();
	// All in use: the time goes into the next sample.
	if (slot == MAX_WORKS)
		return 0;
	area = scratch(facts->cpus + slot);
	c = cache(facts->cpus + slot);
	h = (void *)area;
	if (area && c) {
		begin_record(facts->cpus + slot, h, t, facts, now, holder);
		h->kernel = t->kernel > MAX_KERNEL ? MAX_KERNEL : t->kernel;
		if (h->kernel)
			bpf_probe_read_kernel(area + HEAD, MAX_KERNEL * 8, t->stack);
		user_registers(h, facts);
		snapshot(facts->cpus + slot, area, c, lay, facts, turn, h->time, 0);
	}
	release(slot);
	return 0;
}

// `bpf_task_work_schedule_resume_impl(task, work, map, callback, 0)` of the kernel. The loader writes the number that this
// kernel has given the function here, and omits the program where there is none.
static __always_inline long schedule(void *task, struct bpf_task_work *work, void *callback)
{
	register void *r1 asm("r1") = task;
	register struct bpf_task_work *r2 asm("r2") = work;
	register void *r3 asm("r3") = &THREADS;
	register void *r4 asm("r4") = callback;
	register long r5 asm("r5") = 0;
	register long r0 asm("r0");

	asm volatile("call %[f]"
		     : "=r"(r0), "+r"(r1), "+r"(r2), "+r"(r3), "+r"(r4), "+r"(r5)
		     : [f] "i"(SCHEDULE_RESUME)
		     : "memory");
	return r0;
}

#endif

#ifdef LINUX_5_8
#define EVENT(name) SEC("raw_tp/" name)
// Numbers of a task's thread and process.
#define READ_IDS(id, task) bpf_probe_read_kernel(id, sizeof(id), (void *)((task) + facts->ids))
#else
#define EVENT(name) SEC("tp_btf/" name)
// The loader fills in the offsets of this kernel.
struct rq {
	__u64 clock;
} __attribute__((preserve_access_index));

struct cfs_rq {
	struct rq *rq;
	__u64 throttled_clock_self, throttled_clock_self_time;
} __attribute__((preserve_access_index));

struct sched_entity {
	struct cfs_rq *cfs_rq;
} __attribute__((preserve_access_index));

struct task_struct {
	int pid, tgid;
	unsigned long jobctl;
	struct sched_entity se;
} __attribute__((preserve_access_index));
#define READ_IDS(id, task)                                              \
	({                                                              \
		(id)[0] = ((struct task_struct *)(task))->pid;          \
		(id)[1] = ((struct task_struct *)(task))->tgid;         \
	})
#endif

#ifndef LINUX_5_8
// Whether a thread that is switched out in this state is stopped or frozen. The freezer of cgroup v2 traps threads as signals do.
static __always_inline __u32 suspension(__u32 state, __u64 jobctl)
{
	if (state & TASK_STOPPED_OR_TRACED)
		return STOPPED;
	return state & TASK_FROZEN || jobctl & JOBCTL_TRAP_FREEZE ? FROZEN : 0;
}

// (Not there without CONFIG_CFS_BANDWIDTH.)
#define HAS_THROTTLED_TIME                                                              \
	(bpf_core_field_exists(((struct cfs_rq *)0)->throttled_clock_self_time) &&      \
	 bpf_core_field_exists(((struct cfs_rq *)0)->rq) && bpf_core_field_exists(((struct sched_entity *)0)->cfs_rq))

// Notes the queue of a thread that is switched out, and for how long that was throttled before.
static __always_inline void begin_runnable(struct thread *t, struct task_struct *task)
{
	struct cfs_rq *queue;

	t->queue = 0;
	if (!HAS_THROTTLED_TIME)
		return;
	queue = task->se.cfs_rq;
	t->queue = (__u64)queue;
	t->queue_throttled = queue->throttled_clock_self_time;
	if (queue->throttled_clock_self)
		t->queue_throttled += queue->rq->clock - queue->throttled_clock_self;
}

// For how long the queue was throttled since then, `len` ago. The thread may have moved to another CPU, so the queue may be gone.
static __always_inline __u64 end_runnable(struct thread *t, __u64 len)
{
	struct cfs_rq *queue = (void *)t->queue;
	__u64 time = 0, since = 0, clock = 0;
	struct rq *rq = 0;

	if (!queue || !HAS_THROTTLED_TIME)
		return 0;
	if (bpf_probe_read_kernel(&time, 8, &queue->throttled_clock_self_time) ||
	    bpf_probe_read_kernel(&since, 8, &queue->throttled_clock_self))
		return 0;
	if (since && !bpf_probe_read_kernel(&rq, 8, &queue->rq) && !bpf_probe_read_kernel(&clock, 8, &rq->clock))
		time += clock - since;
	time -= t->queue_throttled;
	if ((__s64)time < 0)
		return 0;
	return time < len ? time : len;
}
#endif

// False for threads of processes that are not sampled, nearly always.
static __always_inline int is_ours(__u32 *id)
{
	__u32 cell = id[1] & (OURS_CELLS - 1), *is = bpf_map_lookup_elem(&OURS, &cell);

	// The idle thread has number 0.
	return id[0] && is && *is;
}

EVENT("sched_switch")
int switched(__u64 *ctx)
{
	__u32 zero = 0, prev[2] = {}, next[2] = {};
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	__u64 now, d, weight, blocked = 0, throttled = 0;
	struct system_call call = {};
	int from_ours, to_ours;
	struct thread *t = 0;

	if (!facts || !facts->ids || !facts->period)
		return 0;
	READ_IDS(prev, ctx[1]);
	READ_IDS(next, ctx[2]);
	from_ours = is_ours(prev);
	to_ours = is_ours(next);
	if (!(from_ours | to_ours))
		return 0;
	now = bpf_ktime_get_ns();
	if (from_ours) {
		t = bpf_map_lookup_elem(&THREADS, &prev[0]);
		if (!t && bpf_map_lookup_elem(&PROCS, &prev[1]))
			t = add_thread(prev[0], prev[1], now, RUNNING, facts->period);
	}
#ifdef LINUX_5_8
	if (t) {
		t->cpu += now - t->since;
		t->since = now;
		t->woken = 0;
		t->waker = 0;
		// The event says only from 5.18 on whether it still wants to run: then it will not be woken.
		if (!ctx[0]) {
			last_call(facts, &call);
			t->next_futex = futex_of(&call);
			t->selected = selected_by(&call);
		}
		t->suspended = 0; // not known
		asm volatile("" ::: "memory");
		t->state = ctx[0] ? RUNNABLE : BLOCKED;
	}
#else
	if (t && (__u32)ctx[3] & TASK_DEAD) {
		bpf_map_delete_elem(&THREADS, &prev[0]);
	} else if (t) {
		t->cpu += now - t->since;
		t->since = now;
		t->woken = 0;
		t->waker = 0;
		t->state = RUNNABLE;
		if (!ctx[0] && (__u32)ctx[3]) {
			t->state = BLOCKED;
			t->suspended = suspension(ctx[3], ((struct task_struct *)ctx[1])->jobctl);
			last_call(facts, &call);
			begin_wait(t, t->suspended ? 0 : futex_of(&call), now);
			t->selected = selected_by(&call);
		} else {
			begin_runnable(t, (void *)ctx[1]);
		}
	}
#endif
	if (!to_ours)
		return 0;
	t = bpf_map_lookup_elem(&THREADS, &next[0]);
	if (!t) {
		if (bpf_map_lookup_elem(&PROCS, &next[1]))
			add_thread(next[0], next[1], now, RUNNING, facts->period);
		return 0;
	}
	d = now - t->since;
	if (t->state == BLOCKED) {
		if (t->woken > t->since) {
			blocked = t->woken - t->since;
			if (blocked > d)
				blocked = d;
		}
#ifndef LINUX_5_8
		else {
			blocked = d;
			t->waker = t->waker_pid = 0;
			account_blocked(t, facts, blocked, now);
		}
#endif
	}
#ifndef LINUX_5_8
	if (t->state == RUNNABLE)
		throttled = end_runnable(t, d);
	weight = throttled ? account(throttled, facts->period, &t->until_throttled, &t->step_throttled) : 0;
	if (weight) {
		t->take_throttled += weight;
		t->throttled_length = throttled;
	}
#endif
	t->state = RUNNING;
	t->since = now;
	if (t->wants_lock) {
		t->wants_lock = 0;
		t->got_lock = now;
	}
	d -= blocked + throttled;
	weight = account(d, facts->period, &t->until_runnable, &t->step_runnable);
	if (weight) {
		t->take_runnable += weight;
		t->runnable_length = d;
	}
#ifdef LINUX_5_8
	if (t->take_runnable | t->take_blocked | t->timed_out) {
		struct turn *turn = bpf_map_lookup_elem(&TURN, &zero);

		if (turn)
			turn->selected = 1;
	}
#else
	if (!(t->take_runnable | t->take_blocked | t->take_throttled | t->timed_out) || t->scheduled)
		return 0;
	t->kernel = 0;
	if (facts->want_kernel) {
		d = bpf_get_task_stack((void *)ctx[2], t->stack, MAX_KERNEL * 8, 0);
		if ((__s64)d > 0)
			t->kernel = d / 8;
	}
	t->scheduled = 1;
	if (schedule((void *)ctx[2], &t->work, resumed))
		t->scheduled = 0;
#endif
	return 0;
}
