// SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0
//
// The tasks that run, the span that is active in a thread, and its OpenTelemetry context.

// Writes a record of a task, like that of a code object, with fingerprint 0: where the frame of its coroutine is (0: it awaits the
// last one), and its name. The task may have ended before the reader reads it.
static __always_inline int put_task(char *area, struct running *r, __u64 task, __u64 frame)
{
	struct head *sample = (void *)area;
	struct code_head *h = (void *)(area + COPY);
	char *raw = area + COPY + sizeof(*h);
	__u64 name, size = NAME_BYTES;

	name = user_word((r->flags & NAME_OF_COROUTINE ? user_word(task + r->coroutine) : task) + r->name);
	// The object may lie at the end of what is mapped.
	if (bpf_probe_read_user(raw, NAME_BYTES, (void *)name)) {
		size = NAME_BYTES / 2;
		if (bpf_probe_read_user(raw, NAME_BYTES / 2, (void *)name)) {
			size = NAME_BYTES / 4;
			if (bpf_probe_read_user(raw, NAME_BYTES / 4, (void *)name))
				return 0;
		}
	}
	__builtin_memset(h, 0, sizeof(*h));
	h->pid = sample->pid;
	h->tid = sample->tid;
	h->flags = CODE_COPY;
	h->time = sample->time;
	h->code = task;
	h->parts[PART_CODE].at = frame;
	h->parts[PART_NAME].at = name;
	h->parts[PART_NAME].len = size;
	h->size = sizeof(*h) + size;
	return !bpf_ringbuf_output(&SAMPLES, h, sizeof(*h) + size, BPF_RB_NO_WAKEUP);
}

// The task that a callback resumes, if it awaits this future.
static __always_inline __u64 waiting_task(struct running *r, __u64 callback, __u64 future)
{
	__u64 task = user_word(callback + r->head);

	if (task && user_word(task + r->waiter) == future)
		return task;
	task = user_word(callback + r->head + 8);
	return task && user_word(task + r->waiter) == future ? task : 0;
}

// The task that awaits another one: directly, or through a future that functions like `gather` and `wait` create. Their callbacks
// refer to it in a closure, or as an argument. 0: none, several, or in another way.
static __always_inline __u64 awaiter(struct running *r, __u64 task)
{
	__u64 callback, tuple, found, future, next, count;
	int i;

	if (r->awaited_by)
		return user_byte(task + r->awaited_by_is_set) ? 0 : user_word(task + r->awaited_by);
	callback = user_word(task + r->callback);
	if (!callback)
		return 0;
	found = waiting_task(r, callback, task);
	if (found)
		return found;
	tuple = user_word(callback + r->closure);
	count = tuple ? user_word(tuple + r->head) : 0;
	for (i = 0; i <= MAX_CELLS; i++) {
		if (i < MAX_CELLS) {
			if (i >= count)
				continue;
			future = user_word(tuple + r->items + 8 * i);
			future = future ? user_word(future + r->head) : 0;
		} else {
			tuple = user_word(callback + r->head + 8);
			future = tuple ? user_word(tuple + r->items) : 0;
		}
		next = future ? user_word(future + r->callback) : 0;
		found = next ? waiting_task(r, next, future) : 0;
		if (found)
			return found;
	}
	return 0;
}

// Writes a task that runs, and those that await it. The same walk in cpython/code_copy.rs.
__noinline int copy_task(__u32 slot, __u64 task)
{
	char *area = scratch(slot);
	struct running *r;
	__u64 frame;
	__u32 pid;
	int i;

	if (!area)
		return 0;
	pid = ((struct head *)area)->pid;
	r = bpf_map_lookup_elem(&RUNNING_TASKS, &pid);
	if (!r)
		return 0;
	frame = user_word(task + r->coroutine);
	if (!frame)
		return 0;
	frame += r->frame;
	if (r->flags & FRAME_POINTER)
		frame = user_word(frame);
	if (!frame)
		return 0;
	for (i = 0; i < MAX_CHAIN; i++) {
		if (!put_task(area, r, task, frame))
			return 0;
		task = awaiter(r, task);
		if (!task)
			return 0;
		frame = 0;
	}
	return 0;
}

// Writes which tasks run. The dictionary holds one for each event loop that runs one: which of them is the thread's own follows
// from the frames. (Small dictionaries have room for DICT_ENTRIES; entries that were removed have no value.)
__noinline int copy_tasks(__u32 slot)
{
	char *area = scratch(slot), *raw;
	struct running *r;
	__u64 keys;
	__u32 pid;
	__u8 size;
	int i;

	if (!area)
		return 0;
	pid = ((struct head *)area)->pid;
	r = bpf_map_lookup_elem(&RUNNING_TASKS, &pid);
	if (!r)
		return 0;
	if (!r->current) {
		keys = user_word(((struct state *)(area + STATE))->states[0] + r->task);
		if (keys)
			copy_task(slot, keys);
		return 0;
	}
	keys = user_word(r->current + r->keys);
	if (!keys)
		return 0;
	size = user_byte(keys + 8); // 8 slots, or their logarithm (3.11 and later)
	if (size != 3 && size != 8)
		return 0;
	// Behind the records that put_task writes.
	raw = area + COPY + sizeof(struct code_head) + NAME_BYTES;
	if (bpf_probe_read_user(raw, DICT_ENTRIES * 24, (void *)(keys + r->entries)))
		return 0;
	for (i = 0; i < DICT_ENTRIES; i++) {
		__u64 task = *(__u64 *)(raw + 24 * i + 16);

		if (task)
			copy_task(slot, task);
	}
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
