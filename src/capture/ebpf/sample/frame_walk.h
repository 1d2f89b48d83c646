// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// The frames of the interpreter from the innermost one outwards, and a copy of the stack. The same walk is in
// cpython/frame_walk.rs.

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
					} else if (((struct head *)area)->flags & NEW || is_new(c->pid, code, print)) {
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
		if (lay->frame_copy != ABSENT && out->owner < SHIM)
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
static __always_inline int one_anchor(char *area, struct cache *c, struct state *s)
{
	struct anchor *out;
	__u64 at, off, next, frame = 0;
	char *raw;

	if (!s->anchor || s->anchor == s->root) {
		s->done = WALK_COMPLETE;
		return 1;
	}
	raw = peek(c, s->anchor, CFRAME);
	if (!raw) {
		s->done = WALK_FAULT;
		return 1;
	}
	off = s->lay.cframe_previous;
	BOUND(off, 0x1f);
	next = *(__u64 *)(raw + off);
	if (s->lay.cframe_frame != ABSENT) {
		off = s->lay.cframe_frame;
		BOUND(off, 0x1f);
		frame = *(__u64 *)(raw + off);
	}
	at = s->at;
	BOUND(at, WORDS);
	if (at > LIMIT)
		return 1;
	out = (void *)(area + at);
	out->anchor = s->anchor;
	out->frame = frame;
	s->at = at + sizeof(struct anchor);
	s->n += 1;
	s->anchor = next;
	return 0;
}

TURN(walk_some_anchors)
{
	char *area = scratch(slot);
	struct cache *c = cache(slot);
	__u32 k;

	if (!area || !c)
		return 1;
	for (k = 0; k < BATCH; k++)
		if (one_anchor(area, c, (void *)(area + STATE)))
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
	if (s->lay.base_frame != ABSENT)
		s->base = user_word(state + s->lay.base_frame);
	if (s->lay.cframe_frame == ABSENT) {
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
			if (whole || s->lay.frame_entry != ABSENT)
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
__noinline int walk_anchors(__u32 slot, __u32 which)
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
	s->anchor = s->lay.cframe_frame != ABSENT ? s->cframes[which] : user_word(state + s->lay.cframe);
	LOOP(MAX_CFRAMES / BATCH, walk_some_anchors, slot);
	if (h->walk == WALK_COMPLETE && s->done != WALK_COMPLETE)
		h->walk = s->done ? s->done : WALK_DEEP;
	return 0;
}

// Appends the frames of the next thread state.
TURN(walk_state)
{
	char *area = scratch(slot);
	struct state *s;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	walk_frames(slot, s->which);
	s->which++;
	return s->which > s->nested;
}

// Appends the CFrames of the next thread state.
TURN(walk_state_anchors)
{
	char *area = scratch(slot);
	struct state *s;

	if (!area)
		return 1;
	s = (void *)(area + STATE);
	walk_anchors(slot, s->which);
	s->which++;
	return s->which > s->nested;
}
