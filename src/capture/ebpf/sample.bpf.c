// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// One snapshot of the running thread per tick of its CPU: user registers, the interpreter's frame chain, the user
// stack, kernel return addresses; and the names of code objects that are new. Runs at the sample instant,
// in the context of the sampled thread, and only reads. Ticks in processes that are not in PROCS end at once.
// Its work is bounded: MAX_STACKS * MAX_STACK bytes of stack, MAX_FAULTS unreadable pages, MAX_FRAMES frames, MAX_COPIES
// code objects.
//
// `struct layout`, `struct head` and `struct code_head` are mirrored in cpython_layout.rs and abi.rs.
//
// Compiled twice. With LINUX_5_8 for kernels from 5.8 on, which need not have bpf_loop (5.17), dynptrs (5.19), hash maps
// that allocate at a tick (6.1), or task works that programs schedule (6.18): records and bounds are the same, and stacks of
// threads that were off the CPU are taken at a kprobe.

#include <linux/bpf.h>
#include <linux/bpf_perf_event.h>
#include <bpf/bpf_helpers.h>

// The CPU: words of the kernel's `struct pt_regs` and which of them hold what; the same in arch/ as SAVED_REGS_WORDS,
// SYSTEM_CALL_WORD.
#ifndef __TARGET_ARCH_arm64
#define REGS 21
#define EVENT_REGS REGS
#define SP 19
#define SYSTEM_CALL_OF(regs) ((__s64)(regs)[15])
#define CALL_NUMBER(r) ((r)->orig_rax)
#define CALL_FIRST(r) ((r)->rdi)
#define CALL_SECOND(r) ((r)->rsi)
#define GENERAL_REGS 15           // at the start, the stack pointer excepted
#define IN_USER_MODE(regs) (((regs)[17] & 0xffff & 3) == 3 && ((regs)[20] & 3) == 3) // cs, ss
#define EVENT_IN_USER_MODE(ctx) (((ctx)->regs.cs & 3) == 3)
#define EVENT_SP(ctx) ((ctx)->regs.rsp)
#define PLACES 2
#define PLACE(i) (REGS * 8 + 16 * (i)) // 16 bytes lower on kernels with FRED (TOP_OF_KERNEL_STACK_PADDING)
#define INHERITED 6               // registers of its creator that a new thread begins with: r15 to r12, rbp, rbx
#define INHERITED_AT 0
#define ADDRESS_BITS 47
#define DESCRIPTOR(lay) 0
#define TLS_VECTOR 8              // thread pointer -> vector of thread-local blocks
#define FUTEX 202                 // number of the system call (arch/x86/entry/syscalls/syscall_64.tbl)
#define RED_ZONE 128              // below the stack pointer; functions and their epilogues still use it
#else
#define REGS 36                   // x0 to x30, sp, pc, pstate, first argument, number of the system call (32 bits)
#define EVENT_REGS 34             // those of them that a perf event has (struct user_pt_regs)
#define SP 31
#define SYSTEM_CALL_OF(regs) ((__s32)(regs)[35])
#define CALL_NUMBER(r) (((struct user_pt_regs *)(r))->regs[8])
#define CALL_FIRST(r) (((struct user_pt_regs *)(r))->regs[0])
#define CALL_SECOND(r) (((struct user_pt_regs *)(r))->regs[1])
#define GENERAL_REGS 31           // at the start
#define IN_USER_MODE(regs) (!((regs)[33] >> 32) && !((regs)[33] & 0x1f)) // pstate: EL0, 64-bit (asm/ptrace.h)
#define EVENT_IN_USER_MODE(ctx) (!((ctx)->regs.pstate & 0x1f))
#define EVENT_SP(ctx) ((ctx)->regs.sp)
#define PLACES 2                  // sizes that `struct pt_regs` has; it ends where the kernel stack does
#define PLACE(i) (336 - 16 * (i)) // 336 in Linux 5.10 to 6.12, less where fields are gone
#define INHERITED 11              // registers of its creator that a new thread begins with: x19 to x29
#define INHERITED_AT 19
#define ADDRESS_BITS 48
#define DESCRIPTOR(lay) ((lay)->descriptor)
#define TLS_VECTOR 0              // thread pointer -> vector of thread-local blocks
#define FUTEX 98                  // number of the system call (include/uapi/asm-generic/unistd.h)
#define RED_ZONE 0
#endif

#define PAGE 4096ULL
#define KERNEL_STACK 16384ULL     // THREAD_SIZE (asm/page_64_types.h; on aarch64 with pages of 4 KiB, asm/memory.h)
#define MAX_STACK (1ULL << 20)    // bytes of stack in one record
#define MAX_STACKS 8              // records of one stack
#define DEEP_FRAMES 1000          // from this number on, one record may be too small for the stack
#define MAX_PAGES 257             // MAX_STACK and the page of the stack pointer
#define LOT (1ULL << 16)          // bytes of stack per read
#define MAX_FAULTS 64             // a failed probe costs about 0.7 us
#define MAX_FRAMES 16384
#define MAX_CFRAMES 16384
#define MAX_KERNEL 127
#define HEAD (512 + 8 * (REGS - 21))
// Bytes of scratch per CPU; a power of two, so that a mask bounds an offset. A complete record is assembled in it where
// the stack cannot go straight into the ring. SLACK bytes follow, as many as are accessed at one offset: verifiers (6.1 and
// older) remember the mask of an offset, but not always what it was compared with.
#ifdef LINUX_5_8
#define AREA (1ULL << 21)
#define STACK_ROOM MAX_STACK
#define SLACK LOT
#else
#define AREA (1ULL << 20)
#define STACK_ROOM 0
#define SLACK 64
#endif
#define WORDS (AREA - 8)          // mask of an offset in it
#define SEEN_CELLS 65536
// Minimum time between two wake-ups of the reader because frames are missing, ns.
#define SOON 10000000
#define MAX_NESTED 4              // further thread states of one thread
#define MAX_LOCALS_DISTANCE 512   // bytes between two local variables of the bytecode loop, at most
#define BATCH 8                  // entries in one turn of a loop; the verifier goes through each
#define KNOWN 4096               // code objects remembered
#define BLOCK_BITS 12            // a block: what one read fetches where objects are close together; at most a page
#define BLOCK (1ULL << BLOCK_BITS)
#define BLOCKS 32
#define SHIM 3                   // owner of an entry frame; of other frames less (pycore_frame.h, v3.12)
#define CFRAME 24                // bytes of a CFrame that hold what is read of it
#define MAX_COPIES 64            // code objects copied in one sample
#define MAX_TEXT 0x7ff           // bytes of a string object that is copied
#define MAX_LINES 0x7fff         // bytes of a line table that is copied
#define MAX_SPAN 0x1ff           // bytes of the record of an active span
#define MAX_CONTEXT 0x3ff        // bytes of a thread's OpenTelemetry context
#define CONTEXT_HEAD 28          // those before its attributes (OTEP 4947)
#define TRIE_LEVELS 7            // of a context's mapping: 32 bits of a hash, five at a time
#define NAME_BYTES 128           // copied of the name of a task
#define DICT_ENTRIES 5           // of a dictionary with 8 slots
#define NONE 0xffff
#define WORK_SLOTS 8             // off-CPU samples that are taken at the same time, at most
#define SCHEDULE_RESUME 0x4b460001 // see `schedule`
#define GILS 4                   // interpreter locks of one process that are known here, at most
#define THREAD_STATE (1ULL << 63) // marks the address of a thread state, where the thread's number is not known
#define HOLDS (1ULL << 62)        // marks one that still held the lock
#define RELEASES 64              // of those that held them, so many are remembered; a power of two
#define GENERAL (8 * GENERAL_REGS)
#define CHUNK_BITS 16            // of stack addresses that one thread is known by
#define SCANNED 0x7fffULL        // bytes of a worker's stack that are searched, a mask; kernels of OpenBLAS use 28 KiB
#define OURS_CELLS 4096          // a power of two
#define HOLDERS 10               // threads that one wait for such a lock is divided among, at most

enum { WALK_NONE, WALK_COMPLETE, WALK_FAULT, WALK_DEEP };
enum { TLS_NONE, TLS_KEY_GLIBC, TLS_KEY_MUSL, TLS_OFFSET, TLS_BLOCK_GLIBC, TLS_BLOCK_MUSL };
enum { REGS_OK = 1, IN_KERNEL = 2, MORE = 4, REST = 8, CODE_COPY = 16, OFF_CPU = 32, WAKER = 64, HOLDS_LOCK = 128, WORKER = 256,
       UNCHANGED = 512 };
enum { PART_CODE, PART_NAME, PART_QUALNAME, PART_FILENAME, PART_LINES, PARTS };
enum { COUNT_LOST, COUNT_SAMPLES, COUNT_TIME, COUNTERS }; // time in ns, of all samples together

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
	__u32 interpreter;        // runtime -> main interpreter
	__u32 interp_generation;  // interpreter -> the number of code objects freed, 8 bytes; or 0
	__u32 generation;         // runtime -> the number of code objects made, 4 bytes (signed); or 0
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
	__u16 state_interp;       // thread state -> its interpreter
	__u16 code_size;          // bytes of a code object that hold all fields that are read, less than 256
	__u16 code_qualname;
	__u16 code_linetable;
	__u16 str_state;
	__u16 str_kind_bit;       // lowest bit of the kind in it; the bit for compact and the one for ASCII follow
	__u16 str_compact_data;   // of another string than an ASCII one
	__u16 bytes_size;
	__u16 bytes_data;
	__u32 descriptor;         // pthread_self() -> where the thread pointer points
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
	__u64 regs[REGS];
	__u64 thread_pointer;     // address of the thread's descriptor
	__u64 stack_base;
	__u32 stack_len;
	__u16 kernel, frames, marks, walk;
	__u32 frames_at, stack_at;
	__u64 holes[5];
	__u64 cpu, runnable, blocked; // time that the sample represents, ns; 0 without the accounting of off-CPU time
	__u32 waker;              // OFF_CPU: the thread that ended the interval, 0: not known; WAKER: the thread woken; WORKER: the
	                          // thread that gave it work, whose Python frames these are
	__u32 waker_pid;          // OFF_CPU: the process of that thread
	// OFF_CPU: lengths of the intervals that the sample was taken for, ns.
	__u64 runnable_length, blocked_length;
	__u64 woken;              // OFF_CPU, WAKER: when the thread was woken
	__u64 holder;             // OFF_CPU: thread state that held the interpreter lock, where no thread ended the wait
	// OFF_CPU, of a wait for an interpreter lock: the threads that held it, the last one first, and for how long, ns.
	struct {
		__u64 who, time;  // the thread's number, or its thread state with THREAD_STATE
	} holders[HOLDERS];
};

// A copy of a new code object: it may be freed before the reader can read it. Precedes the record of its
// sample. Followed by the bytes of its parts, one after the other: the object itself, string objects, a bytes object.
struct code_head {
	__u32 size, pid, tid, flags;
	__u64 time, code;
	__u32 fingerprint, pad;
	struct {
		__u64 at;
		__u32 len, pad;   // 0: not copied
	} parts[PARTS];
};

// As record.rs has them.
_Static_assert(sizeof(struct code_head) == 120, "code_head");
_Static_assert(sizeof(struct layout) == 112, "layout");
_Static_assert(__builtin_offsetof(struct head, stack_base) == 32 + 8 * REGS, "stack_base");
_Static_assert(__builtin_offsetof(struct head, holes) == 64 + 8 * REGS, "holes");
_Static_assert(sizeof(struct head) <= HEAD, "head");

struct area {
	char bytes[AREA + SLACK];
};

// LOOP(n, f, slot) calls f(slot) until it returns other than 0, at most n times. TURN defines such a function. Without
// bpf_loop it is a function that the verifier checks once, so that the loop around it is short.
#ifdef LINUX_5_8
#define TURN(f) __noinline int f(__u32 slot)
#define LOOP(n, f, slot)                                  \
	({                                                \
		__u32 turn_;                              \
		for (turn_ = 0; turn_ < (n); turn_++)     \
			if (f(slot))                      \
				break;                    \
	})
#define HASH_FLAGS 0
#define MAX_LOCKED 4096           // processes whose interpreter locks, or running tasks, are known; all are allocated beforehand
#else
#define TURN(f)                                           \
	static __always_inline int f##_turn(__u32 slot);  \
	static long f(__u32 i, __u32 *slot)               \
	{                                                 \
		return f##_turn(*slot);                   \
	}                                                 \
	static __always_inline int f##_turn(__u32 slot)
#define LOOP(n, f, slot) bpf_loop(n, f, &slot, 0)
#define HASH_FLAGS BPF_F_NO_PREALLOC
#define MAX_LOCKED 16384
#endif

// Where a process keeps which asyncio task a thread runs, if that is wanted. Offsets in bytes.
struct running {
	__u64 current;            // the dictionary event loop -> task; 0: the thread state has the task
	__u16 keys;               // dictionary -> its keys
	__u16 entries;            // keys -> the first entry of a small dictionary
	__u16 task;               // thread state -> task
	__u16 name;               // task -> its name
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_LOCKED);
	__uint(map_flags, HASH_FLAGS);
	__type(key, __u32);
	__type(value, struct running);
} RUNNING_TASKS SEC(".maps");

// Where a process keeps which span is active in a thread, if that is wanted and the process has any. Offsets in bytes.
struct spans {
	__u64 variable;           // the context variable
	__u64 bitmap_node, array_node; // types of the nodes of a context's mapping
	__u64 hash;               // of the variable, 32 bits
	__u16 context;            // thread state -> context
	__u16 header;             // bytes of a PyObject
	__u16 item;               // the variable's value -> record, a bytes object
	__u16 data;               // record -> its bytes
	// Of the OpenTelemetry context of threads.
	__u64 context_offset;     // thread-local block, or thread pointer -> pointer to the record
	__u32 context_block;      // the thread's vector of blocks -> block; 0: none
	__u32 has_context;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_LOCKED);
	__uint(map_flags, HASH_FLAGS);
	__type(key, __u32);
	__type(value, struct spans);
} SPANS SEC(".maps");

// Whether the records of active spans are taken. Set by the loader: if it is 0, the verifier leaves out what does it.
const volatile __u32 want_spans = 0;

// Two cells for each code object, by its hash: fingerprints seen. Small and approximate: one that is crowded out only
// means one more wake-up of the reader.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SEEN_CELLS);
	__type(key, __u32);
	__type(value, __u32);
} SEEN SEC(".maps");

// What was read of the thread's memory during one sample: a call to read costs as much as a copy of a kilobyte. In the
// next sample nothing in it is taken for true but the fingerprints, and those only in the same epoch.
struct cache {
	__u64 sample;             // number of the sample on this CPU
	__u64 generation_at, generation;
	__u32 pid, epoch;         // an epoch: no code object took the place of another
	__u32 pid_epoch, unused;  // the first epoch of this process
	struct {
		__u64 code;
		__u32 print, epoch;
	} known[KNOWN];           // by the address of the code object
	struct {
		__u64 number, sample; // address of the block / BLOCK; of another sample: what to expect
		__u64 whole;          // the block is there, not only known to be in use
	} tags[BLOCKS];
	char raw[256];
	char blocks[BLOCKS * BLOCK + 256];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);   // the loader makes it one per CPU
	__type(key, __u32);
	__type(value, struct cache);
} CACHE SEC(".maps");

struct kernel_facts {
	__u32 fsbase;             // task_struct -> thread.fsbase, 0: unknown
	__u32 stack;              // task_struct -> stack, 0: unknown
	__u32 ids;                // task_struct -> pid and tgid, 0: unknown
	__u32 want_kernel;        // take kernel return addresses
	__u32 ticks;              // one in this number of ticks, at random, makes a sample due
	__u32 off_cpu;            // account for off-CPU time
	__u32 cpus;               // scratch areas of CPUs
	__u32 wakers;             // take the stacks of all wakers, not only of those that release an interpreter lock
	__u64 period;             // of off-CPU samples, ns
	__u64 min_blocked;        // shorter blocked intervals are left out, ns
};

struct turn {
	__u32 left, chosen;
	__u64 woken;
	__u64 selected;
};

// Ticks left in this turn, and the one of them to take. When the reader was last woken because frames were missing. Whether
// the thread that this CPU switches to has something to be taken (LINUX_5_8).
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct turn);
} TURN SEC(".maps");

// The processes to sample.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, HASH_FLAGS);
	__type(key, __u32);
	__type(value, struct layout);
} PROCS SEC(".maps");

// By the low bits of a process's number, whether such a process was ever sampled: at context switches of all others nothing is
// looked up. Only with off-CPU time.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, OURS_CELLS);
	__type(key, __u32);
	__type(value, __u32);
} OURS SEC(".maps");

// Further thread states of one thread: of the interpreters around the subinterpreter that it runs.
struct nested_key {
	__u64 thread_pointer;
	__u32 pid, pad;
};

struct nested {
	__u64 states[MAX_NESTED];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, HASH_FLAGS);
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

static __always_inline void count(__u32 which, __u64 more)
{
	__u64 *n = bpf_map_lookup_elem(&COUNTS, &which);

	if (n)
		*n += more;
}

// `slot`: the number of the CPU for a tick, which nothing else on that CPU interrupts; one claimed for the time being for
// a snapshot that can be interrupted (`claim`).
static __always_inline char *scratch(__u32 slot)
{
	return bpf_map_lookup_elem(&SCRATCH, &slot);
}

static __always_inline struct cache *cache(__u32 slot)
{
	return bpf_map_lookup_elem(&CACHE, &slot);
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
	__u64 frame, print_at;    // the latter: first frame without fingerprint
	__u64 base;               // frame that ends the chain; 0: it ends without
	__u64 copy_at;            // where the copy of the bytecode begins ...
	__u64 copy_code;          // ... of this code object
	__u32 last_copy, pad;     // ... that the last frame ran, 0: none
	__u64 mark, root;
	__u64 second;             // innermost frame of the next outer CFrame
	__u64 from, end, last_end, base_page;
	__u64 careful;            // the stack is read page by page up to here
	__u32 faults, n, done, met_second, urgent;
	__u32 copies;             // code objects that may still be copied in this sample
	__u64 cframe;             // the CFrame that the walk began at
	__u64 cframes[1 + MAX_NESTED]; // ... for each thread state
	__u64 states[1 + MAX_NESTED]; // thread states to walk, innermost first
	__u64 window;             // address of what the window holds
	__u64 window_end;         // greatest offset of a complete frame in it
	__u64 last_frame;
	__u64 instr_unused;       // bits of a word beyond the instruction
	__u64 ends;               // which bits of fingerprint, owner and entry are to be taken from a frame
	__u64 scan_at, scan_end;  // words of a worker that are searched, as offsets in the area
	__u64 dispatcher;         // thread pointer of the thread that most of them so far point to ...
	__u32 dispatcher_tid, votes; // ... and by how many it leads
	__u64 inherited[INHERITED]; // of the worker
	struct layout lay;
};

#define STATE (AREA - 4096)       // place of the state in the area
#define WINDOW (STATE - 16384)    // place of a copy of the page around the last frame ...
#define APART 8192                // ... and, behind it, of a frame that lies elsewhere
#define COPY (WINDOW - 65536)     // place of a copy of a code object
#define LIMIT (COPY - STACK_ROOM - 2 * PAGE) // entries start below this

// `len` bytes, at most 128, of the thread's memory; 0 if they are not there. Valid until the next call.
static __always_inline char *peek(struct cache *c, __u64 at, __u64 len)
{
	__u64 number = at >> BLOCK_BITS, off = at & (BLOCK - 1), slot = number;
	char *block;

	BOUND(len, 0xff);
	if (off + len <= BLOCK) {
		BOUND(slot, BLOCKS - 1);
		block = c->blocks + (slot << BLOCK_BITS);
		BOUND(off, BLOCK - 1);
		if (c->tags[slot].number == number) {
			if (c->tags[slot].whole && c->tags[slot].sample == c->sample)
				return block + off;
			// The second thing in this block, or there were several last time. A block lies in one page: if it
			// cannot be read, neither can a part of it.
			if (c->tags[slot].whole || c->tags[slot].sample == c->sample) {
				c->tags[slot].whole = 0;
				if (bpf_probe_read_user(block, BLOCK, (void *)(number << BLOCK_BITS)))
					return 0;
				c->tags[slot].sample = c->sample;
				c->tags[slot].whole = 1;
				return block + off;
			}
		}
		c->tags[slot].number = number;
		c->tags[slot].sample = c->sample;
		c->tags[slot].whole = 0;
	}
	return bpf_probe_read_user(c->raw, len, (void *)at) ? 0 : c->raw;
}

// Distinguishes a reused address of a code object from the object that was there before. Same hash in
// cpython/code_object.rs. From 3.12 on code objects are numbered (co_version, Objects/codeobject.c). Before, the addresses
// of name and file name are reused as readily as that of the code, so the name's first letters are included too. Fields
// that are close together are fetched by one read: code objects deep in a stack are seldom in the cache. (Not static: as walk_chain.)
__noinline int fingerprint(__u32 slot, __u64 code)
{
	char *area = scratch(slot);
	struct cache *c = cache(slot);
	struct layout *lay;
	__u64 name, file, hash, off, len;
	__u32 line;
	char *raw;

	if (!area || !c)
		return 0;
	lay = &((struct state *)(area + STATE))->lay;
	len = lay->code_name + 8 - lay->code_firstlineno;
	raw = peek(c, code + lay->code_firstlineno, len);
	if (!raw)
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
	raw = peek(c, name + lay->str_length, off + 16);
	if (!raw)
		return 0;
	hash = (hash + *(__u64 *)raw) * 0x9e3779b97f4a7c15ULL;
	hash = (hash ^ *(__u64 *)(raw + off)) * 0xc2b2ae3d27d4eb4fULL;
	hash = (hash ^ *(__u64 *)(raw + off + 8)) * 0x9e3779b97f4a7c15ULL;
	// <module>, <lambda>: all have the same name; the end of the file's name tells them apart.
	if (*(raw + off) == '<') {
		__u64 words[2], end;

		if (bpf_probe_read_user(&end, 8, (void *)(file + lay->str_length)))
			return 0;
		hash += end;
		end = end < 16 || end > 4096 ? 0 : end - 16;
		if (bpf_probe_read_user(words, 16, (void *)(file + lay->str_data + end)))
			return 0;
		hash = (hash ^ words[0]) * 0xc2b2ae3d27d4eb4fULL;
		hash = (hash ^ words[1]) * 0x9e3779b97f4a7c15ULL;
	}
	return (hash + line) >> 32 | 1;
}

// Begins a new epoch if, since the last sample, a code object may have taken the place of another: unless the interpreter
// (the main one, which lasts as long as its process) has made none since, or freed none. While a frame runs a code
// object, that one is not freed.
static __always_inline void begin_epoch(struct layout *lay, struct cache *c, __u32 pid, __u64 state)
{
	__u64 at = 0, now = 0, main;

	if (state && (lay->interp_generation || lay->generation)) {
		main = user_word(lay->runtime + lay->interpreter);
		at = lay->interp_generation ? main + lay->interp_generation :
					      lay->runtime + (__s64)(__s32)lay->generation;
		if (main && user_word(state + lay->state_interp) == main)
			bpf_probe_read_user(&now, lay->interp_generation ? 8 : 4, (void *)at);
	}
	// (0: the interpreter has run out of numbers.)
	if (now && c->generation == now && c->generation_at == at && c->pid == pid)
		return;
	c->generation = now;
	c->generation_at = at;
	c->epoch++;
	if (c->pid != pid)
		c->pid_epoch = c->epoch;
	c->pid = pid;
}

// Is this code object new? If so, it is recorded. Forked processes have different ones at the same address, and
// equal fingerprints of them.
static __always_inline int is_new(__u32 pid, __u64 code, __u32 print)
{
	__u32 mark = (print ^ (__u32)(code >> 4) * 0x9e3779b1U ^ pid * 0x85ebca6bU) * 0xc2b2ae35U | 1;
	__u32 first = mark >> 7 & (SEEN_CELLS - 1), second = mark * 0x9e3779b1U >> 16 & (SEEN_CELLS - 1), *a, *b;

	a = bpf_map_lookup_elem(&SEEN, &first);
	if (!a || *a == mark)
		return 0;
	b = bpf_map_lookup_elem(&SEEN, &second);
	if (!b || *b == mark)
		return 0;
	*(*a && (bpf_get_prandom_u32() & 1) ? b : a) = mark;
	return 1;
}

// Appends a string object to the copy of a code object. Returns where the next part goes; 0: it was not copied.
static __always_inline __u64 copy_text(char *area, struct layout *lay, __u32 part, __u64 text, __u64 at)
{
	struct code_head *h = (void *)(area + COPY);
	__u64 len = 0, size;
	__u32 state = 0;

	if (bpf_probe_read_user(&len, 8, (void *)(text + lay->str_length)) ||
	    bpf_probe_read_user(&state, 4, (void *)(text + lay->str_state)) || len > MAX_TEXT)
		return 0;
	state >>= lay->str_kind_bit & 31;
	size = len * (state & 7) + (state & 16 ? lay->str_data : lay->str_compact_data);
	if (size > MAX_TEXT)
		return 0;
	BOUND(size, MAX_TEXT);
	BOUND(at, 0xffff);
	if (bpf_probe_read_user(area + COPY + at, size, (void *)text))
		return 0;
	h->parts[part].at = text;
	h->parts[part].len = size;
	return at + size;
}

// Copies what names a code object and its lines into a record of its own. False if the reader has to read them itself,
// soon: something is unreadable or too long, or there is little room.
__noinline int copy_code(__u32 slot, __u64 code, __u32 print)
{
	char *area = scratch(slot), *raw;
	struct head *sample = (void *)area;
	struct code_head *h;
	struct layout *lay;
	__u64 at = sizeof(*h), off, size, name, qualname = 0, filename, lines;
	__u64 len = 0;

	if (!area ||
	    bpf_ringbuf_query(&SAMPLES, BPF_RB_AVAIL_DATA) > bpf_ringbuf_query(&SAMPLES, BPF_RB_RING_SIZE) / 2)
		return 0;
	h = (void *)(area + COPY);
	lay = &((struct state *)(area + STATE))->lay;
	__builtin_memset(h, 0, sizeof(*h));
	h->pid = sample->pid;
	h->tid = sample->tid;
	h->flags = CODE_COPY;
	h->time = sample->time;
	h->code = code;
	h->fingerprint = print;
	size = lay->code_size;
	BOUND(size, 0xff);
	raw = area + COPY + sizeof(*h);
	if (bpf_probe_read_user(raw, size, (void *)code))
		return 0;
	h->parts[PART_CODE].at = code;
	h->parts[PART_CODE].len = size;
	at += size;
	off = lay->code_name;
	BOUND(off, 0xff);
	name = *(__u64 *)(raw + off);
	off = lay->code_filename;
	BOUND(off, 0xff);
	filename = *(__u64 *)(raw + off);
	off = lay->code_linetable;
	BOUND(off, 0xff);
	lines = *(__u64 *)(raw + off);
	if (lay->code_qualname != NONE) {
		off = lay->code_qualname;
		BOUND(off, 0xff);
		qualname = *(__u64 *)(raw + off);
	}
	at = copy_text(area, lay, PART_NAME, name, at);
	// Functions of modules have one string for both.
	if (at && qualname && qualname != name)
		at = copy_text(area, lay, PART_QUALNAME, qualname, at);
	if (at)
		at = copy_text(area, lay, PART_FILENAME, filename, at);
	if (!at)
		return 0;
	// Without its lines it still has a name.
	size = 0;
	if (!bpf_probe_read_user(&len, 8, (void *)(lines + lay->bytes_size)) && len <= MAX_LINES &&
	    len + lay->bytes_data <= MAX_LINES) {
		size = len + lay->bytes_data;
		BOUND(size, MAX_LINES);
		BOUND(at, 0x7fff);
		if (bpf_probe_read_user(area + COPY + at, size, (void *)lines))
			size = 0;
		h->parts[PART_LINES].at = lines;
		h->parts[PART_LINES].len = size;
		at += size;
	}
	BOUND(at, 0xffff);
	h->size = at;
	if (bpf_ringbuf_output(&SAMPLES, h, at, BPF_RB_NO_WAKEUP))
		return 0;
	return size != 0;
}

// The task that a thread state runs. The dictionary holds one for each loop that runs one: with several it is not known which
// one is meant. (Small dictionaries have room for DICT_ENTRIES; entries that were removed have no value.)
static __always_inline __u64 running_task(struct running *r, __u64 state, char *raw)
{
	__u64 keys, value, task = 0;
	__u8 size;
	int i;

	if (!r->current)
		return user_word(state + r->task);
	keys = user_word(r->current + r->keys);
	if (!keys)
		return 0;
	size = user_byte(keys + 8); // 8 slots, or their logarithm (3.11 and later)
	if ((size != 3 && size != 8) || bpf_probe_read_user(raw, DICT_ENTRIES * 24, (void *)(keys + r->entries)))
		return 0;
	for (i = 0; i < DICT_ENTRIES; i++) {
		value = *(__u64 *)(raw + 24 * i + 16);
		if (value && task)
			return 0;
		if (value)
			task = value;
	}
	return task;
}

// Writes which task the thread runs, and its name, into a record like that of a code object, with fingerprint 0: the task may
// have ended before the reader reads it.
__noinline int copy_task(__u32 slot)
{
	char *area = scratch(slot), *raw;
	struct head *sample = (void *)area;
	struct code_head *h;
	struct running *r;
	struct state *s;
	__u64 task, name, size = NAME_BYTES;
	__u32 pid;

	if (!area)
		return 0;
	pid = sample->pid;
	r = bpf_map_lookup_elem(&RUNNING_TASKS, &pid);
	if (!r)
		return 0;
	h = (void *)(area + COPY);
	raw = area + COPY + sizeof(*h);
	s = (void *)(area + STATE);
	task = running_task(r, s->states[0], raw);
	if (!task)
		return 0;
	name = user_word(task + r->name);
	if (bpf_probe_read_user(raw, NAME_BYTES, (void *)name)) {
		size = NAME_BYTES / 2;
		if (bpf_probe_read_user(raw, NAME_BYTES / 2, (void *)name))
			return 0;
	}
	__builtin_memset(h, 0, sizeof(*h));
	h->pid = pid;
	h->tid = sample->tid;
	h->flags = CODE_COPY;
	h->time = sample->time;
	h->code = task;
	h->parts[PART_NAME].at = name;
	h->parts[PART_NAME].len = size;
	h->size = sizeof(*h) + size;
	bpf_ringbuf_output(&SAMPLES, h, sizeof(*h) + size, BPF_RB_NO_WAKEUP);
	return 0;
}

// The record of the span that is active in a thread state: the value of a context variable, found in the trie of the
// thread's context as the interpreter finds it. The same walk in cpython/spans.rs. 0: none.
static __always_inline __u64 active_span(struct spans *sp, __u64 state)
{
	__u64 node, kind, slot, bitmap, pair[2];
	int i;

	node = user_word(state + sp->context);
	node = node ? user_word(node + sp->header + 8) : 0;
	node = node ? user_word(node + sp->header) : 0;
	for (i = 0; i < TRIE_LEVELS; i++) {
		if (!node)
			return 0;
		slot = sp->hash >> (5 * i) & 31;
		kind = user_word(node + sp->header - 8);
		if (kind == sp->array_node) {
			node = user_word(node + sp->header + 8 * slot);
			continue;
		}
		if (kind != sp->bitmap_node)
			return 0;
		bitmap = user_word(node + sp->header + 8) & 0xffffffff;
		if (!(bitmap >> slot & 1))
			return 0;
		// The number of slots before it that are in use.
		bitmap &= (1ULL << slot) - 1;
		bitmap -= bitmap >> 1 & 0x55555555;
		bitmap = (bitmap & 0x33333333) + (bitmap >> 2 & 0x33333333);
		bitmap = ((bitmap + (bitmap >> 4)) & 0x0f0f0f0f) * 0x01010101 >> 24 & 31;
		if (bpf_probe_read_user(pair, 16, (void *)(node + sp->header + 16 + 16 * bitmap)))
			return 0;
		if (pair[0] == sp->variable)
			return pair[1] ? user_word(pair[1] + sp->item) : 0;
		if (pair[0])
			return 0;
		node = pair[1];
	}
	return 0;
}

// Puts a record of `len` bytes into one like that of a code object, with this fingerprint.
static __always_inline void put_span(char *area, __u64 record, __u64 from, __u64 len, __u32 fingerprint)
{
	struct head *sample = (void *)area;
	struct code_head *h = (void *)(area + COPY);

	BOUND(len, MAX_CONTEXT);
	if (bpf_probe_read_user(area + COPY + sizeof(*h), len, (void *)from))
		return;
	__builtin_memset(h, 0, sizeof(*h));
	h->pid = sample->pid;
	h->tid = sample->tid;
	h->flags = CODE_COPY;
	h->time = sample->time;
	h->code = record;
	h->fingerprint = fingerprint;
	h->parts[PART_NAME].at = record;
	h->parts[PART_NAME].len = len;
	h->size = sizeof(*h) + len;
	bpf_ringbuf_output(&SAMPLES, h, sizeof(*h) + len, BPF_RB_NO_WAKEUP);
}

// Writes the record of the active span.
__noinline int copy_span(__u32 slot)
{
	char *area = scratch(slot);
	struct spans *sp;
	struct state *s;
	__u64 record, len;
	__u32 pid;

	if (!area)
		return 0;
	pid = ((struct head *)area)->pid;
	sp = bpf_map_lookup_elem(&SPANS, &pid);
	if (!sp || !sp->variable)
		return 0;
	s = (void *)(area + STATE);
	record = active_span(sp, s->states[0]);
	len = record ? user_word(record + sp->header) : 0;
	if (len && len <= MAX_SPAN)
		put_span(area, record, record + sp->data, len, 2);
	return 0;
}

// Writes the record of the thread's OpenTelemetry context. The same walk in target/thread_context.rs.
__noinline int copy_context(__u32 slot)
{
	char *area = scratch(slot), head[CONTEXT_HEAD];
	struct spans *sp;
	__u64 block, record, len;
	__u32 pid;

	if (!area)
		return 0;
	pid = ((struct head *)area)->pid;
	sp = bpf_map_lookup_elem(&SPANS, &pid);
	if (!sp || !sp->has_context)
		return 0;
	block = ((struct head *)area)->thread_pointer;
	if (sp->context_block) {
		// One that is not allocated yet is 0 or -1.
		block = user_word(user_word(block + 8) + sp->context_block);
		if (!block || !(block + 1))
			return 0;
	}
	record = user_word(block + sp->context_offset);
	if (!record || bpf_probe_read_user(head, sizeof(head), (void *)record) || head[24] != 1)
		return 0;
	len = CONTEXT_HEAD + ((__u64)(__u8)head[26] | (__u64)(__u8)head[27] << 8);
	if (len > MAX_CONTEXT)
		len = MAX_CONTEXT;
	put_span(area, record, record, len, 4);
	return 0;
}

TURN(print_frames)
{
	char *area = scratch(slot);
	struct cache *c = cache(slot);
	struct state *s;
	__u64 at, code, last_code = 0, cell;
	__u32 k, print = 0, other;
	struct frame *f;

	if (!area || !c)
		return 1;
	s = (void *)(area + STATE);
	at = s->print_at;
	for (k = 0; k < BATCH; k++) {
		if (at >= s->at)
			return 1;
		BOUND(at, WORDS);
		if (at > LIMIT)
			return 1;
		f = (void *)(area + at);
		at += sizeof(struct frame);
		// the code of entry frames is of no interest
		if (f->owner >= SHIM)
			continue;
		code = f->code;
		if (code != last_code) {
			// No two code objects begin in the same 128 bytes, and those used together are often close together.
			cell = code >> 7 ^ code >> 19;
			BOUND(cell, KNOWN - 1);
			if (c->known[cell].code == code && c->known[cell].epoch == c->epoch) {
				print = c->known[cell].print;
			} else {
				print = fingerprint(slot, code);
				// not there now: to be read again in the next sample, but not in this one
				if (!print)
					c->generation = 0;
				other = c->known[cell].epoch < c->pid_epoch;
				c->known[cell].epoch = c->epoch;
				if (c->known[cell].code != code || c->known[cell].print != print || other) {
					c->known[cell].code = code;
					c->known[cell].print = print;
					if (!s->copies) {
						// Enough for now: the next sample copies it.
						c->known[cell].code = 0;
						s->urgent = 1;
					} else if (is_new(c->pid, code, print)) {
						s->copies--;
						if (!print || !copy_code(slot, code, print))
							s->urgent = 1;
					}
				}
			}
			last_code = code;
		}
		f->fingerprint = print;
	}
	s->print_at = at;
	return 0;
}

// Where a thread runs its own copy of the bytecode: as if it ran the code object's.
static __always_inline void own_copy(struct state *s, struct frame *f, char *raw)
{
	__u64 off = s->lay.frame_copy;
	__u32 copy;

	BOUND(off, 0x7f);
	copy = *(__u32 *)(raw + off);
	if (!copy)
		return;
	if (f->code != s->copy_code || copy != s->last_copy) {
		s->copy_at = user_word(user_word(f->code + s->lay.code_copies) + 8 + 8ULL * copy);
		s->copy_code = f->code;
		s->last_copy = copy;
	}
	f->instr += f->code + s->lay.code_adaptive - s->copy_at;
}

TURN(walk_some)
{
	char *area = scratch(slot);
	struct state *s;
	struct layout *lay;
	__u64 frame, at, window, window_end, last, size, code_off, instr_off, previous_off, owner_off, entry_off;
	__u64 instr_unused, ends, first;
	__u32 k, done = WALK_NONE;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	lay = &s->lay;
	frame = first = s->frame;
	at = s->at;
	window = s->window;
	window_end = s->window_end;
	last = s->last_frame;
	size = lay->frame_size;
	code_off = lay->frame_code;
	instr_off = lay->frame_instr;
	previous_off = lay->frame_previous;
	owner_off = lay->frame_owner;
	entry_off = lay->frame_entry;
	instr_unused = s->instr_unused;
	ends = s->ends;
	BOUND(size, 0x7f);
	BOUND(code_off, 0x7f);
	BOUND(instr_off, 0x7f);
	BOUND(previous_off, 0x7f);
	BOUND(owner_off, 0x7f);
	BOUND(entry_off, 0x7f);
	BOUND(instr_unused, 0x3f);
	for (k = 0; k < BATCH; k++) {
		__u64 off, code, instr, end;
		struct frame *out;
		char *raw;

		if (!frame || frame == s->base) {
			// A chain that has begun ends at the base frame, where there is one.
			done = frame || !s->base || !last ? WALK_COMPLETE : WALK_FAULT;
			break;
		}
		if (frame == s->second)
			s->met_second = 1;
		off = frame - window;
		// From 3.11 on frames lie side by side, older ones lower (the data stack): where the last step was a short one,
		// or this one is short from what was read before (entry frames lie elsewhere), one read fetches all of this page
		// that may hold the next ones.
		if (off > window_end) {
			__u64 from = frame & ~(PAGE - 1), len = frame + size - from, to = 0;

			if (last - frame >= PAGE && window - frame >= PAGE) {
				from = frame;
				len = size;
				to = APART;
			}
			BOUND(len, 0x1fff);
			if (bpf_probe_read_user(area + WINDOW + to, len, (void *)from)) {
				done = WALK_FAULT;
				break;
			}
			off = frame - from + to;
			if (!to) {
				window = from;
				window_end = len - size;
			}
		}
		BOUND(off, 0x3fff);
		raw = area + WINDOW + off;
		BOUND(at, WORDS);
		if (at > LIMIT) {
			done = WALK_DEEP;
			break;
		}
		out = (void *)(area + at);
		code = *(__u64 *)(raw + code_off) & ~3ULL; // from 3.14 on the low bits of a reference are tags
		instr = *(__u64 *)(raw + instr_off);
		instr = (__u64)((__s64)(instr << instr_unused) >> instr_unused);
		end = (__u64)*(__u8 *)(raw + owner_off) << 32 | (__u64)*(__u8 *)(raw + entry_off) << 40;
		out->frame = frame;
		out->code = code;
		out->instr = instr;
		*(__u64 *)&out->fingerprint = end & ends; // and owner, entry
		last = frame;
		frame = *(__u64 *)(raw + previous_off);
		at += sizeof(struct frame);
		if (lay->frame_copy != NONE && out->owner < SHIM)
			own_copy(s, out, raw);
		// Of a thread that exchanges its stack, the chain may lead in a circle.
		if (frame == first) {
			done = WALK_FAULT;
			break;
		}
	}
	s->frame = frame;
	s->at = at;
	s->window = window;
	s->window_end = window_end;
	s->last_frame = last;
	s->done = done;
	return done != WALK_NONE;
}

// True if this was the last CFrame, or there is no room for it.
static __always_inline int one_mark(char *area, struct cache *c, struct state *s)
{
	struct mark *out;
	__u64 at, off, next, frame = 0;
	char *raw;

	if (!s->mark || s->mark == s->root) {
		s->done = WALK_COMPLETE;
		return 1;
	}
	raw = peek(c, s->mark, CFRAME);
	if (!raw) {
		s->done = WALK_FAULT;
		return 1;
	}
	off = s->lay.cframe_previous;
	BOUND(off, 0x1f);
	next = *(__u64 *)(raw + off);
	if (s->lay.cframe_frame != NONE) {
		off = s->lay.cframe_frame;
		BOUND(off, 0x1f);
		frame = *(__u64 *)(raw + off);
	}
	at = s->at;
	BOUND(at, WORDS);
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

TURN(walk_some_marks)
{
	char *area = scratch(slot);
	struct cache *c = cache(slot);
	__u32 k;

	if (!area || !c)
		return 1;
	for (k = 0; k < BATCH; k++)
		if (one_mark(area, c, (void *)(area + STATE)))
			return 1;
	return 0;
}

// Where the stack is copied to: into the ring, or into the scratch area, from which the whole record is then copied.
struct copy {
#ifndef LINUX_5_8
	struct bpf_dynptr ring;
#endif
	__u32 slot, pad;
};

// Room for `len` bytes, a constant, at offset `at` of the record.
static __always_inline char *room(struct copy *copy, char *area, __u64 at, __u64 len)
{
#ifdef LINUX_5_8
	BOUND(at, AREA - 1);
	return area + at;
#else
	return bpf_dynptr_data(&copy->ring, at, len);
#endif
}

static __always_inline int copy_next(struct copy *copy)
{
	char *area = scratch(copy->slot), *to;
	struct head *h = (void *)area;
	struct state *s;
	__u64 n, hole;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	if (s->from >= s->end)
		return 1;
	// Much at once where nothing is missing.
	if (!(s->from & (PAGE - 1)) && s->from >= s->careful && s->end - s->from >= LOT) {
		to = room(copy, area, s->at, LOT);
		if (to && !bpf_probe_read_user(to, LOT, (void *)s->from)) {
			s->from += LOT;
			s->at += LOT;
			return 0;
		}
		s->careful = s->from + LOT;
	}
	n = PAGE - (s->from & (PAGE - 1));
	if (n > s->end - s->from)
		n = s->end - s->from;
	BOUND(n, 0x1fff);
	to = room(copy, area, s->at, PAGE);
	if (!to || n > PAGE)
		return 1;
	if (bpf_probe_read_user(to, n, (void *)s->from)) {
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
	s->at += n;
	return 0;
}

#ifdef LINUX_5_8
TURN(copy_some)
{
	struct copy copy = { .slot = slot };

	return copy_next(&copy);
}
#else
static long copy_some(__u32 i, struct copy *copy)
{
	return copy_next(copy);
}
#endif

// Walks from s->frame, and replaces what was appended since `at` and `n`. True if the chain is complete: it ends, and it
// leads through the frame that the next outer CFrame points to.
// (Not static: the verifier checks such a function once, not at each call.)
__noinline int walk_chain(__u32 slot, __u64 at, __u32 n)
{
	char *area = scratch(slot);
	struct state *s;

	if (!area)
		return 0;
	s = (void *)(area + STATE);
	s->at = at;
	s->done = s->met_second = 0;
	s->copy_code = 0;
	s->window = s->window_end = s->last_frame = 0; // an empty window: no frame is at address 0
	LOOP(MAX_FRAMES / BATCH, walk_some, slot);
	s->n = n + (s->at - at) / sizeof(struct frame);
	return s->done == WALK_COMPLETE && (!s->second || s->met_second);
}

// Makes the frame that a CFrame points to the start of a walk. False if it is no CFrame: the next outer one lies a
// little higher on the stack, or is the thread state's own.
__noinline int start_at(__u32 slot, __u64 cframe)
{
	char *area = scratch(slot);
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
__noinline int walk_frames(__u32 slot, __u32 which)
{
	char *area = scratch(slot);
	struct head *h = (void *)area;
	struct state *s;
	__u64 state, at, first, other;
	__u32 n, i, tries = 0;
	int whole = 0;

	if (!area || which > MAX_NESTED)
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
		walk_chain(slot, at, n);
	} else {
		// A CFrame is linked some instructions before it is filled (Python/ceval.c, v3.11 and v3.12). Until then what
		// it holds is left over from another call, and its caller's CFrame is only in a register, if anywhere.
		s->root = state + s->lay.cframe_root;
		s->cframe = first;
		s->frame = 0; // what a thread runs that is in no call of the bytecode loop
		if (first == s->root || start_at(slot, first))
			whole = walk_chain(slot, at, n);
		other = user_word(first + s->lay.cframe_previous);
		if (!whole && other > first && start_at(slot, other))
			whole = walk_chain(slot, at, n);
		for (i = 0; i < GENERAL_REGS + 1; i++) {
			other = h->regs[i];
			if (whole || tries > 2)
				break;
			if (other == s->root) {
				s->cframe = other;
				s->frame = s->second = 0;
				whole = walk_chain(slot, at, n);
			} else if (other > first && other - first < MAX_STACK && !(other & 7) && start_at(slot, other)) {
				whole = walk_chain(slot, at, n);
				tries++;
			}
		}
		// 3.12 may have the outer CFrame in a vector register only, but by then the new frame, in a register, is
		// linked to the entry frame next to the CFrame.
		for (i = 0; i < GENERAL_REGS + 1; i++) {
			if (whole || s->lay.frame_entry != NONE)
				break;
			other = user_word(h->regs[i] + s->lay.frame_previous);
			if (other - first + MAX_LOCALS_DISTANCE < 2 * MAX_LOCALS_DISTANCE && user_byte(other + s->lay.frame_owner) == SHIM) {
				s->cframe = s->root;
				s->frame = h->regs[i];
				s->second = 0;
				whole = walk_chain(slot, at, n);
			}
		}
		if (!whole) {
			s->second = 0;
			s->cframe = first;
			s->frame = user_word(first + s->lay.cframe_frame);
			walk_chain(slot, at, n);
		}
		s->cframes[which] = s->cframe;
	}
	s->print_at = at;
	LOOP(MAX_FRAMES / BATCH + 1, print_frames, slot);
	if (s->done != WALK_COMPLETE)
		h->walk = s->done ? s->done : s->frame ? WALK_DEEP : h->walk;
	return 0;
}

// Appends the CFrames of one thread state.
__noinline int walk_marks(__u32 slot, __u32 which)
{
	char *area = scratch(slot);
	struct head *h = (void *)area;
	struct state *s;
	__u64 state;

	if (!area || which > MAX_NESTED)
		return 0;
	s = (void *)(area + STATE);
	state = s->states[which];
	s->done = 0;
	s->root = state + s->lay.cframe_root;
	s->mark = s->lay.cframe_frame != NONE ? s->cframes[which] : user_word(state + s->lay.cframe);
	LOOP(MAX_CFRAMES / BATCH, walk_some_marks, slot);
	if (h->walk == WALK_COMPLETE && s->done != WALK_COMPLETE)
		h->walk = s->done ? s->done : WALK_DEEP;
	return 0;
}

// The record could not be written. The rest alone would be of no use; a stack without it is marked as truncated.
static __always_inline void not_written(struct head *h)
{
	if (!(h->flags & REST))
		count(COUNT_LOST, 1);
	h->flags &= ~MORE;
}

// Completes the head of a record whose stack has been copied.
static __always_inline void finish_head(struct head *h, struct state *s, __u64 base)
{
	h->stack_len = s->from - base;
	if (s->from < s->last_end && s->faults <= MAX_FAULTS)
		h->flags |= MORE;
	h->size = s->at;
}

// Writes what has been gathered, and the next MAX_STACK bytes of the stack.
static __always_inline void write(__u32 slot, struct head *h, struct state *s)
{
	__u64 base = s->from, prefix = s->at, wake;
#ifdef LINUX_5_8
	__u64 len;
#else
	struct copy copy = { .slot = slot };
#endif

	BOUND(prefix, AREA - 1);
	h->stack_at = prefix;
	h->stack_base = base;
	h->stack_len = 0;
	__builtin_memset(h->holes, 0, sizeof(h->holes));
	s->base_page = base >> 12;
	s->end = s->last_end - base > MAX_STACK ? base + MAX_STACK : s->last_end;
	// The reader polls from time to time. Wake it when the ring fills, and when it must read this record soon.
	wake = s->urgent ||
	       bpf_ringbuf_query(&SAMPLES, BPF_RB_AVAIL_DATA) > bpf_ringbuf_query(&SAMPLES, BPF_RB_RING_SIZE) / 4;
	wake = wake ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
#ifdef LINUX_5_8
	LOOP(MAX_PAGES, copy_some, slot);
	finish_head(h, s, base);
	len = s->at;
	BOUND(len, AREA - 1);
	if (bpf_ringbuf_output(&SAMPLES, h, len, wake))
		not_written(h);
#else
	// (A page more: what is copied to must be known to have room for one.)
	if (bpf_ringbuf_reserve_dynptr(&SAMPLES, prefix + (s->end - base) + PAGE, 0, &copy.ring)) {
		not_written(h);
		bpf_ringbuf_discard_dynptr(&copy.ring, 0);
		return;
	}
	bpf_loop(MAX_PAGES, copy_some, &copy, 0);
	finish_head(h, s, base);
	bpf_dynptr_write(&copy.ring, 0, h, prefix, 0);
	bpf_ringbuf_submit_dynptr(&copy.ring, wake);
#endif
}

TURN(write_rest)
{
	char *area = scratch(slot);
	struct head *h = (void *)area;
	struct state *s;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	h->flags = REST;
	h->kernel = h->frames = h->marks = 0;
	h->frames_at = s->at = HEAD;
	write(slot, h, s);
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
	if (state && user_word(state + lay->thread_id) != tp)
		return 0;
	return state;
}

// Interpreter locks of a process: `struct _gil_runtime_state`, 0 where there are fewer.
struct gils {
	__u64 at[GILS];
	__u32 len;                // bytes, up to the last futex in it
	__u32 last_holder;        // -> thread state, followed by whether the lock is held, 4 bytes
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

// Does one of these thread states hold the lock of its interpreter?
static __always_inline int holds_lock(__u32 pid, __u64 *states)
{
	struct gils *gils = bpf_map_lookup_elem(&INTERPRETER_LOCKS, &pid);
	struct {
		__u64 holder;
		__u32 locked, pad;
	} lock;
	int i, j;

	for (i = 0; gils && i < GILS; i++) {
		if (!gils->at[i])
			break;
		// The holder stays noted when it releases the lock.
		if (bpf_probe_read_user(&lock, sizeof(lock), (void *)(gils->at[i] + gils->last_holder)) || lock.locked != 1)
			continue;
		for (j = 0; j <= MAX_NESTED; j++)
			if (states[j] && states[j] == lock.holder)
				return 1;
	}
	return 0;
}

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

// Off-CPU time.
//
// Each time a thread of a sampled process is switched in, the interval since it was switched out is split into time
// blocked and time runnable (woken, or preempted, and waiting for a CPU). An interval of either kind that is as long as
// the sampling period is always taken, with its own length as its weight. The shorter ones of a thread, put end to end,
// are a clock of their own, with ticks at random distances of 0.5 to 1.5 periods: an interval with a tick in it is taken,
// and its weight is the distance from the previous tick. So no interval length is favored, at most two stacks are taken
// per period however often the thread switches, and the weights of a thread add up to its off-CPU time. (The time since
// the previously taken interval would be biased: long intervals go on for longer after their tick.)
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

enum { RUNNING, RUNNABLE, BLOCKED };
#define TASK_DEAD 0x80           // include/linux/sched.h, v4.14 and later
#define FUTEX_WAKES 0x43a        // its operations that wake: WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAKE_BITSET, as bits

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
	__u64 pending;            // time in this wait for an interpreter lock so far, not accounted for yet
	__u64 late;               // time in such waits that are over, but that no sample represents yet
	__u64 began;              // when the blocked thread began to wait, for such a wait with all its parts
	__u64 got_lock;           // when it last began to run after such a wait
	__u32 state, scheduled;
	__u32 tgid, waker;        // waker: the thread that woke it
	__u32 waker_pid, take_waker, take_waker_pid;
	__u32 timed_out;          // it was woken by a timer while it waited for an interpreter lock
	__u32 kernel;
	__u32 wants_lock;         // it was woken while it waited for an interpreter lock, and has not run since
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
	__uint(max_entries, WORK_SLOTS);
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
	__u64 state = thread_state(lay, tp);
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

	if (lay->cframe_frame != NONE)
		return user_word(frame + lay->cframe_frame);
	return lay->base_frame != NONE && frame == user_word(state + lay->base_frame) ? 0 : frame;
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

// Takes everything but the registers and the kernel stack, which are in `h`, and submits the record.
static __always_inline void snapshot(__u32 slot, char *area, struct cache *c, struct layout *lay,
				     struct kernel_facts *facts, struct turn *turn, __u64 began)
{
	__u64 task = bpf_get_current_task(), tp = 0, sp, end, size;
	struct head *h = (void *)area;
	struct state *s = (void *)(area + STATE);

	s->urgent = 0;
	s->copies = MAX_COPIES;
	c->sample++;
	if (facts->fsbase)
		bpf_probe_read_kernel(&tp, 8, (void *)(task + facts->fsbase));
	tp -= DESCRIPTOR(lay);
	h->thread_pointer = tp;

	if (want_spans && !(h->flags & WAKER))
		copy_context(slot);

	h->frames = h->marks = 0;
	h->walk = WALK_NONE;
	s->at = HEAD + 8 * (__u64)h->kernel;
	h->frames_at = s->at;
	if (want_workers && lay->runtime && !(h->flags & (OFF_CPU | WAKER)) && find_dispatcher(slot)) {
		h->flags |= WORKER;
		tp = s->dispatcher;
	}
	if (lay->runtime) {
		__u64 state = thread_state(lay, tp), begin = 0;
		struct nested_key key = { .thread_pointer = tp, .pid = h->pid };
		struct nested *nested = state || !lay->tls ? bpf_map_lookup_elem(&NESTED_STATES, &key) : 0;

		if (!state && nested && user_word(nested->states[0] + lay->thread_id) == tp)
			state = nested->states[0];
		if (state) {
			int i;

			s->lay = *lay;
			s->instr_unused = lay->instr_size == 4 ? 32 : 0;
			s->ends = (lay->frame_owner != NONE ? 0xffULL << 32 : 0) | (lay->frame_entry != NONE ? 0xffULL << 40 : 0);
			s->states[0] = state;
			for (i = 0; i < MAX_NESTED; i++) {
				__u64 other = nested ? nested->states[i] : 0;

				if (other == state || (other && user_word(other + lay->thread_id) != tp))
					other = 0;
				s->states[1 + i] = other;
			}
			begin_epoch(lay, c, h->pid, nested ? 0 : state);
			if (h->flags & WORKER)
				begin = position(lay, state);
			s->n = 0;
			h->walk = WALK_COMPLETE;
			for (i = 0; i <= MAX_NESTED; i++)
				if (s->states[i])
					walk_frames(slot, i);
			h->frames = s->n;
			copy_task(slot);
			// (A worker's sample belongs to the span of the thread that gave it work.)
			if (want_spans && !(h->flags & WAKER))
				copy_span(slot);
			s->n = 0;
			if (lay->cframe != NONE)
				for (i = 0; i <= MAX_NESTED; i++)
					if (s->states[i])
						walk_marks(slot, i);
			h->marks = s->n;
			// The dispatcher has continued meanwhile.
			if (h->flags & WORKER && begin != position(lay, state)) {
				h->frames = h->marks = 0;
				h->walk = WALK_NONE;
				s->at = h->frames_at;
			}
		}
		if (!h->frames)
			h->flags &= ~WORKER;
		tp = h->thread_pointer;
	}

	if (h->walk != WALK_NONE && !(h->flags & WORKER) && holds_lock(h->pid, s->states))
		h->flags |= HOLDS_LOCK;
	// The process may have begun to run Python, or another program: the reader has to check first.
	if (h->walk != WALK_COMPLETE && began - turn->woken > SOON) {
		turn->woken = began;
		s->urgent = 1;
	}
	sp = h->regs[SP] - RED_ZONE;
	s->from = s->last_end = sp;
	s->faults = s->careful = 0;
	if (h->flags & REGS_OK) {
		// Where the stack ends: argc in the main thread, the thread descriptor in the others (glibc and musl put
		// it above the stack); anywhere else (signal stacks, coroutines) an estimate.
		if (lay->stack_end >= sp && lay->stack_end - sp < (64ULL << 20))
			end = lay->stack_end + 8;
		else if (tp > sp && tp - sp < (1ULL << 30))
			end = tp;
		else
			end = sp + 65536;
		// Only where that is sure, or the depth of Python says so, more than one record's worth.
		size = MAX_STACK;
		if (lay->stack_end + 8 == end || h->frames > DEEP_FRAMES)
			size *= MAX_STACKS;
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

SEC("perf_event")
int sample(struct bpf_perf_event_data *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 pid = id >> 32, zero = 0, slot = bpf_get_smp_processor_id();
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	char *area = scratch(slot);
	struct head *h = (void *)area;
	struct turn *turn = bpf_map_lookup_elem(&TURN, &zero);
	__u64 task = bpf_get_current_task();
	struct cache *c = cache(slot);
	long n;

	if (!lay || !area || !c || !facts || !turn)
		return 0;
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
	h->cpu = h->runnable = h->blocked = 0;
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
	snapshot(slot, area, c, lay, facts, turn, h->time);
	return 0;
}

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
	bpf_map_update_elem(&THREADS, &tid, t, BPF_NOEXIST);
	t = bpf_map_lookup_elem(&THREADS, &tid);
	// More threads than there is room for.
	if (!t)
		count(COUNT_LOST, 1);
	return t;
}

// The interpreter lock of a process that this futex belongs to, 0: none.
static __always_inline __u64 interpreter_lock(struct gils *gils, __u64 futex)
{
	int i;

	if (!gils)
		return 0;
	for (i = 0; i < GILS; i++)
		if (gils->at[i] && futex - gils->at[i] < gils->len)
			return gils->at[i];
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

// A scratch area that is not in use; WORK_SLOTS if there is none.
static __always_inline __u32 claim_any(void)
{
	__u32 i;

	for (i = 0; i < WORK_SLOTS; i++)
		if (claim(i))
			return i;
	return WORK_SLOTS;
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

	if (n >= HOLDERS)
		return;
	BOUND(n, 15);
	if (n >= HOLDERS)
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

// A system call and its first two arguments.
struct system_call {
	__u64 number, first, second;
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
	__u64 rsi, rdi, orig_rax, rip, cs, flags, rsp, ss;
};

static __always_inline void last_call(struct kernel_facts *facts, struct system_call *call)
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
		    bpf_probe_read_kernel(&call->first, 16, &regs->regs[0]))
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
}
#endif

// The futex that the current thread's system call is about, 0: none.
static __always_inline __u64 current_futex(struct kernel_facts *facts)
{
	struct system_call call = {};

	last_call(facts, &call);
	return call.number == FUTEX ? call.first : 0;
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
	__u64 holder = 0, lock = interpreter_lock(gils, t->futex);
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
static __always_inline void begin_record(__u32 slot, struct head *h, struct thread *t, __u64 now, __u64 holder)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 pid = id >> 32;

	h->time = now;
	h->pid = pid;
	h->tid = id;
	h->flags = IN_KERNEL | OFF_CPU;
	h->kernel = 0;
	h->cpu = 0;
	h->runnable = t->take_runnable;
	h->blocked = t->take_blocked;
	h->runnable_length = t->runnable_length;
	h->blocked_length = t->blocked_length;
	h->waker = t->take_waker;
	h->waker_pid = t->take_waker_pid;
	h->woken = t->take_woken;
	h->holder = holder;
	__builtin_memset(h->holders, 0, sizeof(h->holders));
	if (t->take_blocked && t->futex) {
		struct gils *gils = bpf_map_lookup_elem(&INTERPRETER_LOCKS, &pid);
		__u64 lock = interpreter_lock(gils, t->futex);

		if (lock)
			find_holders(slot, lock, t->began, t->take_woken);
	}
	t->take_runnable = t->take_blocked = 0;
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
	begin_record(slot, h, t, now, holder);
	if (facts->want_kernel) {
		// Without this function.
		n = bpf_get_stack(ctx, area + HEAD, MAX_KERNEL * 8, 1);
		if (n > 0)
			h->kernel = n / 8;
	}
	user_registers(h, facts);
	snapshot(slot, area, c, lay, facts, turn, now);
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
	if (!(t->take_runnable | t->take_blocked))
		return 0;
	slot = claim_any();
	// All in use: the time goes into the next sample.
	if (slot == WORK_SLOTS)
		return 0;
	area = scratch(facts->cpus + slot);
	c = cache(facts->cpus + slot);
	h = (void *)area;
	if (area && c) {
		begin_record(facts->cpus + slot, h, t, now, holder);
		h->kernel = t->kernel > MAX_KERNEL ? MAX_KERNEL : t->kernel;
		if (h->kernel)
			bpf_probe_read_kernel(area + HEAD, MAX_KERNEL * 8, t->stack);
		user_registers(h, facts);
		snapshot(facts->cpus + slot, area, c, lay, facts, turn, h->time);
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
struct task_struct {
	int pid, tgid;
} __attribute__((preserve_access_index));
#define READ_IDS(id, task)                                              \
	({                                                              \
		(id)[0] = ((struct task_struct *)(task))->pid;          \
		(id)[1] = ((struct task_struct *)(task))->tgid;         \
	})
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
	__u64 now, d, runnable, blocked = 0;
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
		if (!ctx[0])
			t->next_futex = current_futex(facts);
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
			begin_wait(t, current_futex(facts), now);
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
	t->state = RUNNING;
	t->since = now;
	if (t->wants_lock) {
		t->wants_lock = 0;
		t->got_lock = now;
	}
	runnable = account(d - blocked, facts->period, &t->until_runnable, &t->step_runnable);
	if (runnable) {
		t->take_runnable += runnable;
		t->runnable_length = d - blocked;
	}
#ifdef LINUX_5_8
	if (t->take_runnable | t->take_blocked | t->timed_out) {
		struct turn *turn = bpf_map_lookup_elem(&TURN, &zero);

		if (turn)
			turn->selected = 1;
	}
#else
	if (!(t->take_runnable | t->take_blocked | t->timed_out) || t->scheduled)
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

	if (slot == WORK_SLOTS)
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
		snapshot(facts->cpus + slot, area, c, lay, facts, turn, woken);
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
		lock = interpreter_lock(gils, t->futex);
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

// A forked child has its parent's memory. What is known of that must be known of the child before its first sample; the
// reader may be notified of the fork later than that. Runs in the parent.
SEC("raw_tp/sched_process_fork")
int forked(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 pid = bpf_get_current_pid_tgid() >> 32, zero = 0;
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	__u32 parent[2] = {}, child[2] = {}, ours, one = 1;

	if (!lay || !facts || !facts->ids)
		return 0;
	bpf_probe_read_kernel(parent, sizeof(parent), (void *)(ctx->args[0] + facts->ids));
	bpf_probe_read_kernel(child, sizeof(child), (void *)(ctx->args[1] + facts->ids));
	// A process, not a thread; and the field is what it was taken for.
	if (parent[1] == pid && child[0] == child[1]) {
		ours = child[0] & (OURS_CELLS - 1);
		bpf_map_update_elem(&OURS, &ours, &one, BPF_ANY);
		bpf_map_update_elem(&PROCS, &child[0], lay, BPF_ANY);
	}
	return 0;
}

// Runs in the thread that wakes another one: notes who gives work to it, if it is known as a worker.
SEC("raw_tp/sched_waking")
int worker_woken(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 id = bpf_get_current_pid_tgid(), regs[REGS];
	__u32 pid = id >> 32, zero = 0, woken[2] = {};
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct dispatcher d = {};
	struct worker *known;
	struct layout *lay;

	if (!facts || !facts->ids || !facts->fsbase)
		return 0;
	bpf_probe_read_kernel(woken, sizeof(woken), (void *)(ctx->args[0] + facts->ids));
	if (woken[1] != pid)
		return 0;
	known = bpf_map_lookup_elem(&WORKERS, &woken[0]);
	lay = known ? bpf_map_lookup_elem(&PROCS, &pid) : 0;
	// An interrupt may hit any thread: a wake-up is attributed to a thread only in a system call.
	if (!known || !lay || !lay->runtime || !registers_at_entry(facts, regs, sizeof(regs)) || SYSTEM_CALL_OF(regs) < 0)
		return 0;
	current_dispatcher(lay, facts, &d);
	if (!d.tid)
		return 0;
	if (d.tid == (__u32)id)
		note_stack(pid, &d, regs[SP]);
	known->last = d;
	return 0;
}

// Runs in the thread that creates another one, or a process.
SEC("raw_tp/sched_process_fork")
int thread_created(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 pid = bpf_get_current_pid_tgid() >> 32, zero = 0, child[2] = {};
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	struct worker new = {};
	__u64 regs[REGS];

	if (!lay || !lay->runtime || !facts || !facts->ids || !facts->fsbase)
		return 0;
	bpf_probe_read_kernel(child, sizeof(child), (void *)(ctx->args[1] + facts->ids));
	if (child[1] != pid)
		return 0;
	current_dispatcher(lay, facts, &new.last);
	if (registers_at_entry(facts, regs, sizeof(regs)))
		__builtin_memcpy(new.inherited, regs + INHERITED_AT, sizeof(new.inherited));
	bpf_map_update_elem(&WORKERS, &child[0], &new, BPF_ANY);
	return 0;
}

// Finds fields of task_struct without knowing the kernel: run on a thread that knows what they hold. It lies in the
// scratch area, as the state of the other loops.
struct search {
	__u64 fsbase, stack, ids, last;
	__u32 i, pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);     // thread pointer of the thread that calibrates
} CALIBRATE SEC(".maps");

TURN(look_word)
{
	__u32 zero = 0, i;
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	char *area = scratch(slot);
	struct search *s;
	__u64 v = 0;

	if (!area || !facts)
		return 1;
	s = (void *)(area + STATE);
	i = s->i++;
	bpf_probe_read_kernel(&v, 8, (void *)(bpf_get_current_task() + 8ULL * i));
	if (v == s->fsbase && !facts->fsbase)
		facts->fsbase = 8 * i;
	if (s->stack && v == s->stack && !facts->stack)
		facts->stack = 8 * i;
	if (!facts->ids && v == s->ids)
		facts->ids = 8 * i;
	if (!facts->ids && i && (s->last >> 32 | v << 32) == s->ids)
		facts->ids = 8 * i - 4;
	s->last = v;
	return 0;
}

SEC("perf_event")
int calibrate(struct bpf_perf_event_data *ctx)
{
	__u32 zero = 0, slot = bpf_get_smp_processor_id();
	__u64 *tp = bpf_map_lookup_elem(&CALIBRATE, &zero);
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	char *area = scratch(slot);
	struct search *s;

	if (!tp || !facts || !area)
		return 0;
	s = (void *)(area + STATE);
	s->fsbase = *tp;
	s->ids = bpf_get_current_pid_tgid(); // pid below tgid, as the task has them
	s->stack = !EVENT_IN_USER_MODE(ctx) ? EVENT_SP(ctx) & ~(KERNEL_STACK - 1) : 0;
	s->last = s->i = 0;
	if (!facts->fsbase || (s->stack && !facts->stack))
		LOOP(2048, look_word, slot);
	return 0;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
