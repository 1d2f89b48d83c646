// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Programs at forks and execs, and at wake-ups that give work to native workers.

// A forked child has its parent's memory. What is known of that must be known of the child before its first sample; the
// reader may be notified of the fork later than that. Runs in the parent.
SEC("raw_tp/sched_process_fork")
int forked(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 pid = bpf_get_current_pid_tgid() >> 32, zero = 0;
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	__u32 parent[2] = {}, child[2] = {}, ours, one = 1;

	if ((!lay && !host_rules) || !facts || !facts->ids)
		return 0;
	bpf_probe_read_kernel(parent, sizeof(parent), (void *)(ctx->args[0] + facts->ids));
	bpf_probe_read_kernel(child, sizeof(child), (void *)(ctx->args[1] + facts->ids));
	// A process, not a thread; and the field is what it was taken for.
	if (parent[1] == pid && child[0] == child[1]) {
		// (Of a whole host, a process becomes known by its first sample.)
		if (host_rules) {
			if (HAS(RULE_PROCESS))
				inherit_rule(RULE_PROCESS, pid, child[0]);
			if (HAS(RULE_EXCLUDED))
				inherit_rule(RULE_EXCLUDED, pid, child[0]);
			return 0;
		}
		ours = child[0] & (OURS_CELLS - 1);
		bpf_map_update_elem(&OURS, &ours, &one, BPF_ANY);
		bpf_map_update_elem(&PROCS, &child[0], lay, BPF_ANY);
	}
	return 0;
}

// Runs in a process that has begun another program: wakes the reader, which has to find its interpreter before it runs code. The
// sideband records of what it maps first are in their ring already. Of a whole host, it is a new process from here on.
SEC("raw_tp/sched_process_exec")
int executed(void *ctx)
{
	__u32 pid = bpf_get_current_pid_tgid() >> 32;
	void *nothing = 0;

	if (host_rules)
		bpf_map_delete_elem(&PROCS, &pid);
	else if (bpf_map_lookup_elem(&PROCS, &pid))
		nothing = bpf_ringbuf_reserve(&SAMPLES, 8, 0);
	if (nothing)
		bpf_ringbuf_discard(nothing, BPF_RB_FORCE_WAKEUP);
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
