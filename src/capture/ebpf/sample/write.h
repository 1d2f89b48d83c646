// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Writes a record, in parts where the stack is long.

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
	if (s->from < s->last_end && (s->faults <= MAX_FAULTS || s->cross_holes))
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

// Searches for the end of a hole at s->from: by leaps that double up to MAX_LEAP, then between the last two. What lies between pages of a
// hole that were tried counts as a part of it.
TURN(skip_hole)
{
	char *area = scratch(slot);
	struct state *s;
	__u64 at, word;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	if (s->present && s->present <= s->from)
		return 1;
	if (s->present)
		at = s->from + ((s->present - s->from) / 2 & ~(PAGE - 1));
	else
		at = s->from + s->stride;
	// (The end of a stack is always there: what is at it was written first.)
	if (at >= s->last_end)
		at = (s->last_end - 8) & ~(PAGE - 1);
	if (!bpf_probe_read_user(&word, 8, (void *)at)) {
		s->present = at;
		return 0;
	}
	s->from = at + PAGE;
	if (s->stride < MAX_LEAP)
		s->stride *= 2;
	if (s->from < s->last_end)
		return 0;
	s->from = s->last_end;
	return 1;
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
	h->kernel = h->frames = h->anchors = 0;
	h->frames_at = s->at = HEAD;
	if (s->faults > MAX_FAULTS) {
		s->present = 0;
		s->stride = PAGE;
		s->from &= ~(PAGE - 1);
		LOOP(PROBES, skip_hole, slot);
		s->faults = MAX_FAULTS - FAULTS_OF_REST;
		s->careful = 0;
	}
	write(slot, h, s);
	return !(h->flags & MORE);
}
