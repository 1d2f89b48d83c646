"""The profiler for the process that it runs in."""

import contextlib
import ctypes
import errno
import json
import os
import re
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import warnings

import pytest
from chance import likely, repeated

import nativeprof
from nativeprof import _native


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
    # Of few samples none may lie in the key function, which has a fifth of the time.
    likely(between, stats)
    assert any(name.startswith(sort) for name in between), between
    rows = profiler.top(5)
    assert rows[0].self_ >= rows[-1].self_ and all(row.total >= row.self_ for row in rows)


def test_calls_are_shown_by_their_time():
    def slow():
        return sorted(range(200_000), key=callback)

    def often():
        return [callback(n) for n in range(1000)]

    with nativeprof.Profiler(mode="calls") as profiler:
        slow()
        often()
    profile = profiler.profile
    rows = profile.top(50)
    assert rows.value == "wall_ns"
    assert rows[0].self_ >= rows[-1].self_ and max(row.total for row in rows) > 1_000_000
    assert str(rows).startswith("SELF TIME % TOTAL TIME %  FUNCTION")
    assert "<th>self time</th>" in rows._repr_html_()
    assert re.search(r"\d m?s wall<", _native.notebook_view(profile._native, {})["graph"].decode())
    calls = profile.top(50, value="calls")
    assert calls.value == "calls" and calls[0].self_ >= 201_000
    with pytest.raises(ValueError, match=r'no value "cpu"; it has calls, wall'):
        profile.top(value="cpu")


def test_python_frames_only():
    with nativeprof.Profiler(native=False) as profiler:
        work(0.2)
    assert {n["description"]["filename"] for n in nodes(profiler.to_dict())}.isdisjoint({"<low-level>"})


@pytest.mark.parametrize("ending", ["svg", "json", "json.gz", "collapsed"])
@repeated
def test_save(tmp_path, ending):
    with nativeprof.Profiler() as profiler:
        work(0.1)
    # Collapsed stacks of no samples are an empty file.
    likely(profiler.profile.stats["taken"])
    profiler.profile.save(tmp_path / f"x.{ending}")
    assert (tmp_path / f"x.{ending}").stat().st_size > 0
    with pytest.raises(ValueError, match="cannot tell the format"):
        profiler.save(tmp_path / "x.unknown")
    with pytest.raises(OSError):
        profiler.save(tmp_path / "no" / "x.svg")


@pytest.fixture(scope="module")
def profile():
    with nativeprof.Profiler(mode="counts") as profiler:
        callback(1)
    return profiler.profile


def test_save_replaces_a_file_by_a_complete_one(tmp_path, profile):
    path = tmp_path / "x.json"
    path.write_text("old")
    path.chmod(0o600)
    before = os.umask(0o027)
    try:
        with open(path) as reader:
            profile.save(path)
            assert reader.read() == "old", "it was written to"
    finally:
        os.umask(before)
    assert json.loads(path.read_text())["identifier"] == "root"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(ValueError):
        profile.save(path, "unknown")
    assert json.loads(path.read_text())["identifier"] == "root"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_save_follows_links_and_writes_to_pipes(tmp_path, profile):
    profile.save(tmp_path / "x.json")
    content = (tmp_path / "x.json").read_bytes()
    (tmp_path / "target").write_text("old")
    (tmp_path / "link.json").symlink_to("target")
    profile.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "target").read_bytes() == content
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    profile.save(pipe)
    reader.join()
    assert read == [content] and pipe.is_fifo()


def test_save_names_the_file_that_cannot_be_written(tmp_path, profile):
    for path in (tmp_path / "no" / "x.json", tmp_path):
        with pytest.raises(OSError) as error:
            profile.save(path, "json")
        assert error.value.filename in (path, str(path))
    with pytest.raises(OSError) as error:
        profile.save("/dev/full", "json")
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


@repeated
def test_notebooks_show_escaped_text():
    scope = {}
    exec(compile("def f():\n    while go(): pass", "<script>alert(1)</script>", "exec"), scope)
    end = time.process_time() + 0.2
    scope["go"] = lambda: time.process_time() < end
    with nativeprof.Profiler() as profiler:
        scope["f"]()
    likely(profiler.profile.stats["taken"])
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
    sampled = [name for name in by_thread.to_dict()["children"] if name.startswith("thread ")]
    likely(len(sampled) >= 4, sampled, by_thread.profile.stats)
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
    for mode in ("cpu", "wall", "counts", "counts+cpu", "counts+wall"):
        for option in ("cpu", "subtract"):
            with pytest.raises(ValueError, match=f'mode="calls": mode={mode!r}'.replace("+", r"\+")):
                nativeprof.Profiler(mode=mode, **{option: True})
    for mode in ("cpu", "wall"):
        for option in ("only", "skip"):
            with pytest.raises(ValueError, match=f'or "counts.{mode}"'):
                nativeprof.Profiler(mode=mode, **{option: ["json"]})
    profiler = nativeprof.Profiler()
    with pytest.raises(RuntimeError, match=r"not running; call start\(\) first"):
        profiler.stop()
    with pytest.raises(RuntimeError, match=r"has not run in this process; call start\(\) first"):
        profiler.save("x.svg")


def test_one_at_a_time():
    with nativeprof.Profiler() as profiler:
        with pytest.raises(RuntimeError, match="another Profiler is already running"):
            nativeprof.Profiler().start()
        with pytest.raises(RuntimeError, match=r"this Profiler is already running; call stop\(\) first"):
            profiler.start()
        with pytest.raises(RuntimeError, match=r"is still running; call stop\(\) first"):
            profiler.profile
    nativeprof.Profiler().start()  # and ends when it is collected
    nativeprof.profiler._running.stop()


def test_system_calls_are_not_ended():
    """C code that does not check for EINTR would see it."""
    with nativeprof.Profiler(rate=1000, mode="wall"):
        for _ in range(20):
            assert LIBC.poll(None, 0, 20) == 0, os.strerror(ctypes.get_errno())
        # Short ones: the signal arrives between reading the thread's state and the call.
        for _ in range(2000):
            assert LIBC.usleep(300) == 0, os.strerror(ctypes.get_errno())


LIBC = ctypes.CDLL(None, use_errno=True)


class Message(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_long), ("text", ctypes.c_char * 8)]


def socket_that_times_out(option):
    """One end of a pair whose other end neither reads nor writes, with a time-out of the kernel."""
    ends = socket.socketpair()
    if option == socket.SO_SNDTIMEO:
        ends[0].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ends[0].send(bytes(65536))
        ends[0].setblocking(True)
    ends[0].setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 700))
    return ends


def interruptible_calls():
    """Each a name, a function of the C library with its arguments, and the error that is expected, or 0."""
    duration = struct.pack("ll", 0, 700_000)
    buffer = ctypes.create_string_buffer(64)
    reads, writes = socket_that_times_out(socket.SO_RCVTIMEO), socket_that_times_out(socket.SO_SNDTIMEO)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 700))
    epoll = select.epoll()
    usr2 = ctypes.create_string_buffer(128)
    LIBC.sigemptyset(usr2)
    LIBC.sigaddset(usr2, int(signal.SIGUSR2))
    semaphore, queue = LIBC.semget(0, 1, 0o600), LIBC.msgget(0, 0o600)
    down = struct.pack("Hhh", 0, -1, 0)
    message = Message(1, b"")

    def receive():
        # The sender waits for a moment, so the receiver sleeps.
        threading.Timer(0.0005, LIBC.msgsnd, (queue, ctypes.byref(message), 8, 0)).start()
        return LIBC.msgrcv(queue, ctypes.byref(Message()), 8, 0, 0)

    try:
        yield "recv", lambda: LIBC.recv(reads[0].fileno(), buffer, 1, 0), errno.EAGAIN
        yield "recvfrom", lambda: LIBC.recvfrom(reads[0].fileno(), buffer, 1, 0, None, None), errno.EAGAIN
        yield "read", lambda: LIBC.read(reads[0].fileno(), buffer, 1), errno.EAGAIN
        yield "send", lambda: LIBC.send(writes[0].fileno(), buffer, 64, 0), errno.EAGAIN
        yield "write", lambda: LIBC.write(writes[0].fileno(), buffer, 64), errno.EAGAIN
        yield "accept", lambda: LIBC.accept(listener.fileno(), None, None), errno.EAGAIN
        yield "poll", lambda: LIBC.poll(None, 0, 1), 0
        yield "ppoll", lambda: LIBC.ppoll(None, 0, duration, None), 0
        yield "select", lambda: LIBC.select(0, None, None, None, ctypes.create_string_buffer(struct.pack("ll", 0, 700))), 0
        yield "pselect", lambda: LIBC.pselect(0, None, None, None, duration, None), 0
        yield "epoll_wait", lambda: LIBC.epoll_wait(epoll.fileno(), buffer, 1, 1), 0
        yield "epoll_pwait", lambda: LIBC.epoll_pwait(epoll.fileno(), buffer, 1, 1, None), 0
        yield "nanosleep", lambda: LIBC.nanosleep(duration, None), 0
        yield "clock_nanosleep", lambda: LIBC.clock_nanosleep(1, 0, duration, None), 0
        yield "sigtimedwait", lambda: LIBC.sigtimedwait(usr2, None, duration), errno.EAGAIN
        yield "semtimedop", lambda: LIBC.semtimedop(semaphore, down, 1, duration), errno.EAGAIN
        yield "msgrcv", receive, 0
    finally:
        LIBC.semctl(semaphore, 0, 0)
        LIBC.msgctl(queue, 0, None)
        for end in (*reads, *writes, listener, epoll):
            end.close()


def test_no_system_call_fails_because_it_is_sampled():
    failed = {}
    # The timers of CPU time seldom tick just before a call.
    for mode, times in (("cpu", 50), ("wall", 200)):
        with nativeprof.Profiler(rate=2000, mode=mode):
            for name, call, expected in interruptible_calls():
                for _ in range(times):
                    ctypes.set_errno(0)
                    result = call()
                    seen = result if name == "clock_nanosleep" else ctypes.get_errno() if result < 0 else 0
                    if seen != expected:
                        key = (mode, name, errno.errorcode.get(seen, seen))
                        failed[key] = failed.get(key, 0) + 1
    assert not failed, failed


@repeated
@pytest.mark.parametrize("mode, rate", [("cpu", 100), ("cpu", 2000), ("wall", 500)])
def test_programs_that_take_every_signal_do_not_get_ours(mode, rate):
    """Samples are lost while a thread blocks all signals, and count as lost."""
    done, received = threading.Event(), []

    def wait_for_all():
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not done.is_set():
            end = time.thread_time() + 0.003
            while time.thread_time() < end:
                pass
            got = signal.sigtimedwait(signal.valid_signals(), 0.001)
            if got is not None:
                received.append(got.si_signo)
        received.extend(signal.sigpending())

    thread = threading.Thread(target=wait_for_all)
    thread.start()
    # Its first calls, before it is sampled.
    time.sleep(0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # perf events may not be permitted
        with nativeprof.Profiler(rate=rate, mode=mode, threads=[thread]) as profiler:
            time.sleep(0.7)
    done.set()
    thread.join()
    # A thread that has left sigtimedwait, and has not run yet, looks like one that blocks nothing.
    likely(not received, received)
    stats = profiler.profile.stats
    if mode == "cpu":
        likely(stats["lost"] > rate // 20 and stats["taken"] == 0, stats)
        assert stats["expected"] == stats["taken"] + stats["lost"], stats
    else:
        likely(stats["taken"] > 10, stats)


# Programs that are sampled more often than the kernel's clock ticks: by perf events, where these are permitted.
FAST = """
import os, resource, sys, threading, time, warnings
import nativeprof
warnings.simplefilter("ignore", RuntimeWarning)

def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

def descriptors(kind=""):
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += kind in os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass
    return count

def events():
    return descriptors("perf_event")

"""


def run_fast(program, *arguments, timeout=120):
    done = subprocess.run([sys.executable, "-c", FAST + program, *arguments], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def test_a_tick_does_not_end_the_program_that_is_executed():
    """What is pending at exec is pending in the new program, which has no handler."""
    program = """
left = int(sys.argv[1])
profiler = nativeprof.Profiler(rate=10_000)
profiler.start()
spin(0.02)
if left:
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], str(left - 1), sys.argv[2]])
profiler.stop()
"""
    run_fast(program, "10", FAST + program)


def test_a_forked_child_has_neither_ticks_nor_their_descriptors():
    program = """
profiler = nativeprof.Profiler(rate=2000)
profiler.start()
threads = [threading.Thread(target=spin, args=(0.3,)) for _ in range(4)]
for thread in threads:
    thread.start()
spin(0.1)
child = os.fork()
if child == 0:
    assert events() == 0
    # Its own recording is as any other.
    with nativeprof.Profiler(rate=2000) as own:
        spin(0.2)
    assert own.profile.stats["taken"] > 0
    os._exit(events())
for thread in threads:
    thread.join()
_, status = os.waitpid(child, 0)
assert profiler.stop().stats["taken"] > 10
assert events() == 0
sys.exit(status)
"""
    run_fast(program)


def test_half_of_the_descriptors_are_left_for_the_program():
    program = """
end = threading.Event()
def until_end():
    while not end.wait(0.02):
        spin(0.0002)
threads = [threading.Thread(target=until_end, daemon=True) for _ in range(100)]
for thread in threads:
    thread.start()
limit = 2 * (descriptors() + 90)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
for mode in ("cpu", "wall"):
    with nativeprof.Profiler(rate=1000, mode=mode) as profiler:
        time.sleep(0.7)
        # Files of the interpreter and its libraries are open, too.
        assert descriptors() < limit // 2 + 60, (descriptors(), limit)
        assert mode == "wall" or events() <= limit // 2
    stats = profiler.profile.stats
    assert mode == "wall" or stats["expected"] == stats["taken"] + stats["lost"], stats
assert events() == 0
end.set()
"""
    run_fast(program)


def test_a_handler_that_replaces_that_of_the_ticks_costs_samples_only():
    program = """
import signal
with nativeprof.Profiler(rate=1000) as profiler:
    spin(0.1)
    signal.signal(signal.SIGURG, lambda *_: None)
    spin(0.5)
stats = profiler.profile.stats
assert stats["taken"] >= 20, stats
# With a handler of the program's from the beginning, the rate is limited; it is said once.
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("default")
    with nativeprof.Profiler(rate=5000) as profiler:
        spin(0.1)
[limitation] = [str(w.message) for w in said]
rate = profiler.profile.stats["rate"]
assert rate <= 1000 and f"rate={rate}" in limitation, limitation
warnings.simplefilter("error")
try:
    nativeprof.Profiler(rate=5000).start()
except RuntimeWarning:
    with nativeprof.Profiler():
        pass
else:
    sys.exit("no warning")
"""
    run_fast(program)


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
    assert ours == plain
    assert json.loads((tmp_path / "out.json").read_text())["identifier"] == "root"


ENDING = """
import os, signal, sys, time
what = sys.argv[1]
def handle(number, frame):
    print("handled", flush=True)
    sys.exit(3)
if what == "handle":
    for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, handle)
print("up", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
if what == "child":
    pid = os.fork()
    if pid == 0: os._exit(5)
    sys.exit(os.waitpid(pid, 0)[1] >> 8)
if what == "error":
    os._exit("x")
if what == "exit":
    os._exit(status=4)
while True:
    time.sleep(100) if what == "sleep" else sum(range(1000))
"""


@pytest.mark.parametrize("trace", [None, "times", "counts+samples", "events"])
def test_programs_ended_by_a_signal_leave_a_profile(tmp_path, trace):
    (tmp_path / "program.py").write_text(ENDING)
    output = tmp_path / "out.json"
    ours = ["-m", "nativeprof", "-q", "-o", output, *(["--trace", trace] if trace else [])]
    for what, number in [("loop", signal.SIGTERM), ("sleep", signal.SIGHUP), ("handle", signal.SIGHUP)]:
        ends = []
        for before in ([], ours):
            command = [sys.executable, *before, "program.py", what]
            program = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            first = program.stdout.readline()
            program.send_signal(number)
            printed, said = program.communicate()
            ends.append((program.returncode, first + printed, said))
        assert ends[0] == ends[1]
        if trace == "events" and sys.version_info < (3, 12) and what != "handle":
            continue  # cannot be ended by another thread
        json.loads(output.read_text())
        output.unlink()


def test_a_profile_lost_by_exit_is_reported(tmp_path):
    (tmp_path / "program.py").write_text(ENDING)
    for what in ("exit", "child", "error"):
        ends = []
        for before in ([], ["-m", "nativeprof", "-q", "-o", "out.json"]):
            command = [sys.executable, "-W", "ignore", *before, "program.py", what]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            ends.append((done.returncode, done.stdout, done.stderr))
        plain, profiled = ends
        if what == "exit":
            assert not plain[2] and not (tmp_path / "out.json").exists()
            assert profiled[2].count("\n") == 1 and "the profile is lost: the program ended by os._exit" in profiled[2]
            assert profiled[:2] == plain[:2] == (4, "up True\n")
        else:
            assert profiled == plain, "no word, and no frame of ours"


def test_wrong_programs_and_options(tmp_path):
    def run(*words):
        return subprocess.run([sys.executable, "-m", "nativeprof", *words], cwd=tmp_path, capture_output=True, text=True)

    for words, said in [
        ([], "missing"),
        (["-o", "no/such/x.svg", "x.py"], "cannot be written"),
        (["-o", "x.unknown", "x.py"], "cannot tell the format"),
        (["-r", "0", "x.py"], "not between"),
        (["x.py"], "can't open file"),
        (["--only", "json", "x.py"], "need --trace times, counts or counts+samples"),
        (["--skip", "json", "--trace", "events", "x.py"], "need --trace times, counts or counts+samples"),
        (["--subtract", "x.py"], "--subtract needs --trace times"),
        (["--subtract", "--trace", "counts", "x.py"], "--subtract needs --trace times"),
        (["--subtract", "--trace", "counts+samples", "x.py"], "--subtract needs --trace times"),
        (["--subtract", "--trace", "events", "x.py"], "--subtract needs --trace times"),
        (["-r", "100", "--trace", "times", "x.py"], "-r/--rate is for samples"),
        (["-r", "100", "--trace", "counts", "x.py"], "-r/--rate is for samples"),
        (["--mode", "cpu", "--trace", "times", "x.py"], "--mode is for samples"),
        (["--mode", "wall", "--trace", "events", "x.py"], "or use --trace counts+samples"),
        (["--threads", "--trace", "events", "x.py"], "--threads has no effect on --trace events"),
    ]:
        done = run(*words)
        assert done.returncode == 2 and said in done.stderr, done


def run_and_fail_to_save(directory, program, *words):
    """Runs a program whose profile cannot be written; returns its exit code and what was said. Its directory for temporary
    files is `temporary`, and has a link to `precious` by the name of the profile."""
    (directory / "temporary").mkdir()
    (directory / "precious").write_text("precious")
    (directory / "temporary" / "out").symlink_to("../precious")
    (directory / "program.py").write_text(program)
    command = [sys.executable, "-m", "nativeprof", *words, "program.py"]
    environment = {**os.environ, "TMPDIR": str(directory / "temporary")}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert (directory / "precious").read_text() == "precious"
    return done.returncode, done.stderr


GONE = "import shutil, sys\nshutil.rmtree('gone')\nsys.exit(3)"


@pytest.mark.parametrize("words", [["-f", "json"], ["-f", "json", "-q"], ["--trace", "events", "-f", "csv"]])
def test_a_profile_is_written_elsewhere_if_its_directory_is_gone(tmp_path, words):
    (tmp_path / "gone").mkdir()
    code, said = run_and_fail_to_save(tmp_path, GONE, "-o", "gone/out", *words)
    output, written = tmp_path / "gone" / "out", tmp_path / "temporary" / "out.2"
    failed = f"nativeprof: {output} could not be written: No such file or directory; the profile is in {written}\n"
    assert code == 3 and failed in said, said
    assert said == failed if "-q" in words else f"written:  {written} (" in said
    assert written.read_text().startswith("time," if "csv" in words else "{")
    assert stat.S_IMODE(written.stat().st_mode) == 0o600


def test_a_profile_is_written_elsewhere_if_the_disk_is_full(tmp_path):
    (tmp_path / "out").symlink_to("/dev/full")
    code, said = run_and_fail_to_save(tmp_path, "", "-q", "-o", "out", "-f", "json")
    assert code == 0 and "could not be written: No space left on device" in said
    assert json.loads((tmp_path / "temporary" / "out.2").read_text())["identifier"] == "root"


def test_a_failed_write_leaves_what_was_there(tmp_path):
    (tmp_path / "out").write_text("old")
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))"
    code, said = run_and_fail_to_save(tmp_path, limit, "-o", "out", "-f", "json")
    assert code == 0 and f"nativeprof: cannot write to {tmp_path / 'out'}: File too large; " in said, said
    assert "free some disk space" in said and "written:  no (File too large)" in said
    assert (tmp_path / "out").read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "precious", "program.py", "temporary"]
    assert [entry.name for entry in (tmp_path / "temporary").iterdir()] == ["out"]


@pytest.mark.parametrize("mode", ["cpu", "wall"])
@repeated
def test_threads_that_start_later_have_names(mode):
    def spin():
        end = time.thread_time() + 0.15
        while time.thread_time() < end:
            pass

    with nativeprof.Profiler(mode=mode, threads=True) as profiler:
        threads = [threading.Thread(target=spin, name="later %d" % number) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    names = [node["description"]["name"] for node in profiler.to_dict()["children"].values()]
    for number in range(3):
        likely(any("(later %d" % number in name for name in names), names)
