"""Native stacks on demand, as Dask's low-level profiling requests them."""

import io
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from chance import likely, repeated

import stacktrace
from stacktrace.tools import Profiler, Timer
from stacktrace.utils import StackEntry


@contextmanager
def running(target):
    ended = threading.Event()
    ready = threading.Event()

    def run():
        ready.set()
        target(ended)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield thread.ident
    finally:
        ended.set()
        thread.join()


def busy(ended):
    data = b"x" * (1 << 20)
    while not ended.is_set():
        data.upper()
        sorted(range(1000), key=lambda n: -n)


def asleep(ended):
    while not ended.wait(10):
        pass


def low_level(entries):
    """What distributed keeps: up to the first Python entry."""
    kept = []
    for entry in entries:
        if entry.is_python:
            return kept
        kept.append(entry)
    return kept


@pytest.mark.parametrize("target", [busy, asleep])
@repeated
def test_another_thread(target):
    with running(target) as ident:
        seen = 0
        for _ in range(50):
            entries = stacktrace.get_thread_stack(ident, show_python=False)
            if entries:
                seen += 1
                assert all(isinstance(entry, StackEntry) and entry.addr >= entry.offset for entry in entries)
                assert any(entry.is_python for entry in entries)
                assert low_level(entries), "a native frame before the first Python one"
            time.sleep(0.002)
        # A busy machine may leave a thread without a CPU for a while; one that sleeps is never missed.
        likely(seen >= (25 if target is busy else 50), seen)


def test_itself():
    for _ in range(100):
        assert low_level(stacktrace.get_thread_stack(threading.get_ident(), show_python=False))
    plain = stacktrace.get_thread_stack(threading.get_ident())
    assert not any(entry.is_python for entry in plain)
    assert len(stacktrace.get_thread_stack(threading.get_ident(), maxdepth=3)) == 3
    assert stacktrace.get_thread_stack(threading.get_ident(), maxdepth=0) == []


def test_no_such_thread_is_an_empty_list():
    with running(asleep) as ident:
        pass
    for _ in range(1000):  # Python forgets a thread before the system does
        if not stacktrace.get_thread_stack(ident):
            break
        time.sleep(0.005)
    for wrong in (ident, 0, 1, 12345, -1, 1 << 63, 1 << 80, None, "main"):
        assert stacktrace.get_thread_stack(wrong) == []


@repeated
def test_signals_may_be_blocked():
    def deaf(ended):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not ended.is_set():
            sum(range(10_000))

    with running(deaf) as ident:
        began = time.monotonic()
        for _ in range(20):
            stacktrace.get_thread_stack(ident)
        likely(time.monotonic() - began < 10)


def test_addresses_are_those_of_the_files():
    starts = {e.name: e.addr - e.offset for e in stacktrace.get_thread_stack(threading.get_ident())}
    code = (
        "import stacktrace, threading\n"
        "print({e.name: e.addr - e.offset for e in stacktrace.get_thread_stack(threading.get_ident())})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    other = eval(done.stdout)
    shared = [name for name in starts if name.startswith(("Py_RunMain", "Py_BytesMain", "_PyEval_EvalFrameDefault"))]
    assert shared and all(starts[name] == other[name] for name in shared)


@repeated
def test_print():
    out = io.StringIO()
    stacktrace.print_stack(file=out)
    assert out.getvalue().startswith("[0x")
    for size in (0, 10, 50, 100):
        out = io.StringIO()
        stacktrace.print_stack(file=out, _bufsize=size)
        assert len(out.getvalue()) <= size
    with running(asleep) as ident:
        out = io.StringIO()
        stacktrace.print_thread_stack(ident, file=out, maxdepth=5)
        lines = out.getvalue().splitlines()
        assert len(lines) <= 5
        likely(lines)
    assert str(StackEntry(0x1F, "f", 3, True)) == "[0x1f] f +3 [PY]"
    assert str(StackEntry(0x1F, "f", 0, False)) == "[0x1f] f"


@repeated
def test_tools():
    stacks = []
    with running(busy) as ident:
        with Timer(ident, stacks.append, interval=0.002, show_python=False):
            time.sleep(0.3)
        with Profiler(ident, interval=0.002) as profiler:
            time.sleep(0.3)
    assert all(isinstance(stack, list) for stack in stacks)
    likely(any(stacks), stacks)
    rows = profiler.get_sorted()
    assert dict(rows) == profiler.get_result()
    likely(rows)
    counts = [row["count"] for _, row in rows]
    assert counts == sorted(counts, reverse=True)
