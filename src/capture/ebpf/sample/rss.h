// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Resident memory: each change of the kernel's own counters, which it reports at `kmem:rss_stat`.
//
// Up to Linux 6.1 the report has the new total. It may be of 64 earlier page faults of the thread, and comes at the begin of
// the next one, or when the thread gives memory back. Later it has none, and the counters are per CPU: a part for each CPU,
// which is added to a common count when it has become large. What one report is about is then the change of this CPU's
// part since the last one, and if that part is 0, that of the common count as well. Both are compared with what they
// were at the last report, so the sum is exact: what one report missed is in the next one.
//
// Growth is sampled by a clock that counts bytes: a report is taken if a point of a Poisson process lies in its bytes.
// A report of `s` bytes is then taken with probability 1 - exp(-s / interval), by which the reader divides. The reader
// doubles the interval when taking stacks costs too much; counting goes on at each report. Memory that is given back is
// counted exactly and sampled in the same way, and each range that is given back is passed on: a thread that gives
// memory back is in a system call that names the range.

static __always_inline void note_fault(__u64 address, __u64 stack, __u32 in_user_mode)
{
	__u32 zero = 0;
	struct fault *last = bpf_map_lookup_elem(&LAST_FAULT, &zero);

	if (last) {
		last->address = address;
		last->thread = stack;
		last->in_user_mode = in_user_mode;
		last->sampled = 0;
	}
}

// Whether page faults are to be noted: where a change is reported later than in the fault that has made it. Run by the reader.
SEC("raw_tp/notes_faults")
int notes_faults(void *ctx)
{
	return !FINDS_FAULTS;
}

// Arguments: the address, and the registers, which are on the kernel stack.
SEC("raw_tp/page_fault_user")
int user_fault(struct bpf_raw_tracepoint_args *ctx)
{
	note_fault(ctx->args[0], ctx->args[1], 1);
	return 0;
}

SEC("raw_tp/page_fault_kernel")
int kernel_fault(struct bpf_raw_tracepoint_args *ctx)
{
	note_fault(ctx->args[0], ctx->args[1], 0);
	return 0;
}

// The same where the kernel has no such tracepoints (aarch64): at its software event of page faults.
SEC("perf_event")
int counted_fault(struct bpf_perf_event_data *ctx)
{
	struct task_struct___memory *task = (void *)bpf_get_current_task();

	note_fault(ctx->addr, (__u64)BPF_CORE_READ(task, stack), EVENT_IN_USER_MODE(ctx));
	return 0;
}

// Finds the page fault that the thread is in, whose address is then in LAST_FAULT; 0: none was found. The kernel describes a
// fault on its stack (`struct vm_fault` of __handle_mm_fault in mm/memory.c, Linux 6.18), also one in a system call. A
// description is taken if its area is one of this address space and has the address. The innermost one is searched for,
// outwards from the program's arguments, which are on the same stack: remains of earlier calls may be further out.
// (Not static: as walk_chain.)
__noinline int find_fault(__u64 from, __u64 mm)
{
	struct task_struct___memory *task = (void *)bpf_get_current_task();
	char *words = scratch(bpf_get_smp_processor_id());
	__u64 at_area, at_page, at_address, address = 0, left, number;
	__u32 zero = 0, at;
	struct fault *fault = bpf_map_lookup_elem(&LAST_FAULT, &zero);

	if (!fault || !words || !FINDS_FAULTS)
		return 0;
	at_area = bpf_core_field_offset(struct vm_fault, vma);
	at_page = bpf_core_field_offset(struct vm_fault, address);
	at_address = bpf_core_field_offset(struct vm_fault, real_address);
	left = (__u64)BPF_CORE_READ(task, stack) + KERNEL_STACK - from;
	if (at_area > MAX_FAULT || at_page > MAX_FAULT || at_address > MAX_FAULT)
		left = 0;
	if (left > SEARCHED_STACK)
		left = left < KERNEL_STACK ? SEARCHED_STACK : 0;
	if (bpf_probe_read_kernel(words, left, (void *)from))
		left = 0;
	for (at = 0; at + MAX_FAULT < SEARCHED_STACK; at += 8) {
		__u64 page = *(__u64 *)(words + at + at_page), is_at = *(__u64 *)(words + at + at_address);
		struct vm_area_struct *area = *(void **)(words + at + at_area);

		if (at + MAX_FAULT >= left)
			break;
		if (!page || page >= USER_END || page != (is_at & ~(PAGE - 1)) || (__u64)area < USER_END)
			continue;
		if ((__u64)BPF_CORE_READ(area, vm_mm) == mm && BPF_CORE_READ(area, vm_start) <= page &&
		    BPF_CORE_READ(area, vm_end) > page) {
			address = is_at;
			break;
		}
	}
	// A thread has as many faults behind it as long as it is in the same one.
	number = BPF_CORE_READ(task, min_flt) + BPF_CORE_READ(task, maj_flt);
	if (fault->address != address || fault->thread != (__u64)task || fault->number != number)
		fault->sampled = 0;
	fault->address = address;
	fault->thread = (__u64)task;
	fault->number = number;
	return 0;
}

static __always_inline __u64 ring_flags(void)
{
	int is_full = bpf_ringbuf_query(&SAMPLES, BPF_RB_AVAIL_DATA) > bpf_ringbuf_query(&SAMPLES, BPF_RB_RING_SIZE) / 4;

	return is_full ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}

// (A function of its own: older kernels count the stack of the caller and of all that it calls, which is near their limit.)
__noinline int pass_range(__u32 pid, __u64 from, __u64 to, __u64 moved_to)
{
	struct memory_range range = {
		.size = sizeof(range),
		.pid = pid,
		.tid = (__u32)bpf_get_current_pid_tgid(),
		.flags = RANGE,
		.time = bpf_ktime_get_ns(),
		.from = from,
		.to = to,
		.moved_to = moved_to,
	};

	if (bpf_ringbuf_output(&SAMPLES, &range, sizeof(range), ring_flags()))
		count_lost(LOST_RANGES);
	return 0;
}

// Where an area of `length` bytes begins if the kernel has searched room for a larger one, in order to align it for
// large pages: at the beginning of one, if it is the first part of a file or of memory without a file
// (__thp_get_unmapped_area in mm/huge_memory.c, and shmem_get_unmapped_area in mm/shmem.c, Linux 6.18).
static __always_inline __u64 aligned_area(__u64 at, void *info, __u64 length)
{
	__u64 searched = 0, more, distance = -at & (HUGE - 1);

	bpf_probe_read_kernel(&searched, 8, info + bpf_core_field_offset(struct vm_unmapped_area_info, length));
	more = searched - ALIGNED(length);
	if (more == HUGE)
		return at + (distance ? distance : HUGE); // (Areas are searched from the highest address down.)
	if (more == HUGE - PAGE)
		return at + distance;
	return at;
}

// The kernel has found room for a mapping: for memory that it will fill at once, or that a system call moves. (For a mapping
// at a fixed address nothing is searched: the system call has it.)
SEC("raw_tp/vm_unmapped_area")
int area_found(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 pid = bpf_get_current_pid_tgid() >> 32, tid = bpf_get_current_pid_tgid(), zero = 0;
	struct kernel_facts *facts = bpf_map_lookup_elem(&FACTS, &zero);
	struct new_area area = { .at = ctx->args[0] };
	struct system_call call = {};
	__u64 kept;

	if (!facts || area.at >= -PAGE || !bpf_map_lookup_elem(&PROCS, &pid))
		return 0;
	last_call(facts, &call);
	if (call.number == MREMAP) {
		kept = call.second < call.third ? call.second : call.third;
		pass_range(pid, call.first, call.first + kept, aligned_area(area.at, (void *)ctx->args[1], call.third));
	} else if (call.number == MMAP && call.fourth & POPULATE) {
		area.at = aligned_area(area.at, (void *)ctx->args[1], call.second);
		area.hint = call.first;
		area.length = call.second;
		bpf_map_update_elem(&NEW_AREAS, &tid, &area, BPF_ANY);
	}
	return 0;
}

// The system call that the thread is in; its number is negative if it is in none.
static __always_inline void current_call(struct kernel_facts *facts, struct system_call *call)
{
#ifdef __TARGET_ARCH_arm64
	struct head *h = (void *)scratch(bpf_get_smp_processor_id());
#endif

	last_call(facts, call);
#ifdef __TARGET_ARCH_arm64
	// (The register has the number only while the thread is in a call.)
	if (!h || !registers_at_entry(facts, h->regs, sizeof(h->regs)) || SYSTEM_CALL_OF(h->regs) < 0)
		call->number = -1ULL;
#endif
}

// What a thread gives back in this system call, or by this fault: `from` and `to`.
static __always_inline int range_given_back(struct space *s, struct system_call *call, __u32 member, __s64 pages, __u64 address,
					    __u64 *from, __u64 *to)
{
	*from = call->first;
	*to = call->first + call->second;
	switch (call->number) {
	case MUNMAP:
		return RANGE_ALL;
	case MADVISE:
		// (Pages that cannot be written out stay.)
		return call->third == PAGEOUT ? RANGE_SOME : RANGE_ALL;
	case MMAP:
		return call->fourth & FIXED ? RANGE_ALL : RANGE_NONE;
	case MREMAP:
		*from += ALIGNED(call->third);
		return call->third < call->second ? RANGE_ALL : RANGE_NONE;
	case BRK:
		*from = ALIGNED(*from);
		*to = s->highest_brk;
		return *from < *to ? RANGE_ALL : RANGE_NONE;
	}
	if (member == RSS_ANONYMOUS)
		return RANGE_NONE;
	if ((__s64)call->number >= 0) {
		// A file has become shorter.
		*from = 0;
		*to = USER_END;
		return RANGE_SOME_FILES;
	}
	// Pages of a file that copies take the place of: up to Linux 6.1 those before this fault, or any others.
	*from = *to = address & ~(PAGE - 1);
	if (IS_COUNTED)
		*from += pages * (__s64)PAGE;
	else
		*to += PAGE;
	return address && *from < *to ? RANGE_OF_FILES : RANGE_NONE;
}

// Whether a thread may get memory in this system call, without a page fault.
static __always_inline int may_fill(struct space *s, struct system_call *call)
{
	switch (call->number) {
	case MMAP:
		return !(call->fourth & FIXED) || call->fourth & POPULATE;
	case MADVISE:
		return call->third >= POPULATE_READ;
	case BRK:
		return ALIGNED(call->first) >= s->highest_brk;
	case MREMAP:
		return call->third >= call->second;
	case MLOCK:
	case MLOCK2:
	case MLOCKALL:
		return 1;
	}
	return 0;
}

// Where the memory lies that a thread gets in this system call, without a page fault.
static __always_inline __u64 range_filled(struct system_call *call, __u64 *length)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct new_area *area;

	*length = 0;
	switch (call->number) {
	case MMAP:
		area = bpf_map_lookup_elem(&NEW_AREAS, &tid);
		*length = call->second;
		if (call->fourth & FIXED || !area || area->hint != call->first || area->length != call->second)
			return call->first;
		return area->at;
	case MADVISE:
	case MLOCK:
	case MLOCK2:
		*length = call->second;
		return call->first;
	case BRK:
	case MREMAP:
	case MLOCKALL:
		return 0;
	}
	return ~0ULL;
}

// Takes a sample of a change: `pages` are negative if memory was given back.
static __always_inline void take_change(struct bpf_raw_tracepoint_args *ctx, struct kernel_facts *facts, struct space *s,
					struct system_call *call, struct fault *fault, __u32 member, __s64 pages, __u64 address,
					__u32 doubled, int is_late)
{
	__u32 zero = 0, slot = bpf_get_smp_processor_id(), pid = s->pid;
	struct layout *lay = bpf_map_lookup_elem(&PROCS, &pid);
	struct turn *turn = bpf_map_lookup_elem(&TURN, &zero);
	struct cache *c = cache(slot);
	char *area = scratch(slot);
	struct head *h = (void *)area;
	struct change *change;
	__u64 brk;
	long n;

	if (!lay || !turn || !c || !area)
		return;
	h->time = bpf_ktime_get_ns();
	h->pid = pid;
	h->tid = bpf_get_current_pid_tgid();
	h->flags = IN_KERNEL | RSS;
	h->kernel = 0;
	h->cpu = h->runnable = h->blocked = 0;
	change = (void *)h->holders;
	change->pages = pages;
	change->member = member;
	change->doubled = doubled;
	change->pad = 0;
	change->length = 0;
	change->address = address;
	change->is_repeated = 0;
	if (pages > 0 && address) {
		change->is_repeated = fault->sampled;
		fault->sampled = 1;
	}
	if (pages > 0) {
		__u64 filled = is_late ? ~0ULL : range_filled(call, &change->length);

		if (filled != ~0ULL)
			change->address = filled;
		else if (IS_COUNTED && pages < HUGE / PAGE)
			change->length = 1; // this page, which may not be there yet
		s->sampled++;
		brk = pointer_at((char *)s->mm + bpf_core_field_offset(struct mm_struct___places, brk));
		if (brk > s->highest_brk)
			s->highest_brk = brk;
	}
	if (facts->want_kernel) {
		n = bpf_get_stack(ctx, area + HEAD, MAX_KERNEL * 8, 0);
		if (n > 0)
			h->kernel = n / 8;
	}
	user_registers(h, facts);
	snapshot(slot, area, c, lay, facts, turn, h->time, 0);
}

// Whether a change is what the thread does: gives back in a system call that can do so, or by a fault that puts a copy
// in the place of a page of a file, and grows in any other way.
static __always_inline int fits(struct system_call *call, __u32 member, __s64 pages)
{
	switch (call->number) {
	case MUNMAP:
		return pages < 0;
	case MMAP:
	case MADVISE:
	case MREMAP:
	case BRK:
		return 1;
	}
	return pages > 0 || (member != RSS_ANONYMOUS && ((__s64)call->number >= 0 || pages == -1));
}

// The address space of the thread; 0: it has given it up.
static __always_inline __u64 current_space(void)
{
	struct task_struct___memory *task = (void *)bpf_get_current_task();

	return (__u64)BPF_CORE_READ(task, mm);
}

// The address of the page fault that has made a change, 0: there is none, or it makes no difference.
static __always_inline __u64 address_of_fault(struct bpf_raw_tracepoint_args *ctx, struct fault *fault, __u64 mm,
					      struct system_call *call, __u32 member, __s64 pages, int is_late)
{
	struct task_struct___memory *task = (void *)bpf_get_current_task();
	int is_in_call = (__s64)call->number >= 0;
	__u64 from;

	if (FINDS_FAULTS) {
		if (pages < 0 && (member == RSS_ANONYMOUS || is_in_call))
			return 0;
		// (The verifier passes no address of the arguments as a number.)
		bpf_probe_read_kernel(&from, 8, &ctx);
		find_fault(from, mm);
		return fault->address;
	}
	// (In a system call, the last fault in user mode is of an earlier time.)
	if ((is_late || fault->in_user_mode == !is_in_call) && fault->thread - (__u64)BPF_CORE_READ(task, stack) < KERNEL_STACK)
		return fault->address;
	return 0;
}

SEC("raw_tp/rss_stat")
int rss_changed(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 number = space_number(ctx->args[0]), member = ctx->args[1], zero = 0, index;
	__u64 mm = ctx->args[0], address = 0, from, to;
	struct system_call call = {};
	struct kernel_facts *facts;
	struct space_part *part;
	struct fault *fault;
	struct space *s;
	__u32 doubled = 0;
	int is_moved = 0, is_late;
	__s64 pages;

	if (!number || member >= RSS_MEMBERS)
		return 0;
	index = number - 1;
	s = bpf_map_lookup_elem(&SPACES, &index);
	part = bpf_map_lookup_elem(&SPACE_PARTS, &index);
	if (!s || !part || s->mm != mm)
		return 0;
	BOUND(member, RSS_MEMBERS - 1);
	if (IS_COUNTED) {
		pages = ctx->args[2];
		pages -= EXCHANGE(&s->global[member], pages);
	} else if (IS_PER_CPU) {
		__s32 now = part_of_counter(s->counters[member] + part->offset);
		__s64 common, before;

		pages = now - part->last[member];
		part->last[member] = now;
		if (!now) {
			common = common_count(mm, member);
			before = EXCHANGE(&s->global[member], common);
			// Another CPU may have counted what was moved from this one.
			is_moved = common == before;
			pages += common - before;
		}
	} else {
		return 0;
	}
	if (!pages)
		return 0;
	if ((__u32)(bpf_get_current_pid_tgid() >> 32) != s->pid) {
		// The last user of an address space need not be of its process: it may be a reader of /proc.
		if (pages < 0 && has_no_users(mm)) {
			end_space(s);
			return 0;
		}
		if (member != RSS_SWAP)
			post(s, part, pages);
		part->others_grown[member] += pages > 0 ? pages : 0;
		part->others_returned[member] -= pages < 0 ? pages : 0;
		return 0;
	}
	// The process ends, or executes another program.
	if (pages < 0 && current_space() != mm) {
		end_space(s);
		return 0;
	}
	if (is_moved) {
		facts = bpf_map_lookup_elem(&FACTS, &zero);
		if (!facts)
			return 0;
		current_call(facts, &call);
		is_moved = !fits(&call, member, pages);
	}
	if (is_moved) {
		if (member != RSS_SWAP)
			post(s, part, pages);
		if (pages < 0) {
			part->grown[member] += pages;
			part->until_grown -= pages * (__s64)PAGE;
		} else {
			part->returned[member] -= pages;
			part->until_returned += pages * (__s64)PAGE;
		}
		return 0;
	}
	if (pages > 0) {
		part->grown[member] += pages;
		if (member == RSS_SWAP)
			return 0;
		post(s, part, pages);
		if (!part->until_grown)
			part->until_grown = gap(&part->grown_doubled);
		part->until_grown -= pages * (__s64)PAGE;
		if (part->until_grown > 0)
			return 0;
		doubled = part->grown_doubled;
		part->until_grown = gap(&part->grown_doubled);
	} else {
		part->returned[member] -= pages;
		if (member == RSS_SWAP)
			return 0;
		// (Before the range is passed on: until now all of it was there.)
		post(s, part, pages);
	}
	facts = bpf_map_lookup_elem(&FACTS, &zero);
	fault = bpf_map_lookup_elem(&LAST_FAULT, &zero);
	if (!facts || !fault)
		return 0;
	current_call(facts, &call);
	// What earlier faults have made resident; the last one is among them.
	is_late = IS_COUNTED && pages > 0 && (__s64)call.number >= 0 && !may_fill(s, &call);
	address = address_of_fault(ctx, fault, mm, &call, member, pages, is_late);
	if (pages < 0) {
		int which = range_given_back(s, &call, member, pages, address, &from, &to);

		if (which != RANGE_NONE &&
		    (part->range_sampled != s->sampled || part->range.number != call.number || part->range.first != from ||
		     part->range.second != to)) {
			part->range.number = call.number;
			part->range.first = from;
			part->range.second = to;
			part->range_sampled = s->sampled;
			pass_range(s->pid, from, to, which == RANGE_ALL ? 0 : ~0ULL - (which - RANGE_SOME_FILES));
		}
		if (!part->until_returned)
			part->until_returned = gap(&part->returned_doubled);
		part->until_returned += pages * (__s64)PAGE;
		if (part->until_returned > 0)
			return 0;
		doubled = part->returned_doubled;
		part->until_returned = gap(&part->returned_doubled);
	}
	take_change(ctx, facts, s, &call, fault, member, pages, address, doubled, is_late);
	return 0;
}
