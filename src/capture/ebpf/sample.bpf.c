// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// One snapshot of the running thread per tick of its CPU: user registers, the interpreter's frame chain, the user
// stack, kernel return addresses; and the names of code objects that are new. Runs at the sample instant,
// in the context of the sampled thread, and only reads. Ticks in processes that are neither in PROCS nor admitted by the rules
// of a whole host end at once.
// Its work is bounded: MAX_STACKS * MAX_STACK bytes of stack, MAX_FAULTS unreadable pages (and FAULTS_OF_REST in each further
// record), MAX_FRAMES frames, MAX_COPIES code objects.
//
// The headers below sample/ are parts of this program, in the order of its text. `struct layout`, `struct head` and
// `struct code_head` are mirrored in cpython_layout.rs and abi.rs.
//
// Compiled twice. With LINUX_5_8 for kernels from 5.8 on, which need not have bpf_loop (5.17), dynptrs (5.19), hash maps
// that allocate at a tick (6.1), or task works that programs schedule (6.18): records and bounds are the same, and stacks of
// threads that were off the CPU are taken at a kprobe.

#include <linux/bpf.h>
#include <linux/bpf_perf_event.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "sample/cpu.h"
#include "sample/records.h"
#include "sample/host.h"
#include "sample/programs.h"
#include "sample/code_objects.h"
#include "sample/tasks_and_spans.h"
#include "sample/frame_walk.h"
#include "sample/write.h"
#include "sample/thread_state.h"
#include "sample/off_cpu_threads.h"
#include "sample/dispatchers.h"

// Is there a thread's descriptor where the thread pointer points to? Others set it to other things (Go without C), below which
// there may be much that is not this thread's stack. Close by that does not matter.
static __always_inline int is_descriptor(__u64 tp, __u64 distance)
{
	return distance <= 65536 || !BEGINS_WITH_ADDRESS || user_word(tp) == tp;
}

// End of the goroutine's stack that the thread runs on, 0 if it is on none: `g` begins with the stack's bounds
// (runtime/runtime2.go, Go 1.16 to 1.25).
static __always_inline __u64 goroutine_end(struct head *h)
{
	__u64 bounds[2], sp = h->regs[SP];

	if (bpf_probe_read_user(bounds, sizeof(bounds), (void *)GOROUTINE(h)) || bounds[0] > sp || bounds[1] <= sp)
		return 0;
	return bounds[1];
}

// Where the stack ends: argc in the main thread, the thread descriptor in the others (glibc and musl put it above the stack). 0:
// not known (signal stacks, coroutines).
static __always_inline __u64 stack_end(struct layout *lay, __u64 sp, __u64 tp)
{
	if (lay->stack_end >= sp && lay->stack_end - sp < (64ULL << 20))
		return lay->stack_end + 8;
	return tp > sp && tp - sp < (1ULL << 30) ? tp : 0;
}

// Takes everything but the registers and the kernel stack, which are in `h`, and submits the record.
static __always_inline void snapshot(__u32 slot, char *area, struct cache *c, struct layout *lay,
				     struct kernel_facts *facts, struct turn *turn, __u64 began, int is_new)
{
	__u64 task = bpf_get_current_task(), tp = 0, sp, end, size;
	struct head *h = (void *)area;
	struct state *s = (void *)(area + STATE);

	if (host_rules) {
		h->flags |= HOST;
		h->cgroup = bpf_get_current_cgroup_id();
		process_name(facts, h->comm);
	}
	s->urgent = 0;
	s->copies = MAX_COPIES;
	c->sample++;
	if (facts->fsbase)
		bpf_probe_read_kernel(&tp, 8, (void *)(task + facts->fsbase));
	tp -= DESCRIPTOR(lay);
	h->thread_pointer = tp;

	if (want_spans && !(h->flags & WAKER))
		copy_context(slot);

	h->frames = h->anchors = 0;
	h->walk = WALK_NONE;
	s->at = HEAD + 8 * (__u64)h->kernel;
	h->frames_at = s->at;
	if (want_workers && lay->runtime && !(h->flags & (OFF_CPU | WAKER)) && find_dispatcher(slot)) {
		h->flags |= WORKER;
		tp = s->dispatcher;
	}
	if (lay->runtime) {
		__u64 from = 0, to = 0, state, begin = 0;
		struct nested_key key = { .thread_pointer = tp, .pid = h->pid };
		struct nested *nested;

		// (A worker's registers are not those of the thread that gave it work.)
		if (h->flags & REGS_OK && !(h->flags & WORKER)) {
			from = h->regs[SP];
			to = stack_end(lay, from, tp);
		}
		state = thread_state(lay, tp, from, to);
		nested = state || !lay->tls || lay->lent ? bpf_map_lookup_elem(&NESTED_STATES, &key) : 0;
		// (Or where the thread keeps a lent one that runs nothing.)
		if (!state && nested && is_own(lay, nested->states[0], tp, from, to))
			state = nested->states[0];
		if (state) {
			s->lay = *lay;
			s->instr_unused = lay->instr_size == 4 ? 32 : 0;
			s->ends = (lay->frame_owner != ABSENT ? 0xffULL << 32 : 0) | (lay->frame_entry != ABSENT ? 0xffULL << 40 : 0);
			s->states[0] = state;
			s->thread = tp;
			s->stack_from = from;
			s->stack_to = to;
			s->nested = s->too_nested = s->which = 0;
			if (nested)
				LOOP(NESTED_PARTS, find_nested, slot);
			s->which = 0;
			s->named = s->nested;
			if (lay->lent)
				LOOP(NESTED_PARTS, find_lent, slot);
			// What was copied of it before may be forgotten: it may have exited before it was known.
			if (h->flags & NEW)
				c->pid = 0;
			begin_epoch(lay, c, h->pid, nested ? 0 : state);
			if (h->flags & WORKER)
				begin = position(lay, state);
			s->n = 0;
			h->walk = WALK_COMPLETE;
			s->which = 0;
			LOOP(1 + MAX_NESTED, walk_state, slot);
			// A subinterpreter that the thread runs since the lists were read.
			if (!s->n && s->nested < MAX_NESTED) {
				__u64 other = newest_state(slot, tp);
				__u32 last = s->nested;

				if (other && last < MAX_NESTED) {
					s->states[1 + last] = other;
					s->nested = 1 + last;
					walk_frames(slot, 1 + last);
				}
			}
			if (s->too_nested)
				h->walk = WALK_DEEP;
			// The thread's first state is the attached one, if that is any of its states.
			if (lay->current && !(h->flags & WORKER) && user_word(lay->runtime + lay->current) != state)
				h->flags |= DETACHED;
			h->frames = s->n;
			copy_tasks(slot);
			// (A worker's sample belongs to the span of the thread that gave it work.)
			if (want_spans && !(h->flags & WAKER))
				copy_span(slot);
			s->n = 0;
			s->which = 0;
			if (lay->cframe != ABSENT)
				LOOP(1 + MAX_NESTED, walk_state_anchors, slot);
			h->anchors = s->n;
			// The dispatcher has continued meanwhile.
			if (h->flags & WORKER && begin != position(lay, state)) {
				h->frames = h->anchors = 0;
				h->walk = WALK_NONE;
				s->at = h->frames_at;
			}
		}
		if (!h->frames)
			h->flags &= ~WORKER;
		tp = h->thread_pointer;
	}

	if (h->walk != WALK_NONE && !(h->flags & WORKER) && holds_lock(slot, h->pid))
		h->flags |= HOLDS_LOCK;
	// The process may have begun to run Python, or another program: the reader has to check first.
	// On a whole host only one that is not known is waited for, since it may exit, or one that runs Python.
	if ((is_new || (h->walk != WALK_COMPLETE && (!host_rules || lay->runtime))) &&
	    began - turn->woken > MIN_WAKE_UP_INTERVAL) {
		turn->woken = began;
		s->urgent = 1;
	}
	sp = h->regs[SP] - RED_ZONE;
	s->from = s->last_end = sp;
	s->faults = s->careful = s->cross_holes = 0;
	if (h->flags & REGS_OK) {
		// Where the stack ends: argc in the main thread, the thread descriptor in the others (glibc and musl put
		// it above the stack), what Go says of a goroutine's; anywhere else (signal stacks, coroutines) an
		// estimate. More than one record's worth, and more after a long hole, only where it is known; where the
		// stack is that of a main thread that is not known yet; or where Python is deep.
		size = MAX_STACKS * MAX_STACK;
		s->cross_holes = 1;
		if (lay->stack_end >= sp && lay->stack_end - sp < (64ULL << 20)) {
			end = lay->stack_end + 8;
		} else if (tp > sp && tp - sp < (1ULL << 30) && is_descriptor(tp, tp - sp)) {
			end = tp;
			// (A stack of the default size or less. What is not on it is further away, or it is small.)
			s->cross_holes = tp - sp <= size;
			if (!s->cross_holes && h->frames <= DEEP_FRAMES)
				size = MAX_STACK;
		} else if (sp < USER_END && USER_END - sp < MAIN_STACKS) {
			end = USER_END;
		} else {
			end = goroutine_end(h);
			if (!end) {
				end = sp + 65536;
				s->cross_holes = 0;
			}
		}
		if (end - sp > size)
			end = sp + size;
		s->last_end = end;
	}
	write(slot, h, s);
	if (h->flags & MORE)
		LOOP(MAX_STACKS - 1, write_rest, slot);
	count(COUNT_SAMPLES, 1);
	count(COUNT_TIME, bpf_ktime_get_ns() - began);
}

// How many events this CPU has counted since the last sample's. (The period in force is not how many: a new one
// takes effect at the next event, and this one is a sample at once.)
static __always_inline __u64 events_since_last(struct bpf_perf_event_data *ctx, struct turn *turn)
{
	struct bpf_perf_event_value now = {};
	__u64 events;

	if (bpf_perf_prog_read_value(ctx, &now, sizeof(now)))
		return ctx->sample_period;
	events = now.counter - turn->counted;
	turn->counted = now.counter;
	return events;
}

SEC("perf_event")
int sample(struct bpf_perf_event_data *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), task, events = 0;
	__u32 pid = id >> 32, zero = 0, slot;
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	int is_new = !lay;
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct turn *turn;
	struct cache *c;
	struct head *h;
	char *area;
	long n;

	// Of each sample, also of other processes: theirs stand for the events before them.
	turn = bpf_map_lookup_elem(&TURN, &zero);
	if (facts && turn && facts->counted)
		events = events_since_last(ctx, turn);
	// Most ticks of a busy machine, and those of an idle CPU: nothing else is done in other processes.
	if (is_new && !(host_rules && facts && is_admitted(facts, pid)))
		return 0;
	slot = bpf_get_smp_processor_id();
	area = scratch(slot);
	c = cache(slot);
	if (!area || !c || !facts || !turn)
		return 0;
	h = (void *)area;
	task = bpf_get_current_task();
	if (facts->ticks > 1) {
		if (!turn->left) {
			turn->left = facts->ticks;
			turn->chosen = bpf_get_prandom_u32() % facts->ticks;
		}
		turn->left--;
		if (turn->left != turn->chosen)
			return 0;
	}
	h->time = bpf_ktime_get_ns();
	h->pid = pid;
	h->tid = id;
	h->flags = 0;
	h->kernel = 0;
	h->cpu = events;
	h->runnable = h->blocked = 0;
	if (facts->off_cpu)
		used_cpu(h, id);

	if (EVENT_IN_USER_MODE(ctx)) {
		__builtin_memcpy(h->regs, &ctx->regs, 8 * EVENT_REGS);
		for (n = EVENT_REGS; n < REGS; n++)
			h->regs[n] = -1ULL; // in no system call
		h->flags = REGS_OK;
	} else {
		// The user registers lie at the top of the thread's kernel stack.
		__u64 top = 0;
		int i;

		h->flags = IN_KERNEL;
		if (facts->stack && !bpf_probe_read_kernel(&top, 8, (void *)(task + facts->stack)) && top)
			top += KERNEL_STACK;
		else
			top = (EVENT_SP(ctx) | (KERNEL_STACK - 1)) + 1;
		for (i = 0; i < PLACES; i++) {
			if (h->flags & REGS_OK)
				break;
			if (!bpf_probe_read_kernel(h->regs, sizeof(h->regs), (void *)(top - PLACE(i))) && IN_USER_MODE(h->regs))
				h->flags |= REGS_OK;
		}
		if (facts->want_kernel) {
			n = bpf_get_stack(ctx, area + HEAD, MAX_KERNEL * 8, 0);
			if (n > 0)
				h->kernel = n / 8;
		}
	}
	// Threads of the kernel have none.
	if (is_new && !(h->flags & REGS_OK))
		return 0;
	if (is_new)
		lay = layout_of_new(h);
	if (!lay)
		return 0;
	snapshot(slot, area, c, lay, facts, turn, h->time, is_new);
	return 0;
}

#include "sample/off_cpu_intervals.h"
#include "sample/off_cpu.h"
#include "sample/wake_ups.h"
#include "sample/new_threads.h"
#include "sample/calibrate.h"
#include "sample/rss_spaces.h"
#include "sample/rss.h"
#include "sample/allocations.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";
