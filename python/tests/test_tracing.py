"""`nativeprof.tracing`: cProfile's interface, its figures, and what it gets wrong."""

import _thread
import dataclasses
import gc
import importlib
import json
import marshal
import os
import pstats
import re
import subprocess
import sys
import threading
import time

import pytest
from call_programs import Reference, found, program
from chance import likely, repeated

import nativeprof
from nativeprof import tracing

cProfile = pytest.importorskip("cProfile", reason="this interpreter has no cProfile")
ON_MONITORING = sys.version_info >= (3, 12)


def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def entries(profile):
    """{name: entry} of Python functions."""
    return {e.code.co_name: e for e in profile.getstats() if not isinstance(e.code, str)}


def callers(profile, name):
    """{caller: calls} of a Python function."""
    profile.create_stats()
    return {k[2]: v[0] for f, row in profile.stats.items() if f[2] == name for k, v in row[4].items()}


def python(*arguments, code=0, **options):
    """Runs this interpreter; gives what it printed."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def frozen_heap():
    """Collecting what pytest and its plugins keep takes half a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def without_collector(frozen_heap):
    """The garbage collector calls what pytest's plugins registered, at another place in each run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# Figures


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_have_the_calls_that_a_reference_counts(seed):
    names = {}
    exec(program(seed), names)
    names["main"]()  # caches, and what is made once
    reference = Reference().run(names["main"])
    profile = tracing.Profile()
    profile.enable()
    names["main"]()
    profile.disable()
    calls, recursive, pairs = found(profile.getstats())
    assert calls == reference.calls
    assert (recursive, pairs) == (reference.recursive, reference.pairs)


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("seed", range(40, 50))
@pytest.mark.parametrize("options", [{}, {"builtins": False}, {"subcalls": False}], ids=str)
def test_figures_are_cprofiles_line_by_line(seed, options):
    """With a clock that ticks at each event even the times are the same."""
    names = {}
    exec(program(seed), names)
    names["main"]()
    texts = []
    for kind in (cProfile.Profile, tracing.Profile):
        ticks = iter(range(10**9))
        profile = kind(lambda: next(ticks), 1.0, **options)
        profile.enable(**options)  # cProfile forgets in 3.14 what it was made with
        names["main"]()
        profile.disable()
        profile.create_stats()
        rows = {k: v for k, v in profile.stats.items() if "'disable'" not in k[2]}
        texts.append(rows)
    assert texts[0] == texts[1]


@pytest.mark.alone
def test_times_add_up():
    profile = tracing.Profile()

    def outer():
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.02:
            inner()

    def inner():
        return sum(range(100))

    begin = time.perf_counter()
    profile.runcall(outer)
    passed = time.perf_counter() - begin
    rows = entries(profile)
    outermost = rows["outer"].totaltime
    assert 0.02 <= outermost <= passed
    assert sum(e.inlinetime for e in profile.getstats() if e.code != "") == pytest.approx(outermost, abs=passed * 0.2)
    assert rows["inner"].totaltime < outermost


def test_recursion_counts_the_outermost_time_once():
    profile = tracing.Profile()
    # A collection may run finalizers and callbacks, which are functions of their own.
    gc.disable()
    try:
        profile.runcall(fib, 15)
    finally:
        gc.enable()
    row = entries(profile)["fib"]
    assert (row.callcount, row.reccallcount) == (1973, 1972)
    assert row.totaltime == pytest.approx(row.inlinetime)


def test_both_read_the_same_clock():
    profile = tracing.Profile()
    begin = time.perf_counter()
    profile.runcall(time.sleep, 0.05)
    passed = time.perf_counter() - begin
    slept = [e.totaltime for e in profile.getstats() if e.code == "<built-in method time.sleep>"]
    assert 0.05 * 0.999 <= slept[0] <= passed


def test_calls_open_at_the_start_are_left_out_and_at_the_stop_are_closed():
    profile = tracing.Profile()

    def starts():
        profile.enable()

    def stops():
        profile.disable()

    def outer():
        starts()
        fib(3)
        stops()

    outer()
    rows = entries(profile)
    assert rows["fib"].callcount == 5 and rows["stops"].callcount == 1
    assert "starts" not in rows and "outer" not in rows


def test_it_goes_on_after_a_stop_and_forgets_at_clear():
    profile = tracing.Profile()
    for _ in range(3):
        profile.runcall(fib, 3)
    assert entries(profile)["fib"].callcount == 15
    profile.clear()
    assert profile.getstats() == []
    profile.enable()
    fib(3)
    profile.clear()
    fib(2)
    profile.disable()
    assert entries(profile)["fib"].callcount == 3


# Threads


def work_a():
    for _ in range(50):
        fib(8)


def work_b():
    for _ in range(50):
        step()


def step():
    return sum([1, 2])


def test_callers_are_right_with_many_threads():
    profile = tracing.Profile()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        profile.enable()
        threads = [threading.Thread(target=f) for f in (work_a, work_b) * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        profile.disable()
    finally:
        sys.setswitchinterval(before)
    assert callers(profile, "step") == {"work_b": 200}
    assert callers(profile, "work_a") == {"run": 4}
    fibs = callers(profile, "fib")
    assert fibs == {"work_a": 200, "fib": 200 * 66}


def test_threads_without_the_threading_module_are_seen_from_their_begin():
    profile = tracing.Profile()
    done = threading.Event()

    def target():
        fib(5)
        done.set()

    profile.enable()
    _thread.start_new_thread(target, ())
    done.wait()
    profile.disable()
    assert entries(profile)["target"].callcount == 1
    assert entries(profile)["fib"].callcount == 15


def test_threads_that_ran_before_are_seen():
    profile, go, done = tracing.Profile(), threading.Semaphore(0), threading.Semaphore(0)

    def target():
        while go.acquire() and not over:
            fib(4)
            done.release()

    over = []
    thread = threading.Thread(target=target)
    thread.start()
    profile.enable()
    go.release()
    done.acquire()
    profile.disable()
    over.append(True)
    go.release()
    thread.join()
    assert entries(profile)["fib"].callcount == 9


def test_only_the_current_thread_on_request():
    profile = tracing.Profile(threads="current")
    profile.enable()
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    fib(3)
    profile.disable()
    rows = entries(profile)
    assert rows["fib"].callcount == 5 and "step" not in rows
    with pytest.raises(ValueError, match="all.*current"):
        tracing.Profile(threads="some")


# Filters


def test_filters_leave_out_modules_and_functions():
    import json

    here = __name__
    for options, seen, unseen in [
        ({"skip": ["json"]}, {"use", "fib"}, {"dumps", "encode", "iterencode"}),
        ({"only": [here]}, {"use", "fib"}, {"dumps", "encode"}),
        ({"only": [here], "skip": [f"{here}:fib"]}, {"use"}, {"fib", "dumps"}),
        (
            {"only": ["json.encoder:JSONEncoder.encode"] if sys.version_info >= (3, 11) else ["json.encoder:encode"]},
            {"encode"},
            {"use", "dumps", "fib"},
        ),
    ]:
        profile = tracing.Profile(**options)

        def use():
            fib(3)
            for _ in range(3):
                json.dumps({"a": [1]})

        for _ in range(2):
            profile.enable()
            use()
            profile.disable()
        names = set(entries(profile))
        assert seen <= names and not unseen & names, (options, names)
        if "skip" in options and "use" in seen:
            assert entries(profile)["use"].callcount == 2


def test_what_is_filtered_out_is_not_even_reported():
    """The timer is read for every event that is taken.

    From 3.12 on, each place of code that is left out is reported once; before, the interpreter reports all that it calls.
    """
    names = {"__name__": "left_out"}
    exec("def f(n):\n    for _ in range(n):\n        g()\ndef g():\n    len(())\n", names)
    read = []
    for options in ({}, {"skip": ["left_out"]}):
        count = [0]

        def timer():
            count[0] += 1
            return count[0]

        profile = tracing.Profile(timer, 1.0, **options)
        profile.enable()
        for _ in range(3):
            names["f"](1000)
        profile.disable()
        read.append(count[0])
    assert "f" not in entries(profile) and "g" not in entries(profile)
    # Two functions, two calls of C functions; and what this test itself does. Before 3.12, a call of `len` for each call of `g`.
    assert read[0] > 12_000 and read[1] < (30 if ON_MONITORING else 9_100), read


# Timers


def unraisable(call):
    """Types of the exceptions that are reported as unraisable meanwhile."""
    seen, before = [], sys.unraisablehook
    sys.unraisablehook = lambda raised: seen.append(raised.exc_type)
    try:
        call()
    finally:
        sys.unraisablehook = before
    return seen


def test_timers_of_the_users_own():
    for timer, unit, expected in [(lambda: 7, 1.0, 0.0), (time.perf_counter, 0.0, None), (time.perf_counter_ns, 1e-9, None)]:
        profile = tracing.Profile(timer, unit)
        begin = time.perf_counter()
        profile.runcall(fib, 8)
        passed = time.perf_counter() - begin
        total = entries(profile)["fib"].totaltime
        assert total == expected if expected is not None else 0 < total <= passed


def test_a_timer_that_raises_is_reported():
    def timer():
        raise KeyError

    profile = tracing.Profile(timer)
    assert set(unraisable(lambda: profile.runcall(fib, 2))) == {KeyError}
    assert entries(profile)["fib"].callcount == 3
    profile = tracing.Profile(lambda: "now")
    assert set(unraisable(lambda: profile.runcall(fib, 2))) == {TypeError}


@pytest.mark.parametrize("what", ["disable", "clear"])
def test_a_timer_cannot_stop_or_clear_its_profiler(what):
    profile = None

    def timer():
        if profile is not None:
            getattr(profile, what)()
        return 0

    profile = tracing.Profile(timer)

    def run():
        profile.enable()
        fib(2)

    assert set(unraisable(run)) == {RuntimeError}
    other, profile = profile, None
    other.disable()
    assert entries(other)["fib"].callcount == 3


def test_a_profiler_stops_while_another_thread_is_in_its_timer():
    inside, leave, done = threading.Lock(), threading.Lock(), threading.Lock()
    for lock in (inside, leave, done):
        lock.acquire()

    def timer():
        if threading.get_ident() != main:
            inside.release()
            leave.acquire()
        return 0

    def target():
        fib(2)
        done.release()

    main = threading.get_ident()
    profile = tracing.Profile(timer)
    profile.enable()
    _thread.start_new_thread(target, ())
    inside.acquire()
    profile.disable()
    profile.clear()
    leave.release()
    done.acquire()
    assert profile.getstats() == []


def test_bias_is_subtracted_for_each_event():
    ticks = iter(range(10**9))
    profile = tracing.Profile(lambda: next(ticks), 1.0, builtins=False, bias=0.5)
    profile.runcall(fib, 3)
    plain = iter(range(10**9))
    other = tracing.Profile(lambda: next(plain), 1.0, builtins=False)
    other.runcall(fib, 3)
    # Half a tick is rounded to a whole one: nothing is left.
    assert entries(other)["fib"].totaltime == 9.0
    assert entries(profile)["fib"].totaltime == 0.0


@repeated
def test_calibrate_measures_the_cost_of_an_event():
    profile = tracing.Profile()
    found = [profile.calibrate(500) for _ in range(5)]
    likely(min(abs(cost) for cost in found) < 1e-5, found)

    class Other(tracing.Profile):
        pass

    with pytest.raises(TypeError):
        Other().calibrate(1)


@repeated
def test_overhead_is_measured_and_subtracted():
    raw, net = [], []
    for _ in range(30):
        # Alternately, since the clock rate of a CPU changes.
        for options, times in (({}, raw), ({"subtract": True}, net)):
            profile = tracing.Profile(**options)
            profile.runcall(fib, 12)
            times.append(entries(profile)["fib"].totaltime)
            assert profile.overhead() > 0
    likely(min(net) < min(raw), min(net), min(raw))


# One at a time


def test_a_second_profiler_is_refused_by_name():
    first, second = tracing.Profile(), tracing.Profile()
    first.enable()
    try:
        first.enable()
        with pytest.raises(ValueError, match="nativeprof.tracing.Profile"):
            second.enable()
        with pytest.raises(ValueError, match="nativeprof.tracing.Profile"):
            nativeprof.Profiler(mode="calls").start()
    finally:
        first.disable()
    second.runcall(fib, 2)
    assert entries(second)["fib"].callcount == 3


def test_other_tools_are_named_or_left_alone():
    profile = tracing.Profile()
    if not ON_MONITORING:
        hook = lambda *_: None  # noqa: E731
        sys.setprofile(hook)
        try:
            with pytest.raises(ValueError, match="profile hook"):
                profile.enable()
            assert sys.getprofile() is hook
        finally:
            sys.setprofile(None)
        return
    monitoring = sys.monitoring
    for tool in (2, 3, 4):
        monitoring.use_tool_id(tool, f"tool{tool}")
        try:
            if tool == 4:
                with pytest.raises(ValueError, match="2 by tool2, 3 by tool3, 4 by tool4"):
                    profile.enable()
            else:
                profile.runcall(fib, 2)
        except BaseException:
            monitoring.free_tool_id(tool)
            raise
    assert entries(profile)["fib"].callcount == 6
    for tool in (2, 3, 4):
        monitoring.free_tool_id(tool)


# Hard ends


def test_a_profile_that_is_dropped_while_it_runs_stops():
    profile = tracing.Profile()
    profile.enable()
    fib(2)
    del profile
    gc.collect()
    if not ON_MONITORING:
        # Threads own the hook's object, as with cProfile.
        sys.getprofile().disable()
    tracing.Profile().runcall(fib, 2)


def test_the_collector_takes_a_profiler_that_runs():
    """With its timer, which is empty when the profiler is destroyed."""
    python(
        "-c",
        "import gc, nativeprof.tracing as t\n"
        "def start():\n"
        "  def timer(): return len(())\n"
        "  timer.profile = t.Profile(timer); timer.profile.enable()\n"
        "def nested(): len(()); gc.collect()\n"
        "start(); nested(); gc.collect()\n"
        "p = t.Profile() if __import__('sys').version_info >= (3, 12) else None\n"
        "p and p.runcall(len, [])\n",
    )


def test_a_forked_child_goes_on():
    profile = tracing.Profile()
    profile.enable()
    fib(3)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fib(3)
            profile.disable()
            status = 0 if entries(profile)["fib"].callcount == 10 else 2
        finally:
            os._exit(status)
    profile.disable()
    assert os.waitpid(child, 0)[1] == 0
    assert entries(profile)["fib"].callcount == 5


@pytest.mark.parametrize(
    "end",
    [
        "class D:\n  def __del__(self): sorted([1])\nd = D()",
        "import threading\ndef w():\n  while True: len(())\nthreading.Thread(target=w, daemon=True).start()",
        "import atexit; atexit.register(p.create_stats)",
        "import sys; sys.exit()",
        "import os; os._exit(0)",
    ],
)
def test_the_interpreter_ends_while_it_runs(end):
    for kind in ("nativeprof.tracing.Profile()", "nativeprof.tracing.Profile(lambda: 1)"):
        python("-c", f"import nativeprof.tracing; p = {kind}; p.enable()\n{end}")
    end = end.replace("p.create_stats", "p.stop")
    python("-c", f"import nativeprof; p = nativeprof.Profiler(mode='counts'); p.start()\n{end}")


def test_subinterpreters_are_not_disturbed():
    python(
        "-c",
        "import nativeprof.tracing as t\n"
        "try: import _xxsubinterpreters as i\n"
        "except ImportError: import _interpreters as i\n"
        "p = t.Profile(); p.enable()\n"
        "s = i.create(); i.run_string(s, 'sorted([2, 1], key=lambda x: x)'); i.destroy(s)\n"
        "p.disable()\n",
    )


def test_a_deep_recursion_is_unwound():
    profile = tracing.Profile()

    def down():
        down()

    with pytest.raises(RecursionError):
        profile.runcall(down)
    row = entries(profile)["down"]
    assert row.callcount - row.reccallcount == 1 and row.callcount > 500


def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@repeated
def test_memory_stays_where_it_is():
    profile = tracing.Profile()

    def cycle(count):
        for _ in range(count):
            own = tracing.Profile()
            own.runcall(fib, 4)
            own.getstats()
            profile.enable()
            thread = threading.Thread(target=fib, args=(3,))
            thread.start()
            thread.join()
            profile.disable()

    cycle(100)
    gc.collect()
    before = memory()
    cycle(1000)
    gc.collect()
    # A hundred bytes kept for each cycle would be seen.
    # (Threads of which the system has not yet noticed the end have stacks and heaps.)
    likely(memory() - before < 100_000 + 64 * 1024, memory() - before)
    assert entries(profile)["fib"].callcount == 5 * 1100


# The interface


def test_pstats_reads_profiles_and_files(tmp_path, capsys):
    profile = tracing.Profile()
    profile.runcall(fib, 5)
    path = tmp_path / "fib.pstats"
    profile.dump_stats(path)
    with open(path, "rb") as file:
        stats = marshal.load(file)
    assert {name for _, _, name in stats} >= {"fib"}
    for source in (profile, str(path)):
        pstats.Stats(source).strip_dirs().sort_stats("cumulative").print_stats().print_callers().print_callees()
    out = capsys.readouterr().out
    assert "15/1" in out and "test_tracing.py" in out
    shown = python("-m", "pstats", str(path), input="stats fib\nquit\n")
    assert "15/1" in shown


def test_run_and_runctx_print_or_write(tmp_path, capsys):
    tracing.run("sum([1])")
    assert "{built-in method builtins.sum}" in capsys.readouterr().out
    tracing.runctx("f(3)", {"f": fib}, {}, sort=("calls", "name") if sys.version_info >= (3, 7) else -1)
    assert "5/1" in capsys.readouterr().out
    path = str(tmp_path / "x.pstats")
    with pytest.raises(ZeroDivisionError):
        tracing.runctx("1 / 0", {}, {}, filename=path)
    assert pstats.Stats(path).total_calls >= 1
    tracing.runctx("raise SystemExit", {}, {}, filename=path)


def test_it_takes_the_place_of_cprofile(monkeypatch):
    monkeypatch.setattr(cProfile, "Profile", tracing.Profile)
    cProfile.runctx("f(3)", {"f": fib}, {}, sort="calls")
    with cProfile.Profile() as profile:
        fib(4)
    stats = pstats.Stats(profile)
    assert any(name == "fib" and row[1] == 9 for (_, _, name), row in stats.stats.items())


SCRIPT = """
import sys, pickle
class C: pass
pickle.dumps(C)
print(sys.argv[1:], __name__)
"""


def test_the_command_line_is_cprofiles(tmp_path):
    script = tmp_path / "s.py"
    script.write_text(SCRIPT)
    for tool in ("cProfile", "nativeprof.tracing"):
        assert "sage" in python("-m", tool, code=2)
        python("-m", tool, "-s", "nothing", str(script), code=2)
        python("-m", tool, "-o", str(tmp_path / "o.pstats"), "-m", "timeit", "-n", "1")
        assert pstats.Stats(str(tmp_path / "o.pstats")).total_calls > 0
        text = python("-m", tool, "-s", "ncalls", "-m", "timeit", "-n", "1")
        assert "Ordered by: call count" in text
    text = python("-m", "nativeprof.tracing", str(script), "-o", "b")
    assert "['-o', 'b'] __main__" in text and "s.py:3(C)" in text
    default = "cumulative time" if ON_MONITORING else "standard name"
    assert f"Ordered by: {default}" in text


SPAWNS = """
import multiprocessing, sys
def worker(x): sys.exit(x * x)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(5,))
    process.start()
    process.join()
    print("ended with", process.exitcode)
"""


def test_a_traced_script_can_start_processes_by_spawn(tmp_path):
    script = tmp_path / "s.py"
    script.write_text(SPAWNS)
    for arguments in (["nativeprof.tracing"], ["nativeprof", "-q", "--trace", "counts", "-o", str(tmp_path / "o.json")]):
        assert "ended with 25" in python("-m", *arguments, str(script))


def upstream():
    for name in ("test.test_cprofile", "test.test_profiling.test_tracing_profiler"):  # the latter from 3.15 on
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


@pytest.mark.skipif(upstream() is None, reason="this interpreter comes without CPython's own tests")
def test_cpythons_own_tests_pass():
    """CPython's test_cprofile with our class. Left out: the name of the tool in sys.monitoring, which is ours."""
    import unittest

    module = upstream()

    class Ours(module.CProfileTest):
        profilerclass = tracing.Profile
        profilermodule = tracing

        @classmethod
        def get_expected_output(cls):
            ours = lambda text: text.replace("_lsprof.Profiler", "_native.Profiler")  # noqa: E731
            return {name: ours(text) for name, text in module._ProfileOutput.items()}

    names_of_tool = {"test_profile_enable_disable", "test_profile_as_context_manager"} if ON_MONITORING else set()
    tests = [t for t in unittest.TestLoader().loadTestsFromTestCase(Ours) if t._testMethodName not in names_of_tool]
    assert len(tests) >= 9
    result = unittest.TestResult()
    unittest.TestSuite(tests).run(result)
    assert not result.errors and not result.failures, result.errors + result.failures
    assert result.testsRun == len(tests) and not result.skipped


# As a profile


def walk(node, parent="", out=None):
    """{(caller, callee): calls} of a tree."""
    out = {} if out is None else out
    own = node["count"] - sum(child["count"] for child in node["children"].values())
    name = node["description"]["name"]
    if own:
        out[parent, name] = out.get((parent, name), 0) + own
    for child in node["children"].values():
        walk(child, name, out)
    return out


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("seed", range(50, 60))
def test_trees_of_calls_have_every_call_below_its_caller(seed):
    names = {}
    exec(program(seed), names)
    names["main"]()
    reference = Reference().run(names["main"])
    with nativeprof.Profiler(mode="calls", native=False) as profiler:
        names["main"]()
    pairs = walk(profiler.to_dict())
    wanted, calls = {}, {}
    for key, count in reference.calls.items():
        if not key.endswith("()"):
            name = key.split(":")[0]
            wanted[name] = wanted.get(name, 0) + count
    for (_, name), count in pairs.items():
        calls[name] = calls.get(name, 0) + count
    assert {name: calls.get(name) for name in wanted} == wanted
    direct = {}
    for pair, count in reference.pairs.items():
        if not any(key.endswith("()") for key in pair):
            names_of_pair = tuple(key.split(":")[0] for key in pair)
            direct[names_of_pair] = direct.get(names_of_pair, 0) + count
    assert len(direct) > 3 and all(pairs.get(pair, 0) >= count for pair, count in direct.items())


def test_a_tree_has_times_and_threads():
    def worker():
        time.sleep(0.05)

    with nativeprof.Profiler(mode="calls", threads=True, cpu=True) as profiler:
        thread = threading.Thread(target=worker, name="sleeper")
        thread.start()
        thread.join()
    tree = profiler.to_dict()
    kinds = [kind["name"] for kind in tree["nativeprof"]["value_types"]]
    assert kinds == ["calls", "wall", "cpu"]
    assert {"sleeper", "MainThread"} == {c["description"]["name"] for c in tree["children"].values()}
    sleeper = next(c for c in tree["children"].values() if c["description"]["name"] == "sleeper")
    assert sleeper["values"]["wall_ns"] >= 50_000_000 > sleeper["values"]["cpu_ns"]
    assert profiler.profile.stats["counts"] == "calls"
    assert "calls in" in repr(profiler.profile) and "overhead" in profiler.profile.summary()


def test_counts_are_begins_of_python_functions():
    def generator():
        for i in range(5):
            yield i

    async def coroutine():
        await Step()

    class Step:
        def __await__(self):
            yield 1
            yield 2

    with nativeprof.Profiler(mode="counts") as profiler:
        fib(6)
        list(generator())
        running = coroutine()
        for _ in range(2):
            running.send(None)
        running.close()
    counts = {name: count for (_, name), count in walk(profiler.to_dict()).items()}
    wanted = {"fib": 25, "generator": 1, "coroutine": 1, "__await__": 1}
    assert {k: counts.get(k) for k in wanted} == wanted
    assert "len" not in counts


@pytest.mark.alone
@pytest.mark.parametrize("mode", ["counts+cpu", "counts+wall"])
@repeated
def test_counts_and_sampled_times_are_in_one_profile(mode):
    # Wall time of this thread only: whatever else this process has sleeps.
    this = [threading.current_thread()]
    with nativeprof.Profiler(rate=250, mode=mode, native=False, threads=this) as profiler:
        end = time.process_time() + 0.3
        rounds = 0
        while time.process_time() < end:
            fib(21)
            rounds += 1
    tree = profiler.to_dict()
    kinds = {kind["name"] for kind in tree["nativeprof"]["value_types"]}
    times = {"cpu"} if mode == "counts+cpu" else {"wall", "cpu", "off_cpu"}
    assert kinds == {"samples", "calls"} | times
    counts, samples, todo = 0, 0, [(tree, "")]
    while todo:
        node, parent = todo.pop()
        name = node["description"]["name"]
        inner = node["children"].values()
        if name == "fib":
            calls = [n.get("values", {}).get("calls", 0) for n in (node, *inner)]
            counts += calls[0] - sum(calls[1:])
            samples += node["count"] if parent != "fib" else 0
        todo.extend((child, name) for child in inner)
    assert counts == 35421 * rounds
    # A loaded machine takes the CPU away at system calls, such as the one that reads the clock: that is wall time outside.
    least = 0.5 if mode == "counts+cpu" else 0.2
    likely(profiler.profile.stats["taken"] > 10 and samples > least * tree["count"], samples, profiler.profile.stats)


def test_counts_and_samples_have_one_node_for_each_thread():
    with nativeprof.Profiler(rate=500, mode="counts+cpu", native=False, threads=True) as profiler:
        threads = [threading.Thread(target=fib, args=(22,), name=f"fib-{i}") for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    names = [node["description"]["name"] for node in profiler.to_dict()["children"].values()]
    numbers = [name.split()[1] for name in names if name.startswith("thread ")]
    assert len(numbers) == len(names) == len(set(numbers)), names


def test_take_gives_what_came_since():
    profiler = nativeprof.Profiler(mode="calls", native=False)
    profiler.start()
    fib(3)
    first = profiler.take()
    fib(2)
    second = profiler.stop()
    count = lambda profile: sum(v for (_, name), v in walk(profile.to_dict()).items() if name == "fib")  # noqa: E731
    assert (count(first), count(second)) == (5, 3)


def test_trace_on_the_command_line(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("def f(): pass\nfor _ in range(7): f()\n")
    for mode in ("times", "counts", "counts+samples"):
        out = tmp_path / f"{mode}.json"
        done = subprocess.run(
            [sys.executable, "-m", "nativeprof", "--trace", mode, "-o", str(out), str(script)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        if mode == "counts+samples":
            assert re.search(r"\d+ samples? in", done.stderr), done.stderr
            continue
        assert "calls in" in done.stderr and "overhead" in done.stderr, done.stderr
        with open(out, "rb") as file:
            counts = walk(json.load(file))
        assert sum(v for (_, name), v in counts.items() if name == "f") == 7
        names = {name for pair in counts for name in pair}
        assert "finish" not in names and "stop" not in names
    page = tmp_path / "page.html"
    python("-m", "nativeprof", "--trace", "times", "--subtract", "-q", "-o", str(page), str(script))
    assert page.stat().st_size > 10_000
    python("-m", "nativeprof", "--subtract", str(script), code=2)


def test_the_command_line_traces_threads_from_their_first_call(tmp_path):
    script = tmp_path / "s.py"
    script.write_text(
        "import sys, threading\n"
        "def first(): pass\n"
        "sys.setswitchinterval(1e-6)\n"
        "for _ in range(200):\n"
        "    thread = threading.Thread(target=first)\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    out = tmp_path / "out.json"
    python("-m", "nativeprof", "--trace", "counts", "-q", "-o", str(out), str(script))
    counts = walk(json.loads(out.read_text()))
    assert sum(count for (_, name), count in counts.items() if name == "first") == 200


def test_the_command_line_writes_before_another_program_runs(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("import os, sys\ndef f(): pass\nf()\nos.execv(sys.executable, [sys.executable, '-c', 'print(5)'])\n")
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "nativeprof", "--trace", "counts", "-q", "-o", str(out), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
    counts = walk(json.loads(out.read_text()))
    assert sum(count for (_, name), count in counts.items() if name == "f") == 1


def test_functions_with_equal_file_line_and_name_are_summed():
    """What dataclasses make has the file `<string>` and the same lines."""
    kinds = [dataclasses.make_dataclass(f"Kind{at}", ["value"]) for at in range(60)]

    def make(times):
        for kind in kinds:
            for _ in range(times):
                kind(1)

    profile = tracing.Profile()
    profile.runcall(make, 3)
    profile.create_stats()
    of_init = [entry for entry in profile.getstats() if getattr(entry.code, "co_name", "") == "__init__"]
    assert len({(entry.code.co_filename, entry.code.co_firstlineno) for entry in of_init}) == 1
    (key,) = [key for key in profile.stats if key[2] == "__init__"]
    # The clock is calibrated while it runs, so its seconds differ a little.
    direct, calls, own, total, callers = profile.stats[key]
    assert calls == direct == sum(entry.callcount for entry in of_init) == 180
    assert own == pytest.approx(sum(entry.inlinetime for entry in of_init), rel=0.01)
    assert total == pytest.approx(sum(entry.totaltime for entry in of_init), rel=0.01)
    (caller,) = callers
    assert caller[2] == "make" and callers[caller][:2] == (180, 180)
    # Nothing is lost: the figures of all functions are those of the entries.
    assert sum(row[1] for row in profile.stats.values()) == sum(entry.callcount for entry in profile.getstats())


def test_names_that_are_not_utf8_stay_different():
    names = []
    for byte in (b"\xe9", b"\xe8"):
        file = os.fsdecode(b"/caf" + byte + b"/mod.py")
        space = {}
        exec(compile("def crunch(): pass\n", file, "exec"), space)
        names += [space["crunch"]] * (1 if byte == b"\xe9" else 3)
    with nativeprof.Profiler(mode="calls") as profiler:
        for function in names:
            function()
    expected = {"/caf\\udce9/mod.py": 1, "/caf\\udce8/mod.py": 3}
    found = {row.filename: row.total for row in profiler.profile.top(1000, value="calls") if row.name == "crunch"}
    assert found == expected
    for ending in ("json", "collapsed", "speedscope", "firefox", "pstats"):
        text = profiler.profile._native.render(ending).decode("latin-1")
        for file in expected:
            # In a line of text a backslash has an escape of its own, and another one in JSON.
            assert any(file.replace("\\", backslash) in text for backslash in ("\\", "\\\\", "\\x5c")), ending


# One profiler per thread
# -----------------------


def at_once(count, work):
    """Calls `work(number)` in so many threads; what they raise is raised here."""
    failed = []

    def run(number):
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def shared_leaf():
    return None


@pytest.mark.parametrize("builtins", [True, False, None], ids=["all builtins", "no builtins", "mixed"])
def test_each_thread_has_its_own_profiler(builtins):
    count, rounds = 8, 200
    profiles, started, ended = {}, threading.Barrier(count, timeout=60), threading.Barrier(count, timeout=60)

    def work(number):
        wants = number % 2 == 0 if builtins is None else builtins
        profile = profiles[number] = tracing.Profile(builtins=wants, threads="current")
        name = f"of_thread_{number}"
        space = {"leaf": shared_leaf}
        exec(f"def {name}():\n    leaf()\n    abs(-1)\n", space)
        started.wait()
        profile.enable()
        # All run now, and hand the GIL to each other.
        ended.wait()
        for at in range(rounds * (number + 1)):
            space[name]()
            if at % 50 == 0:
                time.sleep(0)
        ended.wait()
        profile.disable()

    at_once(count, work)
    for number, profile in profiles.items():
        calls = rounds * (number + 1)
        seen = entries(profile)
        assert seen[f"of_thread_{number}"].callcount == calls
        assert seen["shared_leaf"].callcount == calls
        assert not [name for name in seen if name.startswith("of_thread_") and name != f"of_thread_{number}"]
        wants = number % 2 == 0 if builtins is None else builtins
        of_abs = [entry.callcount for entry in profile.getstats() if entry.code == "<built-in method builtins.abs>"]
        assert of_abs == ([calls] if wants else []), number
        assert callers(profile, "shared_leaf") == {f"of_thread_{number}": calls}
    if ON_MONITORING:
        assert [sys.monitoring.get_tool(tool) for tool in (2, 3, 4)] == [None] * 3


def test_what_one_thread_leaves_out_is_seen_by_another():
    turn = threading.Barrier(2, timeout=60)
    profiles = [
        tracing.Profile(threads="current", skip=[f"{__name__}:shared_leaf"]),
        tracing.Profile(threads="current"),
    ]

    def work(number):
        if number == 1:
            turn.wait()  # the other one has left it out before this one starts
        profiles[number].enable()
        if number == 0:
            for _ in range(3):
                shared_leaf()
            turn.wait()
        turn.wait()
        for _ in range(5):
            shared_leaf()
        turn.wait()
        profiles[number].disable()

    at_once(2, work)
    assert "shared_leaf" not in entries(profiles[0])
    assert entries(profiles[1])["shared_leaf"].callcount == 5


def test_concurrent_requests_under_a_middleware():
    """What Werkzeug's ProfilerMiddleware does for each request, in threads that serve at once."""
    results, together = {}, threading.Barrier(4, timeout=60)

    def application(path, start_response):
        def respond():
            return [path.encode()]

        together.wait()
        start_response("200 OK", [])
        for _ in range(int(path)):
            respond()
        return respond()

    def middleware(path):
        body = []

        def catching_start_response(status, headers):
            body.append(status)

        def runapp():
            body.extend(application(path, catching_start_response))

        profile = tracing.Profile(threads="current")
        profile.runcall(runapp)
        results[path] = profile

    for _ in range(3):
        at_once(4, lambda number: middleware(str(number)))
        for path, profile in results.items():
            seen = entries(profile)
            assert seen["respond"].callcount == int(path) + 1
            assert seen["application"].callcount == seen["runapp"].callcount == seen["catching_start_response"].callcount == 1
            assert pstats.Stats(profile).total_calls > 0


def test_what_conflicts_is_an_error():
    here, there = tracing.Profile(threads="current"), []
    running, stop = threading.Event(), threading.Event()

    def elsewhere():
        profile = tracing.Profile(threads="current")
        with profile:
            running.set()
            stop.wait(60)
        there.append(profile)

    other = threading.Thread(target=elsewhere)
    other.start()
    running.wait(60)
    try:
        with pytest.raises(ValueError, match="already active: .*on 1 other thread"):
            tracing.Profile().enable()
        with pytest.raises(ValueError, match="already active: .*on 1 other thread"):
            nativeprof.Profiler(mode="calls").start()
        with here:
            with pytest.raises(ValueError, match="already active"):
                tracing.Profile(threads="current").enable()
            shared_leaf()
    finally:
        stop.set()
        other.join()
    assert entries(here)["shared_leaf"].callcount == 1
    assert "shared_leaf" not in entries(there[0])
    with tracing.Profile() as everything:
        with pytest.raises(ValueError, match="One at a time"):
            at_once(1, lambda _: tracing.Profile(threads="current").enable())
        shared_leaf()
    assert entries(everything)["shared_leaf"].callcount == 1


def test_a_thread_that_ends_without_a_stop_is_in_nobodys_way():
    left = tracing.Profile(threads="current")
    at_once(1, lambda _: left.enable())
    for _ in range(20):  # their idents are used again
        profile = tracing.Profile(threads="current")
        at_once(1, lambda _, profile=profile: profile.runcall(shared_leaf))
        assert entries(profile)["shared_leaf"].callcount == 1
    left.disable()
    assert "shared_leaf" not in entries(left)
    tracing.Profile().runcall(shared_leaf)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_only_the_profiler_of_its_thread():
    running, stop = threading.Event(), threading.Event()

    def elsewhere():
        with tracing.Profile(threads="current"):
            running.set()
            stop.wait(60)

    other = threading.Thread(target=elsewhere)
    other.start()
    running.wait(60)
    try:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                # The other thread is not here: all threads can be traced, and each call is seen once.
                with tracing.Profile() as profile:
                    shared_leaf()
                code = 0 if entries(profile)["shared_leaf"].callcount == 1 else 2
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        stop.set()
        other.join()
