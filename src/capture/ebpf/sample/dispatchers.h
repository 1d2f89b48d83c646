// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0

// Native workers.
//
// A thread without Python frames may work for one that has some: its dispatcher, whose Python frames are then taken at the
// worker's tick, in the same instant. That can be done as both have the same memory. A dispatcher that waits for its workers
// is in the call that gave them the work, so its frames do not change meanwhile; they are dropped if they do.
// (Registers and native stack of the dispatcher at the wake-up would have to be taken at each wake-up, and would say nothing
// of pools that spin.)
//
// Which thread that is:
// 1. The one whose stack the worker's registers and stack point to most often. Pools that wait for their workers (OpenMP,
//    OpenBLAS, oneTBB, Rayon) keep the description of the job on the dispatcher's stack. This needs no wake-up, so it is
//    right also where workers spin between jobs, and where several threads take turns with one pool.
// 2. The one that woke the worker last, while it is still in the same place of its Python code; if another worker did so, the
//    dispatcher of that one at the time.
// 3. The one that created the worker, in the same sense.

// Whether the Python frames of the threads that give work to threads without such frames are taken. Set by the loader: if it is
// 0, the verifier leaves out all that follows.
const volatile __u32 want_workers = 0;

struct dispatcher {
	__u64 thread_pointer;
	__u64 position;           // in its Python code, at the wake-up
	__u32 tid, pad;
};

struct worker {
	struct dispatcher last;   // the thread that woke or created it last; all 0 if that is not known
	__u64 inherited[INHERITED];
};

// By thread id.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);   // the loader sets it
	__type(key, __u32);
	__type(value, struct worker);
} WORKERS SEC(".maps");

// Where the innermost part of the stack of a thread with Python frames lies.
struct chunk {
	__u32 pid, number;        // address >> CHUNK_BITS
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);   // the loader sets it
	__type(key, struct chunk);
	__type(value, struct dispatcher);
} PYTHON_STACKS SEC(".maps");

// The thread state of a thread, also where it is known by the list of them only.
static __always_inline __u64 any_thread_state(struct layout *lay, __u32 pid, __u64 tp)
{
	struct nested_key key = { .thread_pointer = tp, .pid = pid };
	__u64 state = thread_state(lay, tp, 0, 0);
	struct nested *nested;

	if (state || lay->tls)
		return state;
	nested = bpf_map_lookup_elem(&NESTED_STATES, &key);
	if (nested && user_word(nested->states[0] + lay->thread_id) == tp)
		return nested->states[0];
	return 0;
}

// The innermost Python frame of a thread state, 0: it runs none.
static __always_inline __u64 innermost(struct layout *lay, __u64 state)
{
	__u64 frame = user_word(state + lay->first);

	if (lay->cframe_frame != ABSENT)
		return user_word(frame + lay->cframe_frame);
	return lay->base_frame != ABSENT && frame == user_word(state + lay->base_frame) ? 0 : frame;
}

// Where a thread is in its Python code: as a number that changes when it continues.
static __always_inline __u64 position(struct layout *lay, __u64 state)
{
	__u64 frame = innermost(lay, state);

	return frame ? frame * 0x9e3779b97f4a7c15ULL + user_word(frame + lay->frame_instr) : 0;
}

// Notes where the stack of a thread with Python frames lies: the part that its native functions use.
static __always_inline void note_stack(__u32 pid, struct dispatcher *thread, __u64 sp)
{
	struct chunk chunk = { .pid = pid, .number = sp >> CHUNK_BITS };

	bpf_map_update_elem(&PYTHON_STACKS, &chunk, thread, BPF_ANY);
	chunk.number++;
	bpf_map_update_elem(&PYTHON_STACKS, &chunk, thread, BPF_ANY);
}

// The thread that the current thread gives work for: itself if it runs Python, else its own dispatcher.
static __always_inline void current_dispatcher(struct layout *lay, struct kernel_facts *facts, struct dispatcher *d)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tid = id;
	struct worker *mine;
	__u64 state;

	bpf_probe_read_kernel(&d->thread_pointer, 8, (void *)(bpf_get_current_task() + facts->fsbase));
	d->thread_pointer -= DESCRIPTOR(lay);
	state = any_thread_state(lay, id >> 32, d->thread_pointer);
	d->position = state ? position(lay, state) : 0;
	if (d->position) {
		d->tid = tid;
		return;
	}
	mine = bpf_map_lookup_elem(&WORKERS, &tid);
	if (mine)
		*d = mine->last;
}

// A new thread begins with registers of the thread that creates it, and its first functions save them.
static __always_inline int is_inherited(struct state *s, __u64 v)
{
	int i, found = 0;

	for (i = 0; i < INHERITED; i++)
		found |= v == s->inherited[i];
	return found;
}

// Counts which thread's stack the words of a worker point to: after Boyer and Moore, so that one counter suffices. Registers
// hold what is in use now, and count for more.
TURN(scan_words)
{
	char *area = scratch(slot);
	struct head *h = (void *)area;
	struct dispatcher *d;
	struct chunk chunk;
	struct state *s;
	__u64 at, v, sp, stack_end;
	__u32 k, weight;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	at = s->scan_at;
	sp = h->regs[SP];
	stack_end = s->lay.stack_end;
	for (k = 0; k < BATCH; k++) {
		if (at >= s->scan_end)
			return 1;
		BOUND(at, WORDS);
		if (at > STATE)
			return 1;
		v = *(__u64 *)(area + at);
		weight = at < COPY + GENERAL ? GENERAL / 8 : 1;
		at += 8;
		// What a dispatcher passes is aligned. The worker's own stack, and the environment above the main thread's, say
		// nothing.
		if (v & 7 || v >> ADDRESS_BITS || v < PAGE || v - sp < h->thread_pointer - sp || v - stack_end < MAX_STACK)
			continue;
		chunk.pid = h->pid;
		chunk.number = v >> CHUNK_BITS;
		d = bpf_map_lookup_elem(&PYTHON_STACKS, &chunk);
		// (What is above the thread descriptor is not part of the stack.)
		if (!d || v - d->thread_pointer < 2 << CHUNK_BITS || is_inherited(s, v))
			continue;
		if (s->dispatcher == d->thread_pointer) {
			s->votes += weight;
		} else if (s->votes >= weight) {
			s->votes -= weight;
		} else {
			s->dispatcher = d->thread_pointer;
			s->dispatcher_tid = d->tid;
			s->votes = weight - s->votes;
		}
	}
	s->scan_at = at;
	return 0;
}

// Finds the dispatcher of the current thread, and notes what is needed to find others'. False if it has Python frames itself,
// or its dispatcher is not known.
__noinline int find_dispatcher(__u32 slot)
{
	char *area = scratch(slot);
	struct head *h = (void *)area;
	struct worker unknown = {}, *known;
	struct dispatcher d = {};
	struct layout *lay;
	struct state *s;
	__u64 state, len, tp, sp;
	__u32 pid, tid;
	int i;

	if (!area)
		return 0;
	s = (void *)(area + STATE);
	pid = h->pid;
	tid = h->tid;
	tp = h->thread_pointer;
	lay = bpf_map_lookup_elem(&PROCS, &pid);
	if (!lay)
		return 0;
	known = bpf_map_lookup_elem(&WORKERS, &tid);
	state = any_thread_state(lay, pid, tp);
	if (state && innermost(lay, state)) {
		if (known)
			bpf_map_delete_elem(&WORKERS, &tid);
		d.thread_pointer = tp;
		d.tid = tid;
		if (h->flags & REGS_OK)
			note_stack(pid, &d, h->regs[SP]);
		return 0;
	}
	s->votes = 0;
	s->dispatcher = 0;
	sp = h->regs[SP];
	if (h->flags & REGS_OK) {
		__builtin_memcpy(area + COPY, h->regs, GENERAL);
		// As much as can be read from its outermost part on, where the functions of the pool are: buffers may have pages
		// that were never used.
		len = tp > sp ? tp - sp : 0;
		if (len > SCANNED)
			len = SCANNED & ~7ULL;
		for (i = 0; i < 4; i++) {
			BOUND(len, SCANNED);
			if (!bpf_probe_read_user(area + COPY + GENERAL, len, (void *)(tp - len)))
				break;
			len = i == 3 ? 0 : len / 2 & ~7ULL;
		}
		__builtin_memset(s->inherited, 0, sizeof(s->inherited));
		if (known)
			__builtin_memcpy(s->inherited, known->inherited, sizeof(s->inherited));
		s->scan_at = COPY;
		s->scan_end = COPY + GENERAL + (len & ~7ULL);
		s->lay.stack_end = lay->stack_end;
		LOOP((SCANNED + GENERAL) / 8 / BATCH + 1, scan_words, slot);
	}
	if (!known) {
		bpf_map_update_elem(&WORKERS, &tid, &unknown, BPF_ANY);
		if (!s->votes)
			return 0;
	} else {
		d = known->last;
		if (!s->votes) {
			s->dispatcher = d.thread_pointer;
			s->dispatcher_tid = d.tid;
		}
	}
	state = s->dispatcher_tid ? any_thread_state(lay, pid, s->dispatcher) : 0;
	if (!state || !innermost(lay, state))
		return 0;
	if (d.thread_pointer == s->dispatcher) {
		if (d.position == position(lay, state))
			h->flags |= UNCHANGED;
	} else if (known && s->votes) {
		// It does not wait for work of the thread that woke it any more.
		d.thread_pointer = s->dispatcher;
		d.tid = s->dispatcher_tid;
		d.position = 0;
		known->last = d;
	}
	h->waker = s->dispatcher_tid;
	return s->votes || h->flags & UNCHANGED;
}
