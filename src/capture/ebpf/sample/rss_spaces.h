// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Resident memory: the address spaces that are observed, from when on, and what is counted of them.

#define RSS_MEMBERS 4             // file, anonymous, swap entries, shared memory (include/linux/mm_types_task.h)
#define RSS_FILE 0
#define RSS_ANONYMOUS 1
#define RSS_SWAP 2
#define RSS_SHARED 3
#define SPACE_CELLS 4096          // a power of two
#define MAX_SPACES 256            // address spaces, at most
#define MAX_RSS_CPUS 1024
#define GAP_BITS 12               // of the table of distances
#define POSTED 16                 // pages by which the memory of a CPU may differ from what is added to the whole
#define MAX_DOUBLED 16            // times that the interval may be doubled
#define ENDED 1                   // in place of the address of an address space
#define POPULATE (0x8000 | 0x2000) // MAP_POPULATE, MAP_LOCKED (asm-generic/mman.h)
#define FIXED 0x10                // MAP_FIXED (asm-generic/mman-common.h)
#define ANONYMOUS 0x20            // MAP_ANONYMOUS
#define PAGEOUT 21                // MADV_PAGEOUT
#define POPULATE_READ 22          // MADV_POPULATE_READ; MADV_POPULATE_WRITE and MADV_COLLAPSE come after it
#define HUGE (1ULL << 21)         // bytes of a large page (PMD_SIZE with pages of 4 KiB)
#define ALIGNED(at) (((at) + PAGE - 1) & ~(PAGE - 1))
#define SEARCHED_STACK 2048       // bytes of a kernel stack in which the description of a page fault is searched for, ...
#define MAX_FAULT 64              // ... and bytes of that, up to the last word that is read, at most
#define MAX_HEAD_BYTES 512        // of a map's head, up to the addresses of its elements; a power of two

// Which part of a range was given back: some of the pages of files in it, some of any, all pages of files. The reader has them
// as ~0, ~1, ~2.
enum { RANGE_NONE, RANGE_ALL, RANGE_SOME_FILES, RANGE_SOME, RANGE_OF_FILES };

// Results of `begin_space`.
enum { SPACE_BEGUN, SPACE_UNKNOWN_KERNEL, SPACE_NO_ROOM, SPACE_CHANGED, SPACE_NOT_FOUND };

struct percpu_counter {
	__s64 count;
	__s32 *counters;
} __attribute__((preserve_access_index));

struct mm_struct___per_cpu {
	struct percpu_counter rss_stat[RSS_MEMBERS];
} __attribute__((preserve_access_index));

// Up to Linux 6.1.
struct mm_rss_stat {
	__s64 count[RSS_MEMBERS];
} __attribute__((preserve_access_index));

struct mm_struct___counted {
	struct mm_rss_stat rss_stat;
} __attribute__((preserve_access_index));

struct use_count {
	int counter;
} __attribute__((preserve_access_index));

struct mm_struct___used {
	struct use_count mm_users;
} __attribute__((preserve_access_index));

struct vm_unmapped_area_info {
	unsigned long length;
} __attribute__((preserve_access_index));

struct mm_struct___places {
	unsigned long brk, start_stack;
} __attribute__((preserve_access_index));

struct file___opened {
	void *private_data;
} __attribute__((preserve_access_index));

struct fdtable {
	struct file___opened **fd;
} __attribute__((preserve_access_index));

struct files_struct {
	struct fdtable *fdt;
} __attribute__((preserve_access_index));

struct task_struct___memory {
	void *mm, *stack;
	struct files_struct *files;
	int pid, tgid;
	unsigned long min_flt, maj_flt;
} __attribute__((preserve_access_index));

struct vm_area_struct {
	void *vm_mm;
	unsigned long vm_start, vm_end;
} __attribute__((preserve_access_index));

struct vm_fault {
	struct vm_area_struct *vma;
	unsigned long address, real_address;
} __attribute__((preserve_access_index));

struct bpf_array {
	void *pptrs[1];
} __attribute__((preserve_access_index));

// How the kernel counts: 1 if this is it. The loader fills it in, and the verifier leaves out the other way.
#define IS_COUNTED bpf_core_type_exists(struct mm_rss_stat)
#define IS_PER_CPU                                                                        \
	(bpf_core_field_exists(((struct mm_struct___per_cpu *)0)->rss_stat) &&            \
	 bpf_core_field_exists(((struct percpu_counter *)0)->counters) &&                 \
	 bpf_core_field_exists(((struct bpf_array *)0)->pptrs))
// Whether a change is reported in the page fault that makes it, which is then found by its description.
#define FINDS_FAULTS                                                                      \
	(IS_PER_CPU && bpf_core_field_exists(((struct vm_fault *)0)->vma) &&              \
	 bpf_core_field_exists(((struct vm_fault *)0)->address) &&                        \
	 bpf_core_field_exists(((struct vm_fault *)0)->real_address))
#define COUNTER_SIZE bpf_core_type_size(struct percpu_counter)

#ifdef LINUX_5_8
// Kernels before 5.12 have no such instruction. Two CPUs at the same time can count a change twice.
#define EXCHANGE(at, new)               \
	({                              \
		__s64 old_ = *(at);     \
		*(at) = (new);          \
		old_;                   \
	})
#define TAKE(at)                        \
	({                              \
		__u64 old_ = *(at);     \
		*(at) = 1;              \
		!old_;                  \
	})
#define SUM(at, more) (*(at) += (more))
#else
#define EXCHANGE(at, new) __sync_lock_test_and_set(at, new)
#define TAKE(at) (!__sync_lock_test_and_set(at, 1))
#define SUM(at, more) (__sync_fetch_and_add(at, more) + (more))
#endif

// An address space that is observed.
struct space {
	__u64 mm;                 // 0: none
	__u32 pid, pad;
	__u64 sampled;            // samples of growth so far
	__u64 highest_brk;        // end of the heap, as seen when samples were taken
	__s64 global[RSS_MEMBERS]; // the common counts at the last report
	__u64 counters[RSS_MEMBERS]; // addresses of the parts of CPUs, relative to each CPU's own memory
	__s64 start[RSS_MEMBERS]; // pages when it began to be observed
	__u64 began;              // when that was
	__s64 total, peak;        // pages of all kinds, and the most that there were
	__u64 peak_time;          // the last time before memory was given back after that; ...
	__u64 is_rising;          // ... it has not been since
};

// What each CPU has of it. Amounts in pages.
struct space_part {
	__s64 until_grown, until_returned; // bytes to the next sample
	__u64 offset;             // of this CPU's own memory
	__s64 grown[RSS_MEMBERS], returned[RSS_MEMBERS]; // by the process itself
	__s64 others_grown[RSS_MEMBERS], others_returned[RSS_MEMBERS]; // by other tasks
	__s32 last[RSS_MEMBERS];  // this CPU's parts of the counters at the last report
	struct system_call range; // the last one that was passed on, ...
	__u64 range_sampled;      // ... and `sampled` then
	__s64 unposted;           // pages that are not in `total` of the space yet
	__u32 grown_doubled, returned_doubled; // how often the interval was doubled when the distances were drawn
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);   // the loader makes it MAX_SPACES, or fewer
	__type(key, __u32);
	__type(value, struct space);
} SPACES SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);   // as SPACES
	__type(key, __u32);
	__type(value, struct space_part);
} SPACE_PARTS SEC(".maps");

// Whether a place in SPACES is in use. The reader clears it last.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SPACES);
	__type(key, __u32);
	__type(value, __u64);
} TAKEN SEC(".maps");

// Which address space has which place in SPACES, by its address. An entry whose place has another address space is out
// of date. Nearly all reports of a machine end here.
struct space_cell {
	__u64 mm[2];
	__u64 index[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SPACE_CELLS);
	__type(key, __u32);
	__type(value, struct space_cell);
} SPACE_CELL SEC(".maps");

// Distances between the points of the clock, in bytes: entry N is exceeded by a part of 1 - N / 2^GAP_BITS.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, (1 << GAP_BITS) + 1);
	__type(key, __u32);
	__type(value, __u64);
} GAPS SEC(".maps");

// The last page fault on this CPU, or the last one that was searched for; and a word of the CPU's own memory, to find out
// where that is.
struct fault {
	__u64 address;
	__u64 thread;             // an address on its kernel stack, or of its `struct task_struct`
	__u64 number;             // faults of the thread before, if it was searched for
	__u32 in_user_mode;       // not in a system call
	__u32 sampled;            // there is a sample of what it has made resident
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fault);
} LAST_FAULT SEC(".maps");

// Where the kernel is about to map memory for a thread and to fill it at once, and the arguments of the system call.
struct new_area {
	__u64 at, hint, length;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);       // thread id
	__type(value, struct new_area);
} NEW_AREAS SEC(".maps");

// Ranges that could not be passed on, and address spaces that could not be observed.
enum { LOST_RANGES, LOST_SPACES, LOSSES };

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LOSSES);
	__type(key, __u32);
	__type(value, __u64);
} LOST SEC(".maps");

static __always_inline void count_lost(__u32 what)
{
	__u64 *lost = bpf_map_lookup_elem(&LOST, &what);

	if (lost)
		*lost += 1;
}

static __always_inline __u32 cell_of(__u64 mm)
{
	return (mm >> 6 ^ mm >> 18) & (SPACE_CELLS - 1);
}

// Place of an address space in SPACES, and 1 more; 0: it is not observed.
static __always_inline __u32 space_number(__u64 mm)
{
	__u32 at = cell_of(mm);
	struct space_cell *cell = bpf_map_lookup_elem(&SPACE_CELL, &at);

	if (!cell)
		return 0;
	if (cell->mm[0] == mm)
		return cell->index[0] + 1;
	return cell->mm[1] == mm ? cell->index[1] + 1 : 0;
}

// Whether an entry of a cell is free, or out of date.
static __always_inline int is_unused(struct space_cell *cell, __u32 entry)
{
	__u32 index = cell->index[entry];
	__u64 mm = cell->mm[entry];
	struct space *s = bpf_map_lookup_elem(&SPACES, &index);

	return !mm || !s || s->mm != mm;
}

// Whether no task uses an address space any more: it is being taken down.
static __always_inline int has_no_users(__u64 mm)
{
	int users = 1;

	bpf_probe_read_kernel(&users, 4, (char *)mm + bpf_core_field_offset(struct mm_struct___used, mm_users));
	return !users;
}

// How often the interval between samples is doubled, by the reader.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} DOUBLED SEC(".maps");

// Bytes to the next point of the clock: between two entries of the table. What a sample stands for depends on the
// interval that the distance to it was drawn with, which is noted: it may have changed since.
static __always_inline __s64 gap(__u32 *doubled)
{
	__u32 random = bpf_get_prandom_u32(), at = random >> (32 - GAP_BITS), zero = 0;
	__u32 *times = bpf_map_lookup_elem(&DOUBLED, &zero);
	__u64 *from = bpf_map_lookup_elem(&GAPS, &at), *to, bytes;

	at++;
	to = bpf_map_lookup_elem(&GAPS, &at);
	if (!from || !to || !times)
		return 1ULL << 62;
	*doubled = *times < MAX_DOUBLED ? *times : MAX_DOUBLED;
	bytes = *from + ((*to - *from) * (random & ((1 << (32 - GAP_BITS)) - 1)) >> (32 - GAP_BITS)) + 1;
	return bytes << *doubled;
}

// The head of a map as the kernel has it, up to the addresses of its elements.
struct map_head {
	char bytes[MAX_HEAD_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct map_head);
} MAP_HEAD SEC(".maps");

// Address of the element of LAST_FAULT, relative to each CPU's own memory; 0: not found.
static __always_inline __u64 own_memory_base(void)
{
	__u64 at = bpf_core_field_offset(struct bpf_array, pptrs);
	__u32 zero = 0;
	struct map_head *head = bpf_map_lookup_elem(&MAP_HEAD, &zero);

	if (!head || at > MAX_HEAD_BYTES - 8 || bpf_probe_read_kernel(head->bytes, MAX_HEAD_BYTES, &LAST_FAULT))
		return 0;
	BOUND(at, MAX_HEAD_BYTES - 1);
	return at <= MAX_HEAD_BYTES - 8 ? *(__u64 *)(head->bytes + at) : 0;
}

static __always_inline void *counter_at(__u64 mm, __u32 member)
{
	return (char *)mm + bpf_core_field_offset(struct mm_struct___per_cpu, rss_stat) + member * COUNTER_SIZE;
}

static __always_inline __s64 common_count(__u64 mm, __u32 member)
{
	__s64 count = 0;

	bpf_probe_read_kernel(&count, 8, counter_at(mm, member) + bpf_core_field_offset(struct percpu_counter, count));
	return count;
}

static __always_inline __u64 pointer_at(void *at)
{
	__u64 pointer = 0;

	bpf_probe_read_kernel(&pointer, 8, at);
	return pointer;
}

static __always_inline __s32 part_of_counter(__u64 at)
{
	__s32 part = 0;

	bpf_probe_read_kernel(&part, 4, (void *)at);
	return part;
}

// Notes what the parts of the counters are on each CPU. SPACE_CHANGED if a part was moved to the common count meanwhile.
static __always_inline int read_parts(struct space *s, __u32 index, __u64 mm)
{
	__u64 base = own_memory_base(), offset = 0;
	__u32 cpu, m, zero = 0;

	if (!base)
		return SPACE_UNKNOWN_KERNEL;
	for (m = 0; m < RSS_MEMBERS; m++) {
		s->counters[m] = pointer_at(counter_at(mm, m) + bpf_core_field_offset(struct percpu_counter, counters));
		s->global[m] = s->start[m] = common_count(mm, m);
	}
	for (cpu = 0; cpu < MAX_RSS_CPUS; cpu++) {
		struct space_part *part = bpf_map_lookup_percpu_elem(&SPACE_PARTS, &index, cpu);
		struct fault *word = bpf_map_lookup_percpu_elem(&LAST_FAULT, &zero, cpu);

		if (!part || !word)
			break;
		// (The verifier computes with no address of a map's element that it knows as one.)
		bpf_probe_read_kernel(&offset, 8, &word);
		offset -= base;
		__builtin_memset(part, 0, sizeof(*part));
		part->offset = offset;
		for (m = 0; m < RSS_MEMBERS; m++) {
			part->last[m] = part_of_counter(s->counters[m] + offset);
			s->start[m] += part->last[m];
		}
	}
	for (m = 0; m < RSS_MEMBERS; m++)
		if (common_count(mm, m) != s->global[m])
			return SPACE_CHANGED;
	return SPACE_BEGUN;
}

// Adds what has changed on this CPU to the whole, and takes note of the peak. Not at each change: CPUs would wait for each other.
static __always_inline void post(struct space *s, struct space_part *part, __s64 pages)
{
	__s64 change = part->unposted + pages, total;

	if (change < POSTED && change > -POSTED) {
		part->unposted = change;
		return;
	}
	part->unposted = 0;
	if (change < 0 && s->is_rising) {
		s->peak_time = bpf_ktime_get_ns();
		s->is_rising = 0;
	}
	total = SUM(&s->total, change);
	if (total > s->peak) {
		s->peak = total;
		s->is_rising = 1;
	}
}

// An address space ends.
static __always_inline void end_space(struct space *s)
{
	if (s->is_rising) {
		s->peak_time = bpf_ktime_get_ns();
		s->is_rising = 0;
	}
	s->mm = ENDED;
}

// Begins to observe an address space. (Not static: as walk_chain.)
__noinline int begin_space(__u64 mm, __u32 pid)
{
	__u32 index = 0, i, m, at = cell_of(mm), number = space_number(mm);
	struct space_cell *cell;
	__u64 *taken = 0;
	struct space *s;
	int begun = SPACE_BEGUN;

	if (!IS_COUNTED && !IS_PER_CPU)
		return SPACE_UNKNOWN_KERNEL;
	if (number) {
		index = number - 1;
		s = bpf_map_lookup_elem(&SPACES, &index);
		if (s && s->mm == mm)
			return SPACE_BEGUN;
	}
	cell = bpf_map_lookup_elem(&SPACE_CELL, &at);
	if (!cell || (!is_unused(cell, 0) && !is_unused(cell, 1)))
		return SPACE_NO_ROOM;
	for (i = 0; i < MAX_SPACES; i++) {
		index = i;
		taken = bpf_map_lookup_elem(&TAKEN, &index);
		s = bpf_map_lookup_elem(&SPACES, &index);
		if (!taken || !s)
			return SPACE_NO_ROOM;
		// (Looked at first: most places are in use where many are.)
		if (!*taken && TAKE(taken))
			break;
	}
	if (i == MAX_SPACES || !taken || !s)
		return SPACE_NO_ROOM;
	s->mm = mm;
	s->pid = pid;
	s->sampled = 0;
	s->highest_brk = pointer_at((char *)mm + bpf_core_field_offset(struct mm_struct___places, brk));
	if (IS_COUNTED) {
		for (m = 0; m < RSS_MEMBERS; m++)
			s->global[m] = s->start[m] =
				pointer_at((char *)mm + bpf_core_field_offset(struct mm_struct___counted, rss_stat) + 8 * m);
	} else {
		begun = read_parts(s, index, mm);
		if (begun != SPACE_BEGUN) {
			s->mm = 0;
			*taken = 0;
			return begun;
		}
	}
	s->began = bpf_ktime_get_ns();
	s->total = s->start[RSS_FILE] + s->start[RSS_ANONYMOUS] + s->start[RSS_SHARED];
	s->peak = s->total;
	s->is_rising = 1;
	if (is_unused(cell, 0)) {
		cell->index[0] = index;
		cell->mm[0] = mm;
	} else {
		cell->index[1] = index;
		cell->mm[1] = mm;
	}
	return SPACE_BEGUN;
}

// Begins to observe one that a process of ours has got.
static __always_inline void begin_new_space(__u64 mm, __u32 pid)
{
	int begun = begin_space(mm, pid);

	if (begun == SPACE_CHANGED)
		begun = begin_space(mm, pid);
	if (begun != SPACE_BEGUN)
		count_lost(LOST_SPACES);
}

// Run by the reader, which has a file open whose private data is the address space of a process: /proc/PID/pagemap
// (fs/proc/task_mmu.c, v4.1 and later). Arguments: its descriptor, the process.
SEC("raw_tp/begin_rss")
int begin_rss(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct___memory *task = (void *)bpf_get_current_task();
	__u64 fd = ctx->args[0], at = (__u64)BPF_CORE_READ(task, files, fdt, fd);
	struct file___opened *file = (void *)pointer_at((void *)(at + 8 * fd));
	__u64 mm = (__u64)BPF_CORE_READ(file, private_data);

	return mm ? begin_space(mm, ctx->args[1]) : SPACE_NOT_FOUND;
}

// A process executes a program: it has another address space from here on. It may grow before the reader knows where its stack
// ends, without which each sample would take far more room in the ring than it needs.
SEC("raw_tp/sched_process_exec")
int exec_rss(void *ctx)
{
	struct task_struct___memory *task = (void *)bpf_get_current_task();
	__u32 pid = bpf_get_current_pid_tgid() >> 32;
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	__u64 mm;

	if (!lay)
		return 0;
	mm = (__u64)BPF_CORE_READ(task, mm);
	lay->stack_end = pointer_at((char *)mm + bpf_core_field_offset(struct mm_struct___places, start_stack));
	begin_new_space(mm, pid);
	return 0;
}

// A process has a child.
SEC("raw_tp/sched_process_fork")
int fork_rss(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct___memory *task = (void *)bpf_get_current_task(), *child = (void *)ctx->args[1];
	__u32 pid = bpf_get_current_pid_tgid() >> 32, number = BPF_CORE_READ(child, tgid);
	void *mm;

	if (!bpf_map_lookup_elem(&PROCS, &pid) || number != BPF_CORE_READ(child, pid))
		return 0;
	mm = BPF_CORE_READ(child, mm);
	if (mm && mm != BPF_CORE_READ(task, mm))
		begin_new_space((__u64)mm, number);
	return 0;
}
