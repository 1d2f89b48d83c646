// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Whole hosts: the interpreter of a process that is not known yet, if another process has run the same program. Short processes are
// sampled once or twice: the reader would know of them too late.

#define MAX_PROGRAMS 1024
#define MAX_LIBRARIES 128         // of a process, in the order in which they were loaded

// Whether the kernel has type information, so that the loader has filled in the offsets below. Set by the loader.
const volatile __u32 kernel_types = 0;

struct super_block {
	__u32 s_dev;
} __attribute__((preserve_access_index));

struct inode {
	struct super_block *i_sb;
	unsigned long i_ino;
} __attribute__((preserve_access_index));

struct file {
	struct inode *f_inode;
} __attribute__((preserve_access_index));

struct mm_struct {
	struct file *exe_file;
	unsigned long start_code, start_stack;
} __attribute__((preserve_access_index));

struct task_struct___program {
	struct mm_struct *mm;
} __attribute__((preserve_access_index));

// The file of a program.
struct program_id {
	__u64 inode;
	__u32 device, pad;
};

// Where a program has its interpreter.
struct program {
	struct layout lay;        // `runtime`: from where the interpreter begins
	__u64 library;            // from the base address of the interpreter's library to its dynamic section; 0: the interpreter is in
	                          // the program, and begins with its code
	__u64 debug;              // start of the program's code -> address of the loader's `struct r_debug`
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_PROGRAMS);
	__type(key, struct program_id);
	__type(value, struct program);
} PROGRAMS SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct layout);
} NEW_LAYOUT SEC(".maps");

// Base address of the library whose dynamic section is `distance` above it, 0 if it is not loaded. `first`: of the loader's list
// (struct link_map: base address, name, dynamic section, next; link.h of glibc 2.36, ldso/dynlink.c of musl 1.2.5).
static __always_inline __u64 base_of_library(__u64 first, __u64 distance)
{
	__u64 map[4];
	int i;

	for (i = 0; i < MAX_LIBRARIES; i++) {
		if (!first || bpf_probe_read_user(map, sizeof(map), (void *)first))
			return 0;
		if (map[2] - map[0] == distance)
			return map[0];
		first = map[3];
	}
	return 0;
}

// What can be known of the current process, which is in PROCS by no number. Notes its program in `h`, and where its interpreter is
// taken to be. The reader compares that with what the process maps.
static __always_inline struct layout *layout_of_new(struct head *h)
{
	struct task_struct___program *task = (void *)bpf_get_current_task();
	struct program_id id = {};
	__u32 zero = 0;
	struct layout *lay = bpf_map_lookup_elem(&NEW_LAYOUT, &zero);
	struct program *program;
	struct mm_struct *mm;
	__u64 base, code;

	h->flags |= NEW;
	h->inode = h->device = h->runtime = 0;
	if (!lay)
		return 0;
	__builtin_memset(lay, 0, sizeof(*lay));
	if (!kernel_types)
		return lay;
	mm = BPF_CORE_READ(task, mm);
	lay->stack_end = BPF_CORE_READ(mm, start_stack);
	code = BPF_CORE_READ(mm, start_code);
	id.inode = BPF_CORE_READ(mm, exe_file, f_inode, i_ino);
	id.device = BPF_CORE_READ(mm, exe_file, f_inode, i_sb, s_dev);
	h->inode = id.inode;
	h->device = id.device;
	program = bpf_map_lookup_elem(&PROGRAMS, &id);
	if (!program)
		return lay;
	base = code;
	if (program->library) {
		base = user_word(code + program->debug);
		base = base_of_library(base ? user_word(base + 8) : 0, program->library);
	}
	if (!base)
		return lay;
	code = lay->stack_end;
	*lay = program->lay;
	lay->stack_end = code;
	lay->runtime += base;
	h->runtime = lay->runtime;
	return lay;
}
