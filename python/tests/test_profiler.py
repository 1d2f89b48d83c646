"""The profiler for the process that it runs in."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from chance import likely, repeated

import nativeprof


def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sorted(range(2000), key=callback)


def callback(n):
    return -n


def nodes(tree):
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node["children"].values())


def samples(tree, name):
    """Samples with a function on their stack."""
    count, todo = 0, [tree]
    while todo:
        node = todo.pop()
        if node["description"]["name"] == name:
            count += node["count"]
        else:
            todo.extend(node["children"].values())
    return count


def profile_of_fresh_code(mode, seconds):
    source = "def fresh_%d():\n    return sorted(range(300), key=callback)\n"
    number, end = 0, time.process_time() + seconds
    with nativeprof.Profiler(rate=500, mode=mode) as profiler:
        while time.process_time() < end:
            number += 1
            space = {"callback": callback}
            exec(compile(source % number, "fresh-%d" % number, "exec"), space)
            space["fresh_%d" % number]()
    return profiler


@pytest.mark.parametrize("mode", ["cpu", "wall"])
def test_code_that_lives_for_a_moment_is_named(mode):
    # On a busy machine the kernel delivers few of the timer's signals, and the sampling thread runs late: what is missing
    # is counted as lost.
    for seconds in (0.5, 2, 8):
        profiler = profile_of_fresh_code(mode, seconds)
        fresh = 0
        for node in nodes(profiler.to_dict()):
            name, filename = node["description"]["name"], node["description"]["filename"]
            assert "code object freed" not in name
            if name.startswith("fresh_"):
                fresh += 1
                assert name.replace("_", "-") == filename
        if fresh >= 3:
            return
    raise AssertionError(dict(profiler.profile.stats))


@pytest.mark.parametrize("mode", ["cpu", "wall"])
@repeated
def test_stacks_are_exact_and_interleaved(mode):
    with nativeprof.Profiler(mode=mode) as profiler:
        work(0.4)
    stats = profiler.profile.stats
    likely(stats["taken"] >= 10, stats)
    likely(stats["exact"] >= 0.95 * stats["taken"], stats)
    tree = profiler.to_dict()
    assert tree["count"] == stats["taken"]
    likely(samples(tree, "work") >= 0.8 * (tree["count"] if mode == "cpu" else 10), stats)
    # The key function is called from C, that from Python. Debian's interpreters have no symbols of its functions.
    between = set()
    for work_node in (n for n in nodes(tree) if n["description"]["name"] == "work"):
        for node in nodes(work_node):
            if node is not work_node and samples(node, "callback") and node["description"]["name"] != "callback":
                assert node["description"]["filename"] == "<low-level>", node["description"]
                between.add(node["description"]["name"])
    sort = ("list_sort", "sorted", "builtin_sorted", "[unknown]")
    assert any(name.startswith(sort) for name in between), between
    rows = profiler.top(5)
    assert rows[0].own >= rows[-1].own and all(row.total >= row.own for row in rows)


def test_python_frames_only():
    with nativeprof.Profiler(native=False) as profiler:
        work(0.2)
    assert {n["description"]["filename"] for n in nodes(profiler.to_dict())}.isdisjoint({"<low-level>"})


@pytest.mark.parametrize("ending", ["svg", "json", "json.gz", "collapsed"])
def test_save(tmp_path, ending):
    with nativeprof.Profiler() as profiler:
        work(0.05)
    profiler.profile.save(tmp_path / f"x.{ending}")
    assert (tmp_path / f"x.{ending}").stat().st_size > 0
    with pytest.raises(ValueError, match="cannot tell the format"):
        profiler.save(tmp_path / "x.unknown")
    with pytest.raises(OSError):
        profiler.save(tmp_path / "no" / "x.svg")


def test_notebooks_show_escaped_text():
    scope = {}
    exec(compile("def f():\n    while go(): pass", "<script>alert(1)</script>", "exec"), scope)
    end = time.process_time() + 0.2
    scope["go"] = lambda: time.process_time() < end
    with nativeprof.Profiler() as profiler:
        scope["f"]()
    page = profiler._repr_html_()
    assert "<table>" in page and "<iframe" in page and "<script>" not in page


@repeated
def test_threads():
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait, name=f"waiter-{i}") for i in range(3)]
    for thread in threads:
        thread.start()
    with nativeprof.Profiler(mode="wall", threads=threads) as profiler:
        time.sleep(0.3)
    with nativeprof.Profiler(mode="wall", threads=True) as by_thread:
        time.sleep(0.2)
    ended.set()
    for thread in threads:
        thread.join()
    tree = profiler.to_dict()
    likely(tree["count"] > 10 and samples(tree, "wait") >= 0.9 * tree["count"], profiler.profile.stats)
    states = {n["description"]["name"] for n in nodes(tree) if n["description"].get("kind") == "state"}
    assert "[waiting: condition threading.Event]" in states, states
    assert sum(name.startswith("thread ") for name in by_thread.to_dict()["children"]) >= 4
    with pytest.raises(ValueError, match="not been started"):
        nativeprof.Profiler(threads=[threading.Thread()])


@repeated
def test_locks_of_libraries():
    """The lock of the C library's standard output is one of its variables."""
    import ctypes

    libc = ctypes.CDLL(None)
    stdout = ctypes.c_void_p.in_dll(libc, "stdout")

    def wait():
        libc.flockfile(stdout)
        libc.funlockfile(stdout)

    libc.flockfile(stdout)
    thread = threading.Thread(target=wait)
    try:
        thread.start()
        with nativeprof.Profiler(mode="wall", threads=[thread]) as profiler:
            time.sleep(0.3)
    finally:
        libc.funlockfile(stdout)
    thread.join()
    tree = profiler.to_dict()
    states = {n["description"]["name"]: n["count"] for n in nodes(tree) if n["description"].get("kind") == "state"}
    of_libc = sum(count for state, count in states.items() if "(libc" in state or " libc" in state)
    likely(of_libc >= 0.9 * tree["count"], states)


def test_wrong_words():
    for arguments in ({"mode": "gpu"}, {"rate": 0}, {"rate": "fast"}):
        with pytest.raises(ValueError):
            nativeprof.Profiler(**arguments)
    profiler = nativeprof.Profiler()
    with pytest.raises(RuntimeError, match="start"):
        profiler.stop()
    with pytest.raises(RuntimeError, match="has not run"):
        profiler.save("x.svg")


def test_one_at_a_time():
    with nativeprof.Profiler() as profiler:
        with pytest.raises(RuntimeError, match="another Profiler is already running"):
            nativeprof.Profiler().start()
        with pytest.raises(RuntimeError, match="this Profiler is already running"):
            profiler.start()
        with pytest.raises(RuntimeError, match="is still running"):
            profiler.profile
    nativeprof.Profiler().start()  # and ends when it is collected
    nativeprof.profiler._running.stop()


def test_system_calls_are_not_ended():
    """C code that does not check for EINTR would see it."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    with nativeprof.Profiler(rate=1000, mode="wall"):
        for _ in range(20):
            assert libc.poll(None, 0, 20) == 0, os.strerror(ctypes.get_errno())
        # Short ones: the signal arrives between reading the thread's state and the call.
        for _ in range(2000):
            assert libc.usleep(300) == 0, os.strerror(ctypes.get_errno())


@repeated
def test_other_signals_live_on():
    received = []
    before = signal.signal(signal.SIGPROF, lambda *_: received.append(1))
    signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)
    try:
        with nativeprof.Profiler() as profiler:
            work(0.2)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    likely(received and profiler.profile.stats["taken"] > 3, len(received), profiler.profile.stats)


@repeated
def test_forked_children_are_left_alone():
    with nativeprof.Profiler() as profiler:
        for _ in range(8):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    work(0.02)
                    with nativeprof.Profiler() as own:
                        work(0.03)
                    own.to_dict()
                    profiler.__exit__()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
        work(0.1)
    likely(profiler.profile.stats["taken"] > 3, profiler.profile.stats)


@pytest.mark.alone
@repeated
def test_threads_come_and_go():
    with nativeprof.Profiler(rate=200) as profiler:
        end = time.process_time() + 0.5
        while time.process_time() < end:
            threads = [threading.Thread(target=work, args=(0.005,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    likely(samples(profiler.to_dict(), "_bootstrap_inner") > 0, profiler.profile.stats)


PROGRAM = """
import os, sys
print(sys.argv, __name__, __file__, sys.path[0])
def fail(): raise ValueError("boom")
what = sys.argv[1]
if what == "exit": sys.exit(7)
if what == "text": sys.exit("a text")
if what == "fail": fail()
if what == "interrupt": raise KeyboardInterrupt
if what == "exec": os.execv(sys.executable, [sys.executable, "-c", "print('another')"])
if what == "fork":
    pid = os.fork()
    if pid == 0: sys.exit(3)
    print(os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize("what", ["run", "exit", "text", "fail", "interrupt", "exec", "fork"])
@pytest.mark.parametrize("module", [False, True])
def test_programs_run_as_python_runs_them(tmp_path, what, module):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["-m", "program", what] if module else ["program.py", what]

    def run(*before):
        done = subprocess.run([sys.executable, *before, *words], cwd=tmp_path, capture_output=True, text=True)
        # From 3.12 on Python warns of a fork while other threads run, also ours.
        said = re.sub(r"(?m)^.*DeprecationWarning: .*fork.*\n.*\n", "", done.stderr)
        return done.returncode, done.stdout, said

    plain = run()
    ours = run("-m", "nativeprof", "-q", "-o", "out.json")
    if module and what in ("fail", "interrupt"):
        # Its own frames of runpy are those of the traceback that python shows; ours begin with the program's.
        tail = plain[2][plain[2].index(str(tmp_path)) - 8 :]
        assert ours[:2] == plain[:2] and ours[2].endswith(tail)
    else:
        assert ours == plain
    assert json.loads((tmp_path / "out.json").read_text())["identifier"] == "root"


def test_wrong_programs_and_options(tmp_path):
    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "nativeprof", *words], cwd=tmp_path, capture_output=True, text=True
        )

    for words, said in [
        ([], "missing"),
        (["-o", "no/such/x.svg", "x.py"], "cannot be written"),
        (["-o", "x.unknown", "x.py"], "cannot tell the format"),
        (["-r", "0", "x.py"], "not between"),
        (["x.py"], "can't open file"),
    ]:
        done = run(*words)
        assert done.returncode == 2 and said in done.stderr, done
