// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Programs at wake-ups: when a wait ended, and the stack of the thread that ended it.

// Submits the stack of the current thread, which wakes thread `tid`. If an interrupt does, the kernel's part says so, and
// the rest has nothing to do with it.
static __always_inline void waker_stack(__u64 *ctx, struct kernel_facts *facts, __u32 tid, __u64 woken)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 zero = 0, pid = id >> 32, slot = claim_any();
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	struct turn *turn = bpf_map_lookup_elem(&TURN, &zero);
	struct cache *c;
	struct head *h;
	char *area;
	long n;

	if (slot == MAX_WORKS)
		return;
	area = scratch(facts->cpus + slot);
	c = cache(facts->cpus + slot);
	h = (void *)area;
	if (area && c && turn) {
		h->time = h->woken = woken;
		h->pid = pid;
		h->tid = id;
		h->flags = IN_KERNEL | WAKER;
		h->waker = tid;
		h->cpu = h->runnable = h->blocked = 0;
		h->kernel = 0;
		if (facts->wakers) {
			n = bpf_get_stack(ctx, area + HEAD, MAX_KERNEL * 8, 0);
			if (n > 0)
				h->kernel = n / 8;
		}
		if (lay) {
			user_registers(h, facts);
		} else {
			lay = &((struct state *)(area + STATE))->lay;
			__builtin_memset(lay, 0, sizeof(*lay));
		}
		snapshot(facts->cpus + slot, area, c, lay, facts, turn, woken, 0);
	}
	release(slot);
}

// Runs in the thread that wakes another one.
EVENT("sched_waking")
int waking(__u64 *ctx)
{
	__u32 zero = 0, woken[2] = {}, tid, tgid = 0;
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct gils *gils = 0;
	struct thread *t, *by;
	struct {
		__u64 state;
		__u32 locked, pad;
	} held = {};
	__u64 len, id, lock;
	__u32 tid_of_waker;
	int is_lock = 0;

	if (!facts || !facts->ids || !facts->period)
		return 0;
	READ_IDS(woken, ctx[0]);
	if (!is_ours(woken))
		return 0;
	tid = woken[0];
	t = bpf_map_lookup_elem(&THREADS, &tid);
	if (!t || t->state != BLOCKED || t->woken)
		return 0;
	t->woken = bpf_ktime_get_ns();
#ifdef LINUX_5_8
	begin_wait(t, t->next_futex, t->since);
#endif
	id = bpf_get_current_pid_tgid();
	t->waker = id;
	t->waker_pid = id >> 32;
	len = t->woken > t->since ? t->woken - t->since : 0;
	if (t->futex) {
		tgid = t->tgid;
		gils = bpf_map_lookup_elem(&INTERPRETER_LOCKS, &tgid);
		lock = gils ? interpreter_lock(tgid, t->futex) : 0;
		if (gils && lock) {
			struct system_call call = {};

			last_call(facts, &call);
			// The mutex is also taken to release the lock.
			t->wants_lock = is_within(gils, lock, t->futex, CONDITION);
			len += t->pending;
			bpf_probe_read_user(&held, sizeof(held), (void *)(lock + gils->last_holder));
			// A timer's interrupt may hit any thread, one that waits at this futex, too. And threads that stop waiting at
			// a condition variable pass on signals that were not for them, and its mutex, while the lock is held.
			if (call.number != FUTEX || call.first != t->futex || !(FUTEX_WAKES >> (call.second & 31) & 1) ||
			    (held.locked == 1 && is_within(gils, lock, t->futex, CONDITION_AND_MUTEX))) {
				t->pending = len;
				t->timed_out = 1;
				return 0;
			}
			t->pending = 0;
			is_lock = 1;
			tid_of_waker = t->waker;
			by = bpf_map_lookup_elem(&THREADS, &tid_of_waker);
			note_holder(gils, lock, t->futex, t->waker, held.state, by ? by->got_lock : 0, t->woken);
		}
	}
	if (!account_blocked(t, facts, len, t->woken))
		return 0;
	if (is_lock) {
		t->take_blocked += t->late;
		t->late = 0;
	}
	if (facts->wakers || is_lock)
		waker_stack(ctx, facts, tid, t->woken);
	return 0;
}
