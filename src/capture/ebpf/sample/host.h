// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Whole hosts: which processes are sampled that are not in PROCS.

#define MAX_LEVELS 16             // of cgroups, from the root on

enum { RULE_ALL, RULE_CGROUP, RULE_COMM, RULE_USER, RULE_PROCESS, RULE_EXCLUDED };

// Bit N: there are rules of this kind (RULE_ALL: every process is sampled). 0: only the processes in PROCS are sampled. Set by the
// loader, so that the verifier leaves out what is not asked for.
const volatile __u32 host_rules = 0;
#define HAS(kind) (host_rules & 1u << (kind))

// A cgroup, user or process by its number, or a name of 16 bytes.
struct rule {
	__u64 kind;
	__u64 value[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, HASH_FLAGS);
	__type(key, struct rule);
	__type(value, __u32);
} RULES SEC(".maps");

static __always_inline int has_rule(__u64 kind, __u64 value)
{
	struct rule rule = { .kind = kind, .value = { value } };

	return bpf_map_lookup_elem(&RULES, &rule) != 0;
}

// Name of the process: that of its first thread.
static __always_inline void process_name(struct kernel_facts *facts, void *name)
{
	__u64 leader = 0;

	__builtin_memset(name, 0, 16);
	if (facts->leader && facts->comm)
		bpf_probe_read_kernel(&leader, 8, (void *)(bpf_get_current_task() + facts->leader));
	// (Behind its end there may be the rest of an earlier one.)
	if (!leader || bpf_probe_read_kernel_str(name, 16, (void *)(leader + facts->comm)) < 0)
		bpf_get_current_comm(name, 16);
}

static __always_inline int is_admitted(struct kernel_facts *facts, __u32 pid)
{
	int level;

	if (!pid || (HAS(RULE_EXCLUDED) && has_rule(RULE_EXCLUDED, pid)))
		return 0;
	if (HAS(RULE_ALL))
		return 1;
	if (HAS(RULE_PROCESS) && has_rule(RULE_PROCESS, pid))
		return 1;
	if (HAS(RULE_USER) && has_rule(RULE_USER, (__u32)bpf_get_current_uid_gid()))
		return 1;
	if (HAS(RULE_COMM)) {
		struct rule rule = { .kind = RULE_COMM };

		process_name(facts, rule.value);
		if (bpf_map_lookup_elem(&RULES, &rule))
			return 1;
	}
	if (HAS(RULE_CGROUP)) {
		for (level = 0; level < MAX_LEVELS; level++) {
			__u64 id = bpf_get_current_ancestor_cgroup_id(level);

			if (!id)
				break;
			if (has_rule(RULE_CGROUP, id))
				return 1;
		}
	}
	return 0;
}

// A child is sampled, or excluded, as its parent is.
static __always_inline void inherit_rule(__u64 kind, __u32 parent, __u32 child)
{
	struct rule rule = { .kind = kind, .value = { parent } };
	__u32 one = 1;

	if (!bpf_map_lookup_elem(&RULES, &rule))
		return;
	rule.value[0] = child;
	bpf_map_update_elem(&RULES, &rule, &one, BPF_ANY);
}
