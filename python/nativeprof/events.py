"""The event timeline: every call and return and every allocation, in order, of all threads.

::

    profiler = EventProfiler()
    profiler.start()
    work()
    profiler.stop()
    profiler.retrieve_results()          # a DataFrame where pandas is installed, else columns
    profiler.to_chrome("work.trace.json")  # opens in Perfetto and chrome://tracing

The interface is that of ``cpyquickhelper.profiling.event_profiler`` (0.3.412), with these differences:

- All threads are recorded, not only the one that starts; rows have the columns ``thread`` and ``domain`` in addition.
- ``time`` is monotonic (ns), not the time of day.
- Allocations are those of Python's three domains *and* of the C library (``malloc``, ``calloc``, ``realloc``, ``free`` and
  their like), each with the function that made it. A request to Python's allocator that reaches ``malloc`` is one row,
  marked in ``domain``.
- ``id_frame`` is the address of the function's code object, not of a frame: frames and arguments are not kept alive.
- A row of a C function, or of an allocation in one, has the Python function that called it as ``from_name``.
- ``from_line`` is the line where the calling function is defined, not the line of the call.
- Memory is bounded: ``size`` rows are kept in memory, what is more goes to a temporary file up to a limit. What cannot be
  kept is counted in :attr:`EventProfiler.dropped`.

Not seen: memory from ``mmap`` and ``brk``; allocators that are linked into a module (jemalloc in some wheels); functions
looked up with ``dlsym``, so calls of ``malloc`` through ``ctypes`` too; what the loader and the C library allocate for
themselves without going through their own slots; what a library allocates while it is being loaded.

What the interpreter allocates in order to deliver events (before 3.12 frame objects, since then small integers) is in
the timeline too.
"""

from __future__ import annotations

import array
import atexit
import csv
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterable
from typing import Any, Callable, NamedTuple

from . import _native

__all__ = ["EventProfiler", "EventProfilerDebug", "WithEventProfiler"]

_RAW_COLUMNS = ("id_frame", "id_arg", "event", "time", "value1", "value2", "thread", "domain")
_COLUMNS = ("time", "value1", "value2", "event", "name", "mod", "lineno", "from_name", "from_mod", "from_line")
_MORE_COLUMNS = ("thread", "domain", "reached_malloc")
_DOMAINS = ("", "raw", "mem", "obj", "c")
_REACHED_MALLOC = 16
_ALLOCATIONS = {1000, 1001, 1002, 1003, 1004}


class _Function(NamedTuple):
    name: str
    mod: str
    lineno: int
    is_code: bool


_UNKNOWN = _Function("", "", -1, False)
_BUILTIN = re.compile(r"<built-in method (?:(.*)\.)?([^.<>]+)>$")
_METHOD = re.compile(r"<(?:method|slot wrapper) '(.*)' of '(.*)' objects>$")
_PLAIN = re.compile(r"<(?:(.*)\.)?([^.<> ]+)>$")


def _function(thing: Any, is_code: bool) -> _Function:
    """A function's row entries from its code object, or from the text that cProfile has for a C function."""
    if is_code:
        return _Function(thing.co_name, thing.co_filename, thing.co_firstlineno, True)
    text = thing if isinstance(thing, str) else getattr(thing, "__qualname__", type(thing).__name__)
    found = _METHOD.match(text)
    if found:
        return _Function(f"{found[2]}.{found[1]}", "", -1, False)
    found = _BUILTIN.match(text) or _PLAIN.match(text)
    if found:
        return _Function(found[2], found[1] or "builtins", -1, False)
    return _Function(text, getattr(thing, "__module__", None) or "", -1, False)


class EventProfiler:
    """Records every call, return and allocation of this process, of all threads, in order.

    :param size: rows kept in memory (40 bytes each).
    :param impl: ``"python"``, ``"pybind11"`` or ``"c"``, as the original has it; all are the same here.
    :param python: allocations of Python's domains. :param native: allocations of the C library.
    :param calls: calls and returns.
    :param waits: events ``wait`` and ``wait_end`` around ``epoll_wait``, ``poll``, ``select`` and their variants.
    :param spill: where rows beyond ``size`` go: True for a temporary file, a directory for one in it, False to drop them.
    :param limit: bytes of that file at most; what is more is dropped and counted.

    Several can run at once. In a forked child nothing is recorded; the parent's continues.

    :raises ValueError: an argument is wrong.
    """

    _event_mapping = {
        "call": 1,
        "return": 2,
        "c_call": 3,
        "c_return": 4,
        "exception": 5,
        "c_exception": 6,
        "profiler_call": 10,
        "profiler_return": 11,
        "profiler_start": 100,
        "profiler_sort": 101,
        "malloc": 1000,
        "calloc": 1001,
        "realloc": 1002,
        "free": 1003,
        "realloc_free": 1004,
    }
    _event_names = {code: name for name, code in _event_mapping.items()}
    # Not of the original.
    _event_names.update({1100: "wait", 1101: "wait_end"})
    _calls = True

    def __init__(
        self,
        size: int = 1000000,
        impl: str = "python",
        *,
        python: bool = True,
        native: bool = True,
        calls: bool = True,
        waits: bool = False,
        spill: bool | str | os.PathLike[str] = True,
        limit: int = 16 << 30,
    ) -> None:
        if impl not in ("python", "pybind11", "c"):
            raise ValueError(f"impl must be 'python', 'pybind11' or 'c', got {impl!r}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"size must be a number of rows, got {size!r}")
        self.size, self.impl = size, impl
        self._wants_calls = bool(calls)
        self._logged: dict[int, tuple[Any, bool]] = {}
        # Functions whose calls are not shown.
        self._left_out: list[types.CodeType] = _OWN_CODE
        file = None
        if spill is not False:
            file = tempfile.TemporaryFile(prefix="nativeprof-events-", dir=None if spill is True else os.fspath(spill))
        try:
            descriptor = file.fileno() if file else None
            self._log = _native.EventLog(size, bool(python), bool(native), bool(waits), descriptor, limit)
        finally:
            if file:
                file.close()

    def start(self) -> None:
        """Starts the profiling. Rows of an earlier run are kept.

        :raises RuntimeError: it is already running. :raises ValueError: another profiling tool is active.
        """
        if self._log.is_running():
            raise RuntimeError("the profiler was already started; call stop() first")
        _running.add(self)
        stacks: list[tuple[int, list[Any]]] = []
        try:
            if self._calls:
                stacks = _stacks(frozenset(self._left_out))
            self._log.start(self._calls and self._wants_calls, stacks, self._left_out)
        except BaseException:
            _running.discard(self)
            raise

    def stop(self) -> None:
        """Stops the profiling. :raises RuntimeError: it is not running."""
        if not self._log.is_running():
            raise RuntimeError("the profiler was not started; call start() first")
        self._log.stop()
        _running.discard(self)

    def log_event(self, frame: Any, event: str, arg: Any) -> None:
        """Adds an event, given as :func:`sys.setprofile` has it. Nothing happens while the profiler is not running.

        :raises KeyError: no such event.
        """
        thing, is_code = (arg, False) if event.startswith("c_") else (getattr(frame, "f_code", None), True)
        if thing is not None:
            self._logged.setdefault(id(thing), (thing, is_code))
        self._log.append(0 if thing is None else id(thing), self._event_mapping[event])

    @property
    def n_columns(self) -> int:
        """Number of columns of :meth:`retrieve_raw_results`: six, and the thread and the domain."""
        return len(_RAW_COLUMNS)

    @property
    def dropped(self) -> int:
        """Rows that could not be kept, as far as is known while it runs."""
        return self._log.counts()[0] if self._log.is_running() else self._log.rows()[2]

    def _empty_cache(self) -> int:
        """Rows recorded so far. (There is no cache to empty: rows are not copied until they are requested.)"""
        return len(self._log.rows()[0]) // 8 // len(_RAW_COLUMNS)

    def retrieve_raw_results(self, empty_cache: bool = True) -> Any:
        """All rows, in chronological order: an array of 64-bit integers, one row each.

        The columns: ``id_frame`` (the Python function, by the address of its code object, or by an odd number once that has
        ended), ``id_arg`` (the C function, or 0), ``event`` (its code), ``time`` (ns, monotonic), ``value1`` (address of the
        block), ``value2`` (its bytes, minus them where it is freed, 0 where it was allocated before the start), ``thread``
        (native id), ``domain`` (1 raw, 2 mem, 3 obj, 4 C library; 16 more where Python's allocator passed it on to
        ``malloc``).

        It may be called while the profiler runs; what other threads allocate during the call is then not recorded.

        :param empty_cache: has no effect.
        :returns: a numpy array, or a memoryview of that shape if numpy is not installed.
        """
        rows = self._log.rows()[0]
        count = len(rows) // 8 // len(_RAW_COLUMNS)
        numpy = _optional("numpy")
        if numpy is not None:
            return numpy.frombuffer(rows, dtype=numpy.int64).reshape(count, len(_RAW_COLUMNS))
        view = memoryview(rows)
        return view.cast("q", (count, len(_RAW_COLUMNS))) if count else view.cast("q")

    def retrieve_results(
        self, empty_cache: bool = True, clean_file_name: Callable[[str], str] | None = None, extra: bool = True
    ) -> Any:
        """The timeline with names.

        The columns: ``time``, ``value1``, ``value2``, ``event`` (by name), ``name``, ``mod`` and ``lineno`` of the function
        (file and first line; of a C function its module, and the first line of its caller), ``from_name``, ``from_mod`` and
        ``from_line`` of the one that called it (``""`` and -1 if there is none), and ``thread``, ``domain``,
        ``reached_malloc``.

        :param clean_file_name: shortens file names. :param extra: False leaves the last three columns out.
        :returns: a pandas DataFrame, or a dictionary of columns (lists) if pandas is not installed.
        """
        columns = self._columns(clean_file_name, extra)
        pandas = _optional("pandas")
        return columns if pandas is None else pandas.DataFrame(columns, columns=list(columns))

    def _columns(self, clean: Callable[[str], str] | None = None, extra: bool = True) -> dict[str, list[Any]]:
        rows, callers, _, seen = self._log.rows()
        functions = {key: _function(thing, is_code) for key, (thing, is_code) in self._logged.items()}
        functions.update((key, _function(thing, is_code)) for key, thing, is_code in seen)
        cleaned: dict[str, str] = {}

        def module(function: _Function) -> str:
            if clean is None or not function.is_code:
                return function.mod
            if function.mod not in cleaned:
                cleaned[function.mod] = clean(function.mod)
            return cleaned[function.mod]

        raw, pairs = array.array("q"), array.array("q")
        raw.frombytes(rows)
        pairs.frombytes(callers)
        width = len(_RAW_COLUMNS)
        frames = [functions.get(key, _UNKNOWN) for key in raw[0::width]]
        shown = [functions.get(key, _UNKNOWN) for key in pairs[0::2]]
        outer = [functions.get(key, _UNKNOWN) for key in pairs[1::2]]
        domains = raw[7::width]
        columns: dict[str, list[Any]] = {
            "time": list(raw[3::width]),
            "value1": list(raw[4::width]),
            "value2": list(raw[5::width]),
            "event": [self._event_names[code] for code in raw[2::width]],
            "name": [f.name for f in shown],
            "mod": [module(f) for f in shown],
            "lineno": [f.lineno for f in frames],
            "from_name": [f.name for f in outer],
            "from_mod": [module(f) for f in outer],
            "from_line": [f.lineno for f in outer],
        }
        if extra:
            columns["thread"] = list(raw[6::width])
            columns["domain"] = [_DOMAINS[d % _REACHED_MALLOC] for d in domains]
            columns["reached_malloc"] = [d >= _REACHED_MALLOC for d in domains]
        return columns

    def to_arrow(self) -> Any:
        """The timeline as a :class:`pyarrow.Table`. :raises ImportError: pyarrow is not installed."""
        pyarrow = _required("pyarrow", "to_arrow")
        columns: dict[str, Any] = dict(self._columns())
        for name in ("event", "name", "mod", "from_name", "from_mod", "domain"):
            columns[name] = pyarrow.array(columns[name]).dictionary_encode()
        return pyarrow.table(columns)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline to a Parquet file. :raises ImportError: pyarrow is not installed."""
        _required("pyarrow", "to_parquet")
        import pyarrow.parquet

        pyarrow.parquet.write_table(self.to_arrow(), os.fspath(path))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline to a file of comma-separated values, names of columns first."""
        columns = self._columns()
        with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values()))

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline as a Chrome trace (JSON): calls as slices, live bytes as a counter.

        It opens in Perfetto (ui.perfetto.dev) and in ``chrome://tracing``.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
            first = True
            for event in _chrome(self._columns()):
                file.write(("" if first else ",\n") + json.dumps(event))
                first = False
            file.write("\n]}\n")


class EventProfilerDebug(EventProfiler):
    """Records only its start and its stop, and what :meth:`log_event` adds: to time that method."""

    _calls = False

    def __init__(self, size: int = 1000000, impl: str = "python") -> None:
        super().__init__(size, impl, python=False, native=False)


class WithEventProfiler:
    """Records what runs in a ``with`` block, to its end or to the exception that leaves it::

        with WithEventProfiler() as profiler:
            work()
        profiler.report

    :param clean_file_name: shortens file names in the report. Others as for :class:`EventProfiler`.
    """

    def __init__(
        self,
        size: int = 1000000,
        impl: str = "python",
        clean_file_name: Callable[[str], str] | None = None,
        **options: Any,
    ) -> None:
        self.size, self.impl, self.clean_file_name, self._options = size, impl, clean_file_name, options
        self.profiler: EventProfiler | None = None
        self._report: Any = None

    @property
    def report(self) -> Any:
        """What :meth:`EventProfiler.retrieve_results` gives; None before the end of the block."""
        return self._report

    def __enter__(self) -> WithEventProfiler:
        self._report = None
        self.profiler = EventProfiler(self.size, self.impl, **self._options)
        self.profiler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        profiler = self.profiler
        # In a child that was forked in the block there is nothing to stop.
        if profiler is not None and profiler._log.is_running():
            profiler.stop()
            self._report = profiler.retrieve_results(clean_file_name=self.clean_file_name)


# Those that run, so that they are stopped before the interpreter ends.
_running: set[EventProfiler] = set()


def _stop_all() -> None:
    while _running:
        profiler = _running.pop()
        if profiler._log.is_running():
            profiler._log.stop()


def _after_fork() -> None:
    _running.clear()
    _native.events_after_fork()


# Before the interpreter takes itself apart, and after the program's own functions of this kind that came later.
atexit.register(_stop_all)
os.register_at_fork(after_in_child=_after_fork)


def _stacks(left_out: frozenset[types.CodeType] = frozenset()) -> list[tuple[int, list[Any]]]:
    """Of each thread its ident and the code objects on its stack, outermost first, without those of this module."""
    stacks: list[tuple[int, list[Any]]] = []
    frame: types.FrameType | None
    for ident, frame in sys._current_frames().items():
        codes: list[Any] = []
        while frame is not None:
            if frame.f_globals is not globals() and frame.f_code not in left_out:
                codes.append(frame.f_code)
            frame = frame.f_back
        codes.reverse()
        stacks.append((ident, codes))
    return stacks


def _own_code() -> list[types.CodeType]:
    """The functions of this module: a timeline does not show them."""
    scopes: list[Any] = [globals(), *(vars(kind) for kind in (EventProfiler, EventProfilerDebug, WithEventProfiler))]
    found = [getattr(thing, "fget", thing) for scope in scopes for thing in list(scope.values())]
    return [thing.__code__ for thing in found if type(thing) is types.FunctionType and thing.__module__ == __name__]


def _optional(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _required(name: str, method: str) -> Any:
    module = _optional(name)
    if module is None:
        raise ImportError(f"{method} needs {name}, which is not installed: pip install {name}", name=name)
    return module


def _chrome(columns: dict[str, list[Any]]) -> Iterable[dict[str, Any]]:
    """Events of the trace. Slices that were open at the start or the end are closed at the ends of the trace."""
    pid = os.getpid()
    live: dict[str, int] = {}
    sizes: dict[int, tuple[int, str]] = {}
    # Name and category: Chromium's DevTools wants both at the end, too.
    open_slices: dict[int, list[tuple[str, str]]] = {}
    start = columns["time"][0] if columns["time"] else 0
    last = start
    keys = ("time", "event", "value1", "value2", "name", "mod", "lineno", "thread", "domain")
    for time, event, address, size, name, mod, lineno, thread, domain in zip(*(columns[key] for key in keys)):
        base = {"pid": pid, "tid": thread, "ts": (time - start) / 1000}
        last = time
        slices = open_slices.setdefault(thread, [])
        if event in ("call", "c_call", "wait"):
            name = event if event == "wait" else name
            slices.append((name, event))
            yield {**base, "ph": "B", "name": name, "cat": event, "args": {"file": mod, "line": lineno}}
        elif event in ("return", "c_return", "c_exception", "wait_end"):
            name = "wait" if event == "wait_end" else name
            if any(name == begun for begun, _ in slices):
                # What was lost in between ends here too.
                while slices:
                    ended, category = slices.pop()
                    yield {**base, "ph": "E", "name": ended, "cat": category}
                    if ended == name:
                        break
        elif domain:
            if event in ("free", "realloc_free"):
                size, domain = (-sizes[address][0], sizes.pop(address)[1]) if address in sizes else (0, domain)
            else:
                sizes[address] = (size, domain)
            if size:
                live[domain] = live.get(domain, 0) + size
                yield {**base, "ph": "C", "name": "live bytes", "args": dict(live)}
        else:
            yield {**base, "ph": "i", "s": "p", "name": event}
    for thread, slices in open_slices.items():
        while slices:
            name, category = slices.pop()
            yield {"pid": pid, "tid": thread, "ts": (last - start) / 1000, "ph": "E", "name": name, "cat": category}


_OWN_CODE = _own_code()
