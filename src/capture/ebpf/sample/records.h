// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Limits, the records that are written, the maps, and access to the memory of the thread.

#define PAGE 4096ULL
#define KERNEL_STACK 16384ULL     // THREAD_SIZE (asm/page_64_types.h; on aarch64 with pages of 4 KiB, asm/memory.h)
#define MAX_STACK (1ULL << 20)    // bytes of stack in one record
#define MAX_STACKS 8              // records of one stack
#define DEEP_FRAMES 1000          // from this number on, one record may be too small for the stack
#define MAX_PAGES 257             // MAX_STACK and the page of the stack pointer
#define LOT (1ULL << 16)          // bytes of stack per read
#define MAX_FAULTS 64             // a failed probe costs about 0.7 us
#define FAULTS_OF_REST 16         // further ones in each record after a hole that was skipped
#define PROBES 48                 // of the search for the end of such a hole
#define MAX_LEAP (1ULL << 18)     // between two of them, bytes
#define MAX_FRAMES 16384
#define MAX_CFRAMES 16384
#define MAX_KERNEL 127
#define HEAD (576 + 8 * (REGS - 21))
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
#define MIN_WAKE_UP_INTERVAL 10000000
#define MAX_NESTED 64             // further thread states of one thread
#define NESTED_PART 8             // thread states in one entry of the map
#define NESTED_PARTS 9            // entries for one thread: one state more than MAX_NESTED, and its own
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
#define NAME_BYTES 256           // copied of the name of a task, at most
#define DICT_ENTRIES 5           // of a dictionary with 8 slots
#define MAX_CHAIN 8              // tasks that await each other
#define MAX_CELLS 8              // of a closure
#define ABSENT 0xffff
#define MAX_WORKS 8              // off-CPU samples that are taken at the same time, at most
#define SCHEDULE_RESUME 0x4b460001 // see `schedule`
#define MAX_GILS 64              // interpreter locks of one process that are known here, at most
#define THREAD_STATE (1ULL << 63) // marks the address of a thread state, where the thread's number is not known
#define HOLDS (1ULL << 62)        // marks one that still held the lock
#define RELEASES 64              // of those that held them, so many are remembered; a power of two
#define GENERAL (8 * GENERAL_REGS)
#define CHUNK_BITS 16            // of stack addresses that one thread is known by
#define SCANNED 0x7fffULL        // bytes of a worker's stack that are searched, a mask; kernels of OpenBLAS use 28 KiB
#define OURS_CELLS 4096          // a power of two
#define MAX_HOLDERS 10           // threads that one wait for such a lock is divided among, at most

enum { WALK_NONE, WALK_COMPLETE, WALK_FAULT, WALK_DEEP };
enum { TLS_NONE, TLS_KEY_GLIBC, TLS_KEY_MUSL, TLS_OFFSET, TLS_BLOCK_GLIBC, TLS_BLOCK_MUSL };
enum { REGS_OK = 1, IN_KERNEL = 2, MORE = 4, REST = 8, CODE_COPY = 16, OFF_CPU = 32, WAKER = 64, HOLDS_LOCK = 128, WORKER = 256,
       UNCHANGED = 512, STOPPED = 1024, FROZEN = 2048,
       DETACHED = 4096, // the attached thread state is none of the thread's
       HOST = 8192,     // of a whole host: `cgroup` and `comm` are set
       NEW = 16384,     // of a process that is not in PROCS: `inode`, `device` and `runtime` are set
       RSS = 32768,     // of a change of resident memory: `struct change` is in place of `holders`
       RANGE = 65536,   // `struct memory_range`, which is no sample
       ALLOCATION = 131072, // of a block that the process has sampled: `struct allocation` is in place of `holders`
       FREED = 262144 }; // `struct freed_block`, which is no sample
enum { PART_CODE, PART_NAME, PART_QUALNAME, PART_FILENAME, PART_LINES, PARTS };
enum { FRAME_POINTER = 1, NAME_OF_COROUTINE = 2 }; // flags of `struct running`
enum { COUNT_LOST, COUNT_SAMPLES, COUNT_TIME, COUNTERS }; // time in ns, of all samples together

// Where one process keeps things. Offsets in bytes; ABSENT where this interpreter has no such field.
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
	__u32 interp_next;        // interpreter -> the next older one, ...
	__u32 interp_threads;     // ... its newest thread state
	__u32 tstate_next;        // thread state -> the next older one
	__u32 lent;               // where threads run states of other threads: thread state -> innermost CFrame (or ABSENT); else 0
};

struct frame {
	__u64 frame, code, instr;
	__u32 fingerprint;
	__u8 owner, entry;
	__u16 pad;
};

struct anchor {
	__u64 anchor, frame;
};

// Followed by kernel addresses, frames, anchors and the stack, each only as long as needed. The flag MORE: a record with
// the next part of the stack and nothing else follows; it has the flag REST and the same thread and time.
struct head {
	__u32 size, pid, tid, flags;
	__u64 time;
	__u64 regs[REGS];
	__u64 thread_pointer;     // address of the thread's descriptor
	__u64 stack_base;
	__u32 stack_len;
	__u16 kernel, frames, anchors, walk;
	__u32 frames_at, stack_at;
	__u64 holes[5];
	__u64 cpu, runnable, blocked; // time that the sample represents, ns; 0 without the accounting of off-CPU time. Of events that are
	                          // counted, `cpu` is their number
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
	} holders[MAX_HOLDERS];
	__u64 throttled, throttled_length; // OFF_CPU: as `runnable`, of which it is no part
	// OFF_CPU: the only descriptor that the thread polled or selected, 32 bits, and the events that it waited for, 16 bits, as in
	// `struct pollfd`. 0: none, or several.
	__u64 polled;
	// Of whole hosts: the thread's cgroup (v2), and the name of its process.
	__u64 cgroup;
	char comm[16];
	// NEW: the file of its program, 0: not known, and where its interpreter is taken to be, 0: it has none that is known.
	__u64 inode, device, runtime;
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

// A change of resident memory.
struct change {
	__u64 address;            // of the page fault, or where the memory begins that a system call fills; 0: not known
	__u64 length;             // of the latter, bytes; 1: faults of which this is the last one
	__s64 pages;
	__u32 member;             // which of the kernel's counters
	__u32 is_repeated;        // there is a sample of the same page fault
	__u32 doubled, pad;       // how often the interval was doubled that it was sampled at
};

// Memory that a process has given back, or moved.
struct memory_range {
	__u32 size, pid, tid, flags;
	__u64 time, from, to;
	__u64 moved_to;           // 0: given back; ~0: some of its pages of files were given back; ~1: some of its pages;
	                          // ~2: its pages of files
};

// A block that the process has sampled.
struct allocation {
	__u64 address, size;
	__u64 bytes;              // that it stands for
};

// The end of one.
struct freed_block {
	__u32 size, pid, tid, flags;
	__u64 time, address;
};

// As abi.rs has them.
_Static_assert(sizeof(struct code_head) == 120, "code_head");
_Static_assert(sizeof(struct layout) == 128, "layout");
_Static_assert(__builtin_offsetof(struct head, stack_base) == 32 + 8 * REGS, "stack_base");
_Static_assert(__builtin_offsetof(struct head, holes) == 64 + 8 * REGS, "holes");
_Static_assert(sizeof(struct head) <= HEAD, "head");

// The members beside the bytes are there for the object's type information, with which a test compares abi.rs.
struct area {
	union {
		char bytes[AREA + SLACK];
		struct head head;
		struct code_head code_head;
		struct frame frame;
		struct anchor anchor;
		struct change change;
		struct memory_range memory_range;
		struct allocation allocation;
		struct freed_block freed_block;
	};
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

// Where a process keeps which asyncio tasks run, if that is wanted. Offsets in bytes.
struct running {
	__u64 current;            // the dictionary event loop -> task; 0: the thread state has the task
	__u16 keys;               // dictionary -> its keys
	__u16 entries;            // keys -> the first entry of a small dictionary
	__u16 task;               // thread state -> task
	__u16 name;               // task -> its name; with NAME_OF_COROUTINE: its coroutine -> that one's name
	__u16 coroutine;          // task -> its coroutine
	__u16 frame;              // coroutine -> its frame; with FRAME_POINTER: -> a pointer to it
	__u16 flags;
	__u16 callback;           // future -> its first callback
	__u16 waiter;             // task -> the future that it awaits
	__u16 closure;            // function -> the cells of its closure
	__u16 items;              // tuple -> its items
	__u16 head;               // size of an object's header
	__u16 awaited_by;         // task -> the one that awaits it; 0: it has no such field
	__u16 awaited_by_is_set;  // task -> whether these are several
	__u32 pad;
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
	__u32 leader;             // task_struct -> group_leader, 0: unknown
	__u32 comm;               // task_struct -> comm, 0: unknown
	__u32 counted;            // samples are of events that are counted, and stand for a number of them
	__u32 pad;
};

struct turn {
	__u32 left, chosen;
	__u64 woken;
	__u64 selected;
	__u64 counted;
};

// Ticks left in this turn, and the one of them to take. When the reader was last woken because frames were missing. Whether
// the thread that this CPU switches to has something to be taken (LINUX_5_8). The CPU's events up to its last sample, where
// events are counted.
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

// Further thread states of one thread: of the interpreters around the subinterpreter that it runs. And those that any thread
// may run, whichever they belong to.
struct nested_key {
	__u64 thread_pointer;     // 0: any thread
	__u32 pid, part;
};

// Followed by the next part if none is 0.
struct nested {
	__u64 states[NESTED_PART];
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
