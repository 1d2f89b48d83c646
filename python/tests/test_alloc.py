"""Sampled allocations, against what is known to have been allocated."""

import collections
import ctypes
import itertools
import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from chance import likely, repeated

import nativeprof

pytestmark = pytest.mark.few_versions
HERE = Path(__file__).resolve().parent
INTERVAL = 1 << 16
MEGABYTE = 1 << 20
SIZE = 200 + sys.getsizeof(b"")
# Sizes of the blocks of one round of the fixture `allocations`; the block of `realloc` counts again.
ROUND = [70001, 70021, 140003, 70005, 70016, 70007, 70017, 70009, 70011, 70011]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    made = tmp_path_factory.mktemp("alloc") / "allocations.so"
    source = HERE / "fixtures" / "allocations.c"
    subprocess.run(["cc", "-O1", "-g", "-fno-builtin", "-shared", "-fPIC", "-o", made, source], check=True)
    return str(made)


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
