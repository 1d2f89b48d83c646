"""What sampled allocations cost: CPU time of the thread of programs that do little but allocate, without a recording, with the
hooks alone and with samples.

Interleaved runs in one process, minimum of each; the ratio to the first for each program, and the geometric means.

usage: allocations.py [REPEATS]
"""

import json
import math
import pickle
import sys
import time

import nativeprof

# CPU time of one run, seconds: long enough for the number of samples to settle.
LENGTH = 0.2


class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def plus(self, other):
        return Point(self.x + other.x, self.y + other.y)


NONES = [None] * 20
ROWS = [{"id": i, "name": f"row {i}", "values": [i / 7, i / 3, None], "on": bool(i % 2)} for i in range(2000)]
TEXT, PICKLED = json.dumps(ROWS), pickle.dumps(ROWS)


def objects():
    total = Point(0.0, 0.0)
    for i in range(100_000):
        total = total.plus(Point(i, 1.5))


def lists():
    for _ in range(100_000):
        list(NONES)


def strings():
    for i in range(60_000):
        " ".join(("a", str(i), "b")).split()


def large_blocks():
    for _ in range(20_000):
        bytearray(20_000)


def growing():
    for _ in range(300):
        grown = []
        for i in range(2000):
            grown.append(i)


def tree(depth):
    return (tree(depth - 1), tree(depth - 1)) if depth else ()


PROGRAMS = {
    "json.loads": lambda: [json.loads(TEXT) for _ in range(10)],
    "json.dumps": lambda: [json.dumps(ROWS) for _ in range(10)],
    "pickle.loads": lambda: [pickle.loads(PICKLED) for _ in range(20)],
    "pickle.dumps": lambda: [pickle.dumps(ROWS) for _ in range(20)],
    "objects": objects,
    "lists": lists,
    "strings": strings,
    "large blocks": large_blocks,
    "growing": growing,
    "tree": lambda: tree(16),
}


def cpu(program, times, profiler=None):
    if profiler:
        profiler.start()
    start = time.thread_time()
    for _ in range(times):
        program()
    used = time.thread_time() - start
    if profiler:
        profiler.stop()
    return used


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main():
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    all_hooked, all_sampled = [], []
    print(f"{'':14} {'ms':>8} {'hooks':>7} {'sampled':>7} samples")
    for name, program in PROGRAMS.items():
        program()
        times = max(1, round(LENGTH / cpu(program, 1)))
        # Without samples: what the hooks alone cost.
        hooks = nativeprof.Profiler(mode="alloc", interval=1 << 40)
        sampled = nativeprof.Profiler(mode="alloc")
        runs = [[cpu(program, times, profiler) for profiler in (None, hooks, sampled)] for _ in range(repeats)]
        least = [min(column) for column in zip(*runs)]
        all_hooked.append(least[1] / least[0])
        all_sampled.append(least[2] / least[0])
        print(
            f"{name:14} {1000 * least[0]:8.1f} {all_hooked[-1]:7.3f} {all_sampled[-1]:7.3f} {sampled.profile.stats['taken']:7}",
            flush=True,
        )
    print(f"geometric mean {mean(all_hooked):16.3f} {mean(all_sampled):7.3f}")


if __name__ == "__main__":
    main()
