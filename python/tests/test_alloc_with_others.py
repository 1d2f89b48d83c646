"""Recordings of allocations together with other tools, threads, forks, subinterpreters and the end of a program."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import tracemalloc
import warnings
from pathlib import Path

import pytest
from chance import likely, repeated
from test_alloc import INTERVAL, SIZE, amounts, free, is_about, keep_small, places

import nativeprof
from nativeprof import _native

pytestmark = pytest.mark.few_versions
HERE = Path(__file__).resolve().parent
BLOCKS = 10_000
# Bytes between two samples, so few that sums are known within a few percent.
OFTEN = 1 << 14
# Blocks of Python's that caches and lists of free objects may take or give back.
BAND = 2_000


class Allocator(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("context", "malloc", "calloc", "realloc", "free")]


def allocators():
    """What Python's domains raw, mem and obj call."""
    found = []
    for domain in range(3):
        allocator = Allocator()
        ctypes.pythonapi.PyMem_GetAllocator(domain, ctypes.byref(allocator))
        found.append([getattr(allocator, name) for name, _ in Allocator._fields_])
    return found


def blocks():
    gc.collect()
    return sys.getallocatedblocks()


def recording(interval=INTERVAL):
    return nativeprof.Profiler(mode="alloc", interval=interval, max_overhead=1.0)


def in_process(function, *arguments):
    """Calls a function of this file in a process of its own; what it returns."""
    call = f"print(json.dumps(test_alloc_with_others.{function.__name__}(*{arguments!r})))"
    program = f"import json, sys; sys.path.insert(0, {str(HERE)!r}); import test_alloc_with_others; {call}"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    # memray says so of each program at a fixed address.
    said = [line for line in done.stderr.splitlines() if not line.startswith("Memray WARNING: Correcting symbol")]
    assert (done.returncode, said) == (0, []), done
    return json.loads(done.stdout)


def memray_module():
    """Path of the module whose functions memray puts in place of the C library's."""
    return importlib.import_module("memray._memray").__file__


class Memray:
    def __init__(self):
        self._memray = importlib.import_module("memray")

    def start(self):
        self._directory = tempfile.TemporaryDirectory()
        self._tracker = self._memray.Tracker(os.path.join(self._directory.name, "file"))
        self._tracker.__enter__()

    def stop(self):
        self._tracker.__exit__(None, None, None)
        self._directory.cleanup()


def record_with_tool(name, begin, end):
    """A tool begins and ends before, during or after a recording."""
    tool = tracemalloc if name == "tracemalloc" else Memray()
    kept = [places(BLOCKS) for _ in range(3)]
    # What they allocate once, and keep.
    with recording():
        pass
    tool.start()
    tool.stop()
    before, found = blocks(), allocators()
    if begin == "before":
        tool.start()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        with recording(OFTEN) as profiler:
            keep_small(kept[0])
            if begin == "during":
                tool.start()
            keep_small(kept[1])
            if end == "during":
                tool.stop()
            free(kept[1])
            profile = profiler.take()
            keep_small(kept[2])
    if end == "after":
        free(kept[0])
        tool.stop()
    for each in kept:
        free(each)
    is_restored = allocators() == found
    # Where a tool was above our link when we left, the link is at the top again now, and goes with the next recording.
    with recording():
        pass
    lost = blocks() - before
    return {
        "values": amounts(profile, "keep_small"),
        "warned": [str(each.message) for each in warned if each.category is RuntimeWarning],
        "restored": is_restored,
        "restored later": allocators() == found,
        "lost": lost,
    }


@pytest.mark.parametrize("tool", ["tracemalloc", "memray"])
@pytest.mark.parametrize("begin", ["before", "during"])
@pytest.mark.parametrize("end", ["during", "after"])
@repeated
def test_another_tool_begins_and_ends(tool, begin, end):
    seen = in_process(record_with_tool, tool, begin, end)
    assert seen["restored later"] and abs(seen["lost"]) < BAND, seen
    assert seen["restored"] or (begin, end) == ("during", "after"), seen
    # tracemalloc takes away what was hooked after it began. memray replaces the hooks on the C library's allocator, or is there
    # in place of them.
    is_reset = (tool, begin, end) == ("tracemalloc", "before", "during")
    assert len(seen["warned"]) == (is_reset or tool == "memray"), seen
    is_named = [f"calls of malloc get to {memray_module()}" in said for said in seen["warned"]]
    assert is_named == [begin == "before"] * (tool == "memray") + [False] * is_reset, seen
    for value, number in [("alloc_bytes", 2 * BLOCKS), ("live_bytes", BLOCKS)]:
        if tool == "tracemalloc":
            # What it allocates for each block itself is seen, too.
            share = seen["values"][value] / (number * SIZE)
            likely(0.6 < share and (share < 2.5 or is_reset), value, share, seen)
        elif not is_reset:
            is_about(seen["values"], {SIZE: number}, value, OFTEN)


IMPORT_OF_DECIMAL = """
import sys
import nativeprof

assert "_decimal" not in sys.modules
with nativeprof.Profiler(mode="alloc"):
    import _decimal
with nativeprof.Profiler(mode="alloc"):
    pass
"""


def test_a_module_changes_its_own_pointer_to_malloc():
    # `_decimal` has a variable that begins with the address of `malloc`, and sets it to Python's function when it is imported.
    done = subprocess.run([sys.executable, "-c", IMPORT_OF_DECIMAL], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done


def exchange(mine, theirs, n):
    """Allocates blocks for another thread, and frees those of a third."""
    for _ in range(n):
        mine.put(bytes(200))
        theirs.get()


def exchanging_threads(n):
    queues = [queue.SimpleQueue() for _ in range(4)]
    pairs = zip(queues, queues[1:] + queues[:1])
    return [threading.Thread(target=exchange, args=(*pair, n)) for pair in pairs]


@repeated
def test_threads_free_the_blocks_of_others():
    before, found = blocks(), allocators()
    with recording() as profiler:
        threads = exchanging_threads(10_000)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del threads, thread
    values = amounts(profiler.profile, "exchange")
    # The queues grow, too.
    likely(0.8 < values["alloc_bytes"] / (40_000 * SIZE) < 2, values)
    likely(values["live_bytes"] < 10 * INTERVAL, values)
    assert allocators() == found and abs(blocks() - before) < BAND


def fork_while_recording():
    kept, of_child = places(BLOCKS), places(BLOCKS // 2)
    found = allocators()
    seen = {}
    with recording() as profiler:
        keep_small(kept)
        threads = exchanging_threads(5_000)
        for thread in threads:
            thread.start()
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            free(kept)
            with recording() as own:
                keep_small(of_child)
                free(of_child[: BLOCKS // 4])
            is_restored = allocators() == found
            os.write(writable, json.dumps({**amounts(own.profile, "keep_small"), "restored": is_restored}).encode())
            os._exit(0)
        os.close(writable)
        with open(readable) as file:
            seen["child"] = json.load(file)
        seen["status"] = os.waitpid(child, 0)[1]
        for thread in threads:
            thread.join()
    return {**seen, "parent": amounts(profiler.profile, "keep_small"), "restored": allocators() == found}


@repeated
def test_a_forked_child_starts_empty_and_records_for_itself():
    seen = in_process(fork_while_recording)
    assert seen["status"] == 0 and seen["restored"] and seen["child"].pop("restored"), seen
    for value in ("alloc_bytes", "live_bytes"):
        is_about(seen["parent"], {SIZE: BLOCKS}, value)
    is_about(seen["child"], {SIZE: BLOCKS // 2}, "alloc_bytes")
    is_about(seen["child"], {SIZE: BLOCKS // 4}, "live_bytes")


IN_SUBINTERPRETER = """
def keep(n):
    return [bytes(200) for _ in range(n)]

for _ in range(4):
    kept = keep(5_000)
"""


def subinterpreters():
    """The module of the standard library, as it is called in this version."""
    try:
        return importlib.import_module("_interpreters")
    except ImportError:
        return importlib.import_module("_xxsubinterpreters")


def live(module, script, made, failures):
    """An interpreter that allocates, and is destroyed by another thread."""
    try:
        own = module.create()
        failures.append(module.run_string(own, script))
        made.append(own)
    except BaseException as failure:
        failures.append(repr(failure))


def run_subinterpreters(recorded):
    """Some allocate during recordings; one is older than those, and one of each recording lives longer."""
    module = subinterpreters()
    before = blocks()
    old, made, failures, sums = module.create(), [], [], []
    module.run_string(old, IN_SUBINTERPRETER)
    for _ in range(2):
        with recording() if recorded else contextlib.nullcontext() as profiler:
            threads = [threading.Thread(target=live, args=(module, IN_SUBINTERPRETER, made, failures)) for _ in range(2)]
            for thread in threads:
                thread.start()
            failures.append(module.run_string(old, IN_SUBINTERPRETER))
            for thread in threads:
                thread.join()
            module.destroy(made.pop())
        if profiler:
            sums.append(profiler.profile.to_dict()["values"]["alloc_bytes"])
        module.destroy(made.pop())
    module.destroy(old)
    return [failure for failure in failures if failure], sums, blocks() - before


def record_subinterpreters():
    with recording():
        pass
    found = allocators()
    run_subinterpreters(False)
    # CPython 3.12 leaves some 1500 blocks of each.
    _, _, without = run_subinterpreters(False)
    failures, sums, blocks_left = run_subinterpreters(True)
    return {"failures": failures, "sums": sums, "restored": allocators() == found, "lost": blocks_left - without}


@repeated
def test_subinterpreters_allocate():
    seen = in_process(record_subinterpreters)
    assert seen["restored"] and not seen["failures"] and abs(seen["lost"]) < BAND, seen
    # 60,000 blocks in each recording, and what the interpreters take for themselves.
    likely(all(amount > 0.8 * 60_000 * SIZE for amount in seen["sums"]), seen)


AT_THE_END = """
import atexit, sys, threading
import nativeprof
from nativeprof import _native

class Late:
    def __init__(self):
        self.blocks = [bytes(200) for _ in range(1000)]

    def __del__(self):
        self.blocks = [bytes(300) for _ in range(1000)]

def allocate(started):
    kept = []
    while True:
        kept.append(bytes(200))
        if len(kept) > 1000:
            kept.clear()
            started.set()

for _ in range(2):
    started = threading.Event()
    threading.Thread(target=allocate, args=(started,), daemon=True).start()
    started.wait()
late, cycle = Late(), Late()
cycle.itself = cycle
sys.modules["late"] = Late()
if sys.argv[1] == "profiler":
    profiler = nativeprof.Profiler(mode="alloc", interval=1 << 12, max_overhead=1.0)
    profiler.start()
else:
    recorder = _native.AllocationRecorder(1 << 12, 1.0, True, False)
atexit.register(lambda: [bytes(400) for _ in range(1000)])
more = [Late() for _ in range(10)]
print("done")
"""


@pytest.mark.parametrize("kind", ["profiler", "recorder"])
def test_the_program_ends_during_a_recording(kind):
    # The recorder alone does not learn that the program ends: its hooks stay in place while Python ends.
    command = [sys.executable, "-c", AT_THE_END, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", ""), done


def test_slots_and_allocators_are_restored_by_each_recording():
    found, slots = allocators(), _native.hook_slots()
    for _ in range(5):
        with recording(1):
            changed = allocators()
            assert changed[0] == found[0] and changed[1] != found[1] and changed[2] != found[2]
        assert allocators() == found and _native.hook_slots() == slots
