"""Sampled allocations, against what is known to have been allocated."""

import collections
import ctypes
import itertools
import json
import math
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from chance import likely, repeated

import nativeprof
from nativeprof import _native

pytestmark = pytest.mark.few_versions
HERE = Path(__file__).resolve().parent
INTERVAL = 1 << 16
MEGABYTE = 1 << 20
SIZE = 200 + sys.getsizeof(b"")
# Sizes of the blocks of one round of the fixture `allocations`; the block of `realloc` counts again.
ROUND = [70001, 70021, 140003, 70005, 70016, 70007, 70017, 70009, 70011, 70011]


@pytest.fixture(autouse=True)
def deep_trees():
    """Up to CPython 3.11 the module json reads no deeper than functions may call each other; pytest calls deeply."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    yield
    sys.setrecursionlimit(limit)


def compiled(directory, name):
    made = directory / f"{name}.so"
    source = HERE / "fixtures" / f"{name}.c"
    subprocess.run(["cc", "-O1", "-g", "-fno-builtin", "-shared", "-fPIC", "-o", made, source], check=True)
    return str(made)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("alloc"), "allocations")


def amounts(profile, function):
    """Inclusive values of the outermost nodes of a function."""
    sums = collections.Counter()

    def visit(node):
        name = node["description"]["name"]
        if name == function or name.endswith(f".{function}"):
            for value, amount in node["values"].items():
                sums[value] += amount
        else:
            for child in node["children"].values():
                visit(child)

    visit(profile.to_dict())
    return sums


def deviation(sizes, interval=INTERVAL):
    """Standard deviation of the bytes, where each block is sampled by its size."""
    return math.sqrt(sum(n * size * size / math.expm1(size / interval) for size, n in sizes.items()))


def is_about(seen, sizes, value, interval=INTERVAL):
    truth = sum(size * n for size, n in sizes.items())
    likely(abs(seen[value] - truth) < 4 * deviation(sizes, interval) + 1, value, seen, truth)


# No object is created in these loops but the ones that count: the places exist before.


def places(n):
    return [[None] for _ in range(n)]


def keep_small(kept):
    for place in kept:
        place[0] = bytes(200)


def drop_large(n):
    for _ in itertools.repeat(None, n):
        bytes(8000)


def free(kept):
    for place in kept:
        place[0] = None


@repeated
def test_sums_are_right_by_function(library):
    kept, half = places(100_000), places(50_000)
    with nativeprof.Profiler(mode="alloc", interval=INTERVAL, max_overhead=1.0) as profiler:
        native = ctypes.CDLL(library)
        keep_small(kept)
        keep_small(half)
        drop_large(5_000)
        assert native.allocations(200) == 0
        thread = threading.Thread(target=free, args=(half,))
        thread.start()
        thread.join()
    profile = profiler.profile
    small = amounts(profile, "keep_small")
    is_about(small, {SIZE: 150_000}, "alloc_bytes")
    is_about(small, {SIZE: 100_000}, "live_bytes")
    is_about(small, {SIZE: 150_000}, "peak_bytes")
    likely(abs(small["allocs"] / 150_000 - 1) < 0.2, small)
    large = amounts(profile, "drop_large")
    is_about(large, {8000 + sys.getsizeof(b""): 5_000}, "alloc_bytes")
    likely(large["live_bytes"] < MEGABYTE / 4, large)
    in_c = amounts(profile, "allocations")
    is_about(in_c, {size: 200 * n for size, n in collections.Counter(ROUND).items()}, "alloc_bytes")
    assert in_c["live_bytes"] == 0
    likely(abs(in_c["allocs"] / (200 * len(ROUND)) - 1) < 0.2, in_c)
    # The innermost frame is the one that allocates, not one of the hooks.
    tree = json.dumps(profile.to_dict())
    assert "BlockSampler" not in tree and "sample_here" not in tree
    assert profile.stats["event"] == "allocations"
    assert profile.top()._whole == profile.to_dict()["values"]["alloc_bytes"]


def read_short(file, n):
    for _ in itertools.repeat(None, n):
        os.pread(file, 4000, 0)


def in_child(directory):
    """What a program sees of itself, for `test_each_allocator_is_counted_once`."""
    kept, slots = places(20_000), _native.hook_slots()
    short = os.path.join(directory, "short")
    with open(short, "wb") as file:
        file.write(bytes(100))
    file = os.open(short, os.O_RDONLY)
    profiler = nativeprof.Profiler(mode="alloc", interval=INTERVAL, max_overhead=1.0)
    with profiler:
        keep_small(kept)
        pid = os.fork()
        if not pid:
            free(kept)
            os._exit(0 if profiler._recorder is not None and not profiler._is_running() else 1)
        forked = os.waitpid(pid, 0)[1]
    small = amounts(profiler.profile, "keep_small")
    # Each read makes a block of the C library, which becomes so small that Python's own allocator would give it. Every block is
    # sampled.
    with nativeprof.Profiler(mode="alloc", interval=1, max_overhead=1.0) as profiler:
        read_short(file, 20)
    seen = {"small": small, "short": amounts(profiler.profile, "read_short"), "forked": forked}
    print(json.dumps({**seen, "restored": slots == _native.hook_slots()}))


@pytest.mark.parametrize(
    ("options", "environment"),
    [([], {}), ([], {"PYTHONMALLOC": "malloc"}), ([], {"PYTHONMALLOC": "debug"}), (["-X", "tracemalloc"], {})],
)
@repeated
def test_each_allocator_is_counted_once(options, environment, tmp_path):
    program = f"import sys; sys.path.insert(0, {str(HERE)!r}); import test_alloc; test_alloc.in_child({str(tmp_path)!r})"
    command = [sys.executable, *options, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["forked"] == 0 and seen["restored"]
    is_about(seen["small"], {SIZE: 20_000}, "alloc_bytes")
    is_about(seen["small"], {SIZE: 20_000}, "live_bytes")
    # Two blocks for each of 20 reads, and what the loop itself takes. tracemalloc allocates for each itself.
    likely("tracemalloc" in options or 38 <= seen["short"]["allocs"] <= 44, seen)


PEAK = """
blocks = [bytearray(1 << 20) for _ in range(30)]
blocks.clear()
kept = [bytearray(1 << 20) for _ in range(10)]
"""


def test_peak_of_a_program(tmp_path):
    script, output = tmp_path / "peak.py", tmp_path / "peak.json"
    script.write_text(PEAK)
    options = ["--interval", str(INTERVAL), "--max-overhead", "100%", "-o", output]
    command = [sys.executable, "-m", "nativeprof", "--alloc", *options, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    profile = nativeprof.Profile(_native.read(output.read_bytes()))
    # Blocks that are much larger than the interval are all sampled.
    values = amounts(profile, "<module>")
    assert abs(values["peak_bytes"] / MEGABYTE - 30) < 1.5, values
    assert abs(values["live_bytes"] / MEGABYTE - 10) < 1.5, values
    assert abs(values["alloc_bytes"] / MEGABYTE - 40) < 2, values


WORK_IN_CHILD = """
import os, time
if not os.fork():
    while time.process_time() < 3:
        pass
    os._exit(0)
os.wait()
"""


def test_work_of_child_processes_is_not_in_the_profile(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(WORK_IN_CHILD)
    command = [sys.executable, "-m", "nativeprof", "--alloc", "-o", tmp_path / "parent.json", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = [line for line in done.stderr.splitlines() if "child processes used" in line]
    assert done.returncode == 0 and len(said) == 1 and "--mode rss --subprocesses" in said[0], done


def map_memory(n):
    return [mmap.mmap(-1, MEGABYTE) for _ in range(n)]


def test_mappings_that_are_still_there(tmp_path):
    native = ctypes.CDLL(compiled(tmp_path, "own_allocator"))
    native.own_allocator.restype = ctypes.c_void_p
    # Mappings are much larger than the interval: all are sampled.
    with nativeprof.Profiler(mode="alloc", interval=1 << 14, max_overhead=1.0) as profiler:
        kept = map_memory(12)
        for closed in [kept.pop() for _ in range(4)]:
            closed.close()
        address = native.own_allocator(ctypes.c_ulong(5 * MEGABYTE))
    profile = profiler.profile
    mapped = amounts(profile, "map_memory")
    assert abs(mapped["mapped_bytes"] / MEGABYTE - 8) < 0.01, mapped
    # They are no blocks.
    assert mapped["alloc_bytes"] < MEGABYTE, mapped
    assert abs(amounts(profile, "own_allocator")["mapped_bytes"] / MEGABYTE - 5) < 0.01
    assert address and "own_allocator.so mapped 5.00 MiB and did not call malloc" in profile.summary()
    assert profile.top(value="mapped_bytes")._whole >= 13 * MEGABYTE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval must be"),
        ({"max_overhead": 0}, "max_overhead must be"),
        ({"threads": [1]}, "all threads"),
        ({"only": ["json"]}, "only and skip"),
        ({"mode": "cpu", "interval": 1 << 20}, "are for mode"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nativeprof.Profiler(**{"mode": "alloc", **options})


def test_one_recording_at_a_time_may_follow_another():
    for _ in range(2):
        with nativeprof.Profiler(mode="alloc", interval=INTERVAL, max_overhead=1.0) as profiler:
            kept = bytearray(1 << 20)
            assert amounts(profiler.take(), "test_one_recording_at_a_time_may_follow_another")["live_bytes"] >= len(kept)
            kept = bytearray(1 << 21)
        values = amounts(profiler.profile, "test_one_recording_at_a_time_may_follow_another")
        assert values["alloc_bytes"] >= len(kept)
