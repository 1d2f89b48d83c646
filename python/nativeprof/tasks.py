"""The per-task profiler: time of each coroutine's or greenlet's own stack, with the event loop and its waits as entries.

::

    result = go(main)                  # runs main() or main itself as a coroutine, and writes the profile
    profiler = new_profiler(rusage_bench)
    profiler.start()
    work()
    total = profiler.stop()            # ns
    profiler.charges                   # {function: bench}
    profiler.call_counts               # {caller: call_counts_object}
    profiler.save("tasks.json")        # for nativeprof report, diff, export

The interface is that of shrapnel's ``coro.profiler`` (``_profiler``), for tasks of asyncio (with any event loop, uvloop's
for one), greenlets (so gevent too) and generators that are driven by hand.

What is charged to what:

- A task's stack begins with its coroutine. Time counts for the functions on the stack of the task that runs, *self* for
  the innermost one, *aggregate* for the outermost activation of each. A suspended task has no part in the time that
  passes; how long it was suspended is in ``suspended_ticks`` of the function that suspended it.
- ``<main>`` is the event loop between tasks: its own code, and that of the standard library for its callbacks.
- ``<wait>`` is the time in ``epoll_wait``, ``poll``, ``select`` and their variants, whatever called them.
- A call is counted when a function starts; a coroutine that is resumed is not called again.
- What runs outside of all functions that were called since the start is charged to no function.

Times are in ns. All threads are seen.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import re
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any, Callable, ClassVar, NamedTuple

from . import _files, _native, _overhead
from .events import _function
from .profiler import Profile

__all__ = [
    "bench",
    "c_function",
    "call_counts_object",
    "function",
    "get_the_profiler",
    "go",
    "internal_function",
    "new_profiler",
    "python_function",
    "rusage",
    "rusage_bench",
    "start",
    "stop",
]

_LIBRARY = os.path.dirname(os.__file__)


class bench:
    """What was charged to a function: calls and time.

    A class of one's own that measures more names the values, with their units (``count``, ``nanoseconds``, ``bytes``),
    and reads them: numbers that only differences are taken of. It is called for each event, at its cost::

        class blocks_bench(bench):
            values = (("blocks", "count"),)

            @staticmethod
            def measure():
                return (sys.getallocatedblocks(),)

    Values are attributes of the bench: ``blocks``, ``aggregate_blocks``. They are read at calls and returns; what passes
    in a function that waits counts for ``<wait>``.
    """

    #: Names and units of the values in addition to time.
    values: ClassVar[tuple[tuple[str, str], ...]] = ()
    #: Returns one number for each of :attr:`values`.
    measure: ClassVar[Callable[[], tuple[float, ...]] | None] = None

    def __init__(
        self,
        calls: int = 0,
        ticks: int = 0,
        aggregate_ticks: int = 0,
        suspended_ticks: int = 0,
        own: tuple[float, ...] = (),
        aggregate: tuple[float, ...] = (),
    ) -> None:
        #: How often the function was called; of ``<wait>``: waits.
        self.calls = calls
        #: ns in it alone.
        self.ticks = ticks
        #: ns in it and in what it called.
        self.aggregate_ticks = aggregate_ticks
        #: ns for which its task was suspended in it.
        self.suspended_ticks = suspended_ticks
        missing = (0.0,) * (len(self.values) - len(own))
        self._own, self._aggregate = tuple(own) + missing, tuple(aggregate) + missing

    def __getattr__(self, name: str) -> float:
        if not name.startswith("_"):
            is_aggregate = name.startswith("aggregate_")
            amounts = self._aggregate if is_aggregate else self._own
            for (value, _), amount in zip(self.values, amounts):
                if value == name[len("aggregate_") if is_aggregate else 0 :]:
                    return amount
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_data(self) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
        """Calls, own values and aggregate values, time first."""
        return self.calls, (self.ticks, *self._own), (self.aggregate_ticks, *self._aggregate)

    @classmethod
    def get_headings(cls) -> tuple[str, ...]:
        """Names of the values, ``ticks`` first."""
        return ("ticks", *(name for name, _ in cls.values))

    def __repr__(self) -> str:
        headings, (calls, own, aggregate) = self.get_headings(), self.get_data()
        text = ", ".join(f"{h}={o:.10g} ({a:.10g})" for h, o, a in zip(headings, own, aggregate))
        return f"<{type(self).__name__}: calls={calls}, {text}>"


class rusage(NamedTuple):
    """Resource usage of a thread (``RUSAGE_THREAD``): CPU time in s, page faults, block operations, context switches."""

    utime: float
    stime: float
    minflt: float
    majflt: float
    inblock: float
    oublock: float
    nvcsw: float
    nivcsw: float


class rusage_bench(bench):
    """Time and the thread's resource usage: a system call for each event."""

    values = tuple((name, "nanoseconds" if name.endswith("time") else "count") for name in rusage._fields)

    @staticmethod
    def _in_seconds(values: tuple[float, ...]) -> rusage:
        return rusage(values[0] / 1e9, values[1] / 1e9, *values[2:])

    @property
    def ru(self) -> rusage:
        """Of the function alone."""
        return self._in_seconds(self._own)

    @property
    def aggregate_ru(self) -> rusage:
        """Of the function and what it called."""
        return self._in_seconds(self._aggregate)

    def __getattr__(self, name: str) -> float:
        field: float
        if name in rusage._fields:
            field = getattr(self.ru, name)
            return field
        if name.startswith("aggregate_") and name[len("aggregate_") :] in rusage._fields:
            field = getattr(self.aggregate_ru, name[len("aggregate_") :])
            return field
        return super().__getattr__(name)

    def get_data(self) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
        return self.calls, (self.ticks, *self.ru), (self.aggregate_ticks, *self.aggregate_ru)


class function:
    """What time is charged to. Two are equal if they represent the same code."""

    def __init__(self, key: Any) -> None:
        self._key = key

    def as_str(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.as_str()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __lt__(self, other: function) -> bool:
        return self.as_str() < other.as_str()


class internal_function(function):
    """``<main>`` or ``<wait>``."""

    def as_str(self) -> str:
        return str(self._key)


class python_function(function):
    """A function that is written in Python. :ivar code: its code object."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self.code = code

    # Code objects are equal by their contents; these are as different as the objects.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, python_function) and self.code is other.code

    def __hash__(self) -> int:
        return hash(id(self.code))

    def as_str(self) -> str:
        directory, file = os.path.split(self.code.co_filename)
        place = os.path.join(os.path.basename(directory), file)
        return f"{place}:{self.code.co_name}:{self.code.co_firstlineno}"


class c_function(function):
    """A function that is written in C. :ivar text: as ``cProfile`` shows it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def as_str(self) -> str:
        # A method whose name is that of a Python function: cProfile's text has its address.
        python = re.match(r"<function (.*) at 0x[0-9a-f]+>$", self.text)
        if python:
            return python[1]
        found = _function(self.text, False)
        return f"{found.mod}:{found.name}" if found.mod else found.name


class call_counts_object:
    """How often a function called others."""

    def __init__(self) -> None:
        self._counts: dict[function, int] = {}

    def _add(self, callee: function, count: int) -> None:
        self._counts[callee] = self._counts.get(callee, 0) + count

    def get(self) -> tuple[tuple[function, int], ...]:
        """Callee and number of calls, in the order of first calls."""
        return tuple(self._counts.items())

    def __iter__(self) -> Iterator[tuple[function, int]]:
        return iter(self.get())

    def __len__(self) -> int:
        return len(self._counts)

    def __repr__(self) -> str:
        return f"<call_counts: {self._counts}>"


MAIN = internal_function("<main>")
WAIT = internal_function("<wait>")

_the_profiler: _profiler | None = None


class _profiler:
    """A profiler of tasks. Made by :func:`new_profiler`.

    :ivar bench_class: what is measured.
    """

    def __init__(self, bench_class: type[bench] = bench, builtins: bool = True) -> None:
        if not (isinstance(bench_class, type) and issubclass(bench_class, bench)):
            raise TypeError(f"a bench class must be bench, rusage_bench or a class derived from one, got {bench_class!r}")
        self._measure: Any = bench_class.measure
        if self._measure is None:
            self._measure = "rusage" if issubclass(bench_class, rusage_bench) else "time"
        self.bench_class = bench_class
        self._builtins = bool(builtins)
        self._recorder: _native.TaskRecorder | None = None
        #: Functions that were shown and are still in use, by key. Each keeps its code object, and so its key.
        self._shown: weakref.WeakValueDictionary[int, function] = weakref.WeakValueDictionary()

    def start(self) -> None:
        """Starts. What an earlier run of this profiler gathered is dropped.

        :raises SystemError: another one is active.
        """
        global _the_profiler
        if _the_profiler is not None:
            raise SystemError("Another profiler is already active: stop it first.")
        recorder = self._make(True)
        # Another tool that is active is refused by the start, not by the measurement.
        costs = (0.0, 0.0, 0.0) if _native.is_tracing() else self._costs()
        atexit.register(self._abandon)
        self._shown = weakref.WeakValueDictionary()
        self._recorder, _the_profiler = recorder, self
        try:
            recorder.start(costs)
        except BaseException:
            self._recorder = _the_profiler = None
            atexit.unregister(self._abandon)
            raise

    def _make(self, hooks: bool) -> _native.TaskRecorder:
        values = list(self.bench_class.values)
        return _native.TaskRecorder(self._measure, values, self._builtins, [__name__], _LIBRARY, hooks)

    def _costs(self) -> _overhead.Costs:
        """What tracing costs: measured once for each bench class."""

        class Tracer:
            def enable(own) -> None:
                own.recorder = self._make(False)
                own.recorder.start((0.0, 0.0, 0.0))

            def disable(own) -> None:
                own.recorder.stop()

        return _overhead.costs((self.bench_class, self._builtins), self._builtins, Tracer)

    def stop(self) -> int:
        """Stops; calls that are open end now. Returns the time since the start (ns).

        :raises RuntimeError: it is not running.
        """
        global _the_profiler
        if self._recorder is None or not self._recorder.is_running():
            raise RuntimeError("this profiler is not running; call start() first")
        self._recorder.stop()
        _the_profiler = None
        atexit.unregister(self._abandon)
        return self._recorder.total()

    def _abandon(self) -> None:
        if self._recorder is not None and self._recorder.is_running():
            self.stop()

    def _by_number(self, rows: list[tuple[int, int, Any, bool]]) -> dict[int, function]:
        numbers: dict[int, function] = {-1: MAIN, -2: WAIT}
        for number, key, thing, is_code in rows:
            shown = self._shown.get(key)
            if shown is None:
                shown = self._shown[key] = python_function(thing) if is_code else c_function(str(thing))
            numbers[number] = shown
        return numbers

    @property
    def charges(self) -> dict[function, bench]:
        """Function -> what was charged to it. While the profiler runs: so far."""
        if self._recorder is None:
            return {MAIN: self.bench_class(), WAIT: self.bench_class()}
        seen, rows = self._recorder.charges()
        functions = self._by_number(seen)
        return {
            functions[number]: self.bench_class(calls, own, aggregate, suspended, tuple(values), tuple(aggregates))
            for number, calls, suspended, own, aggregate, values, aggregates in rows
        }

    @property
    def call_counts(self) -> dict[function, call_counts_object]:
        """Caller -> how often it called which functions."""
        counts: dict[function, call_counts_object] = {}
        if self._recorder is not None:
            seen, rows = self._recorder.calls()
            functions = self._by_number(seen)
            for caller, callee, count in rows:
                counts.setdefault(functions[caller], call_counts_object())._add(functions[callee], count)
        return counts

    @property
    def func_cache(self) -> dict[int, function]:
        """Address of a code object, or of a C function's definition -> function. Where a code object has ended its key is odd,
        and no address."""
        if self._recorder is None:
            return {}
        rows = self._recorder.functions()
        functions = self._by_number(rows)
        return {key: functions[number] for number, key, _, _ in rows}

    @property
    def main_bench(self) -> bench:
        """What was charged to ``<main>``."""
        return self.charges[MAIN]

    @property
    def wait_bench(self) -> bench:
        """What was charged to ``<wait>``."""
        return self.charges[WAIT]

    @property
    def start_ticks(self) -> int:
        """``time.monotonic_ns()`` at the start."""
        return self._recorder.start_ticks() if self._recorder is not None else 0

    @property
    def counter(self) -> bench:
        """A bench with the time by the same clock, or that of the stop."""
        if self._recorder is None:
            return self.bench_class()
        return self.bench_class(ticks=self._recorder.start_ticks() + self._recorder.total())

    @property
    def profile(self) -> Profile:
        """What was recorded: value types ``calls``, ``wall``, ``await`` (suspended) and those of the bench class."""
        if self._recorder is None:
            raise RuntimeError("nothing has been recorded; call start() first")
        return Profile(self._recorder.profile())

    def save(self, path: os.PathLike[str] | str, format: str | None = None) -> None:
        """As :meth:`nativeprof.Profile.save`."""
        self.profile.save(path, format)


def new_profiler(bench_class: type[bench] = bench, *, builtins: bool = True) -> _profiler:
    """A profiler that measures with this class. ``builtins``: functions that are written in C too.

    :raises SystemError: another one has been started.
    """
    if _the_profiler is not None:
        raise SystemError("Another profiler is already active: stop it first.")
    return _profiler(bench_class, builtins)


def get_the_profiler() -> _profiler | None:
    """The profiler that runs; None if there is none."""
    return _the_profiler


def start(profile_bench: type[bench] = rusage_bench, *, builtins: bool = True) -> None:
    """Starts a profiler, which :func:`get_the_profiler` gives."""
    new_profiler(profile_bench, builtins=builtins).start()


def _destination(filename: os.PathLike[str] | str | None) -> tuple[os.PathLike[str] | str, str]:
    """Where :func:`stop` writes to, and in which format. :raises ValueError: no such format."""
    path = os.path.join(tempfile.gettempdir(), "nativeprof_tasks.json") if filename is None else filename
    return path, _native.format_of(path)


def stop(filename: os.PathLike[str] | str | None = None) -> int:
    """Stops the profiler that :func:`start` has started and writes its profile; returns the time (ns).

    :param filename: where to, as :meth:`nativeprof.Profile.save` has it; None: ``nativeprof_tasks.json`` in the
        directory for temporary files.
    :raises ValueError: no such format; the profiler still runs. :raises OSError: the file cannot be written; the message has
        the file in another directory that has the profile.
    """
    profiler = _the_profiler
    if profiler is None:
        raise RuntimeError("no profiler is running; call start() first")
    path, format = _destination(filename)
    total = profiler.stop()
    try:
        profiler.save(path, format)
    except OSError as error:
        kept = _files.write_elsewhere(path, lambda new: profiler.profile._write(new, format))
        raise OSError(error.errno, f"{error.strerror or error}; the profile is in {kept}", path) from error
    return total


def go(fun: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Calls a function with a profiler; returns what it returns. A coroutine function is run by :func:`asyncio.run`.

    :param profile_filename: as for :func:`stop`. :param profile_bench: what to measure (:class:`rusage_bench`).
    """
    filename = kw.pop("profile_filename", None)
    bench_class = kw.pop("profile_bench", rusage_bench)
    _destination(filename)  # an unknown format is refused before anything has run
    is_coroutine = inspect.iscoroutinefunction(fun)
    start(bench_class)
    try:
        return asyncio.run(fun(*args, **kw)) if is_coroutine else fun(*args, **kw)
    finally:
        stop(filename)
