// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// The task that a thread runs, the span that is active in it, and its OpenTelemetry context.

// The task that a thread state runs. The dictionary holds one for each loop that runs one: with several it is not known which
// one is meant. (Small dictionaries have room for DICT_ENTRIES; entries that were removed have no value.)
static __always_inline __u64 running_task(struct running *r, __u64 state, char *raw)
{
	__u64 keys, value, task = 0;
	__u8 size;
	int i;

	if (!r->current)
		return user_word(state + r->task);
	keys = user_word(r->current + r->keys);
	if (!keys)
		return 0;
	size = user_byte(keys + 8); // 8 slots, or their logarithm (3.11 and later)
	if ((size != 3 && size != 8) || bpf_probe_read_user(raw, DICT_ENTRIES * 24, (void *)(keys + r->entries)))
		return 0;
	for (i = 0; i < DICT_ENTRIES; i++) {
		value = *(__u64 *)(raw + 24 * i + 16);
		if (value && task)
			return 0;
		if (value)
			task = value;
	}
	return task;
}

// Writes which task the thread runs, and its name, into a record like that of a code object, with fingerprint 0: the task may
// have ended before the reader reads it.
__noinline int copy_task(__u32 slot)
{
	char *area = scratch(slot), *raw;
	struct head *sample = (void *)area;
	struct code_head *h;
	struct running *r;
	struct state *s;
	__u64 task, name, size = NAME_BYTES;
	__u32 pid;

	if (!area)
		return 0;
	pid = sample->pid;
	r = bpf_map_lookup_elem(&RUNNING_TASKS, &pid);
	if (!r)
		return 0;
	h = (void *)(area + COPY);
	raw = area + COPY + sizeof(*h);
	s = (void *)(area + STATE);
	task = running_task(r, s->states[0], raw);
	if (!task)
		return 0;
	name = user_word(task + r->name);
	if (bpf_probe_read_user(raw, NAME_BYTES, (void *)name)) {
		size = NAME_BYTES / 2;
		if (bpf_probe_read_user(raw, NAME_BYTES / 2, (void *)name))
			return 0;
	}
	__builtin_memset(h, 0, sizeof(*h));
	h->pid = pid;
	h->tid = sample->tid;
	h->flags = CODE_COPY;
	h->time = sample->time;
	h->code = task;
	h->parts[PART_NAME].at = name;
	h->parts[PART_NAME].len = size;
	h->size = sizeof(*h) + size;
	bpf_ringbuf_output(&SAMPLES, h, sizeof(*h) + size, BPF_RB_NO_WAKEUP);
	return 0;
}

// The record of the span that is active in a thread state: the value of a context variable, found in the trie of the
// thread's context as the interpreter finds it. The same walk in cpython/spans.rs. 0: none.
static __always_inline __u64 active_span(struct spans *sp, __u64 state)
{
	__u64 node, kind, slot, bitmap, pair[2];
	int i;

	node = user_word(state + sp->context);
	node = node ? user_word(node + sp->header + 8) : 0;
	node = node ? user_word(node + sp->header) : 0;
	for (i = 0; i < TRIE_LEVELS; i++) {
		if (!node)
			return 0;
		slot = sp->hash >> (5 * i) & 31;
		kind = user_word(node + sp->header - 8);
		if (kind == sp->array_node) {
			node = user_word(node + sp->header + 8 * slot);
			continue;
		}
		if (kind != sp->bitmap_node)
			return 0;
		bitmap = user_word(node + sp->header + 8) & 0xffffffff;
		if (!(bitmap >> slot & 1))
			return 0;
		// The number of slots before it that are in use.
		bitmap &= (1ULL << slot) - 1;
		bitmap -= bitmap >> 1 & 0x55555555;
		bitmap = (bitmap & 0x33333333) + (bitmap >> 2 & 0x33333333);
		bitmap = ((bitmap + (bitmap >> 4)) & 0x0f0f0f0f) * 0x01010101 >> 24 & 31;
		if (bpf_probe_read_user(pair, 16, (void *)(node + sp->header + 16 + 16 * bitmap)))
			return 0;
		if (pair[0] == sp->variable)
			return pair[1] ? user_word(pair[1] + sp->item) : 0;
		if (pair[0])
			return 0;
		node = pair[1];
	}
	return 0;
}

// Puts a record of `len` bytes into one like that of a code object, with this fingerprint.
static __always_inline void put_span(char *area, __u64 record, __u64 from, __u64 len, __u32 fingerprint)
{
	struct head *sample = (void *)area;
	struct code_head *h = (void *)(area + COPY);

	BOUND(len, MAX_CONTEXT);
	if (bpf_probe_read_user(area + COPY + sizeof(*h), len, (void *)from))
		return;
	__builtin_memset(h, 0, sizeof(*h));
	h->pid = sample->pid;
	h->tid = sample->tid;
	h->flags = CODE_COPY;
	h->time = sample->time;
	h->code = record;
	h->fingerprint = fingerprint;
	h->parts[PART_NAME].at = record;
	h->parts[PART_NAME].len = len;
	h->size = sizeof(*h) + len;
	bpf_ringbuf_output(&SAMPLES, h, sizeof(*h) + len, BPF_RB_NO_WAKEUP);
}

// Writes the record of the active span.
__noinline int copy_span(__u32 slot)
{
	char *area = scratch(slot);
	struct spans *sp;
	struct state *s;
	__u64 record, len;
	__u32 pid;

	if (!area)
		return 0;
	pid = ((struct head *)area)->pid;
	sp = bpf_map_lookup_elem(&SPANS, &pid);
	if (!sp || !sp->variable)
		return 0;
	s = (void *)(area + STATE);
	record = active_span(sp, s->states[0]);
	len = record ? user_word(record + sp->header) : 0;
	if (len && len <= MAX_SPAN)
		put_span(area, record, record + sp->data, len, 2);
	return 0;
}

// Writes the record of the thread's OpenTelemetry context. The same walk in target/thread_context.rs.
__noinline int copy_context(__u32 slot)
{
	char *area = scratch(slot), head[CONTEXT_HEAD];
	struct spans *sp;
	__u64 block, record, len;
	__u32 pid;

	if (!area)
		return 0;
	pid = ((struct head *)area)->pid;
	sp = bpf_map_lookup_elem(&SPANS, &pid);
	if (!sp || !sp->has_context)
		return 0;
	block = ((struct head *)area)->thread_pointer;
	if (sp->context_block) {
		// One that is not allocated yet is 0 or -1.
		block = user_word(user_word(block + 8) + sp->context_block);
		if (!block || !(block + 1))
			return 0;
	}
	record = user_word(block + sp->context_offset);
	if (!record || bpf_probe_read_user(head, sizeof(head), (void *)record) || head[24] != 1)
		return 0;
	len = CONTEXT_HEAD + ((__u64)(__u8)head[26] | (__u64)(__u8)head[27] << 8);
	if (len > MAX_CONTEXT)
		len = MAX_CONTEXT;
	put_span(area, record, record, len, 4);
	return 0;
}
