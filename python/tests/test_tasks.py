"""`nativeprof.tasks`: calls and time by task, against programs that know what they do."""

import asyncio
import gc
import json
import mmap
import os
import random
import re
import resource
import select
import selectors
import subprocess
import sys
import threading
import time
import types
from collections import Counter

import pytest
from chance import likely, repeated

import nativeprof
from nativeprof import _native, tasks, tracing

PAGE = resource.getpagesize()


@pytest.fixture(autouse=True)
def nothing_runs_afterwards():
    yield
    running = tasks.get_the_profiler()
    if running is not None:
        running.stop()
        pytest.fail("the test left its profiler running")


def profiled(call, bench=tasks.bench, **options):
    """The profiler of a call."""
    profiler = tasks.new_profiler(bench, **options)
    profiler.start()
    try:
        call()
    finally:
        profiler.stop()
    return profiler


def name(function):
    """Short: the function's own name."""
    return function.as_str().split(":")[-2] if isinstance(function, tasks.python_function) else function.as_str()


def calls(profiler, *wanted):
    """{name: calls} of Python functions."""
    found = Counter()
    for function, charge in profiler.charges.items():
        if name(function) in wanted:
            found[name(function)] += charge.calls
    return dict(found)


def edges(profiler, *wanted):
    """{(caller, callee): calls} of Python functions."""
    found = Counter()
    for caller, counts in profiler.call_counts.items():
        for callee, count in counts.get():
            if name(caller) in wanted and name(callee) in wanted:
                found[name(caller), name(callee)] += count
    return dict(found)


def charge(profiler, wanted):
    (found,) = [charge for function, charge in profiler.charges.items() if name(function) == wanted]
    return found


# The program that shrapnel's own test runs: two functions that call one another and themselves, and give way at each
# call, in three coroutines at once. Shrapnel counts 441 calls of the one, 438 of the other and 879 of the third.


class Tak:
    """What it does, without coroutines."""

    def __init__(self):
        self.edges = Counter()

    def run(self):
        for _ in range(3):
            self.call(None, "tak2", 9, 6, 3)
        return dict(self.edges)

    def call(self, caller, own, x, y, z):
        if caller:
            self.edges[caller, own] += 1
        self.edges[own, "yield_slice"] += 1
        if y >= x:
            return z
        other = "tak1" if own == "tak2" else "tak2"
        return self.call(
            own,
            own,
            self.call(own, own, x - 1, y, z),
            self.call(own, other, y - 1, z, x),
            self.call(own, other, z - 1, x, y),
        )


TAK = {"tak1": 438, "tak2": 441, "yield_slice": 879}


def check_tak(profiler):
    assert calls(profiler, *TAK) == TAK
    assert edges(profiler, *TAK) == Tak().run()


async def yield_slice():
    await asyncio.sleep(0)


async def tak1(x, y, z):
    await yield_slice()
    if y >= x:
        return z
    return await tak1(await tak1(x - 1, y, z), await tak2(y - 1, z, x), await tak2(z - 1, x, y))


async def tak2(x, y, z):
    await yield_slice()
    if y >= x:
        return z
    return await tak2(await tak2(x - 1, y, z), await tak1(y - 1, z, x), await tak1(z - 1, x, y))


async def three_taks():
    await asyncio.gather(*[tak2(9, 6, 3) for _ in range(3)])


@pytest.mark.parametrize("builtins", [True, False])
def test_asyncio_has_the_counts_of_shrapnel(builtins):
    profiler = profiled(lambda: asyncio.run(three_taks()), builtins=builtins)
    check_tak(profiler)
    assert profiler.main_bench.ticks > 0
    # Stacks begin with the tasks: nothing of the event loop calls them.
    callers = {name(f) for f, counts in profiler.call_counts.items() for c, _ in counts if name(c) == "tak2"}
    assert callers == {"tak1", "tak2"}


def run_with_uvloop(coroutine):
    uvloop = pytest.importorskip("uvloop")
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def test_uvloop_has_the_counts_of_shrapnel():
    pytest.importorskip("uvloop")
    profiler = profiled(lambda: run_with_uvloop(three_taks()))
    check_tak(profiler)
    assert profiler.main_bench.ticks > 0


def test_tasks_that_are_written_in_python_have_the_counts_of_shrapnel():
    """The C version of `asyncio.Task` may be missing, and subclasses have a step of their own."""

    def main():
        loop = asyncio.new_event_loop()
        loop.set_task_factory(lambda loop, coroutine, **options: asyncio.tasks._PyTask(coroutine, loop=loop, **options))
        loop.run_until_complete(three_taks())
        loop.close()

    check_tak(profiled(main))


def greenlet_taks():
    greenlet = pytest.importorskip("greenlet")
    hub, ready = greenlet.getcurrent(), []

    def yield_slice():
        ready.append(greenlet.getcurrent())
        hub.switch()

    def tak1(x, y, z):
        yield_slice()
        if y >= x:
            return z
        return tak1(tak1(x - 1, y, z), tak2(y - 1, z, x), tak2(z - 1, x, y))

    def tak2(x, y, z):
        yield_slice()
        if y >= x:
            return z
        return tak2(tak2(x - 1, y, z), tak1(y - 1, z, x), tak1(z - 1, x, y))

    def schedule():
        ready.extend(greenlet.greenlet(lambda: tak2(9, 6, 3)) for _ in range(3))
        while ready:
            ready.pop(0).switch()

    return schedule


@pytest.mark.parametrize("builtins", [True, False])
def test_greenlets_have_the_counts_of_shrapnel(builtins):
    profiler = profiled(greenlet_taks(), builtins=builtins)
    check_tak(profiler)
    # Each greenlet has a stack of its own.
    assert edges(profiler, "schedule", "<lambda>", "tak2")[("<lambda>", "tak2")] == 3
    assert ("schedule", "<lambda>") not in edges(profiler, "schedule", "<lambda>")


GEVENT = """
import gevent
from nativeprof import tasks
import test_tasks

def yield_slice():
    gevent.sleep(0)

def tak1(x, y, z):
    yield_slice()
    if y >= x:
        return z
    return tak1(tak1(x - 1, y, z), tak2(y - 1, z, x), tak2(z - 1, x, y))

def tak2(x, y, z):
    yield_slice()
    if y >= x:
        return z
    return tak2(tak2(x - 1, y, z), tak1(y - 1, z, x), tak1(z - 1, x, y))

def main():
    gevent.joinall([gevent.spawn(tak2, 9, 6, 3) for _ in range(3)])
    gevent.sleep(0.5)

gevent.sleep(0)  # the hub runs before the profiler
profiler = test_tasks.profiled(main)
test_tasks.check_tak(profiler)
assert profiler.main_bench.ticks > 0
assert profiler.wait_bench.ticks > 0.45e9, profiler.wait_bench
"""


def test_gevent_has_the_counts_of_shrapnel():
    pytest.importorskip("gevent")
    run(GEVENT)


def run(program, *arguments):
    """A program in an interpreter of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_generators_that_are_driven_by_hand_have_the_counts_of_shrapnel():
    def yield_slice():
        yield

    def tak1(x, y, z):
        yield from yield_slice()
        if y >= x:
            return z
        return (yield from tak1((yield from tak1(x - 1, y, z)), (yield from tak2(y - 1, z, x)), (yield from tak2(z - 1, x, y))))

    def tak2(x, y, z):
        yield from yield_slice()
        if y >= x:
            return z
        return (yield from tak2((yield from tak2(x - 1, y, z)), (yield from tak1(y - 1, z, x)), (yield from tak1(z - 1, x, y))))

    def schedule():
        ready = [tak2(9, 6, 3) for _ in range(3)]
        while ready:
            task = ready.pop(0)
            try:
                task.send(None)
            except StopIteration:
                continue
            ready.append(task)

    profiler = profiled(schedule, builtins=False)
    check_tak(profiler)
    assert edges(profiler, "schedule", "tak2")[("schedule", "tak2")] == 3
    check_tak(profiled(schedule))


# Random programs of tasks


class Program:
    """Tasks that call, await, raise, start others and are cancelled, and that note each call."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.edges = Counter()
        self.calls = Counter()
        self.started = 0
        self.coroutines = [self.coroutine(i) for i in range(4)]
        self.plains = [self.plain(i) for i in range(4)]

    def note(self, caller, callee):
        self.calls[callee] += 1
        if caller:
            self.edges[caller, callee] += 1

    def coroutine(self, number):
        async def f(caller, depth, own):
            self.note(caller, own)
            for _ in range(self.random.randrange(4)):
                choice = self.random.random()
                if choice < 0.2:
                    await asyncio.sleep(0)
                elif choice < 0.3:
                    raise ZeroDivisionError
                elif choice < 0.4 and self.started < 30:
                    self.started += 1
                    task = asyncio.ensure_future(self.pick(True)(None, depth - 1))
                    if choice < 0.35:
                        task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                elif depth > 0:
                    callee = self.pick()
                    try:
                        result = callee(own, depth - 1)
                        if callee in self.coroutines:
                            await result
                    except ZeroDivisionError:
                        if choice > 0.8:
                            raise

        return self.named(f, f"coroutine{number}")

    def plain(self, number):
        def f(caller, depth, own):
            self.note(caller, own)
            for _ in range(self.random.randrange(3)):
                if self.random.random() < 0.1:
                    raise ZeroDivisionError
                if depth > 0:
                    self.pick(False)(own, depth - 1)

        return self.named(f, f"plain{number}")

    def named(self, f, own):
        """The function under a name of its own, which its code has too."""
        return types.FunctionType(f.__code__.replace(co_name=own), f.__globals__, own, (own,), f.__closure__)

    def pick(self, is_coroutine=None):
        every = self.coroutines + self.plains
        return self.random.choice({None: every, True: self.coroutines, False: self.plains}[is_coroutine])

    async def main(self):
        first = [self.pick(True)(None, 5) for _ in range(8)]
        await asyncio.gather(*first, return_exceptions=True)


@pytest.mark.parametrize("seed", range(25))
def test_random_tasks_have_the_calls_that_they_note(seed):
    program = Program(seed)
    profiler = profiled(lambda: asyncio.run(program.main()), builtins=seed % 2 == 0)
    names = [f.__name__ for f in program.coroutines + program.plains]
    assert calls(profiler, *names) == dict(program.calls)
    assert edges(profiler, *names) == dict(program.edges)


# Waits


class TimedEpoll:
    """Measures the waits of an event loop."""

    def __init__(self, inner):
        self.inner, self.waited = inner, 0.0

    def poll(self, *arguments):
        begin = time.perf_counter()
        try:
            return self.inner.poll(*arguments)
        finally:
            self.waited += time.perf_counter() - begin

    def __getattr__(self, name):
        return getattr(self.inner, name)


async def sleeper():
    for _ in range(5):
        await asyncio.sleep(0.03)


async def sleepers():
    await asyncio.gather(*[sleeper() for _ in range(3)])


@pytest.mark.alone
@repeated
def test_the_wait_is_what_the_program_measures():
    selector = selectors.EpollSelector()
    timed = selector._selector = TimedEpoll(selector._selector)
    loop = asyncio.SelectorEventLoop(selector)
    _, before = off_cpu()
    try:
        profiler = profiled(lambda: loop.run_until_complete(sleepers()))
    finally:
        loop.close()
    _, after = off_cpu()
    likely(timed.waited > 0.1, timed.waited)
    # The program's measurement includes times in which its thread was ready and had no CPU.
    found = profiler.wait_bench.ticks / 1e9
    assert found <= timed.waited
    likely(found >= 0.98 * timed.waited - (after - before), found, timed.waited)


def off_cpu():
    """Seconds that this thread has run, and that it was ready to run and did not."""
    with open("/proc/thread-self/schedstat") as file:
        ran, ready, _ = file.read().split()
    return int(ran) / 1e9, int(ready) / 1e9


@pytest.mark.alone
@pytest.mark.parametrize("runner", [asyncio.run, run_with_uvloop])
@repeated
def test_the_wait_is_what_the_kernel_measures(runner):
    if runner is run_with_uvloop:
        pytest.importorskip("uvloop")
    # The kernel's figures of a running thread may be a timer tick old: after a sleep they are not.
    time.sleep(0.001)
    before, begin = off_cpu(), time.perf_counter()
    profiler = profiled(lambda: runner(sleepers()))
    wall, after = time.perf_counter() - begin, off_cpu()
    ran, ready = after[0] - before[0], after[1] - before[1]
    waited = profiler.wait_bench.ticks / 1e9
    assert profiler.main_bench.ticks > 0
    # The thread sleeps in waits only; having been woken it may have to wait for a CPU in them. Between the readings of the
    # two clocks a busy machine may take the CPU away.
    likely(0.98 * (wall - ran - ready) <= waited <= 1.02 * (wall - ran), wall, ran, ready, waited)


def poll_for(seconds):
    poll = select.poll()
    poll.poll(seconds * 1000)


def select_for(seconds):
    select.select([], [], [], seconds)


def epoll_for(seconds):
    with select.epoll() as epoll:
        epoll.poll(seconds)


@pytest.mark.parametrize("wait", [poll_for, select_for, epoll_for])
@repeated
def test_waits_of_functions_are_below_them(wait):
    async def blocks():
        wait(0.05)

    profiler = profiled(lambda: asyncio.run(blocks()))
    assert charge(profiler, wait.__name__).aggregate_ticks >= 49e6
    likely(charge(profiler, wait.__name__).ticks < 49e6, charge(profiler, wait.__name__))
    assert charge(profiler, "blocks").aggregate_ticks >= 49e6
    assert profiler.wait_bench.ticks >= 49e6
    profile = profiler.profile.to_dict()
    path = [key for key in find(profile, "<wait>") if "<low-level>" not in key.split(";")[1]]
    assert [key.split(";")[0] for key in path] == ["blocks", wait.__name__]


def find(node, wanted, above=()):
    """Identifiers above the node with the most wall time of those with this name."""
    best, place = -1, None
    work = [(node, above)]
    while work:
        node, above = work.pop()
        if node["description"]["name"] == wanted and node["values"].get("wall_ns", 0) > best:
            best, place = node["values"]["wall_ns"], above
        for key, child in node["children"].items():
            work.append((child, (*above, key) if child["description"]["name"] != wanted else above))
    return place


@repeated
def test_waits_of_other_threads_are_counted_where_they_wait():
    """The profiler stops while the thread waits."""
    reading, writing = os.pipe()
    entered = threading.Event()

    def wait():
        entered.set()
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        poll.poll()

    thread = threading.Thread(target=wait)
    profiler = tasks.new_profiler()
    profiler.start()
    begin = time.perf_counter()
    thread.start()
    entered.wait()
    # Not by `time.sleep`, which is a `select` before 3.11.
    threading.Event().wait(0.05)
    profiler.stop()
    wall = time.perf_counter() - begin
    os.write(writing, b".")
    thread.join()
    os.close(reading), os.close(writing)
    assert profiler.wait_bench.ticks <= wall * 1e9
    likely(profiler.wait_bench.ticks > 0, wall)


# Time


@pytest.mark.alone
@repeated
def test_everything_inside_of_functions_is_charged_once():
    def outer():
        asyncio.run(sleepers())

    profiler = profiled(outer)
    total = profiler.counter.ticks - profiler.start_ticks
    charged = sum(charge.ticks for charge in profiler.charges.values())
    # Rounded down, one by one.
    assert charged <= total
    likely(charged >= 0.97 * total, charged, total)
    whole = profiler.profile.to_dict()["values"]["wall_ns"]
    assert whole - 2000 <= charged <= whole + 2000


SUSPENDED_IN_PYTHON = """
import asyncio
from nativeprof import tasks

# As nest_asyncio does.
asyncio.Task = asyncio.tasks._CTask = asyncio.tasks.Task = asyncio.tasks._PyTask
asyncio.Future = asyncio.futures._CFuture = asyncio.futures.Future = asyncio.futures._PyFuture

async def waits():
    await asyncio.sleep(0.05)

async def main():
    await asyncio.ensure_future(waits())

profiler = tasks.new_profiler(tasks.bench)
profiler.start()
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
profiler.stop()
print(sum(charge.suspended_ticks for charge in profiler.charges.values()))
"""


def test_suspended_time_of_tasks_in_python():
    # Both tasks are suspended for as long as the inner one sleeps.
    assert int(run(SUSPENDED_IN_PYTHON)) >= 2 * 49e6


@repeated
def test_suspended_time_is_apart():
    async def inner():
        await asyncio.sleep(0.05)

    async def outer():
        await inner()

    profiler = profiled(lambda: asyncio.run(outer()))
    likely(charge(profiler, "sleep").suspended_ticks >= 49e6, profiler.charges)
    assert charge(profiler, "inner").suspended_ticks == charge(profiler, "outer").suspended_ticks == 0
    # Running time, of which the sleep is no part.
    assert charge(profiler, "outer").aggregate_ticks + profiler.wait_bench.ticks < profiler.counter.ticks
    likely(profiler.wait_bench.ticks >= 0.9 * charge(profiler, "sleep").suspended_ticks - 5e6, profiler.wait_bench.ticks)
    likely(charge(profiler, "outer").aggregate_ticks < charge(profiler, "sleep").suspended_ticks, profiler.charges)


def test_aggregates_count_outermost_activations():
    def even(n):
        return True if n == 0 else odd(n - 1)

    def odd(n):
        return False if n == 0 else even(n - 1)

    def main():
        even(100)

    profiler = profiled(main)
    whole = charge(profiler, "main").aggregate_ticks
    own = sum(charge(profiler, f).ticks for f in ("even", "odd"))
    assert charge(profiler, "even").aggregate_ticks <= whole
    assert charge(profiler, "odd").aggregate_ticks <= charge(profiler, "even").aggregate_ticks
    assert charge(profiler, "even").aggregate_ticks == pytest.approx(own, abs=3)
    assert edges(profiler, "even", "odd") == {("even", "odd"): 50, ("odd", "even"): 50}


def test_functions_that_are_open_at_the_stop_are_charged():
    profiler = tasks.new_profiler()

    def inner():
        profiler.stop()

    def outer():
        inner()

    profiler.start()
    outer()
    assert calls(profiler, "inner", "outer") == {"inner": 1, "outer": 1}
    assert charge(profiler, "outer").aggregate_ticks >= charge(profiler, "inner").aggregate_ticks > 0


# What is a task's stack, and what is not


@repeated
def test_a_profiler_may_start_and_stop_inside_of_a_task():
    async def before():
        profiler.start()
        await asyncio.gather(worker(), worker())
        await asyncio.sleep(0.02)
        profiler.stop()

    async def worker():
        await yield_slice()

    profiler = tasks.new_profiler()
    asyncio.run(before())
    assert calls(profiler, "worker", "yield_slice") == {"worker": 2, "yield_slice": 2}
    assert edges(profiler, "worker", "yield_slice") == {("worker", "yield_slice"): 2}
    assert profiler.main_bench.ticks > 0
    # Shorter if another program has the CPU before the wait begins.
    likely(profiler.wait_bench.ticks >= 19e6, profiler.wait_bench)


@pytest.mark.parametrize("runner", [asyncio.run, run_with_uvloop])
def test_callbacks_begin_stacks_too(runner):
    if runner is run_with_uvloop:
        pytest.importorskip("uvloop")

    def callback(done):
        helper()
        done.set_result(None)

    def helper():
        pass

    async def main():
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        loop.call_later(0.001, callback, done)
        await done

    def after():
        helper()

    def whole():
        runner(main())
        after()

    profiler = profiled(whole)
    assert edges(profiler, "whole", "callback", "helper", "after", "main") == {
        ("callback", "helper"): 1,
        ("after", "helper"): 1,
        ("whole", "after"): 1,
    }


def test_eager_tasks_have_stacks_of_their_own():
    if not hasattr(asyncio, "eager_task_factory"):
        assert sys.version_info < (3, 12)  # tasks are never eager
        return

    async def eager():
        helper()
        await asyncio.sleep(0)
        helper()

    def helper():
        pass

    def starts():
        task = asyncio.create_task(eager())
        helper()
        return task

    async def main():
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        await starts()

    profiler = profiled(lambda: asyncio.run(main()))
    assert edges(profiler, "main", "starts", "eager", "helper") == {
        ("main", "starts"): 1,
        ("starts", "helper"): 1,
        ("eager", "helper"): 2,
    }


def test_asynchronous_generators_and_context_managers():
    async def numbers():
        for i in range(3):
            await asyncio.sleep(0)
            yield helper(i)

    def helper(i):
        return i

    class Manager:
        async def __aenter__(self):
            await asyncio.sleep(0)

        async def __aexit__(self, *_):
            helper(0)

    async def main():
        async with Manager():
            return [i async for i in numbers()]

    profiler = profiled(lambda: asyncio.run(main()))
    wanted = ("main", "numbers", "helper", "__aenter__", "__aexit__")
    assert calls(profiler, "main", "numbers", "helper", "__aenter__", "__aexit__") == {
        "main": 1,
        "numbers": 1,
        "helper": 4,
        "__aenter__": 1,
        "__aexit__": 1,
    }
    found = edges(profiler, *wanted, "<listcomp>")
    assert found[("numbers", "helper")] == 3 and found[("__aexit__", "helper")] == 1


def test_cancelled_tasks_leave_nothing_behind():
    async def never():
        try:
            await asyncio.sleep(1000)
        finally:
            helper()

    def helper():
        pass

    async def main():
        for _ in range(10):
            task = asyncio.ensure_future(never())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            helper()
        try:
            await asyncio.wait_for(never(), 0.001)
        except asyncio.TimeoutError:
            helper()

    profiler = profiled(lambda: asyncio.run(main()))
    found = edges(profiler, "main", "helper", "never")
    assert (found["never", "helper"], found["main", "helper"]) == (11, 11)


def test_threads_have_stacks_of_their_own():
    def job(n):
        return helper(n)

    def helper(n):
        return n

    async def main():
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*[loop.run_in_executor(None, job, i) for i in range(20)])

    profiler = profiled(lambda: asyncio.run(main()))
    assert calls(profiler, "job", "helper") == {"job": 20, "helper": 20}
    assert edges(profiler, "main", "job", "helper") == {("job", "helper"): 20}


def test_several_loops_in_several_threads():
    def loop():
        asyncio.run(three_taks())

    def main():
        threads = [threading.Thread(target=loop) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    profiler = profiled(main)
    assert calls(profiler, *TAK) == {name: 3 * count for name, count in TAK.items()}
    assert edges(profiler, *TAK) == {pair: 3 * count for pair, count in Tak().run().items()}


# Bench classes


def test_a_bench_class_of_the_users():
    made = [0]

    class made_bench(tasks.bench):
        values = (("made", "count"), ("size", "bytes"))

        @staticmethod
        def measure():
            return made[0], 10 * made[0]

    def inner():
        made[0] += 5

    async def outer():
        made[0] += 2
        await asyncio.sleep(0)
        inner()
        made[0] += 1

    profiler = profiled(lambda: asyncio.run(outer()), made_bench)
    found = charge(profiler, "outer")
    assert type(found) is made_bench
    assert (found.made, found.aggregate_made, found.size, found.aggregate_size) == (3, 8, 30, 80)
    assert charge(profiler, "inner").made == 5
    assert found.get_headings() == ("ticks", "made", "size")
    assert found.get_data() == (1, (found.ticks, 3, 30), (found.aggregate_ticks, 8, 80))
    tree = profiler.profile.to_dict()
    assert tree["values"]["made"] == 8 and tree["values"]["size_bytes"] == 80
    with pytest.raises(AttributeError):
        found.other


def test_a_bench_class_that_fails_is_reported_and_time_goes_on(capfd):
    script = """
from nativeprof import tasks
class bad(tasks.bench):
    values = (("x", "count"),)
    @staticmethod
    def measure():
        raise KeyError("measured")
def work():
    pass
p = tasks.new_profiler(bad)
p.start()
work()
p.stop()
(found,) = [c for f, c in p.charges.items() if ":work:" in f.as_str()]
assert found.calls == 1 and 0 <= found.ticks < 60e9 and found.x == 0
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "KeyError: 'measured'" in done.stderr


def touch(pages):
    """Touches so many new pages."""
    with mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(memory, "madvise"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, pages * PAGE, PAGE):
            memory[at] = 1


def test_resources_are_those_of_the_thread():
    def toucher():
        touch(300)

    async def spinner():
        before = resource.getrusage(resource.RUSAGE_THREAD)
        while resource.getrusage(resource.RUSAGE_THREAD).ru_utime - before.ru_utime < 0.05:
            pass
        thread = threading.Thread(target=toucher)
        thread.start()
        thread.join()

    profiler = profiled(lambda: asyncio.run(spinner()), tasks.rusage_bench)
    found = charge(profiler, "toucher")
    assert 300 <= found.aggregate_ru.minflt < 400
    spun = charge(profiler, "spinner")
    assert spun.aggregate_ru.utime >= 0.049
    assert spun.aggregate_ru.minflt < 300
    assert spun.aggregate_utime == spun.aggregate_ru.utime
    assert found.get_headings()[:3] == ("ticks", "utime", "stime")
    tree = profiler.profile.to_dict()
    assert tree["values"]["cpu_ns"] >= 49e6 and tree["values"]["minor_faults"] >= 300


# The interface


def test_names_and_attributes():
    assert tasks.get_the_profiler() is None
    profiler = tasks.new_profiler()
    assert profiler.bench_class is tasks.bench
    assert {f.as_str() for f in profiler.charges} == {"<main>", "<wait>"}
    profiler.start()
    assert tasks.get_the_profiler() is profiler
    with pytest.raises(SystemError, match="already active"):
        tasks.new_profiler()
    poll_for(0)
    during = profiler.charges
    total = profiler.stop()
    assert tasks.get_the_profiler() is None
    assert total == profiler.counter.ticks - profiler.start_ticks > 0
    assert poll_for.__code__ in {f.code for f in during if isinstance(f, tasks.python_function)}
    cached = profiler.func_cache[id(poll_for.__code__)]
    assert cached in profiler.charges and hash(cached) == hash(tasks.python_function(poll_for.__code__))
    place = os.path.join(os.path.basename(os.path.dirname(__file__)), "test_tasks.py")
    assert cached.as_str() == f"{place}:poll_for:{poll_for.__code__.co_firstlineno}"
    counts = dict(profiler.call_counts[cached].get())
    assert {f.as_str(): n for f, n in counts.items()} == {"select:poll": 1, "select.poll.poll": 1}
    assert profiler.main_bench.calls == 0 and profiler.wait_bench.calls == 1
    with pytest.raises(RuntimeError, match=r"is not running; call start\(\) first"):
        profiler.stop()
    with pytest.raises(TypeError, match="bench class"):
        tasks.new_profiler(int)


def test_a_second_run_sees_nothing_of_the_first():
    async def first():
        second = asyncio.ensure_future(suspended())
        await asyncio.sleep(0)
        profiler.stop()
        other.start()
        await second
        other.stop()

    async def suspended():
        await asyncio.sleep(0.001)
        helper()

    def helper():
        pass

    profiler, other = tasks.new_profiler(tasks.bench), tasks.new_profiler(tasks.rusage_bench)
    profiler.start()
    asyncio.run(first())
    assert calls(profiler, "first", "suspended", "helper") == {"first": 1, "suspended": 1}
    assert calls(other, "first", "suspended", "helper") == {"first": 0, "suspended": 0, "helper": 1}
    profiler.start()
    profiler.stop()
    assert calls(profiler, "first", "suspended", "helper") == {}


def test_one_tool_at_a_time():
    other = tracing.Profile()
    other.enable()
    try:
        profiler = tasks.new_profiler()
        with pytest.raises(ValueError, match="already active"):
            profiler.start()
    finally:
        other.disable()
    assert tasks.get_the_profiler() is None
    profiler.start()
    profiler.stop()


def test_go_runs_and_saves(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = tmp_path / "tak.json"

    async def add(a, b):
        await asyncio.sleep(0)
        return a + b

    assert tasks.go(add, 1, b=2, profile_filename=file) == 3
    assert tasks.go(lambda: 7, profile_bench=tasks.bench) == 7
    assert (tmp_path / "nativeprof_tasks.json").stat().st_size > 0
    tree = json.loads(file.read_text())
    assert tree["nativeprof"]["event"] == "calls"
    assert {"add", "<main>"} <= {child["description"]["name"] for child in tree["children"].values()}
    with pytest.raises(ZeroDivisionError):
        tasks.go(lambda: 1 / 0, profile_filename=file)
    assert "<lambda>" in file.read_text()
    with pytest.raises(ValueError, match="cannot tell the format"):
        tasks.go(lambda: 1 / 0, profile_filename=tmp_path / "x.unknown")
    assert tasks.get_the_profiler() is None
    assert _native.read(file.read_bytes()).stats()["counts"] == "calls"


def test_a_profile_that_cannot_be_saved_is_kept_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tasks.start()
    sum(range(1000))
    with pytest.raises(ValueError, match="cannot tell the format"):
        tasks.stop(tmp_path / "x.unknown")
    with pytest.raises(OSError, match=r"No such file or directory; the profile is in .*x\.json") as error:
        tasks.stop(tmp_path / "no" / "x.json")
    kept = re.search(r"the profile is in ([^']*)", error.value.strerror).group(1)
    with open(kept, encoding="utf-8") as file:
        assert json.load(file)["identifier"] == "root"
    assert tasks.get_the_profiler() is None


def test_a_profile_is_the_same_tree_in_another_place(tmp_path):
    """The report, and a comparison that does not mind where functions are."""
    source = "async def f():\n    g()\n\ndef g():\n    pass\n"
    names = []
    for moved in (0, 7):
        names.append({})
        exec(compile("\n" * moved + source, str(tmp_path / "program.py"), "exec"), names[-1])
    for number, scope in enumerate(names):
        profiled(lambda: asyncio.run(scope["f"]())).save(tmp_path / f"{number}.json")
    command = os.path.join(os.path.dirname(sys.executable), "nativeprof")
    diff = [command, "diff", str(tmp_path / "0.json"), str(tmp_path / "1.json"), "--all", "--value", "calls"]
    done = subprocess.run(diff, capture_output=True, text=True, env={**os.environ, "COLUMNS": "400"})
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "program.py" in line]
    assert len(rows) == 2 and all(row[0] == row[1] and row[2] == "+0" for row in rows), done.stdout
    words = ["report", str(tmp_path / "0.json"), "--value", "wall", "--by", "function", "<main>"]
    report = subprocess.run([command, *words], capture_output=True, text=True)
    assert report.returncode == 0 and "<main>" in report.stdout, report.stdout + report.stderr


def test_objects_are_let_go():
    class Big:
        pass

    def work():
        Big()

    before = len([o for o in gc.get_objects() if isinstance(o, Big)])
    profiler = profiled(work)
    gc.collect()
    assert len([o for o in gc.get_objects() if isinstance(o, Big)]) == before
    del profiler


# Greenlets in the other profilers


def test_tracing_has_right_callers_with_greenlets():
    schedule = greenlet_taks()
    profile = tracing.Profile()
    begin = time.perf_counter()
    profile.enable()
    schedule()
    profile.disable()
    wall = time.perf_counter() - begin
    profile.create_stats()
    found = {}
    for (_, _, callee), row in profile.stats.items():
        for (_, _, caller), figures in row[4].items():
            if caller in TAK and callee in TAK:
                found[caller, callee] = figures[0]
    assert found == Tak().run()
    # Time that passes in other greenlets belongs to no function on the stack.
    assert sum(row[2] for row in profile.stats.values()) <= wall


def test_call_trees_have_a_stack_for_each_greenlet():
    schedule = greenlet_taks()
    with nativeprof.Profiler(mode="calls", cpu=True) as profiler:
        schedule()
    tree = profiler.to_dict()
    top = {node["description"]["name"]: node for node in tree["children"].values()}
    (below,) = [n for n in top["<lambda>"]["children"].values() if n["description"]["filename"] == __file__]
    assert below["description"]["name"] == "tak2"
    assert not any(n["description"]["filename"] == __file__ for n in top["schedule"]["children"].values())
    own = Counter()
    work = list(tree["children"].values())
    while work:
        node = work.pop()
        children = list(node["children"].values())
        own[node["description"]["name"]] += node["count"] - sum(child["count"] for child in children)
        work.extend(children)
    assert {name: own[name] for name in TAK} == TAK


def test_the_timeline_has_right_callers_with_greenlets():
    greenlet = pytest.importorskip("greenlet")
    from nativeprof.events import EventProfiler

    schedule = greenlet_taks()
    profiler = EventProfiler(size=100_000, python=False, native=False)
    profiler.start()
    schedule()
    profiler.stop()
    table = profiler.retrieve_results()
    rows = zip(*(list(table[column]) for column in ("event", "name", "from_name")))
    found = Counter((caller, own) for event, own, caller in rows if event == "call" and own in TAK and caller in TAK)
    assert found == Tak().run()
    assert greenlet.gettrace() is None


def test_a_trace_function_of_greenlets_is_called_and_comes_back():
    greenlet = pytest.importorskip("greenlet")
    seen = []

    def trace(event, greenlets):
        seen.append(event)

    def child():
        return 1

    greenlet.settrace(trace)
    try:
        profiler = profiled(lambda: greenlet.greenlet(child).switch())
        assert seen == ["switch", "switch"]
        assert calls(profiler, "child") == {"child": 1}
        assert greenlet.gettrace() is trace
    finally:
        greenlet.settrace(None)


def test_trace_functions_of_other_threads_go_away_after_the_stop():
    greenlet = pytest.importorskip("greenlet")
    started, stopped = threading.Event(), threading.Event()
    traces = []

    def thread():
        greenlet.greenlet(child).switch()
        traces.append(greenlet.gettrace())
        started.set()
        stopped.wait()
        greenlet.greenlet(child).switch()
        traces.append(greenlet.gettrace())

    def child():
        pass

    other = threading.Thread(target=thread)
    profiler = tasks.new_profiler()
    profiler.start()
    other.start()
    started.wait()
    profiler.stop()
    stopped.set()
    other.join()
    assert traces[0] is not None and traces[1] is None
    assert calls(profiler, "child") == {"child": 1}


def test_greenlets_that_are_imported_while_it_runs():
    pytest.importorskip("greenlet")
    program = """
import sys
from nativeprof import tasks
import test_tasks
assert "greenlet" not in sys.modules
def main():
    return test_tasks.greenlet_taks()()
test_tasks.check_tak(test_tasks.profiled(main))
"""
    run(program)
