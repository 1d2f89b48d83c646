// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0

// Finds fields of task_struct without knowing the kernel: run on a thread that knows what they hold. It lies in the
// scratch area, as the state of the other loops.
struct search {
	__u64 fsbase, stack, ids, last, comm[2];
	__u32 i, pid;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);     // thread pointer of the thread that calibrates
} CALIBRATE SEC(".maps");

TURN(probe_word)
{
	__u32 zero = 0, i;
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	char *area = scratch(slot);
	struct search *s;
	__u64 v = 0, of_other = 0;

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
	if (!facts->comm && s->last == s->comm[0] && v == s->comm[1])
		facts->comm = 8 * i - 8;
	// The first task behind the ids that is the process's first thread: other processes have other ids.
	if (!facts->leader && facts->ids && v >> 63 && !bpf_probe_read_kernel(&of_other, 8, (void *)(v + facts->ids)) &&
	    of_other == ((__u64)s->pid << 32 | s->pid))
		facts->leader = 8 * i;
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
	s->pid = s->ids >> 32;
	bpf_get_current_comm(s->comm, sizeof(s->comm));
	s->last = s->i = 0;
	if (!facts->fsbase || (s->stack && !facts->stack))
		LOOP(2048, probe_word, slot);
	return 0;
}
