"""The event timeline, and the hooks on allocators under it."""

import collections
import csv
import ctypes
import gc
import json
import os
import select
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from chance import likely, repeated

from nativeprof import _native
from nativeprof.events import EventProfiler, EventProfilerDebug, WithEventProfiler

HERE = Path(__file__).resolve().parent
TEN = ["time", "value1", "value2", "event", "name", "mod", "lineno", "from_name", "from_mod", "from_line"]
MALLOC, CALLOC, REALLOC, FREE, REALLOC_FREE = range(1000, 1005)
RAW, MEM, OBJ, C_LIBRARY = range(1, 5)
REACHED_MALLOC = 16


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The C fixture bound on first call, and bound and made read-only when it is loaded: paths that were not loaded yet."""
    directory = tmp_path_factory.mktemp("allocations")
    made = {}
    for name, flags in {"lazy": ["-Wl,-z,lazy"], "now": ["-Wl,-z,now,-z,relro"]}.items():
        made[name] = str(directory / f"{name}.so")
        source = str(HERE / "fixtures" / "allocations.c")
        subprocess.run(["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", made[name], source, *flags], check=True)
    return made


def rows(profiler):
    return memoryview(profiler.retrieve_raw_results()).tolist()


def columns(profiler, **options):
    return as_columns(profiler.retrieve_results(**options))


def as_columns(table):
    """A report as a dictionary, whether pandas is installed or not."""
    try:
        import pandas
    except ImportError:
        return table
    assert isinstance(table, pandas.DataFrame)
    return table.to_dict("list")


def calls(profiler):
    """(event, name) of all calls and returns of functions in this file, or of the C functions that they call."""
    data = columns(profiler)
    return [
        (event, name)
        for event, name, mod, outer, outer_name in zip(*(data[key] for key in ("event", "name", "mod", "from_mod", "from_name")))
        if event in ("call", "return", "c_call", "c_return", "c_exception")
        and __file__ in (mod, outer)
        and not {name, outer_name} & {"calls", "columns", "rows"}
    ]


def blocks(count, size):
    """`count` bytes objects of `size` bytes."""
    return [bytes(size) for _ in range(count)]


def run(program, *arguments, **environment):
    """Runs a program of its own; fails with what it printed if it does not end well."""
    text = "import os, sys, threading, time\nfrom nativeprof.events import *\n" + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONFAULTHANDLER": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


# The ideas of cpyquickhelper's tests (`_unittests/ut_profiling/test_event_profiler.py`, 0.3.412).


@pytest.mark.parametrize("kind", [EventProfiler, EventProfilerDebug])
def test_start_and_stop_in_the_wrong_order(kind):
    profiler = kind()
    with pytest.raises(RuntimeError, match=r"not started; call start\(\) first"):
        profiler.stop()
    profiler.start()
    with pytest.raises(RuntimeError, match=r"already started; call stop\(\) first"):
        profiler.start()
    profiler.stop()
    with pytest.raises(RuntimeError, match=r"not started; call start\(\) first"):
        profiler.stop()


def f1(t):
    time.sleep(t)


def f2():
    f1(0.001)
    f1(0.002)
    return "r2"


def f3():
    return [f2() for _ in range(3)]


@pytest.mark.parametrize("impl", ["python", "pybind11", "c"])
def test_columns(impl):
    profiler = EventProfiler(impl=impl)
    profiler.start()
    f3()
    profiler.stop()
    raw = profiler.retrieve_raw_results()
    assert raw.shape[0] > 0 and raw.shape[1] == profiler.n_columns
    report = columns(profiler, extra=False)
    assert list(report) == TEN and {len(column) for column in report.values()} == {raw.shape[0]}
    assert "sleep" in report["name"] and "time" in report["mod"]
    assert list(columns(profiler)) == TEN + ["thread", "domain", "reached_malloc"]
    # What is in the row of a call.
    lines = [dict(zip(report, values)) for values in zip(*report.values())]
    call = next(line for line in lines if (line["event"], line["name"]) == ("call", "f1"))
    assert (call["mod"], call["lineno"]) == (__file__, f1.__code__.co_firstlineno)
    assert (call["from_name"], call["from_line"]) == ("f2", f2.__code__.co_firstlineno)
    sleep = next(line for line in lines if (line["event"], line["name"]) == ("c_call", "sleep"))
    assert (sleep["mod"], sleep["from_name"], sleep["lineno"]) == ("time", "f1", f1.__code__.co_firstlineno)


def sequence():
    one = [("call", "f1"), ("c_call", "sleep"), ("c_return", "sleep"), ("return", "f1")]
    two = [("call", "f2"), *one, *one, ("return", "f2")]
    inlined = sys.version_info >= (3, 12)
    inner = [] if inlined else [("call", "<listcomp>")], [] if inlined else [("return", "<listcomp>")]
    return [("call", "f3"), *inner[0], *two * 3, *inner[1], ("return", "f3")]


@pytest.mark.parametrize("size", [1, 20, 30, 1000, 1000000])
def test_every_row_is_there_whatever_the_buffer(size):
    profiler = EventProfiler(size=size)
    profiler.start()
    f3()
    profiler.stop()
    assert calls(profiler) == sequence()
    assert profiler.dropped == 0
    times = [row[3] for row in rows(profiler)]
    assert times == sorted(times)


def catch_exc():
    try:
        raise_exc()
    except ValueError:
        return f3()


def raise_exc():
    f1(0)
    raise ValueError("wrong")


@pytest.mark.parametrize("size", [20, 1000])
def test_an_exception_that_is_caught(size):
    profiler = EventProfiler(size=size)
    profiler.start()
    catch_exc()
    profiler.stop()
    found = calls(profiler)
    assert ("return", "raise_exc") in found and ("return", "f3") in found
    names = [name for name in columns(profiler)["name"]]
    assert "catch_exc" in names and len(names) > 5
    data = columns(profiler)
    outer = dict(zip(data["name"], data["from_name"]))
    assert outer["f3"] == "catch_exc"


def test_c_exception():
    profiler = EventProfiler()
    profiler.start()
    with pytest.raises(ValueError):
        int("x" * 3, 10) if False else [].remove(1)
    profiler.stop()
    assert ("c_exception", "list.remove") in calls(profiler)


def test_with():
    profiler = WithEventProfiler(size=10000)
    assert profiler.report is None
    with profiler:
        f3()
    report = as_columns(profiler.report)
    assert len(report) == 13 and len(report["time"]) > 5
    short = WithEventProfiler(clean_file_name=os.path.basename)
    with short:
        f3()
    assert "test_events.py" in as_columns(short.report)["mod"]


def test_with_raise():
    error = ValueError("this one")
    profiler = WithEventProfiler()
    before = _native.hook_slots()
    with pytest.raises(ValueError) as caught:
        with profiler:
            raise error
    assert caught.value is error
    assert profiler.report is not None
    assert_restored(before)


@pytest.mark.parametrize("impl", ["python", "pybind11", "c"])
def test_debug(impl):
    profiler = EventProfilerDebug(impl=impl)
    profiler.start()
    for _ in range(1000):
        profiler.log_event(sys._getframe(), "call", None)
        profiler.log_event(sys._getframe(), "c_call", len)
    profiler.stop()
    data = columns(profiler)
    assert collections.Counter(data["event"]) == {"profiler_start": 1, "profiler_sort": 1, "call": 1000, "c_call": 1000}
    assert [data["event"][0], data["event"][-1]] == ["profiler_start", "profiler_sort"]
    assert {"test_debug", "len"} <= set(data["name"])
    with pytest.raises(KeyError):
        profiler.log_event(sys._getframe(), "no_such_event", None)


def test_wrong_arguments():
    for arguments in ({"impl": "fortran"}, {"size": 0}, {"size": "many"}):
        with pytest.raises(ValueError):
            EventProfiler(**arguments)


def test_rows_accumulate():
    profiler = EventProfiler()
    for _ in range(2):
        profiler.start()
        f3()
        profiler.stop()
    assert calls(profiler) == sequence() * 2


# Programs that crash the original.


def test_an_exception_without_stop():
    run(
        """
        def work():
            profiler = EventProfiler(size=20)
            profiler.start()
            raise ValueError
        try:
            work()
        except ValueError:
            pass
        for i in range(10000):
            bytearray(1000 + i)
        """
    )


def test_many_allocations_in_a_small_buffer():
    run(
        """
        profiler = EventProfiler(size=20)
        profiler.start()
        for i in range(5000):
            bytes(100000 + i)
        profiler.stop()
        first = 100000 + bytes(0).__sizeof__()
        rows = memoryview(profiler.retrieve_raw_results()).tolist()
        for sign in (1, -1):
            sizes = [sign * row[5] for row in rows if first <= sign * row[5] < first + 5000]
            assert sizes == list(range(first, first + 5000)), len(sizes)
        assert profiler.dropped == 0
        """
    )


def test_two_at_once():
    outer, inner = EventProfiler(size=20), EventProfiler(size=1000)
    outer.start()
    f2()
    inner.start()
    f3()
    outer.stop()
    f2()
    inner.stop()
    f2_only = [row for row in sequence() if row[1] not in ("<listcomp>", "f3")]
    two = f2_only[: f2_only.index(("return", "f2")) + 1]
    assert calls(outer) == two + sequence()
    assert calls(inner) == sequence() + two


# What the original does not have.


def known(rounds):
    """Events of the C fixture: (event, bytes) and how many."""
    made = {
        (MALLOC, 70001): 1,
        (CALLOC, 70021): 1,
        (REALLOC_FREE, -70001): 1,
        (REALLOC, 140003): 1,
        (MALLOC, 70005): 1,
        (MALLOC, 70016): 1,
        (MALLOC, 70007): 1,
        (REALLOC, 70017): 1,
        (MALLOC, 70009): 1,
        (MALLOC, 70011): 2,
        (FREE, -140003): 1,
        (FREE, -70021): 1,
        (FREE, -70005): 1,
        (FREE, -70016): 1,
        (FREE, -70007): 1,
        (FREE, -70017): 1,
        (FREE, -70009): 1,
        (FREE, -70011): 2,
    }
    return {key: count * rounds for key, count in made.items()}


def of_fixture(profiler):
    found = (row for row in rows(profiler) if row[7] == C_LIBRARY and 70000 < abs(row[5]) <= 140003)
    return collections.Counter((row[2], row[5]) for row in found)


@pytest.mark.parametrize("size", [20, 1000000])
@pytest.mark.parametrize("binding", ["lazy", "now"])
def test_allocations_of_a_c_library_are_exact(libraries, binding, size):
    """Of a library loaded later, of threads that come and go, and of nothing before or after."""
    before = EventProfiler(size=size)
    before.start()
    library = ctypes.CDLL(libraries[binding])
    assert library.allocations(10) == 0
    threads = [threading.Thread(target=library.allocations, args=(50,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before.stop()
    assert library.allocations(3) == 0
    assert of_fixture(before) == known(310)
    assert before.dropped == 0
    # Loaded before the start, and its slots bound.
    after = EventProfiler(size=size)
    after.start()
    assert library.allocations(10) == 0
    after.stop()
    assert of_fixture(after) == known(10)


def test_the_thread_and_the_function_of_an_allocation(libraries):
    library = ctypes.CDLL(libraries["now"])

    def in_thread():
        idents.append(threading.get_native_id())
        library.allocations(1)

    idents = []
    profiler = EventProfiler()
    profiler.start()
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    profiler.stop()
    data = columns(profiler)
    found = {
        (name, thread)
        for name, thread, size, domain in zip(data["name"], data["thread"], data["value2"], data["domain"])
        if abs(size) == 140003 and domain == "c"
    }
    assert found == {("in_thread", idents[0])}


def test_blocks_from_before_the_start(libraries):
    library = ctypes.CDLL(libraries["lazy"])
    library.keep(81001)
    profiler = EventProfiler(calls=False, python=False)
    profiler.start()
    library.drop()
    library.keep(81002)
    profiler.stop()
    library.drop()
    found = [row[2:6] for row in rows(profiler) if row[2] in (MALLOC, FREE)]
    kept = [row for row in found if row[3] == 81002]
    assert [row[0] for row in kept] == [MALLOC]
    assert any(row[0] == FREE and row[3] == 0 for row in found)
    assert not any(abs(row[3]) == 81001 for row in found)


PYTHON_MALLOC = """
    def blocks(count, size):
        return [bytes(size) for _ in range(count)]
    header = bytes(0).__sizeof__()
    profiler = EventProfiler()
    profiler.start()
    kept = blocks(7, 371), blocks(5, 60007)
    del kept
    profiler.stop()
    rows = memoryview(profiler.retrieve_raw_results()).tolist()
    def of(size):
        return sorted((row[2], row[5], row[7]) for row in rows if abs(row[5]) == size)
    is_malloc = os.environ["PYTHONMALLOC"].startswith("malloc")
    # A calloc, as bytes of zeros are made.
    small, large = 3 | 16 * is_malloc, 3 | 16
    for size, count, domain in ((371 + header, 7, small), (60007 + header, 5, large)):
        expected = [(1001, size, domain)] * count + [(1003, -size, domain)] * count
        assert of(size) == expected, (of(size), expected)
    # Not a second time, as the C library's.
    assert not [row for row in rows if row[7] == 4 and row[5] >= 60007]
"""


@pytest.mark.parametrize("allocator", ["default", "malloc", "debug", "malloc_debug", "pymalloc"])
def test_allocations_of_python_are_exact(allocator):
    run(PYTHON_MALLOC, PYTHONMALLOC=allocator)


def test_without_the_other_allocator(libraries):
    library = ctypes.CDLL(libraries["lazy"])
    for python, native in ((True, False), (False, True), (False, False)):
        profiler = EventProfiler(python=python, native=native)
        profiler.start()
        library.allocations(1)
        kept = blocks(5, 60007)
        profiler.stop()
        del kept
        domains = {row[7] % REACHED_MALLOC for row in rows(profiler)}
        assert (C_LIBRARY in domains) == native
        assert (OBJ in domains) == python
        if native:
            # What Python requested is then the C library's own.
            assert of_fixture(profiler) == known(1)


def assert_restored(before):
    """Slots hold what they held, or have been bound meanwhile."""
    hooks = {value for _, _, _, value in before}
    now = {place: value for _, _, place, value in _native.hook_slots()}
    changed = {place: (value, now[place]) for _, _, place, value in before if now.get(place, value) != value}
    bound = {name: value for _, name, _, value in _native.hook_slots()}
    assert all(new in bound.values() and new in hooks for _, new in changed.values()), changed


def test_slots_are_restored(libraries):
    library = ctypes.CDLL(libraries["now"])
    library.allocations(1)
    EventProfiler().retrieve_raw_results()
    before = {place: (module, name, value) for module, name, place, value in _native.hook_slots()}
    profiler = EventProfiler(waits=True)
    profiler.start()
    during = {place: value for _, _, place, value in _native.hook_slots()}
    library.allocations(1)
    profiler.stop()
    after = {place: value for _, _, place, value in _native.hook_slots()}
    changed = {before[place][1] for place in before if during[place] != before[place][2]}
    assert {"malloc", "free", "calloc", "realloc"} <= changed
    # In read-only pages too. (The C library's own may lead to those of a program at fixed addresses.)
    modules = {before[place][0] for place in before if before[place][1] == "malloc" and during[place] != before[place][2]}
    assert any("now.so" in module for module in modules) and len(modules) > 1
    hooks = set(during.values()) - {value for _, _, value in before.values()}
    assert not hooks & set(after.values())
    # Those that were bound before are as they were.
    real = {name: value for module, name, value in before.values() if "libc.so" in module}
    for place, (module, name, value) in before.items():
        if value == real.get(name):
            assert after[place] == value, (module, name)


def test_another_hook_above_ours():
    """A tool that comes later and goes later: ours stays below it, passes through, and is used again."""
    profiler = EventProfiler()
    profiler.start()
    tracemalloc.start()
    try:
        profiler.stop()
        kept = blocks(10, 60007)
        profiler.start()
        kept = blocks(10, 60011)
        profiler.stop()
    finally:
        tracemalloc.stop()
    del kept
    profiler.start()
    kept = blocks(10, 60013)
    profiler.stop()
    header = b"".__sizeof__()
    sizes = collections.Counter(row[5] - header for row in rows(profiler) if row[2] == CALLOC)
    assert (sizes[60007], sizes[60011], sizes[60013]) == (0, 10, 10)
    del kept


def test_threads_before_and_after_the_start():
    start, go_on = threading.Event(), threading.Event()

    def early():
        started.append(threading.get_native_id())
        start.set()
        go_on.wait()
        f1(0)

    started = []
    thread = threading.Thread(target=early)
    thread.start()
    start.wait()
    profiler = EventProfiler()
    profiler.start()
    go_on.set()
    thread.join()
    later = threading.Thread(target=f1, args=(0,))
    later.start()
    later.join()
    profiler.stop()
    data = columns(profiler)
    of_f1 = [
        (outer, thread)
        for event, name, outer, thread in zip(data["event"], data["name"], data["from_name"], data["thread"])
        if (event, name) == ("call", "f1")
    ]
    # The first one's caller was running before the start.
    assert [outer for outer, _ in of_f1] == ["early", "run"]
    assert of_f1[0][1] == started[0] and of_f1[1][1] not in (started[0], threading.get_native_id())


def test_generators_and_callbacks():
    def numbers():
        yield 1
        yield 2

    def key(value):
        return -value

    def program():
        return sorted(numbers(), key=key)

    profiler = EventProfiler(python=False, native=False)
    profiler.start()
    program()
    profiler.stop()
    run_of = [("call", "numbers"), ("return", "numbers")]
    keys = [("call", "key"), ("return", "key")]
    expected = [("call", "program"), ("c_call", "sorted"), *run_of * 3, *keys * 2, ("c_return", "sorted"), ("return", "program")]
    assert calls(profiler) == expected
    data = columns(profiler)
    assert {o for n, o in zip(data["name"], data["from_name"]) if n in ("key", "numbers")} == {"program"}


def test_rows_beyond_the_limit_are_counted():
    for options in ({"spill": False}, {"limit": 4000}):
        profiler = EventProfiler(size=100, **options)
        profiler.start()
        kept = blocks(1000, 471)
        profiler.stop()
        held = len(rows(profiler))
        assert 50 <= held <= 200 and profiler.dropped >= 800, (held, profiler.dropped)
        del kept


def test_spilling_to_a_directory(tmp_path):
    profiler = EventProfiler(size=20, spill=tmp_path)
    profiler.start()
    f3()
    profiler.stop()
    assert calls(profiler) == sequence()
    with pytest.raises(OSError):
        EventProfiler(spill=tmp_path / "none")


def test_a_file_that_the_program_closes(tmp_path):
    """A program that closes all descriptors and opens others is not written over."""
    run(
        """
        profiler = EventProfiler(size=20)
        profiler.start()
        os.closerange(3, 256)
        files = [os.open(sys.argv[1], os.O_RDWR | os.O_CREAT) for _ in range(64)]
        kept = [bytearray(1000) for i in range(1000)]
        assert os.fstat(files[0]).st_size == 0
        profiler.stop()
        assert profiler.dropped >= 900
        """,
        str(tmp_path / "opened"),
    )


def test_reading_while_it_runs():
    profiler = EventProfiler(size=20)
    profiler.start()
    f3()
    first = calls(profiler)
    f3()
    profiler.stop()
    assert first == sequence()
    wanted = {name for _, name in sequence()}
    assert [row for row in calls(profiler) if row[1] in wanted] == sequence() * 2


def test_fork():
    run(
        """
        def all_of(size):
            first = size + bytes(0).__sizeof__()
            return set(range(first, first + 100))
        profiler = EventProfiler(size=20)
        profiler.start()
        kept = [bytes(1000 + i) for i in range(100)]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                more = [bytes(3000 + i) for i in range(100)]
                try:
                    profiler.stop()
                except RuntimeError:
                    status = 0
                own = EventProfiler(size=20)
                own.start()
                more = [bytes(5000 + i) for i in range(100)]
                own.stop()
                sizes = {row[5] for row in memoryview(own.retrieve_raw_results()).tolist()}
                if not all_of(5000) <= sizes:
                    status = 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        os.system("true")
        profiler.stop()
        sizes = {row[5] for row in memoryview(profiler.retrieve_raw_results()).tolist()}
        assert all_of(1000) <= sizes
        assert not sizes & all_of(3000) and not sizes & all_of(5000)
        """
    )


def test_fork_while_threads_allocate():
    run(
        """
        profiler = EventProfiler(size=1000)
        profiler.start()
        done = threading.Event()
        def work():
            while not done.is_set():
                [bytearray(1000 + i) for i in range(20)]
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                bytearray(100000)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        done.set()
        for thread in threads:
            thread.join()
        profiler.stop()
        """
    )


@pytest.mark.parametrize("size", [20, 100000])
def test_the_interpreter_ends_while_it_runs(size):
    run(
        """
        profiler = EventProfiler(size=int(sys.argv[1]))
        profiler.start()
        def work():
            while True:
                [bytearray(1000 + i) for i in range(5)]
        ready = threading.Barrier(4)
        def first():
            ready.wait()
            work()
        for _ in range(3):
            threading.Thread(target=first, daemon=True).start()
        ready.wait()
        """,
        str(size),
    )


def test_starts_and_stops_while_threads_allocate(libraries):
    """No thread is in a hook whose memory has gone."""
    library = ctypes.CDLL(libraries["lazy"])
    done = threading.Event()

    def work():
        while not done.is_set():
            library.allocations(20)
            blocks(20, 60007)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            profiler = EventProfiler(size=100)
            profiler.start()
            blocks(5, 60007)
            profiler.stop()
            del profiler
    finally:
        done.set()
        for thread in threads:
            thread.join()


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@repeated
def test_memory_stays_flat(libraries):
    library = ctypes.CDLL(libraries["lazy"])
    descriptors = len(os.listdir("/proc/self/fd"))
    for kept in (None, EventProfiler(size=20)):
        # The second time below one that keeps running and sees many threads.
        if kept:
            kept.start()
        for turn in range(90):
            profiler = EventProfiler(size=5000)
            profiler.start()
            threads = [threading.Thread(target=library.allocations, args=(1,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            profiler.stop()
            profiler.retrieve_raw_results()
            del profiler
            if turn == 29:
                gc.collect()
                before = resident()
        gc.collect()
        grown = resident() - before
        if kept:
            kept.stop()
        # 240 threads, and 600 KB of rows each turn. (Threads of which the system has not yet noticed the end have stacks and
        # heaps.)
        likely(grown < 1 << 20, grown)
    assert len(os.listdir("/proc/self/fd")) < descriptors + 20


def test_waits(libraries):
    library = ctypes.CDLL(libraries["now"])
    reading, writing = os.pipe()

    def waiter():
        idents.append(threading.get_native_id())
        library.wait_for(reading)

    idents = []
    profiler = EventProfiler(python=False, native=False, waits=True)
    profiler.start()
    thread = threading.Thread(target=waiter)
    thread.start()
    os.write(writing, b"x")
    thread.join()
    select.select([reading], [], [])
    with select.epoll() as poller:
        poller.register(reading)
        poller.poll()
    poller = select.poll()
    poller.register(reading)
    poller.poll()
    profiler.stop()
    os.close(reading)
    os.close(writing)
    found = rows(profiler)
    assert [row[2] for row in found if row[6] == idents[0] and row[2] in (1100, 1101)] == [1100, 1101]
    own = [row[2] for row in found if row[6] == threading.get_native_id() and row[2] in (1100, 1101)]
    assert own[-6:] == [1100, 1101] * 3


def test_the_clock_is_monotonic_and_in_nanoseconds():
    profiler = EventProfiler(python=False, native=False)
    before = time.monotonic_ns()
    profiler.start()
    time.sleep(0.05)
    profiler.stop()
    after = time.monotonic_ns()
    found = {(row[2]): row[3] for row in rows(profiler)}
    assert before - 1e6 <= found[100] <= found[101] <= after + 1e6
    assert 0.05e9 <= found[4] - found[3] <= after - before + 1e6


# Other forms.


def test_without_numpy_and_pandas(monkeypatch):
    for name in ("numpy", "pandas", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    profiler = EventProfiler()
    profiler.start()
    f3()
    profiler.stop()
    raw, report = profiler.retrieve_raw_results(), profiler.retrieve_results(extra=False)
    assert isinstance(raw, memoryview) and raw.shape == (len(report["time"]), profiler.n_columns)
    assert list(report) == TEN and calls(profiler) == sequence()
    for method in (profiler.to_arrow, lambda: profiler.to_parquet("x")):
        with pytest.raises(ImportError, match="pip install pyarrow"):
            method()
    assert EventProfiler().retrieve_raw_results().shape[0] == 0


@pytest.fixture(scope="module")
def recorded():
    profiler = EventProfiler()
    profiler.start()
    f3()
    profiler.stop()
    return profiler


def test_csv(recorded, tmp_path):
    recorded.to_csv(tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["name"] for row in found] == columns(recorded)["name"]
    assert [int(row["value2"]) for row in found] == columns(recorded)["value2"]


def test_parquet(recorded, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    recorded.to_parquet(tmp_path / "x.parquet")
    table = parquet.read_table(tmp_path / "x.parquet")
    assert table.column_names == TEN + ["thread", "domain", "reached_malloc"]
    for name, values in columns(recorded).items():
        assert table.column(name).to_pylist() == values, name


def test_chrome(recorded, tmp_path):
    recorded.to_chrome(tmp_path / "x.json")
    trace = json.loads((tmp_path / "x.json").read_text())
    events = trace["traceEvents"]
    stacks = collections.defaultdict(list)
    for event in events:
        assert {"ph", "pid", "tid", "ts"} <= set(event)
        if event["ph"] == "B":
            stacks[event["tid"]].append((event["name"], event["cat"]))
        elif event["ph"] == "E":
            # Chromium's DevTools drops a slice whose end has another name or category.
            assert stacks[event["tid"]].pop() == (event["name"], event["cat"])
    assert not any(stacks.values())
    assert [e["name"] for e in events if e["ph"] == "B" and e["name"] in ("f1", "f2", "f3")].count("f1") == 6
    assert any(e["ph"] == "C" and e["args"] for e in events)


def run_traced(directory, *words, code=0):
    script = directory / "script.py"
    script.write_text("def f(n):\n    return [n]\n\n\nfor n in range(7):\n    f(n)\n")
    command = [sys.executable, "-m", "nativeprof", "--trace", "events", *words, str(script)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stderr


# Of the package: what runs the program is not part of it.
OWN = {"run", "main", "start", "finish", "stop", "_profiler", "_is_running"}


def test_command_line_chrome(tmp_path):
    said = run_traced(tmp_path, "-o", "out.json")
    assert "events" in said and "out.json (chrome)" in said
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = collections.Counter(e["name"] for e in events if e["ph"] == "B")
    assert names["f"] == 7 and names["<module>"] >= 1
    ours = [e for e in events if e["ph"] == "B" and "nativeprof" in e["args"]["file"] and e["name"] in OWN]
    assert not ours, ours
    assert run_traced(tmp_path, "-q", "-o", "x", "-f", "chrome") == ""
    assert json.loads((tmp_path / "x").read_text())["traceEvents"]


def test_command_line_csv(tmp_path):
    run_traced(tmp_path, "-o", "out.csv", "--no-native")
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    calls = [row for row in rows if row["event"] == "call" and row["name"] == "f"]
    assert len(calls) == 7 and {row["from_name"] for row in calls} == {"<module>"}
    assert {row["domain"] for row in rows} <= {"", "raw", "mem", "obj"}


def test_command_line_arrow_and_parquet(tmp_path):
    ipc = pytest.importorskip("pyarrow.ipc")
    from pyarrow import parquet

    for name in ("out.arrow", "out.feather", "out.parquet"):
        run_traced(tmp_path, "-o", name)
        path = str(tmp_path / name)
        table = parquet.read_table(path) if name.endswith("parquet") else ipc.open_file(path).read_all()
        events = zip(table.column("event").to_pylist(), table.column("name").to_pylist())
        assert sum(1 for event in events if event == ("call", "f")) == 7


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-o", "out.svg"], ".parquet, or name the format with -f"),
        (["-o", "out.json", "-f", "svg"], "a timeline of events can be chrome, csv, arrow, parquet, not svg"),
        (["--only", "json"], "need --trace times, counts or counts+samples"),
        (["--subtract"], "--subtract needs --trace times"),
        (["--threads"], "--threads has no effect on --trace events"),
        (["-o", "nowhere/out.json"], "cannot be written"),
    ],
)
def test_command_line_errors(tmp_path, words, expected):
    assert expected in run_traced(tmp_path, *words, code=2)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".py"]


def test_timeline_formats_are_for_events_only(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    command = [sys.executable, "-m", "nativeprof", "-f", "csv", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "csv is for --trace events" in done.stderr


@pytest.mark.parametrize("end", ["raise ValueError(7)", "import sys; sys.exit(3)", "import os; os._exit(4)"])
def test_command_line_keeps_the_end_of_the_program(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(f"def f():\n    {end}\n\n\nf()\n")
    command = [sys.executable, "-m", "nativeprof", "--trace", "events", "-o", "out.csv", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    expected = {"raise": 1, "import sys": 3, "import os": 4}
    assert done.returncode == next(code for start, code in expected.items() if end.startswith(start)), done.stderr
    assert (tmp_path / "out.csv").exists() == ("_exit" not in end)
