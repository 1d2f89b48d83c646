"""Cost of the functions of nativeprof.profile compared with the original's, from the installed `distributed`.

    target/python-venvs/3.13/bin/python python/benches/profile.py

Both take turns in one run; a figure is the median over the turns, of this process's CPU time per call.
"""

import statistics
import sys
import time
from types import SimpleNamespace

from distributed import profile as theirs

from nativeprof import profile as ours

TURNS = 15


def frame_at(depth):
    """A frame with `depth` callers, each a function of its own."""
    scope = {"end": sys._getframe}
    inner = "end"
    for at in range(depth):
        exec(compile(f"def f{at}():\n  return {inner}()", f"/lib/module{at % 7}.py", "exec"), scope)
        inner = f"f{at}"
    return scope[inner]()


def tree_of(depth, width, prefix="f"):
    """A tree with `width` children a node."""
    root = theirs.create()
    level = [root]
    for at in range(depth):
        below = []
        for place, node in enumerate(level):
            for child in range(width):
                name = f"{prefix}{at}_{child}"
                new = theirs.create()
                new["identifier"] = f"{name};/lib/{at}.py;{place}"
                new["description"] = {"filename": f"/lib/{at}.py", "name": name, "line_number": 1, "line": "x = 1\n"}
                new["count"] = 10
                node["children"][new["identifier"]] = new
                below.append(new)
            node["count"] = 10 * width
        level = below
    return root


def entries(count):
    return [SimpleNamespace(addr=4096 * at + 17, offset=17, name=f"native{at}", is_python=False) for at in range(count)]


def cases():
    frame = frame_at(30)
    for depth in (30, 99):
        deep = frame_at(depth)
        states = {m: m.create() for m in (ours, theirs)}
        yield f"process, {depth} frames, known functions", 200, lambda m, d=deep, s=states: m.process(d, None, s[m])
    yield "process, 30 frames, new tree", 50, lambda m: m.process(frame, None, m.create())
    stack, states = entries(10), {m: m.create() for m in (ours, theirs)}
    yield "llprocess, 10 frames", 300, lambda m: m.llprocess(list(stack), None, states[m])
    big, other = tree_of(6, 4), tree_of(6, 4, "g")
    yield "merge, 2 equal trees of 5461 nodes", 2, lambda m: m.merge(big, big)
    yield "merge, 2 different trees of 5461 nodes", 2, lambda m: m.merge(big, other)
    small = tree_of(5, 2)
    yield "merge, 100 trees of 63 nodes", 3, lambda m: m.merge(*[small] * 100)
    history = [(float(t), small) for t in range(1000)]
    yield "get_profile, 300 of 1000 trees of 63 nodes", 1, lambda m: m.get_profile(history, None, 200.0, 500.0)
    yield "plot_data, 5461 nodes", 2, lambda m: m.plot_data(big)


def main():
    print(f"CPython {sys.version.split()[0]}; microseconds of CPU time a call, medians of {TURNS} turns")
    print(f"{'':46}{'original':>10}{'ours':>10}{'ratio':>8}")
    for name, calls, call in cases():
        spent = {ours: [], theirs: []}
        for module in spent:
            call(module)
        for _ in range(TURNS):
            for module, times in spent.items():
                start = time.process_time_ns()
                for _ in range(calls):
                    call(module)
                times.append((time.process_time_ns() - start) / calls / 1000)
        original, own = statistics.median(spent[theirs]), statistics.median(spent[ours])
        print(f"{name:46}{original:10.1f}{own:10.1f}{original / own:7.1f}x")


main()
