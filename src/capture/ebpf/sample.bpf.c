// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// One snapshot of the running thread per perf event: user registers, the interpreter's frame chain, the user
// stack, kernel return addresses. Runs at the sample instant, in the context of the sampled thread, and only
// reads. Its work is bounded: MAX_STACKS * MAX_STACK bytes of stack, MAX_FAULTS unreadable pages, MAX_FRAMES frames.
//
// `struct layout` and `struct head` are mirrored in layout.rs and record.rs.

#include <linux/bpf.h>
#include <linux/bpf_perf_event.h>
#include <bpf/bpf_helpers.h>

#define PAGE 4096ULL
#define KERNEL_STACK 16384ULL     // THREAD_SIZE on x86-64 (arch/x86/include/asm/page_64_types.h)
#define MAX_STACK (1ULL << 20)    // bytes of stack in one record
#define MAX_STACKS 8              // records of one stack
#define DEEP_FRAMES 1000          // so many frames need more stack than one record holds
#define MAX_PAGES 257             // MAX_STACK and the page of the stack pointer
#define MAX_FAULTS 64             // a failed probe costs about 0.7 us
#define MAX_FRAMES 16384
#define MAX_MARKS 16384
#define MAX_KERNEL 127
#define HEAD 512
#define AREA (1ULL << 21)         // bytes of scratch per CPU; a power of two, so that a mask bounds an offset
#define SEEN_CELLS 65536
#define RED_ZONE 128              // below the stack pointer; functions and their epilogues still use it
#define NESTED 4                 // thread states of one thread beside its own
#define BESIDE 512               // bytes between two local variables of the bytecode loop, at most
#define SHIM 3                   // owner of an entry frame; of other frames less (pycore_frame.h, v3.12)
#define NONE 0xffff

enum { WALK_NONE, WALK_COMPLETE, WALK_FAULT, WALK_DEEP };
enum { TLS_NONE, TLS_KEY_GLIBC, TLS_KEY_MUSL, TLS_OFFSET, TLS_BLOCK_GLIBC, TLS_BLOCK_MUSL };
enum { REGS_OK = 1, IN_KERNEL = 2, MORE = 4, REST = 8 };
enum { COUNT_SAMPLES, COUNT_LOST, COUNT_STRANGERS, COUNTERS };

// Where one process keeps things. Offsets in bytes; NONE where this interpreter has no such field.
struct layout {
	__u64 stack_end;          // of the main thread: address of argc
	__u64 runtime;            // _PyRuntime; 0: no Python
	__u32 key;                // runtime -> index of the pthread key that holds the thread state; TLS_BLOCK: -> number
	                          // of the library whose thread-local block holds it (signed)
	__u32 current;            // runtime -> attached thread state, or 0
	__u32 tls;                // TLS_*
	__u32 tls_specific;       // thread pointer -> array of key blocks; TLS_OFFSET: -> thread state (signed);
	                          // TLS_BLOCK: block -> thread state
	__u16 thread_id;          // thread state -> pthread_self()
	__u16 first;              // thread state -> innermost frame, or the CFrame that points to it
	__u16 cframe_frame;       // CFrame -> innermost frame
	__u16 cframe_previous;
	__u16 cframe_root;        // thread state -> the CFrame that ends the chain
	__u16 cframe;             // thread state -> innermost CFrame
	__u16 frame_size;         // bytes to read of a frame, at most 128
	__u16 frame_previous;
	__u16 frame_code;
	__u16 frame_instr;
	__u16 instr_size;         // 4: f_lasti, 8: pointer
	__u16 frame_owner;
	__u16 frame_entry;
	__u16 code_name;          // the last of the three
	__u16 code_filename;
	__u16 code_firstlineno;   // the first of the three
	__u16 str_length;
	__u16 str_data;           // of an ASCII string, after the length
	__u16 code_version;       // between the first line and the name
	__u16 base_frame;         // thread state -> pointer to the frame that ends every chain
	__u16 frame_copy;         // number of the copy of the bytecode that runs
	__u16 code_copies;        // -> array of copies
	__u16 code_adaptive;      // the code object's own bytecode
	__u16 pad;
};

struct frame {
	__u64 frame, code, instr;
	__u32 fingerprint;
	__u8 owner, entry;
	__u16 pad;
};

struct mark {
	__u64 mark, frame;
};

// Followed by kernel addresses, frames, marks and the stack, each only as long as needed. The flag MORE: a record with
// the next part of the stack and nothing else follows; it has the flag REST and the same thread and time.
struct head {
	__u32 size, pid, tid, flags;
	__u64 time;
	__u64 regs[21];
	__u64 thread_pointer;
	__u64 stack_base;
	__u32 stack_len;
	__u16 kernel, frames, marks, walk;
	__u32 frames_at, stack_at;
	__u64 holes[5];
};

// As record.rs has them.
_Static_assert(__builtin_offsetof(struct head, stack_base) == 200, "stack_base");
_Static_assert(__builtin_offsetof(struct head, holes) == 232, "holes");
_Static_assert(sizeof(struct head) <= HEAD, "head");

struct area {
	char bytes[AREA];
};

// One cell per hash of a code object: the last fingerprint seen there. Small and approximate: a clash only means that
// the reader is woken once more.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SEEN_CELLS);
	__type(key, __u32);
	__type(value, __u32);
} SEEN SEC(".maps");

struct kernel_facts {
	__u32 fsbase;             // task_struct -> thread.fsbase, 0: unknown
	__u32 stack;              // task_struct -> stack, 0: unknown
	__u32 ids;                // task_struct -> pid and tgid, 0: unknown
	__u32 want_kernel;        // take kernel return addresses
	__u32 follow_forks;       // take samples of processes that are not in PROCS
	__u32 ticks;              // ticks of the timer for one sample; 0: no timer, take all
	__u32 leave_out;          // of so many samples one is left out
};

// A timer of fixed period keeps step with a loop of that length and sees one point of it only; and where a sample
// delays the program, the two settle into step by themselves. So the timer ticks several times for one sample, of which
// one at random is taken, and runs a little faster than asked, in no round ratio: one sample in each `leave_out`, at
// random, is left out again.
struct block {
	__u32 left, out, ticks_left, tick;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct block);
} BLOCK SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct layout);
} PROCS SEC(".maps");

// Thread states of one thread beside its own: of the interpreters around the subinterpreter that it runs.
struct nested_key {
	__u64 thread_pointer;
	__u32 pid, pad;
};

struct nested {
	__u64 states[NESTED];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct nested_key);
	__type(value, struct nested);
} NESTED_STATES SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 24);
} SAMPLES SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);   // the loader makes it one per CPU
	__type(key, __u32);
	__type(value, struct area);
} SCRATCH SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} COUNTS SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct kernel_facts);
} FACTS SEC(".maps");

static __always_inline void count(__u32 which)
{
	__u64 *n = bpf_map_lookup_elem(&COUNTS, &which);

	if (n)
		*n += 1;
}

static __always_inline char *scratch(void)
{
	__u32 cpu = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&SCRATCH, &cpu);
}

static __always_inline __u64 user_word(__u64 at)
{
	__u64 v = 0;

	bpf_probe_read_user(&v, sizeof(v), (void *)at);
	return v;
}

static __always_inline __u8 user_byte(__u64 at)
{
	__u8 v = 0;

	bpf_probe_read_user(&v, sizeof(v), (void *)at);
	return v;
}

// clang may widen or fold a bound that the verifier needs to see.
#define BOUND(x, mask) ({ asm volatile("%0 &= %1" : "+r"(x) : "i"(mask)); x; })

// State of the three loops below. It lies in the scratch area, not on the BPF stack: the verifier takes what comes
// from a map as unknown and so settles each loop after a few rounds.
struct state {
	__u64 at;                 // where in the area the next entry goes
	__u64 frame, last_code;
	__u64 base;               // frame that ends the chain; 0: it ends without
	__u64 copy_at;            // where the copy of the bytecode begins ...
	__u32 last_copy, pad;     // ... that the last frame ran, 0: none
	__u64 mark, root;
	__u64 second;             // innermost frame of the next outer CFrame
	__u64 from, end, last_end, base_page;
	__u32 last_print, faults, n, done, met_second, fresh;
	__u64 cframe;             // the CFrame that the walk began at
	__u64 cframes[1 + NESTED]; // ... for each thread state
	__u64 states[1 + NESTED]; // thread states to walk, innermost first
	__u64 window;             // address of what the window holds
	__u64 window_end;
	__u64 last_frame;
	struct layout lay;
};

#define STATE (AREA - 4096)       // place of the state in the area
#define WINDOW (STATE - 8192)     // place of a copy of the page around the last frame
#define CODE (WINDOW - 512)        // place of a copy of some fields of a code object
#define LIMIT (CODE - 2 * PAGE)  // entries and pages start below this

// Tells a reused address of a code object from the object seen before. Same hash in interp/code.rs. From 3.12 on code
// objects are numbered (co_version, Objects/codeobject.c). Before, the addresses of name and file name are used again
// as readily as that of the code, so the name's first letters are taken too. What lies close together is read in one
// go: code objects deep in a stack are seldom in the cache.
static __always_inline __u32 fingerprint(struct layout *lay, char *area, __u64 code)
{
	__u64 name, file, hash, off, len = lay->code_name + 8 - lay->code_firstlineno;
	char *raw = area + CODE;
	__u32 line;

	BOUND(len, 0xff);
	if (bpf_probe_read_user(raw, len, (void *)(code + lay->code_firstlineno)))
		return 0;
	line = *(__u32 *)raw;
	off = lay->code_name - lay->code_firstlineno;
	BOUND(off, 0x7f);
	name = *(__u64 *)(raw + off);
	off = lay->code_filename - lay->code_firstlineno;
	BOUND(off, 0x7f);
	file = *(__u64 *)(raw + off);
	hash = (name * 0x9e3779b97f4a7c15ULL) ^ (file * 0xc2b2ae3d27d4eb4fULL);
	if (lay->code_version != NONE) {
		__u32 version;

		off = lay->code_version - lay->code_firstlineno;
		BOUND(off, 0x7f);
		version = *(__u32 *)(raw + off);
		if (version)
			return ((hash + version) * 0x9e3779b97f4a7c15ULL + line) >> 32 | 1;
	}
	off = lay->str_data - lay->str_length;
	BOUND(off, 0x7f);
	len = off + 16;
	if (bpf_probe_read_user(raw, len, (void *)(name + lay->str_length)))
		return 0;
	hash = (hash + *(__u64 *)raw) * 0x9e3779b97f4a7c15ULL;
	hash = (hash ^ *(__u64 *)(raw + off)) * 0xc2b2ae3d27d4eb4fULL;
	hash = (hash ^ *(__u64 *)(raw + off + 8)) * 0x9e3779b97f4a7c15ULL;
	// <module>, <lambda>: all have the same name; the end of the file's name tells them apart.
	if (*(raw + off) == '<') {
		__u64 end;

		if (bpf_probe_read_user(&end, 8, (void *)(file + lay->str_length)))
			return 0;
		hash += end;
		end = end < 16 || end > 4096 ? 0 : end - 16;
		if (bpf_probe_read_user(raw, 16, (void *)(file + lay->str_data + end)))
			return 0;
		hash = (hash ^ *(__u64 *)raw) * 0xc2b2ae3d27d4eb4fULL;
		hash = (hash ^ *(__u64 *)(raw + 8)) * 0x9e3779b97f4a7c15ULL;
	}
	return (hash + line) >> 32 | 1;
}

static long walk_frame(__u32 i, void *unused)
{
	char *area = scratch();
	struct state *s;
	struct layout *lay;
	struct frame *out;
	char *raw;
	__u64 at, size, off, code, instr;
	__u32 seen_key, *cell;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	lay = &s->lay;
	if (!s->frame || s->frame == s->base) {
		// A chain that has begun ends at the base frame, where there is one.
		s->done = s->frame || !s->base || !s->last_frame ? WALK_COMPLETE : WALK_FAULT;
		return 1;
	}
	if (s->frame == s->second)
		s->met_second = 1;
	size = lay->frame_size;
	BOUND(size, 0x7f);
	// From 3.11 on frames lie side by side, older ones lower (the data stack): where the last step was a short one,
	// one read fetches all of this page that may hold the next ones.
	if (s->frame < s->window || s->frame + size > s->window_end) {
		__u64 from = s->frame, len = size;
		__s64 step = s->last_frame - s->frame;

		if (step > 0 && step < (__s64)PAGE) {
			from &= ~(PAGE - 1);
			len = s->frame + size - from;
		}
		BOUND(len, 0x1fff);
		if (bpf_probe_read_user(area + WINDOW, len, (void *)from)) {
			s->window_end = 0;
			s->done = WALK_FAULT;
			return 1;
		}
		s->window = from;
		s->window_end = from + len;
	}
	s->last_frame = s->frame;
	off = s->frame - s->window;
	BOUND(off, 0x1fff);
	raw = area + WINDOW + off;
	at = s->at;
	BOUND(at, 0x1ffff8);
	if (at > LIMIT)
		return 1;
	out = (void *)(area + at);
	out->frame = s->frame;
	off = lay->frame_code;
	BOUND(off, 0x7f);
	code = *(__u64 *)(raw + off) & ~3ULL; // from 3.14 on the low bits of a reference are tags
	out->code = code;
	off = lay->frame_instr;
	BOUND(off, 0x7f);
	instr = *(__u64 *)(raw + off);
	if (lay->instr_size == 4)
		instr = (__u64)(__s64)(__s32)instr;
	out->instr = instr;
	out->owner = 0;
	out->entry = 0;
	out->pad = 0;
	if (lay->frame_owner != NONE) {
		off = lay->frame_owner;
		BOUND(off, 0x7f);
		out->owner = *(__u8 *)(raw + off);
	}
	if (lay->frame_entry != NONE) {
		off = lay->frame_entry;
		BOUND(off, 0x7f);
		out->entry = *(__u8 *)(raw + off);
	}
	// the code of entry frames is of no interest
	if (out->owner < SHIM) {
		if (lay->frame_copy != NONE) {
			__u32 copy;

			off = lay->frame_copy;
			BOUND(off, 0x7f);
			copy = *(__u32 *)(raw + off);
			// A thread's own copy of the bytecode: as if it ran the code object's.
			if (copy && (code != s->last_code || copy != s->last_copy))
				s->copy_at = user_word(user_word(code + lay->code_copies) + 8 + 8ULL * copy);
			s->last_copy = copy;
			if (copy)
				out->instr = instr - s->copy_at + code + lay->code_adaptive;
		}
		if (code != s->last_code) {
			s->last_print = fingerprint(lay, area, code);
			s->last_code = code;
			seen_key = (s->last_print ^ (__u32)(code >> 4)) & (SEEN_CELLS - 1);
			cell = bpf_map_lookup_elem(&SEEN, &seen_key);
			if (cell && *cell != s->last_print) {
				*cell = s->last_print;
				s->fresh = 1;
			}
		}
		out->fingerprint = s->last_print;
	} else {
		out->fingerprint = 0;
	}
	off = lay->frame_previous;
	BOUND(off, 0x7f);
	s->frame = *(__u64 *)(raw + off);
	s->at = at + sizeof(struct frame);
	s->n += 1;
	return 0;
}

static long walk_mark(__u32 i, void *unused)
{
	char *area = scratch();
	struct state *s;
	struct mark *out;
	__u64 at, next = 0, frame = 0;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	if (!s->mark || s->mark == s->root) {
		s->done = WALK_COMPLETE;
		return 1;
	}
	if (bpf_probe_read_user(&next, 8, (void *)(s->mark + s->lay.cframe_previous)) ||
	    (s->lay.cframe_frame != NONE && bpf_probe_read_user(&frame, 8, (void *)(s->mark + s->lay.cframe_frame)))) {
		s->done = WALK_FAULT;
		return 1;
	}
	at = s->at;
	BOUND(at, 0x1ffff8);
	if (at > LIMIT)
		return 1;
	out = (void *)(area + at);
	out->mark = s->mark;
	out->frame = frame;
	s->at = at + sizeof(struct mark);
	s->n += 1;
	s->mark = next;
	return 0;
}

static long copy_page(__u32 i, void *unused)
{
	char *area = scratch();
	struct head *h = (void *)area;
	struct state *s;
	__u64 at, n, hole;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	if (s->from >= s->end)
		return 1;
	n = PAGE - (s->from & (PAGE - 1));
	if (n > s->end - s->from)
		n = s->end - s->from;
	at = s->at;
	BOUND(at, 0x1fffff);
	BOUND(n, 0x1fff);
	if (at > LIMIT || n > PAGE)
		return 1;
	if (bpf_probe_read_user(area + at, n, (void *)s->from)) {
		if (++s->faults > MAX_FAULTS)
			return 1;
		hole = (s->from >> 12) - s->base_page;
		if (hole < 320) {
			__u64 word = hole >> 6;

			BOUND(word, 7);
			if (word < 5)
				h->holes[word] |= 1ULL << (hole & 63);
		}
	}
	s->from += n;
	s->at = at + n;
	return 0;
}

// Walks from s->frame, over again what was appended since `at` and `n`. True if the chain is whole: it ends, and it
// leads through the frame that the next outer CFrame points to.
// (Not static: the verifier looks at such a function once, not at each call.)
__noinline int walk_chain(__u64 at, __u32 n)
{
	char *area = scratch();
	struct state *s;

	if (!area)
		return 0;
	s = (void *)(area + STATE);
	s->at = at;
	s->n = n;
	s->done = s->last_code = s->met_second = 0;
	s->window = s->window_end = s->last_frame = 0;
	bpf_loop(MAX_FRAMES, walk_frame, 0, 0);
	return s->done == WALK_COMPLETE && (!s->second || s->met_second);
}

// Makes the frame that a CFrame points to the start of a walk. False if it is no CFrame: the next outer one lies a
// little higher on the stack, or is the thread state's own.
__noinline int start_at(__u64 cframe)
{
	char *area = scratch();
	struct state *s;
	__u64 outer;

	if (!area)
		return 0;
	s = (void *)(area + STATE);
	outer = user_word(cframe + s->lay.cframe_previous);

	if (outer != s->root && (outer <= cframe || outer - cframe > MAX_STACK))
		return 0;
	s->second = outer == s->root ? 0 : user_word(outer + s->lay.cframe_frame);
	s->frame = user_word(cframe + s->lay.cframe_frame);
	s->cframe = cframe;
	return 1;
}

// Appends the frames of one thread state.
__noinline int walk_frames(__u32 which)
{
	char *area = scratch();
	struct head *h = (void *)area;
	struct state *s;
	__u64 state, at, first, other;
	__u32 n, i, tries = 0;
	int whole = 0;

	if (!area || which > NESTED)
		return 0;
	s = (void *)(area + STATE);
	state = s->states[which];
	at = s->at;
	n = s->n;
	first = user_word(state + s->lay.first);
	s->second = s->base = 0;
	if (s->lay.base_frame != NONE)
		s->base = user_word(state + s->lay.base_frame);
	if (s->lay.cframe_frame == NONE) {
		s->frame = first;
		walk_chain(at, n);
	} else {
		// A CFrame is linked some instructions before it is filled (Python/ceval.c, v3.11 and v3.12). Until then what
		// it holds is left over from another call, and its caller's CFrame is only in a register, if anywhere.
		s->root = state + s->lay.cframe_root;
		s->cframe = first;
		s->frame = 0; // what a thread runs that is in no call of the bytecode loop
		if (first == s->root || start_at(first))
			whole = walk_chain(at, n);
		other = user_word(first + s->lay.cframe_previous);
		if (!whole && other > first && start_at(other))
			whole = walk_chain(at, n);
		for (i = 0; i < 16; i++) {
			other = h->regs[i];
			if (whole || tries > 2)
				break;
			if (other == s->root) {
				s->cframe = other;
				s->frame = s->second = 0;
				whole = walk_chain(at, n);
			} else if (other > first && other - first < MAX_STACK && !(other & 7) && start_at(other)) {
				whole = walk_chain(at, n);
				tries++;
			}
		}
		// 3.12 may have the outer CFrame in a vector register only, but by then the new frame, in a register, is
		// linked to the entry frame beside the CFrame.
		for (i = 0; i < 16; i++) {
			if (whole || s->lay.frame_entry != NONE)
				break;
			other = user_word(h->regs[i] + s->lay.frame_previous);
			if (other - first + BESIDE < 2 * BESIDE && user_byte(other + s->lay.frame_owner) == SHIM) {
				s->cframe = s->root;
				s->frame = h->regs[i];
				s->second = 0;
				whole = walk_chain(at, n);
			}
		}
		if (!whole) {
			s->second = 0;
			s->cframe = first;
			s->frame = user_word(first + s->lay.cframe_frame);
			walk_chain(at, n);
		}
		s->cframes[which] = s->cframe;
	}
	if (s->done != WALK_COMPLETE)
		h->walk = s->done ? s->done : s->frame ? WALK_DEEP : h->walk;
	return 0;
}

// Appends the CFrames of one thread state.
__noinline int walk_marks(__u32 which)
{
	char *area = scratch();
	struct head *h = (void *)area;
	struct state *s;
	__u64 state;

	if (!area || which > NESTED)
		return 0;
	s = (void *)(area + STATE);
	state = s->states[which];
	s->done = 0;
	s->root = state + s->lay.cframe_root;
	s->mark = s->lay.cframe_frame != NONE ? s->cframes[which] : user_word(state + s->lay.cframe);
	bpf_loop(MAX_MARKS, walk_mark, 0, 0);
	if (h->walk == WALK_COMPLETE && s->done != WALK_COMPLETE)
		h->walk = s->done ? s->done : WALK_DEEP;
	return 0;
}

// Copies the next MAX_STACK bytes of the stack.
static __always_inline void copy_stack(struct head *h, struct state *s)
{
	__u64 base = s->from;

	h->stack_base = base;
	s->base_page = base >> 12;
	s->end = s->last_end - base > MAX_STACK ? base + MAX_STACK : s->last_end;
	__builtin_memset(h->holes, 0, sizeof(h->holes));
	bpf_loop(MAX_PAGES, copy_page, 0, 0);
	h->stack_len = s->from - base;
	if (s->from < s->last_end && s->faults <= MAX_FAULTS)
		h->flags |= MORE;
}

static __always_inline void write(struct head *h, struct state *s)
{
	__u64 size = s->at;
	int wake;

	BOUND(size, 0x1fffff);
	h->size = size;
	// The reader looks by itself a hundred times a second. Wake it when the ring fills, and when it must copy a code
	// object that may not live that long.
	wake = s->fresh ||
	       bpf_ringbuf_query(&SAMPLES, BPF_RB_AVAIL_DATA) > bpf_ringbuf_query(&SAMPLES, BPF_RB_RING_SIZE) / 4;
	if (bpf_ringbuf_output(&SAMPLES, h, size, wake ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP)) {
		// The rest alone would be of no use; without its rest a stack is cut, and says so.
		if (!(h->flags & REST))
			count(COUNT_LOST);
		h->flags &= ~MORE;
	}
}

static long write_rest(__u32 i, void *unused)
{
	char *area = scratch();
	struct head *h = (void *)area;
	struct state *s;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	h->flags = REST;
	h->kernel = h->frames = h->marks = 0;
	h->frames_at = h->stack_at = s->at = HEAD;
	copy_stack(h, s);
	write(h, s);
	return !(h->flags & MORE);
}

static __always_inline __u64 thread_state(struct layout *lay, __u64 tp)
{
	__s32 key = -1;
	__u64 state = 0, block;

	// The attached thread state of this thread, if it is the one that runs Python (subinterpreters before 3.12).
	if (lay->current) {
		state = user_word(lay->runtime + lay->current);
		if (state && user_word(state + lay->thread_id) == tp)
			return state;
	}
	if (lay->tls == TLS_OFFSET) {
		state = user_word(tp + (__s64)(__s32)lay->tls_specific);
	} else if (lay->tls >= TLS_BLOCK_GLIBC) {
		// The thread's vector of blocks, at the second word of its descriptor (System V ABI for thread-local
		// storage, 3.4.6); glibc's entries have two words. A block that is not there yet is 0 or -1.
		block = user_word(lay->runtime + (__s64)(__s32)lay->key);
		if (!block || block > 4095)
			return 0;
		block = user_word(user_word(tp + 8) + (block << (lay->tls == TLS_BLOCK_GLIBC ? 4 : 3)));
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
	if (state && user_word(state + lay->thread_id) != tp)
		return 0;
	return state;
}

SEC("perf_event")
int sample(struct bpf_perf_event_data *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 pid = id >> 32, zero = 0;
	char *area = scratch();
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	struct head *h = (void *)area;
	__u64 task = bpf_get_current_task(), tp = 0, sp, end, at, size;
	struct state *s;
	long n;

	if (!area || !facts)
		return 0;
	if (facts->ticks && facts->leave_out) {
		struct block *b = bpf_map_lookup_elem(&BLOCK, &zero);

		if (b) {
			if (!b->ticks_left) {
				b->ticks_left = facts->ticks;
				b->tick = bpf_get_prandom_u32() % facts->ticks;
			}
			b->ticks_left--;
			if (b->ticks_left != b->tick)
				return 0;
			if (!b->left) {
				b->left = facts->leave_out;
				b->out = bpf_get_prandom_u32() % facts->leave_out;
			}
			b->left--;
			if (b->left == b->out)
				return 0;
		}
	}
	s = (void *)(area + STATE);
	if (!lay && !facts->follow_forks) {
		count(COUNT_STRANGERS);
		return 0;
	}
	count(COUNT_SAMPLES);
	s->fresh = 0;
	h->time = bpf_ktime_get_ns();
	h->pid = pid;
	h->tid = id;
	h->flags = 0;
	h->kernel = h->frames = h->marks = 0;
	h->walk = WALK_NONE;
	h->stack_len = 0;
	__builtin_memset(h->holes, 0, sizeof(h->holes));

	if ((ctx->regs.cs & 3) == 3) {
		__builtin_memcpy(h->regs, &ctx->regs, sizeof(h->regs));
		h->flags = REGS_OK;
	} else {
		// The user registers lie at the top of the thread's kernel stack.
		__u64 top = 0;
		int pad;

		h->flags = IN_KERNEL;
		if (facts->stack && !bpf_probe_read_kernel(&top, 8, (void *)(task + facts->stack)) && top)
			top += KERNEL_STACK;
		else
			top = (ctx->regs.rsp | (KERNEL_STACK - 1)) + 1;
		// 16 bytes lower on kernels with FRED (TOP_OF_KERNEL_STACK_PADDING)
		for (pad = 0; pad <= 16; pad += 16) {
			if (h->flags & REGS_OK)
				break;
			if (!bpf_probe_read_kernel(h->regs, sizeof(h->regs), (void *)(top - pad - sizeof(h->regs))) &&
			    (h->regs[17] & 0xffff & 3) == 3 && (h->regs[20] & 3) == 3)
				h->flags |= REGS_OK;
		}
		if (facts->want_kernel) {
			n = bpf_get_stack(ctx, area + HEAD, MAX_KERNEL * 8, 0);
			if (n > 0)
				h->kernel = n / 8;
		}
	}
	if (facts->fsbase)
		bpf_probe_read_kernel(&tp, 8, (void *)(task + facts->fsbase));
	h->thread_pointer = tp;

	at = HEAD + 8 * (__u64)h->kernel;
	h->frames_at = at;
	s->at = at;
	if (lay && lay->runtime) {
		__u64 state = thread_state(lay, tp);
		struct nested_key key = { .thread_pointer = tp, .pid = pid };
		struct nested *nested = state || !lay->tls ? bpf_map_lookup_elem(&NESTED_STATES, &key) : 0;

		if (!state && nested && user_word(nested->states[0] + lay->thread_id) == tp)
			state = nested->states[0];
		if (state) {
			int i;

			s->lay = *lay;
			s->states[0] = state;
			for (i = 0; i < NESTED; i++) {
				__u64 other = nested ? nested->states[i] : 0;

				if (other == state || (other && user_word(other + lay->thread_id) != tp))
					other = 0;
				s->states[1 + i] = other;
			}
			s->n = 0;
			h->walk = WALK_COMPLETE;
			for (i = 0; i <= NESTED; i++)
				if (s->states[i])
					walk_frames(i);
			h->frames = s->n;
			s->n = 0;
			if (lay->cframe != NONE)
				for (i = 0; i <= NESTED; i++)
					if (s->states[i])
						walk_marks(i);
			h->marks = s->n;
		}
	}

	h->stack_at = s->at;
	sp = h->regs[19] - RED_ZONE;
	h->stack_base = sp;
	if (h->flags & REGS_OK) {
		// Where the stack ends: argc in the main thread, the thread descriptor in the others (glibc and musl put
		// it above the stack); anywhere else (signal stacks, coroutines) a guess.
		if (lay && lay->stack_end >= sp && lay->stack_end - sp < (64ULL << 20))
			end = lay->stack_end + 8;
		else if (tp > sp && tp - sp < (1ULL << 30))
			end = tp;
		else
			end = sp + 65536;
		// Only where that is sure, or the depth of Python says so, more than one record's worth.
		size = MAX_STACK;
		if ((lay && lay->stack_end + 8 == end) || h->frames > DEEP_FRAMES)
			size *= MAX_STACKS;
		if (end - sp > size)
			end = sp + size;
		s->from = sp;
		s->last_end = end;
		s->faults = 0;
		copy_stack(h, s);
	}
	write(h, s);
	if (h->flags & MORE)
		bpf_loop(MAX_STACKS - 1, write_rest, 0, 0);
	return 0;
}

// A forked child has its parent's memory. What is known of that must be known of the child before its first sample; the
// reader may hear of the fork later than that. Runs in the parent.
SEC("raw_tp/sched_process_fork")
int forked(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 pid = bpf_get_current_pid_tgid() >> 32, zero = 0;
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	__u32 parent[2] = {}, child[2] = {};

	if (!lay || !facts || !facts->ids)
		return 0;
	bpf_probe_read_kernel(parent, sizeof(parent), (void *)(ctx->args[0] + facts->ids));
	bpf_probe_read_kernel(child, sizeof(child), (void *)(ctx->args[1] + facts->ids));
	// A process, not a thread; and the field is what it was taken for.
	if (parent[1] == pid && child[0] == child[1])
		bpf_map_update_elem(&PROCS, &child[0], lay, BPF_ANY);
	return 0;
}

// Finds fields of task_struct without knowing the kernel: run on a thread that knows what they hold.
struct search {
	__u64 task, fsbase, stack, ids, last;
	struct kernel_facts *facts;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);     // thread pointer of the thread that calibrates
} CALIBRATE SEC(".maps");

static long look_word(__u32 i, struct search *s)
{
	__u64 v = 0;

	bpf_probe_read_kernel(&v, 8, (void *)(s->task + 8ULL * i));
	if (!s->facts)
		return 1;
	if (v == s->fsbase && !s->facts->fsbase)
		s->facts->fsbase = 8 * i;
	if (s->stack && v == s->stack && !s->facts->stack)
		s->facts->stack = 8 * i;
	if (!s->facts->ids && v == s->ids)
		s->facts->ids = 8 * i;
	if (!s->facts->ids && i && (s->last >> 32 | v << 32) == s->ids)
		s->facts->ids = 8 * i - 4;
	s->last = v;
	return 0;
}

SEC("perf_event")
int calibrate(struct bpf_perf_event_data *ctx)
{
	__u32 zero = 0;
	__u64 *tp = bpf_map_lookup_elem(&CALIBRATE, &zero);
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct search s = { .task = bpf_get_current_task() };

	if (!tp || !facts)
		return 0;
	s.fsbase = *tp;
	s.ids = bpf_get_current_pid_tgid(); // pid below tgid, as the task has them
	s.facts = facts;
	if ((ctx->regs.cs & 3) != 3)
		s.stack = ctx->regs.rsp & ~(KERNEL_STACK - 1);
	if (!facts->fsbase || (s.stack && !facts->stack))
		bpf_loop(2048, look_word, &s, 0);
	return 0;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
