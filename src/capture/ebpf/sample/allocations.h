// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Allocations that a process samples itself, and publishes at probes (USDT): each sampled block with the bytes that it stands
// for, and the frees of those blocks.

#define ARGUMENTS 3
#define MAX_PROBES 4096           // of all processes
#define NO_INDEX 0xff

enum { PLACE_CONSTANT, PLACE_REGISTER, PLACE_MEMORY };

// Where an argument of a probe is.
struct probe_argument {
	__s64 offset;             // the constant; of memory, from the address in the registers
	__u8 place, reg, index;   // registers, as words of REGS; `index`: added to the address, or NO_INDEX
	__u8 shift;               // of the index, bits
	__u8 size, is_signed;     // bytes: 1, 2, 4 or 8
	__u16 pad;
};

struct probe_key {
	__u64 pc;
	__u64 pid;
};

// Arguments of an allocation: address, size, the bytes that it stands for; of a free: address.
struct probe {
	__u64 is_free;
	struct probe_argument arguments[ARGUMENTS];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_PROBES);
	__type(key, struct probe_key);
	__type(value, struct probe);
} ALLOCATION_PROBES SEC(".maps");

// What could not be passed on: sampled blocks, frees of some.
enum { LOST_BLOCKS, LOST_FREES, LOST_EVENTS };

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LOST_EVENTS);
	__type(key, __u32);
	__type(value, __u64);
} LOST_ALLOCATIONS SEC(".maps");

static __always_inline void count_lost_event(int is_free)
{
	__u32 what = is_free ? LOST_FREES : LOST_BLOCKS;
	__u64 *lost = bpf_map_lookup_elem(&LOST_ALLOCATIONS, &what);

	if (lost)
		*lost += 1;
}

// Reads an argument; false if it is in memory that cannot be read. (Not inlined: for the room on the stack.)
static __noinline int read_argument(__u32 slot, struct probe_argument *a, __u64 *out)
{
	struct head *h = (void *)scratch(slot);
	__u64 value, reg, index, bits, size;

	if (!h || !a || !out)
		return 0;
	reg = a->reg;
	index = a->index;
	size = a->size;
	bits = (64 - 8 * size) & 63;
	value = a->offset;
	BOUND(reg, 63);
	if (a->place == PLACE_REGISTER) {
		value = h->regs[reg];
	} else if (a->place == PLACE_MEMORY) {
		__u64 at = value + h->regs[reg];

		if (index != NO_INDEX) {
			BOUND(index, 63);
			at += h->regs[index] << (a->shift & 3);
		}
		value = 0;
		BOUND(size, 15);
		if (size > 8 || bpf_probe_read_user(&value, size, (void *)at))
			return 0;
	}
	*out = a->is_signed ? (__s64)(value << bits) >> bits : value << bits >> bits;
	return 1;
}

// Passes on what a probe publishes.
static __always_inline void take_published(struct pt_regs *ctx, struct kernel_facts *facts, struct probe *p, __u32 pid,
					   __u32 slot)
{
	__u32 zero = 0;
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	struct turn *turn = bpf_map_lookup_elem(&TURN, &zero);
	struct freed_block freed = {};
	struct allocation *block;
	struct cache *c = cache(slot);
	char *area = scratch(slot);
	struct head *h = (void *)area;
	__u64 arguments[ARGUMENTS] = {};

	if (!lay || !turn || !c || !area)
		return;
	if (bpf_probe_read_kernel(h->regs, sizeof(h->regs), ctx) || !read_argument(slot, &p->arguments[0], &arguments[0])) {
		count_lost_event(p->is_free);
		return;
	}
	if (p->is_free) {
		freed.size = sizeof(freed);
		freed.pid = pid;
		freed.tid = bpf_get_current_pid_tgid();
		freed.flags = FREED;
		freed.time = bpf_ktime_get_ns();
		freed.address = arguments[0];
		if (bpf_ringbuf_output(&SAMPLES, &freed, sizeof(freed), ring_flags()))
			count_lost_event(1);
		return;
	}
	if (!read_argument(slot, &p->arguments[1], &arguments[1]) || !read_argument(slot, &p->arguments[2], &arguments[2])) {
		count_lost_event(0);
		return;
	}
	h->time = bpf_ktime_get_ns();
	h->pid = pid;
	h->tid = bpf_get_current_pid_tgid();
	h->flags = REGS_OK | ALLOCATION;
	h->kernel = 0;
	h->cpu = h->runnable = h->blocked = 0;
	block = (void *)h->holders;
	block->address = arguments[0];
	block->size = arguments[1];
	block->bytes = arguments[2];
	snapshot(slot, area, c, lay, facts, turn, h->time, 0);
}

// At a probe, in the thread that is at it. It may be preempted, so it has a scratch area for itself.
SEC("uprobe")
int published(struct pt_regs *ctx)
{
	__u32 zero = 0, pid = bpf_get_current_pid_tgid() >> 32;
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct probe_key key = { .pc = PROBE_PC(ctx), .pid = pid };
	struct probe *p = bpf_map_lookup_elem(&ALLOCATION_PROBES, &key);
	__u32 slot;

	if (!p || !facts)
		return 0;
	slot = claim_any();
	if (slot == MAX_WORKS) {
		count_lost_event(p->is_free);
		return 0;
	}
	take_published(ctx, facts, p, pid, facts->cpus + slot);
	release(slot);
	return 0;
}
