/* Random calls of allocators in many threads while a sampler is started and removed again and again. The program keeps its own
   books of all blocks, and checks the sampler's against them: a block ends once, at the call that frees it, and no other one.

   Usage: stress_allocations SECONDS OBJECT LIBRARY, the object of `examples/stress_allocations.rs` and this file as a library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef LIBRARY

/* Calls through the slots of a module that is loaded while the sampler is in place. */
void *allocate(size_t size) { return malloc(size); }

#else

/* C++ operators new and delete. */
void *_Znwm(size_t);
void _ZdlPv(void *);

enum { THREADS = 6, CALLS = 4000, CALLS_OF_CHILD = 500, PLACES = 2048, MAPPINGS = 64, PAGE = 4096, MOST_PAGES = 64 };
/* Blocks of one recording. A number has the recording in its upper bits. */
enum { ROW_BITS = 20, ROWS = 1 << ROW_BITS };
/* One call ends its own block, and perhaps one at the same place whose end was not seen. */
enum { MOST_ENDS = 2 };
#define NONE UINT32_MAX

static _Noreturn void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("stress: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("\n", stderr);
    abort();
}

/* --- The sampler's side. */

enum state { UNUSED, LIVE, MAPPED, OTHERS, ENDED, OVERFLOWN };

struct row {
    _Atomic int64_t bytes;
    _Atomic uint8_t state;
    /* The recording in which it ended or changed where the sampler may not have been in place. */
    _Atomic uint16_t uncertain_in;
};

static struct row rows[ROWS];
static _Atomic uint32_t used;
/* The recording that is being started or in place, the one that is in place for certain (0: none), and whether one may be. */
static _Atomic uint32_t recording, certain;
static _Atomic int is_open;
static _Atomic uint64_t calls, sampled, overflows, forks, loads;

/* What the sampler has said during a call on this thread. */
static __thread struct {
    int is_in_call;
    uint32_t given, given_count, ended[MOST_ENDS], ended_count;
    /* A block whose end will not be reported. */
    uint32_t overflown;
    size_t given_size;
    uint32_t certain;
    uint64_t random;
} here;

static uint32_t key(void) { return recording << ROW_BITS; }

static struct row *row_of(uint32_t number) {
    if (!is_open)
        fail("the sampler was called after it was removed");
    if ((number ^ key()) >= ROWS || (number & (ROWS - 1)) >= used)
        fail("number %x is not of recording %x", number, recording);
    return &rows[number & (ROWS - 1)];
}

static uint32_t on_block(size_t size, int is_mapping) {
    if (!is_open)
        fail("a block was sampled after the sampler was removed");
    uint32_t at = atomic_fetch_add(&used, 1);
    if (at >= ROWS)
        return NONE;
    rows[at].bytes = size;
    rows[at].uncertain_in = 0;
    rows[at].state = !here.is_in_call ? OTHERS : is_mapping ? MAPPED : LIVE;
    here.given = key() | at;
    here.given_size = size;
    here.given_count++;
    sampled++;
    return key() | at;
}

static void on_end(uint32_t number) {
    struct row *row = row_of(number);
    uint8_t was = atomic_exchange(&row->state, ENDED);
    if (was != LIVE && was != OTHERS)
        fail("number %x ended in state %d", number, was);
    if (here.is_in_call && here.ended_count == MOST_ENDS)
        fail("a call ended more than %d blocks", MOST_ENDS);
    here.ended[here.ended_count++ % MOST_ENDS] = number;
}

static void on_resize(uint32_t number, int64_t change) {
    struct row *row = row_of(number);
    if (row->state != MAPPED && row->state != OTHERS && row->state != OVERFLOWN)
        fail("number %x was resized in state %d", number, row->state);
    if (atomic_fetch_add(&row->bytes, change) + change < 0)
        fail("number %x has less than no bytes", number);
}

static void on_overflow(uint32_t number) {
    row_of(number)->state = OVERFLOWN;
    here.overflown = number;
    overflows++;
}

static const struct callbacks {
    uint32_t (*on_block)(size_t, int);
    void (*on_end)(uint32_t);
    void (*on_resize)(uint32_t, int64_t);
    void (*on_overflow)(uint32_t);
} callbacks = {on_block, on_end, on_resize, on_overflow};

/* Held for reading by each call, for writing by who wants none to be going on. */
static pthread_rwlock_t quiet;
/* Held for reading by who calls the loader, for writing by who forks: a child in which another thread had the loader's lock
   cannot call it (glibc 2.36), and so starts no sampler. */
static pthread_rwlock_t loader;
static void *(*stress_start)(const struct callbacks *, uint64_t, int);
static void (*stress_set_mean)(uint64_t);
static int (*stress_stop)(void *);
static void (*stress_remember_slots)(void);
static size_t (*stress_changed_slots)(void);

static void *start(uint64_t mean, int with_handler) {
    /* Never 0, which is none. */
    recording = recording % 1000 + 1;
    used = 0;
    is_open = 1;
    void *handle = stress_start(&callbacks, mean, with_handler);
    if (!handle)
        fail("the sampler is refused");
    certain = recording;
    return handle;
}

static void stop(void *handle) {
    certain = 0;
    if (stress_stop(handle))
        fail("the sampler is stuck");
    is_open = 0;
    pthread_rwlock_rdlock(&loader);
    size_t changed = stress_changed_slots();
    pthread_rwlock_unlock(&loader);
    if (changed)
        fail("%zu slots are not restored", changed);
}

/* --- The program's side. */

static uint64_t number_below(uint64_t end) {
    here.random ^= here.random << 13;
    here.random ^= here.random >> 7;
    here.random ^= here.random << 17;
    return here.random % end;
}

/* What the books say of a block or a mapping. */
struct block {
    char *at;
    size_t size;
    uint32_t number, recording;
    uint8_t seed, is_new;
};

struct place {
    _Atomic int is_busy;
    struct block block;
};

static struct place places[PLACES], mappings[MAPPINGS];
static sem_t progress;
static _Atomic int is_over;
static const char *library;

/* A random place that is the caller's until it is left. */
static struct place *enter(struct place *all, int count) {
    for (;;) {
        struct place *place = &all[number_below(count)];
        if (!atomic_exchange(&place->is_busy, 1))
            return place;
    }
}

static void leave(struct place *place) { place->is_busy = 0; }

static size_t step(size_t size) { return size > 4096 ? 509 : 1; }

static void fill(struct block *block) {
    block->seed = number_below(256);
    for (size_t i = 0; i < block->size; i += step(block->size))
        block->at[i] = (char)(block->seed + i);
}

/* Of the block as it was when it was filled, the first bytes. */
static void check(const struct block *block, size_t size) {
    for (size_t i = 0; i < size; i += step(block->size))
        if (block->at[i] != (char)(block->seed + i))
            fail("byte %zu of a block of %zu is %d", i, block->size, block->at[i]);
}

static void begin(void) {
    here.given_count = here.ended_count = 0;
    here.overflown = NONE;
    here.certain = certain;
    here.is_in_call = 1;
}

/* The sampler was in place all the time. */
static int finish(void) {
    here.is_in_call = 0;
    return here.certain && here.certain == certain;
}

/* Whether the recording of a call is still going on: else what was read of its rows is another one's. */
static int is_still(void) { return here.certain == certain; }

static int is_uncertain(const struct row *row) { return row->uncertain_in == recording; }

/* A block is about to end, or a mapping to change: it may not be noticed. */
static void may_be_missed(const struct block *block) {
    if (block->number != NONE && here.certain != block->recording && block->recording == recording)
        rows[block->number & (ROWS - 1)].uncertain_in = block->recording;
}

/* After a call of `free`, or one that has replaced a block. `is_certain`: as `finish` says. */
static void has_ended(const struct block *block, int is_certain) {
    if (!is_certain || block->number == NONE || block->recording != here.certain)
        return;
    for (uint32_t i = 0; i < here.ended_count; i++)
        if (here.ended[i] == block->number)
            return;
    fail("number %x was freed, and its end was not reported", block->number);
}

/* A block or a mapping of this size was given, or nothing. */
static void has_begun(struct block *block, size_t size) {
    int is_given = here.given_count != 0;
    if (here.given_count > 1 || (is_given && !block->at))
        fail("a call gave %u blocks", here.given_count);
    if (is_given && here.given_size != size)
        fail("a block of %zu bytes was sampled as %zu", size, here.given_size);
    block->size = size;
    block->number = is_given && here.given != here.overflown ? here.given : NONE;
    block->recording = block->number >> ROW_BITS;
}

static size_t random_size(void) {
    static const uint32_t ends[] = {64, 64, 64, 600, 600, 5000, 5000, 100000, 1 << 20};
    size_t end = ends[number_below(sizeof ends / sizeof *ends)];
    /* Large ones are rare: they take longer. */
    return number_below(end > 5000 && number_below(16) ? 5000 : end);
}

static void give(struct block *block) {
    size_t size = random_size(), alignment = (size_t)16 << number_below(9);
    int which = number_below(12);
    void *at = NULL;
    block->is_new = which == 0;
    begin();
    switch (which) {
    case 0: size += !size; at = _Znwm(size); break;
    case 1: at = calloc(1, size); break;
    case 2: size &= ~(size_t)7; at = calloc(size / 8, 8); break;
    case 3: at = realloc(NULL, size); break;
    case 4: at = reallocarray(NULL, 1, size); break;
    case 5: size = (size + alignment - 1) & -alignment; at = aligned_alloc(alignment, size); break;
    case 6: if (posix_memalign(&at, alignment, size)) at = NULL; break;
    case 7: at = memalign(alignment, size); break;
    case 8: at = number_below(2) ? valloc(size) : pvalloc(size); break;
    default: at = malloc(size);
    }
    finish();
    if (!at)
        fail("no memory for %zu bytes", size);
    block->at = at;
    has_begun(block, size);
    fill(block);
}

static void drop(struct block *block) {
    check(block, block->size);
    begin();
    may_be_missed(block);
    if (block->is_new)
        _ZdlPv(block->at);
    else
        free(block->at);
    has_ended(block, finish());
    block->at = NULL;
}

static void move(struct block *block) {
    struct block old = *block;
    size_t size = number_below(8) ? random_size() : number_below(2) ? 0 : old.size + 16;
    int is_array = number_below(3) == 0, is_hopeless = 0;
#ifndef __SANITIZE_ADDRESS__
    is_hopeless = number_below(16) == 0;
#endif
    if (is_hopeless)
        size = PTRDIFF_MAX;
    check(&old, old.size);
    begin();
    if (!is_hopeless)
        may_be_missed(&old);
    block->at = is_array ? reallocarray(old.at, 1, size) : realloc(old.at, size);
    int is_certain = finish();
    if (is_hopeless) {
        if (block->at || here.given_count || here.ended_count)
            fail("a call that failed changed something");
        block->at = old.at;
        if (here.overflown == old.number)
            block->number = NONE;
        return;
    }
    has_ended(&old, is_certain);
    if (block->at) {
        struct block as_before = {.at = block->at, .size = old.size, .seed = old.seed};
        check(&as_before, old.size < size ? old.size : size);
    } else if (size)
        fail("no memory for %zu bytes", size);
    has_begun(block, size);
    if (block->at)
        fill(block);
}

static void change_block(void) {
    struct place *place = enter(places, PLACES);
    struct block *block = &place->block;
    if (!block->at)
        give(block);
    else if (!block->is_new && number_below(3) == 0)
        move(block);
    else
        drop(block);
    leave(place);
}

/* --- Mappings. */

/* Bytes of a mapping as the sampler has them; -1: not known. */
static int64_t bytes_of(uint32_t number) {
    const struct row *row = &rows[number & (ROWS - 1)];
    int64_t bytes = row->state == MAPPED && !is_uncertain(row) ? row->bytes : -1;
    return number >> ROW_BITS == here.certain && is_still() ? bytes : -1;
}

/* After a call that has changed a mapping. */
static void has_changed(struct block *mapping, int is_certain) {
    if (mapping->number == NONE)
        return;
    if (here.overflown == mapping->number) {
        mapping->number = NONE;
        return;
    }
    int64_t bytes = is_certain ? bytes_of(mapping->number) : -1;
    if (bytes >= 0 && bytes != (int64_t)mapping->size)
        fail("a mapping of %zu bytes has %ld", mapping->size, (long)bytes);
}

static void touch(struct block *mapping) {
    mapping->seed = number_below(256);
    mapping->at[0] = mapping->at[mapping->size - 1] = (char)mapping->seed;
}

static void *map(void *at, size_t size, int flags) {
    return mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

static void change_mapping(void) {
    struct place *place = enter(mappings, MAPPINGS);
    struct block *mapping = &place->block;
    size_t size = (1 + number_below(MOST_PAGES)) * PAGE, old = mapping->size;
    if (!mapping->at) {
        begin();
        void *at = map(NULL, size, 0);
        int is_certain = finish();
        if (at == MAP_FAILED)
            fail("no memory is mapped");
        mapping->at = at;
        has_begun(mapping, size);
        touch(mapping);
        has_changed(mapping, is_certain);
        leave(place);
        return;
    }
    if (mapping->at[0] != (char)mapping->seed || mapping->at[old - 1] != (char)mapping->seed)
        fail("a mapping of %zu bytes has changed", old);
    int which = number_below(4), result = 0;
    size_t part = old > PAGE ? (1 + number_below(old / PAGE - 1)) * PAGE : 0;
    begin();
    may_be_missed(mapping);
    if (which == 0 && part) {
        /* The first part goes. */
        result = munmap(mapping->at, part);
        mapping->at += part;
        mapping->size -= part;
    } else if (which == 1 && part) {
        /* The last part becomes a mapping that nothing is known of, and goes. */
        result = map(mapping->at + old - part, part, MAP_FIXED) == MAP_FAILED;
        result |= munmap(mapping->at + old - part, part);
        mapping->size -= part;
        if (here.given_count && finish()) {
            if (bytes_of(here.given) > 0)
                fail("a mapping over another one is not gone");
        } else if (here.given_count) {
            rows[here.given & (ROWS - 1)].uncertain_in = here.given >> ROW_BITS;
        }
    } else if (which == 2) {
        void *at = mremap(mapping->at, old, size, MREMAP_MAYMOVE);
        result = at == MAP_FAILED;
        mapping->at = at;
        mapping->size = size;
    } else {
        result = munmap(mapping->at, old);
        mapping->at = NULL;
        mapping->size = 0;
    }
    int is_certain = finish();
    if (result)
        fail("a mapping cannot be changed");
    has_changed(mapping, is_certain);
    if (mapping->at)
        touch(mapping);
    leave(place);
}

/* --- Rarer calls. */

static void allocate_in_library(void) {
    pthread_rwlock_rdlock(&loader);
    void *handle = dlopen(library, RTLD_NOW);
    if (!handle)
        fail("%s", dlerror());
    void *(*allocate)(size_t) = (void *(*)(size_t))dlsym(handle, "allocate");
    struct place *place = enter(places, PLACES);
    if (place->block.at)
        drop(&place->block);
    size_t size = random_size();
    place->block.is_new = 0;
    begin();
    place->block.at = allocate(size);
    finish();
    has_begun(&place->block, size);
    fill(&place->block);
    leave(place);
    dlclose(handle);
    pthread_rwlock_unlock(&loader);
    loads++;
}

static void compare_books(void);

/* The child has one thread and no sampler, until it starts its own. */
static _Noreturn void live_as_child(void) {
    uint32_t before = used;
    is_open = certain = 0;
    pthread_rwlock_init(&loader, NULL);
    for (int i = 0; i < CALLS_OF_CHILD; i++)
        number_below(8) ? change_block() : change_mapping();
    if (used != before)
        fail("a forked child has its parent's sampler");
    void *handle = start(1, number_below(2));
    for (int i = 0; i < CALLS_OF_CHILD; i++)
        number_below(8) ? change_block() : change_mapping();
    if (!used)
        fail("a forked child has no sampler of its own");
    compare_books();
    stop(handle);
    _exit(0);
}

static void fork_child(void) {
    /* The sanitizer's own allocator cannot be used in the child if another thread was in it. */
#ifdef __SANITIZE_ADDRESS__
    pthread_rwlock_wrlock(&quiet);
#else
    pthread_rwlock_rdlock(&quiet);
#endif
    pthread_rwlock_wrlock(&loader);
    pid_t child = fork();
    if (child == 0)
        live_as_child();
    pthread_rwlock_unlock(&loader);
    pthread_rwlock_unlock(&quiet);
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || status)
        fail("a forked child failed: %x", status);
    forks++;
}

static void *run(void *seed) {
    here.random = (uintptr_t)seed;
    if (number_below(64) == 0)
        fork_child();
    for (int i = 0; i < CALLS && !is_over; i++) {
        pthread_rwlock_rdlock(&quiet);
        uint64_t which = number_below(500);
        if (which == 0)
            allocate_in_library();
        else if (which < 50)
            change_mapping();
        else
            change_block();
        pthread_rwlock_unlock(&quiet);
        if (i % 500 == 0)
            sem_post(&progress);
    }
    calls += CALLS;
    return NULL;
}

/* Threads, one after the other. */
static void *spawn(void *seed) {
    here.random = (uintptr_t)seed;
    while (!is_over) {
        pthread_t thread;
        pthread_rwlock_rdlock(&quiet);
        if (pthread_create(&thread, NULL, run, (void *)(uintptr_t)(number_below(UINT32_MAX) + 1)))
            fail("no thread is created");
        pthread_rwlock_unlock(&quiet);
        pthread_join(thread, NULL);
    }
    return NULL;
}

/* Compares both sides' books while no call is going on: what lives, and nothing else. */
static void compare_books(void) {
    uint32_t blocks = 0, mapped = 0, live_rows = 0, mapped_rows = 0;
    for (int i = 0; i < PLACES + MAPPINGS; i++) {
        const struct place *place = i < PLACES ? &places[i] : &mappings[i - PLACES];
        const struct block *block = &place->block;
        /* In a child, one that another thread of the parent had. */
        if (place->is_busy || !block->at || block->number == NONE || block->recording != recording)
            continue;
        const struct row *row = &rows[block->number & (ROWS - 1)];
        int expected = i < PLACES ? LIVE : MAPPED;
        if (row->state != expected && row->state != OVERFLOWN)
            fail("number %x lives and is in state %d", block->number, row->state);
        if (expected == MAPPED && row->state == MAPPED && !is_uncertain(row) && row->bytes != (int64_t)block->size)
            fail("a mapping of %zu bytes has %ld", block->size, (long)row->bytes);
        blocks += row->state == LIVE;
        mapped += row->state == MAPPED && !is_uncertain(row);
    }
    for (uint32_t i = 0; i < used && i < ROWS; i++) {
        live_rows += rows[i].state == LIVE && !is_uncertain(&rows[i]);
        mapped_rows += rows[i].state == MAPPED && !is_uncertain(&rows[i]) && rows[i].bytes;
    }
    if (blocks != live_rows || mapped != mapped_rows)
        fail("%u blocks and %u mappings live, the sampler has %u and %u", blocks, mapped, live_rows, mapped_rows);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static uint64_t random_mean(void) { return (uint64_t)1 << number_below(25); }

static void *function(void *object, const char *name) {
    void *found = dlsym(object, name);
    if (!found)
        fail("%s", dlerror());
    return found;
}

int main(int count, char **arguments) {
    if (count != 4)
        fail("usage: stress_allocations SECONDS OBJECT LIBRARY");
    double end = seconds() + atof(arguments[1]);
    library = arguments[3];
    void *object = dlopen(arguments[2], RTLD_NOW);
    if (!object)
        fail("%s", dlerror());
    stress_start = (void *(*)(const struct callbacks *, uint64_t, int))function(object, "stress_start");
    stress_set_mean = (void (*)(uint64_t))function(object, "stress_set_mean");
    stress_stop = (int (*)(void *))function(object, "stress_stop");
    stress_remember_slots = (void (*)(void))function(object, "stress_remember_slots");
    stress_changed_slots = (size_t(*)(void))function(object, "stress_changed_slots");

    pthread_rwlockattr_t kind;
    pthread_rwlockattr_init(&kind);
    pthread_rwlockattr_setkind_np(&kind, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&quiet, &kind);
    pthread_rwlock_init(&loader, &kind);
    sem_init(&progress, 0, 0);
    here.random = 88172645463325252;
    stress_remember_slots();
    /* What is done once for the process must not be interrupted by a fork. */
    stop(start(1, 0));

    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, spawn, (void *)(i + 1));
    uint64_t rounds = 0;
    for (; rounds < 2 || seconds() < end; rounds++) {
        void *handle = start(random_mean(), number_below(4) == 0);
        while (!sem_trywait(&progress))
            continue;
        for (int steps = number_below(30); steps > 0 && used < ROWS; steps--) {
            sem_wait(&progress);
            stress_set_mean(random_mean());
        }
        if (number_below(2)) {
            pthread_rwlock_wrlock(&quiet);
            compare_books();
            pthread_rwlock_unlock(&quiet);
        }
        stop(handle);
        if (number_below(4) == 0)
            sem_wait(&progress);
    }
    is_over = 1;
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < PLACES; i++)
        if (places[i].block.at)
            drop(&places[i].block);
    for (int i = 0; i < MAPPINGS; i++)
        if (mappings[i].block.at)
            munmap(mappings[i].block.at, mappings[i].block.size);
    dlclose(object);
    printf("%lu recordings, %lu calls, %lu sampled blocks and mappings, %lu of them not followed, %lu children, %lu libraries\n",
           (unsigned long)rounds, (unsigned long)calls, (unsigned long)sampled, (unsigned long)overflows, (unsigned long)forks,
           (unsigned long)loads);
    return 0;
}

#endif
