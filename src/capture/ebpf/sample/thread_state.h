// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// The thread state of a thread, the locks of its interpreters, and its registers at the entry to the kernel.

// Where a thread state runs code: 1, on this stack; -1, on another one; 0, it runs none, or that is not known.
static __always_inline int place(struct layout *lay, __u64 state, __u64 from, __u64 to)
{
	__u64 at;

	if (!lay->lent || lay->lent == ABSENT || !to)
		return 0;
	at = user_word(state + lay->lent);
	if (!at || at == state + lay->cframe_root)
		return 0;
	return at >= from && at < to ? 1 : -1;
}

// Is it a state of this thread? One names its thread, but another one may run it.
static __always_inline int is_own(struct layout *lay, __u64 state, __u64 tp, __u64 from, __u64 to)
{
	int where = place(lay, state, from, to);

	return where > 0 || (!where && user_word(state + lay->thread_id) == tp);
}

// `from`, `to`: the part of the thread's stack that is in use.
static __always_inline __u64 thread_state(struct layout *lay, __u64 tp, __u64 from, __u64 to)
{
	__s32 key = -1;
	__u64 state = 0, block;

	// The attached thread state of this thread, if it is the one that runs Python (subinterpreters before 3.12).
	if (lay->current) {
		state = user_word(lay->runtime + lay->current);
		if (state && is_own(lay, state, tp, from, to))
			return state;
	}
	if (lay->tls == TLS_OFFSET) {
		state = user_word(tp + DESCRIPTOR(lay) + (__s64)(__s32)lay->tls_specific);
	} else if (lay->tls >= TLS_BLOCK_GLIBC) {
		// The thread's vector of blocks (System V ABI for thread-local storage, 3.4.6); glibc's entries have two words. A
		// block that is not there yet is 0 or -1.
		block = user_word(lay->runtime + (__s64)(__s32)lay->key);
		if (!block || block > 4095)
			return 0;
		block = user_word(user_word(tp + DESCRIPTOR(lay) + TLS_VECTOR) + (block << (lay->tls == TLS_BLOCK_GLIBC ? 4 : 3)));
		if (!block || block == ~0ULL)
			return 0;
		state = user_word(block + lay->tls_specific);
	} else if (!lay->tls || bpf_probe_read_user(&key, 4, (void *)(lay->runtime + lay->key)) || key < 0 ||
		   key > 1023) {
		return 0;
	} else if (lay->tls == TLS_KEY_GLIBC) {
		// nptl/descr.h: struct pthread.specific[key / 32] -> {seq, data} pairs
		block = user_word(tp + lay->tls_specific + 8 * (key >> 5));
		if (!block)
			return 0;
		state = user_word(block + 16 * (key & 31) + 8);
	} else if (lay->tls == TLS_KEY_MUSL) {
		block = user_word(tp + lay->tls_specific);
		if (!block)
			return 0;
		state = user_word(block + 8 * key);
	}
	// Before the interpreter made its key, slot 0 may hold anything.
	if (state && !is_own(lay, state, tp, from, to))
		return 0;
	return state;
}

#define NEWEST 32                 // thread states that are searched for one
#define MAIN 8                    // list of interpreters -> main one

// A state of the thread, other than its own, in the newest interpreters: those come first in the list. Only where there are
// several, and up to CPython 3.11: later, a thread's own state is that of the interpreter that it runs.
__noinline __u64 newest_state(__u32 slot, __u64 tp)
{
	char *area = scratch(slot);
	struct state *s;
	__u64 interpreter, state;
	__u32 i;

	if (!area)
		return 0;
	s = (void *)(area + STATE);
	if (!s->lay.current || s->lay.interpreter == MAIN)
		return 0;
	interpreter = user_word(s->lay.runtime + s->lay.interpreter - MAIN);
	if (!interpreter || !user_word(interpreter + s->lay.interp_next))
		return 0;
	state = user_word(interpreter + s->lay.interp_threads);
	for (i = 0; i < NEWEST; i++) {
		if (!state) {
			interpreter = user_word(interpreter + s->lay.interp_next);
			if (!interpreter)
				return 0;
			state = user_word(interpreter + s->lay.interp_threads);
			continue;
		}
		if (state != s->states[0] && user_word(state + s->lay.thread_id) == tp)
			return state;
		state = user_word(state + s->lay.tstate_next);
	}
	return 0;
}

// Interpreter locks of a process: `struct _gil_runtime_state`, 0 where there are fewer.
struct gils {
	__u64 at[MAX_GILS];
	__u32 len;                // bytes, up to the last futex in it
	__u32 last_holder;        // -> thread state, followed by whether the lock is held, 4 bytes
	__u32 in_interpreter;     // interpreter -> its lock; 0: all have the first one
	__u32 pad;
	// Releases while another thread waited, the latest one before `released`. The locks themselves keep the releases of one
	// lock apart. A release is not seen where all waiting threads have been woken by timers already; who held the lock when
	// those wake up (HOLDS) is in the list, too.
	__u64 released;
	struct {
		__u64 time, lock, who;
		__u64 since;      // it had waited for the lock until then, 0: not known
		__u64 state;      // its thread state
		__u64 first;      // `time` is when it was last seen to hold or release it, this when at first
	} releases[RELEASES];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_LOCKED);
	__uint(map_flags, HASH_FLAGS);
	__type(key, __u32);       // process id
	__type(value, struct gils);
} INTERPRETER_LOCKS SEC(".maps");

// Sets `holds` if the thread state holds the lock of its interpreter.
TURN(holds_own_lock)
{
	char *area = scratch(slot);
	struct gils *gils;
	struct state *s;
	struct {
		__u64 holder;
		__u32 locked, pad;
	} lock;
	__u64 state, at;
	__u32 which, pid;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	which = s->which;
	pid = ((struct head *)area)->pid;
	gils = bpf_map_lookup_elem(&INTERPRETER_LOCKS, &pid);
	if (!gils || which > (s->lay.lent == ABSENT ? s->named : s->nested) || which > MAX_NESTED)
		return 1;
	state = s->states[which];
	at = gils->at[0];
	// With one lock only it is not searched for.
	if (gils->in_interpreter && gils->at[1])
		at = user_word(user_word(state + s->lay.state_interp) + gils->in_interpreter);
	// The holder stays noted when it releases the lock.
	s->holds = !bpf_probe_read_user(&lock, sizeof(lock), (void *)(at + gils->last_holder)) && lock.locked == 1 &&
		   lock.holder == state;
	s->which = which + 1;
	return s->holds;
}

// Does one of the thread states hold the lock of its interpreter?
static __always_inline int holds_lock(__u32 slot, __u32 pid)
{
	char *area = scratch(slot);
	struct state *s;

	if (!area || !bpf_map_lookup_elem(&INTERPRETER_LOCKS, &pid))
		return 0;
	s = (void *)(area + STATE);
	s->which = s->holds = 0;
	LOOP(1 + MAX_NESTED, holds_own_lock, slot);
	return s->holds;
}

// Appends a thread state to those of the thread, if it is another one. `lent`: if it names another thread, and this one runs it.
// True if there is no room.
static __always_inline int add_nested(struct state *s, __u64 other, int lent)
{
	__u32 n = s->nested;
	int named;

	if (other == s->states[0])
		return 0;
	named = user_word(other + s->lay.thread_id) == s->thread;
	// Where no CFrame says which thread runs a state, the reader finds out whose frames these are.
	if (named == lent || place(&s->lay, other, s->stack_from, s->stack_to) < (lent && s->lay.lent != ABSENT))
		return 0;
	if (n >= MAX_NESTED) {
		s->too_nested = 1;
		return 1;
	}
	s->states[1 + n] = other;
	s->nested = n + 1;
	return 0;
}

// Appends the further thread states in the next part of the list of a thread, or of any (0).
static __always_inline int find_some(__u32 slot, int lent)
{
	char *area = scratch(slot);
	struct nested_key key = {};
	struct nested *nested;
	struct state *s;
	__u32 i;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	key.thread_pointer = lent ? 0 : s->thread;
	key.pid = ((struct head *)area)->pid;
	key.part = s->which++;
	nested = bpf_map_lookup_elem(&NESTED_STATES, &key);
	for (i = 0; i < NESTED_PART; i++)
		if (!nested || !nested->states[i] || add_nested(s, nested->states[i], lent))
			return 1;
	return 0;
}

TURN(find_nested) { return find_some(slot, 0); }

TURN(find_lent) { return find_some(slot, 1); }

// The user registers of the current thread, which is in the kernel: they lie at the top of its kernel stack. False if they are
// not found.
static __always_inline int registers_at_entry(struct kernel_facts *facts, __u64 *regs, __u64 len)
{
	__u64 top = 0;
	int i;

	if (!facts->stack || bpf_probe_read_kernel(&top, 8, (void *)(bpf_get_current_task() + facts->stack)) || !top)
		return 0;
	for (i = 0; i < PLACES; i++)
		if (!bpf_probe_read_kernel(regs, len, (void *)(top + KERNEL_STACK - PLACE(i))) && IN_USER_MODE(regs))
			return 1;
	return 0;
}
