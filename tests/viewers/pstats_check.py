"""Reads a pstats file of ours with CPython's own `pstats` and prints what it holds, in JSON.

Usage: pstats_check.py FILE [more]

With `more`, gprof2dot and snakeviz have to find the same in it.
"""

import io
import json
import pstats
import sys

path = sys.argv[1]
text = io.StringIO()
stats = pstats.Stats(path, stream=text)
functions = [list(key) + list(value[:4]) for key, value in stats.stats.items()]
edges = [
    list(caller) + list(key) + list(value)
    for key, (_, _, _, _, callers) in stats.stats.items()
    for caller, value in callers.items()
]
found = {
    "all": stats.total_calls,
    "samples": stats.prim_calls,
    "seconds": stats.total_tt,
    "functions": functions,
    "edges": edges,
}

# Everything that people do with it.
for order in ("cumulative", "tottime", "ncalls", "nfl"):
    stats.sort_stats(order).print_stats(0.5).print_callers(5).print_callees(5)
assert "primitive calls" in text.getvalue()
if hasattr(stats, "get_stats_profile"):
    assert stats.get_stats_profile().func_profiles
twice = pstats.Stats(path, stream=text).add(path)
assert twice.prim_calls == 2 * stats.prim_calls
twice.strip_dirs().print_stats()

if sys.argv[2:] == ["more"]:
    import gprof2dot
    import snakeviz.stats

    profile = gprof2dot.PstatsParser(path).parse()
    times = sorted(f.events[gprof2dot.TIME] for f in profile.functions.values())
    # It leaves out the time of functions that it finds above no other.
    ours = sorted(value[2] for value in stats.stats.values())
    assert len(times) == len(ours), (len(times), len(ours))
    assert all(abs(a - b) < 1e-6 for a, b in zip(times, ours)), (times, ours)
    assert abs(profile.events[gprof2dot.TIME] - stats.total_tt) < 1e-6

    rows = snakeviz.stats.table_rows(pstats.Stats(path))
    assert len(rows) == len(functions)
    shown = sum(float(row[1]) for row in rows)
    assert abs(shown - stats.total_tt) < 1e-3 * stats.total_tt, (shown, stats.total_tt)
    tree = snakeviz.stats.json_stats(pstats.Stats(path))
    # It leaves out functions that neither call nor are called.
    linked = {tuple(edge[:3]) for edge in edges} | {tuple(edge[3:6]) for edge in edges}
    shown = {"{}:{}({})".format(*key): list(value[:4]) for key, value in stats.stats.items() if key in linked}
    assert {name: node["stats"] for name, node in tree.items()} == shown

print(json.dumps(found))
