// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Intervals off the CPU: their weights, and who held the interpreter lock meanwhile.

// Adds an interval of one kind. Returns the weight of the sample to take for it, 0: none.
static __always_inline __u64 account(__u64 len, __u64 period, __s64 *until, __u64 *step)
{
	__u64 weight = 0;
	int i;

	if (len >= period)
		return len;
	*until -= len;
	// Two ticks at most: they are half a period apart or more.
	for (i = 0; i < 2 && *until <= 0; i++) {
		weight += *step;
		*step = period / 2 + bpf_get_prandom_u32() % (period + 1);
		*until += *step;
	}
	return weight;
}

// A blocked interval of the thread has ended at `woken`. True if a sample is to be taken for it.
static __always_inline int account_blocked(struct thread *t, struct kernel_facts *facts, __u64 len, __u64 woken)
{
	__u64 weight;

	if (len < facts->min_blocked)
		return 0;
	weight = account(len, facts->period, &t->until_blocked, &t->step_blocked);
	if (!weight)
		return 0;
	t->take_blocked += weight;
	t->blocked_length = len;
	t->take_woken = woken;
	t->take_suspended = t->suspended;
	t->take_waker = t->waker;
	t->take_waker_pid = t->waker_pid;
	return 1;
}

static __always_inline struct thread *add_thread(__u32 tid, __u32 tgid, __u64 now, __u32 state, __u64 period)
{
	__u32 zero = 0;
	struct thread *t = bpf_map_lookup_elem(&NEW_THREAD, &zero);

	if (!t)
		return 0;
	t->since = now;
	t->state = state;
	t->tgid = tgid;
	t->until_runnable = t->step_runnable = 1 + bpf_get_prandom_u32() % period;
	t->until_blocked = t->step_blocked = 1 + bpf_get_prandom_u32() % period;
	t->until_throttled = t->step_throttled = 1 + bpf_get_prandom_u32() % period;
	bpf_map_update_elem(&THREADS, &tid, t, BPF_NOEXIST);
	t = bpf_map_lookup_elem(&THREADS, &tid);
	// More threads than there is room for.
	if (!t)
		count(COUNT_LOST, 1);
	return t;
}

// The interpreter lock of a process that this futex belongs to, 0: none. (Not static: as walk_chain.)
__noinline __u64 interpreter_lock(__u32 pid, __u64 futex)
{
	struct gils *gils = bpf_map_lookup_elem(&INTERPRETER_LOCKS, &pid);
	int i;

	if (!gils)
		return 0;
	for (i = 0; i < MAX_GILS; i++) {
		if (!gils->at[i])
			break;
		if (futex - gils->at[i] < gils->len)
			return gils->at[i];
	}
	return 0;
}

#ifdef LINUX_5_8
// (Before 5.12 programs cannot compare and exchange.)
static __always_inline long claim(__u32 i)
{
	return !bpf_map_update_elem(&SLOTS, &i, &i, BPF_NOEXIST);
}

static __always_inline void release(__u32 slot)
{
	bpf_map_delete_elem(&SLOTS, &slot);
}
#else
static __always_inline long claim(__u32 i)
{
	__u32 *busy = bpf_map_lookup_elem(&SLOTS, &i);

	return busy && !__sync_val_compare_and_swap(busy, 0, 1);
}

static __always_inline void release(__u32 slot)
{
	__u32 *busy = bpf_map_lookup_elem(&SLOTS, &slot);

	if (busy)
		*busy = 0;
}
#endif

// A scratch area that is not in use; MAX_WORKS if there is none. (Inlined, it would make the verifier go through what follows
// once for each area.)
__noinline int claim_any(void)
{
	__u32 i;

	for (i = 0; i < MAX_WORKS; i++)
		if (claim(i))
			return i;
	return MAX_WORKS;
}

// Parts of a lock with a futex (Include/internal/pycore_gil.h, v3.7 to v3.15): the condition variable that threads wait at, 48
// bytes, and its mutex, 40 bytes. Behind them is what a thread waits for that has released the lock on request.
#define CONDITION 48
#define CONDITION_AND_MUTEX 88

static __always_inline int is_within(struct gils *gils, __u64 lock, __u64 futex, __u64 len)
{
	return futex - lock - gils->last_holder - 24 < len;
}

// Notes that a thread has released an interpreter lock for which a thread waits at this futex, or with HOLDS that it holds it.
// `state`: its thread state.
static __always_inline void note_holder(struct gils *gils, __u64 lock, __u64 futex, __u64 who, __u64 state, __u64 since, __u64 now)
{
	__u64 at = gils->released, last = at - 1, before;

	if (!is_within(gils, lock, futex, CONDITION_AND_MUTEX))
		return;
	BOUND(at, RELEASES - 1);
	BOUND(last, RELEASES - 1);
	// No other thread was seen to hold it since.
	if (gils->releases[last].lock == lock && gils->releases[last].state == state) {
		at = last;
		before = gils->releases[last].who;
		if (who & THREAD_STATE && !(before & THREAD_STATE))
			who = (before & ~HOLDS) | (who & HOLDS);
		if (gils->releases[last].since)
			since = gils->releases[last].since;
	} else {
		gils->released++;
		gils->releases[at].first = now;
	}
	gils->releases[at].state = state;
	gils->releases[at].time = now;
	gils->releases[at].lock = lock;
	gils->releases[at].who = who;
	gils->releases[at].since = since;
}

// A search through the releases of a lock, the latest one first. It lies in the scratch area, as the state of the other loops.
struct holders {
	__u64 lock, began, woken;
	__u64 until, who;         // when the holder that was found last released it
	__u64 since;              // when that one had it at the earliest
	__u32 i, n;
};

static __always_inline void add_holder(struct head *h, struct holders *f, __u64 since)
{
	__u64 n = f->n;

	if (n >= MAX_HOLDERS)
		return;
	BOUND(n, 15);
	if (n >= MAX_HOLDERS)
		return;
	h->holders[n].who = f->who & ~HOLDS;
	h->holders[n].time = f->until - since;
	f->n++;
}

TURN(one_release)
{
	char *area = scratch(slot);
	struct head *h = (void *)area;
	struct holders *f;
	struct gils *gils;
	__u64 at, time, who, start;
	__u32 pid;

	if (!area)
		return 1;
	f = (void *)(area + STATE);
	pid = h->pid;
	gils = bpf_map_lookup_elem(&INTERPRETER_LOCKS, &pid);
	if (!gils)
		return 1;
	at = gils->released - 1 - f->i++;
	BOUND(at, RELEASES - 1);
	time = gils->releases[at].time;
	who = gils->releases[at].who;
	if (gils->releases[at].lock != f->lock || gils->releases[at].first > f->woken)
		return 0;
	if (time > f->woken)
		time = f->woken;
	start = time > f->began ? time : f->began;
	if (f->until) {
		// One that was seen to hold it did so until the next one had it.
		if (who & HOLDS && f->since > start && f->since <= f->until)
			start = f->since;
		add_holder(h, f, start);
	} else if (who & HOLDS) {
		start = f->woken;
	}
	f->until = start;
	f->who = who;
	f->since = gils->releases[at].since;
	if (time > f->began)
		return 0;
	if (!(who & HOLDS) || start <= f->began)
		f->until = 0;
	return 1;
}

// Which threads held the lock while a thread waited for it from `began` to `woken`. They held it until they released it.
__noinline int find_holders(__u32 slot, __u64 lock, __u64 began, __u64 woken)
{
	char *area = scratch(slot);
	struct holders *f;

	if (!area)
		return 0;
	f = (void *)(area + STATE);
	f->lock = lock;
	f->began = began;
	f->woken = woken;
	f->until = f->since = f->i = f->n = 0;
	LOOP(RELEASES, one_release, slot);
	// No earlier release is known, or it held the lock when the wait began.
	if (f->until)
		add_holder((void *)area, f, began);
	return 0;
}
