// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// Names of code objects: each is copied once, in a record of its own.

// State of the three loops below. It lies in the scratch area, not on the BPF stack: the verifier takes what comes
// from a map as unknown and so settles each loop after a few rounds.
struct state {
	__u64 at;                 // where in the area the next entry goes
	__u64 frame, print_at;    // the latter: first frame without fingerprint
	__u64 base;               // frame that ends the chain; 0: it ends without
	__u64 copy_at;            // where the copy of the bytecode begins ...
	__u64 copy_code;          // ... of this code object
	__u32 last_copy, pad;     // ... that the last frame ran, 0: none
	__u64 anchor, root;
	__u64 second;             // innermost frame of the next outer CFrame
	__u64 from, end, last_end, base_page;
	__u64 careful;            // the stack is read page by page up to here
	__u64 present;            // beyond a hole: a page that can be read, 0: none is known yet
	__u64 stride;
	__u32 faults, n, done, met_second, urgent;
	__u32 cross_holes;        // the stack is copied beyond a long hole
	__u32 copies;             // code objects that may still be copied in this sample
	__u32 named;              // further thread states that name this thread
	__u64 thread;             // thread pointer of the thread whose states these are
	__u64 stack_from, stack_to; // the part of its stack that is in use; 0: not known
	__u32 nested, which;      // further thread states; the one that is dealt with, or the part of their list
	__u32 too_nested, holds;  // there are more than MAX_NESTED; one of them holds the lock of its interpreter
	__u64 cframe;             // the CFrame that the walk began at
	__u64 cframes[1 + MAX_NESTED]; // ... for each thread state
	__u64 states[1 + MAX_NESTED]; // thread states to walk, innermost first
	__u64 window;             // address of what the window holds
	__u64 window_end;         // greatest offset of a complete frame in it
	__u64 last_frame;
	__u64 instr_unused;       // bits of a word beyond the instruction
	__u64 ends;               // which bits of fingerprint, owner and entry are to be taken from a frame
	__u64 scan_at, scan_end;  // words of a worker that are searched, as offsets in the area
	__u64 dispatcher;         // thread pointer of the thread that most of them so far point to ...
	__u32 dispatcher_tid, votes; // ... and by how many it leads
	__u64 inherited[INHERITED]; // of the worker
	struct layout lay;
};

_Static_assert(sizeof(struct state) <= 4096, "state");

#define STATE (AREA - 4096)       // place of the state in the area
#define WINDOW (STATE - 16384)    // place of a copy of the page around the last frame ...
#define APART 8192                // ... and, behind it, of a frame that lies elsewhere
#define COPY (WINDOW - 65536)     // place of a copy of a code object
#define LIMIT (COPY - STACK_ROOM - 2 * PAGE) // entries start below this

// `len` bytes, at most 128, of the thread's memory; 0 if they are not there. Valid until the next call.
static __always_inline char *peek(struct cache *c, __u64 at, __u64 len)
{
	__u64 number = at >> BLOCK_BITS, off = at & (BLOCK - 1), slot = number;
	char *block;

	BOUND(len, 0xff);
	if (off + len <= BLOCK) {
		BOUND(slot, BLOCKS - 1);
		block = c->blocks + (slot << BLOCK_BITS);
		BOUND(off, BLOCK - 1);
		if (c->tags[slot].number == number) {
			if (c->tags[slot].whole && c->tags[slot].sample == c->sample)
				return block + off;
			// The second thing in this block, or there were several last time. A block lies in one page: if it
			// cannot be read, neither can a part of it.
			if (c->tags[slot].whole || c->tags[slot].sample == c->sample) {
				c->tags[slot].whole = 0;
				if (bpf_probe_read_user(block, BLOCK, (void *)(number << BLOCK_BITS)))
					return 0;
				c->tags[slot].sample = c->sample;
				c->tags[slot].whole = 1;
				return block + off;
			}
		}
		c->tags[slot].number = number;
		c->tags[slot].sample = c->sample;
		c->tags[slot].whole = 0;
	}
	return bpf_probe_read_user(c->raw, len, (void *)at) ? 0 : c->raw;
}

// Distinguishes a reused address of a code object from the object that was there before. Same hash in
// cpython/code_object.rs. From 3.12 on code objects are numbered (co_version, Objects/codeobject.c). Before, the addresses
// of name and file name are reused as readily as that of the code, so the name's first letters are included too. Fields
// that are close together are fetched by one read: code objects deep in a stack are seldom in the cache. (Not static: as walk_chain.)
__noinline int fingerprint(__u32 slot, __u64 code)
{
	char *area = scratch(slot);
	struct cache *c = cache(slot);
	struct layout *lay;
	__u64 name, file, hash, off, len;
	__u32 line;
	char *raw;

	if (!area || !c)
		return 0;
	lay = &((struct state *)(area + STATE))->lay;
	len = lay->code_name + 8 - lay->code_firstlineno;
	raw = peek(c, code + lay->code_firstlineno, len);
	if (!raw)
		return 0;
	line = *(__u32 *)raw;
	off = lay->code_name - lay->code_firstlineno;
	BOUND(off, 0x7f);
	name = *(__u64 *)(raw + off);
	off = lay->code_filename - lay->code_firstlineno;
	BOUND(off, 0x7f);
	file = *(__u64 *)(raw + off);
	hash = (name * 0x9e3779b97f4a7c15ULL) ^ (file * 0xc2b2ae3d27d4eb4fULL);
	if (lay->code_version != ABSENT) {
		__u32 version;

		off = lay->code_version - lay->code_firstlineno;
		BOUND(off, 0x7f);
		version = *(__u32 *)(raw + off);
		if (version)
			return ((hash + version) * 0x9e3779b97f4a7c15ULL + line) >> 32 | 1;
	}
	off = lay->str_data - lay->str_length;
	BOUND(off, 0x7f);
	raw = peek(c, name + lay->str_length, off + 16);
	if (!raw)
		return 0;
	hash = (hash + *(__u64 *)raw) * 0x9e3779b97f4a7c15ULL;
	hash = (hash ^ *(__u64 *)(raw + off)) * 0xc2b2ae3d27d4eb4fULL;
	hash = (hash ^ *(__u64 *)(raw + off + 8)) * 0x9e3779b97f4a7c15ULL;
	// <module>, <lambda>: all have the same name; only the end of the file name distinguishes them.
	if (*(raw + off) == '<') {
		__u64 words[2], end;

		if (bpf_probe_read_user(&end, 8, (void *)(file + lay->str_length)))
			return 0;
		hash += end;
		end = end < 16 || end > 4096 ? 0 : end - 16;
		if (bpf_probe_read_user(words, 16, (void *)(file + lay->str_data + end)))
			return 0;
		hash = (hash ^ words[0]) * 0xc2b2ae3d27d4eb4fULL;
		hash = (hash ^ words[1]) * 0x9e3779b97f4a7c15ULL;
	}
	return (hash + line) >> 32 | 1;
}

// Begins a new epoch if, since the last sample, a code object may have taken the place of another: unless the interpreter
// (the main one, which lasts as long as its process) has made none since, or freed none. While a frame runs a code
// object, that one is not freed.
static __always_inline void begin_epoch(struct layout *lay, struct cache *c, __u32 pid, __u64 state)
{
	__u64 at = 0, now = 0, main;

	if (state && (lay->interp_generation || lay->generation)) {
		main = user_word(lay->runtime + lay->interpreter);
		at = lay->interp_generation ? main + lay->interp_generation :
					      lay->runtime + (__s64)(__s32)lay->generation;
		if (main && user_word(state + lay->state_interp) == main)
			bpf_probe_read_user(&now, lay->interp_generation ? 8 : 4, (void *)at);
	}
	// (0: the interpreter has run out of numbers.)
	if (now && c->generation == now && c->generation_at == at && c->pid == pid)
		return;
	c->generation = now;
	c->generation_at = at;
	c->epoch++;
	if (c->pid != pid)
		c->pid_epoch = c->epoch;
	c->pid = pid;
}

// Is this code object new? If so, it is recorded. Forked processes have different ones at the same address, and
// equal fingerprints of them.
static __always_inline int is_new(__u32 pid, __u64 code, __u32 print)
{
	__u32 mark = (print ^ (__u32)(code >> 4) * 0x9e3779b1U ^ pid * 0x85ebca6bU) * 0xc2b2ae35U | 1;
	__u32 first = mark >> 7 & (SEEN_CELLS - 1), second = mark * 0x9e3779b1U >> 16 & (SEEN_CELLS - 1), *a, *b;

	a = bpf_map_lookup_elem(&SEEN, &first);
	if (!a || *a == mark)
		return 0;
	b = bpf_map_lookup_elem(&SEEN, &second);
	if (!b || *b == mark)
		return 0;
	*(*a && (bpf_get_prandom_u32() & 1) ? b : a) = mark;
	return 1;
}

// Appends a string object to the copy of a code object. Returns where the next part goes; 0: it was not copied.
static __always_inline __u64 copy_text(char *area, struct layout *lay, __u32 part, __u64 text, __u64 at)
{
	struct code_head *h = (void *)(area + COPY);
	__u64 len = 0, size;
	__u32 state = 0;

	if (bpf_probe_read_user(&len, 8, (void *)(text + lay->str_length)) ||
	    bpf_probe_read_user(&state, 4, (void *)(text + lay->str_state)) || len > MAX_TEXT)
		return 0;
	state >>= lay->str_kind_bit & 31;
	size = len * (state & 7) + (state & 16 ? lay->str_data : lay->str_compact_data);
	if (size > MAX_TEXT)
		return 0;
	BOUND(size, MAX_TEXT);
	BOUND(at, 0xffff);
	if (bpf_probe_read_user(area + COPY + at, size, (void *)text))
		return 0;
	h->parts[part].at = text;
	h->parts[part].len = size;
	return at + size;
}

// Copies what names a code object and its lines into a record of its own. False if the reader has to read them itself,
// soon: something is unreadable or too long, or there is little room.
__noinline int copy_code(__u32 slot, __u64 code, __u32 print)
{
	char *area = scratch(slot), *raw;
	struct head *sample = (void *)area;
	struct code_head *h;
	struct layout *lay;
	__u64 at = sizeof(*h), off, size, name, qualname = 0, filename, lines;
	__u64 len = 0;

	if (!area ||
	    bpf_ringbuf_query(&SAMPLES, BPF_RB_AVAIL_DATA) > bpf_ringbuf_query(&SAMPLES, BPF_RB_RING_SIZE) / 2)
		return 0;
	h = (void *)(area + COPY);
	lay = &((struct state *)(area + STATE))->lay;
	__builtin_memset(h, 0, sizeof(*h));
	h->pid = sample->pid;
	h->tid = sample->tid;
	h->flags = CODE_COPY;
	h->time = sample->time;
	h->code = code;
	h->fingerprint = print;
	size = lay->code_size;
	BOUND(size, 0xff);
	raw = area + COPY + sizeof(*h);
	if (bpf_probe_read_user(raw, size, (void *)code))
		return 0;
	h->parts[PART_CODE].at = code;
	h->parts[PART_CODE].len = size;
	at += size;
	off = lay->code_name;
	BOUND(off, 0xff);
	name = *(__u64 *)(raw + off);
	off = lay->code_filename;
	BOUND(off, 0xff);
	filename = *(__u64 *)(raw + off);
	off = lay->code_linetable;
	BOUND(off, 0xff);
	lines = *(__u64 *)(raw + off);
	if (lay->code_qualname != ABSENT) {
		off = lay->code_qualname;
		BOUND(off, 0xff);
		qualname = *(__u64 *)(raw + off);
	}
	at = copy_text(area, lay, PART_NAME, name, at);
	// Functions of modules have one string for both.
	if (at && qualname && qualname != name)
		at = copy_text(area, lay, PART_QUALNAME, qualname, at);
	if (at)
		at = copy_text(area, lay, PART_FILENAME, filename, at);
	if (!at)
		return 0;
	// Without its lines it still has a name.
	size = 0;
	if (!bpf_probe_read_user(&len, 8, (void *)(lines + lay->bytes_size)) && len <= MAX_LINES &&
	    len + lay->bytes_data <= MAX_LINES) {
		size = len + lay->bytes_data;
		BOUND(size, MAX_LINES);
		BOUND(at, 0x7fff);
		if (bpf_probe_read_user(area + COPY + at, size, (void *)lines))
			size = 0;
		h->parts[PART_LINES].at = lines;
		h->parts[PART_LINES].len = size;
		at += size;
	}
	BOUND(at, 0xffff);
	h->size = at;
	if (bpf_ringbuf_output(&SAMPLES, h, at, BPF_RB_NO_WAKEUP))
		return 0;
	return size != 0;
}
