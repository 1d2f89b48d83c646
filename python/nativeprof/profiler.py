"""The profiler for the process that it runs in: :class:`Profiler` and the :class:`Profile` that it makes."""

from __future__ import annotations

import atexit
import html
import json
import os
import threading
import warnings
from collections.abc import Iterable
from typing import Any, Callable, NamedTuple, TypedDict, Union, cast

from . import _files, _native, _notebook, _overhead

__all__ = ["Profile", "Profiler", "Row", "Rows", "Stats"]

Threads = Union[None, bool, Iterable[Union[int, threading.Thread]]]

# The one that runs; held so that a second one is refused with a clear error.
_running: Profiler | None = None


class Stats(TypedDict):
    """The figures in :attr:`Profile.stats`.

    ``expected`` is how many samples the rate and the duration make, ``taken`` how many there are. Of these, ``exact`` and
    ``repaired`` have complete stacks; of ``partial`` ones ``reasons`` says how many miss frames for which reason. ``lost``
    is how many could not be taken. ``rate`` is in Hz, ``duration`` and ``profiler_cpu`` (nativeprof's own CPU time) are in
    seconds. ``counts`` is what the tree counts, ``samples`` or ``calls``, and ``total`` their number.
    """

    rate: int
    event: str
    duration: float
    profiler_cpu: float
    expected: int
    taken: int
    exact: int
    repaired: int
    partial: int
    lost: int
    reasons: dict[str, int]
    counts: str
    total: int


class Row(NamedTuple):
    """A function in :meth:`Profile.top`.

    ``self_`` is what it has itself, ``total`` with all that it calls: samples, calls, or time in ns, as :attr:`Rows.value`
    says. ``filename`` and ``line`` are where a
    Python function is defined; of a native one they are its source file and the line with most samples, or
    ``<low-level>`` and 0 where these are not known. ``module`` is the file of native code.
    """

    name: str
    filename: str
    line: int
    module: str
    self_: int
    total: int


class Rows(list["Row"]):
    """What :meth:`Profile.top` returns: a list of rows; printed, and in a notebook, a table.

    ``value`` is what the numbers are, with its unit: ``samples``, ``calls``, ``wall_ns``, ``cpu_ns``, ...
    """

    def __init__(self, rows: Iterable[Row], whole: int, value: str = "samples") -> None:
        super().__init__(rows)
        self.value = value
        self._whole = max(whole, 1)

    def _titles(self) -> tuple[str, str]:
        """What the shares are shares of."""
        kind = "" if self.value == "samples" else " time" if self.value.endswith("_ns") else f" {self.value}"
        return f"self{kind}", f"total{kind}"

    def __str__(self) -> str:
        own, total = (f"{title} %".upper().rjust(8) for title in self._titles())

        def share(part: int, title: str) -> str:
            return f"{100 * part / self._whole:{len(title)}.1f}"

        rows = (f"{share(row.self_, own)} {share(row.total, total)}  {row.name}  {_place(row)}" for row in self)
        return "\n".join([f"{own} {total}  FUNCTION  WHERE", *rows])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:right'>{row.self_ / self._whole:.1%}</td>"
            f"<td style='text-align:right'>{row.total / self._whole:.1%}</td>"
            f"<td style='text-align:left'><code>{html.escape(row.name)}</code></td>"
            f"<td style='text-align:left' title='{html.escape(row.filename)}'>{html.escape(_place(row))}</td></tr>"
            for row in self
        )
        own, total = map(html.escape, self._titles())
        return (
            f"<table><thead><tr><th>{own}</th><th>{total}</th><th style='text-align:left'>function</th>"
            f"<th style='text-align:left'>where</th></tr></thead><tbody>{rows}</tbody></table>"
        )


class Profile:
    """A finished profile: a count tree of interleaved Python and native stacks.

    Shown as a flame graph where it is the value of a notebook's cell.
    """

    def __init__(self, native: _native.Profile) -> None:
        self._native = native

    def save(self, path: os.PathLike[str] | str, format: str | None = None) -> None:
        """Writes the profile to a file. An existing one is replaced by the complete new one or not at all.

        Links, devices and pipes are not replaced but written to.

        :param path: where to; the extension determines the format (``.svg``, ``.json``, ``.json.gz``, ``.collapsed`` ...).
        :param format: name of the format, if the extension does not determine it.
        :raises ValueError: no such format. :raises OSError: the file cannot be written.
        """
        format = format or _native.format_of(path)
        with _files.replacing(path) as new:
            self._write(new, format)

    def _write(self, path: str, format: str) -> None:
        content = self._native.render(format)
        with open(path, "wb") as file:
            file.write(content)

    def to_dict(self) -> dict[str, Any]:
        """The count tree as ``distributed.profile`` has it: ``identifier``, ``description``, ``count``, ``children``.

        Data of the recording are under the key ``nativeprof`` of the root, and there under ``timeline`` the samples: columns
        ``time`` (ns since the start), ``pid``, ``tid`` and ``node`` (its number in the tree, each followed by all below it). If
        samples have labels of spans, ``labels`` has ``sets``, lists of pairs of key and value, and ``set``, for each sample the
        index of its list.
        """
        tree: dict[str, Any] = json.loads(self._native.tree())
        return tree

    def top(self, count: int = 20, value: str | None = None) -> Rows:
        """The functions with the most samples or time of their own, most first.

        :param value: what to count: ``samples``, ``calls``, ``wall``, ``cpu``, ... Without it, times where calls or wall-clock
            time were recorded, else samples, or calls without times.
        :raises ValueError: the profile does not have this value.
        """
        key, whole, rows = self._native.top(count, value)
        return Rows((Row(*row) for row in rows), whole, key)

    @property
    def stats(self) -> Stats:
        """How the profile was made, and how many samples were taken and lost."""
        return cast(Stats, self._native.stats())

    def summary(self, written: str = "") -> str:
        """The block of text that the command line prints after a recording."""
        return self._native.summary(written)

    def __repr__(self) -> str:
        stats = self.stats
        count = stats["taken"] if stats["counts"] == "samples" else stats["total"]
        return f"<nativeprof.Profile: {_notebook.counted(count, stats['counts'])} in {stats['duration']:.1f} s>"

    def _repr_html_(self) -> str:
        return _notebook.page(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(_notebook.text(self))


def _place(row: Row) -> str:
    """Where a function is: the end of the path, its line; of native code without a source, the module."""
    if row.filename == "<low-level>":
        return row.module
    path = row.filename if row.filename.startswith("<") else "/".join(row.filename.split("/")[-2:])
    place = f"{path}:{row.line}" if row.line else path
    return f"{place} ({row.module})" if row.module else place


def _idents(threads: Threads) -> list[int] | None:
    if threads is None or isinstance(threads, bool):
        return None
    idents = []
    for thread in threads:
        ident = thread.ident if isinstance(thread, threading.Thread) else thread
        if ident is None:
            raise ValueError(f"{thread!r} has not been started, so it has no stack")
        if not isinstance(ident, int) or isinstance(ident, bool) or ident < 0:
            raise TypeError(f"a thread must be a threading.Thread or its ident, got {thread!r}")
        idents.append(ident)
    return idents


def _calls(subtract: bool, mode: str, builtins: bool, *arguments: Any) -> _native.CallRecorder:
    recorder = _native.CallRecorder(mode, builtins, *arguments)
    # Another tool that is active is refused by the start, not by the measurement.
    kind = "times" if mode == "times" else "counts"
    measured = (0.0, 0.0, 0.0) if _native.is_tracing() else _overhead.costs(kind, builtins)
    recorder.start(measured, subtract)
    return recorder


_MODES = ("cpu", "wall", "calls", "counts", "counts+cpu", "counts+wall", "alloc")


class _CountsAndSamples:
    """Samples, and the exact number of calls of each Python function."""

    def __init__(self, sampling: tuple[Any, ...], counting: tuple[Any, ...]) -> None:
        self._calls = _calls(False, "counts with samples", False, False, *counting)
        try:
            self._samples = _native.SampleRecorder(*sampling)
        except BaseException:
            self._calls.stop()
            raise

    def take(self) -> _native.Profile:
        return _native.combine(self._samples.take(), self._calls.take())

    def lap(self) -> list[tuple[str, int, str, int]]:
        return self._calls.lap()

    def stop(self) -> _native.Profile:
        calls = self._calls.stop()
        return _native.combine(self._samples.stop(), calls)

    def is_current_process(self) -> bool:
        return self._samples.is_current_process()

    def signal(self) -> int | None:
        return self._samples.signal()

    def limitation(self) -> str | None:
        return self._samples.limitation()


# These interrupt no thread.
_WITHOUT_SIGNALS = (_native.CallRecorder, _native.AllocationRecorder)
_Recorder = Union[_native.SampleRecorder, _native.CallRecorder, _native.AllocationRecorder, _CountsAndSamples]


class Profiler:
    """Samples the stacks of this process: Python and native frames interleaved in true calling order.

    No privileges are needed. Where a thread runs it is interrupted for some microseconds by a real-time signal (the highest
    one without another use, normally ``SIGRTMAX - 1``); one that sleeps is not disturbed::

        with nativeprof.Profiler() as profiler:
            work()
        profiler.profile.save("work.svg")

    :param rate: samples per second of each thread (Hz). With ``mode="cpu"`` more than the kernel's clock ticks (250 a second
        on most systems) need perf events; where these are not permitted, a warning says how many are taken.
    :param native: native frames too, not only Python's.
    :param mode: ``"cpu"`` samples each thread's CPU time, ``"wall"`` wall-clock time: sleeping threads too.
        ``"calls"`` does not sample: every call is counted and timed, with its callers (``rate`` means nothing then, and
        ``native``: functions written in C too). ``"counts"``: only how often each Python function begins, which costs
        far less. ``"counts+cpu"``, ``"counts+wall"``: both, exact counts and sampled times in one profile.
        ``"alloc"``: samples what is allocated, by bytes: see ``interval``.
    :param threads: ``True`` gives a node per thread in the tree; an iterable of :class:`threading.Thread` or idents
        samples only these; else all threads of the process are sampled, native ones included.

    :param cpu: with ``mode="calls"``: the CPU time of calls too (a system call for each call and return).
    :param only: with all modes but ``"cpu"`` and ``"wall"``: modules (``"json"`` is ``json`` and ``json.*``) or functions
        (``"json.decoder:JSONDecoder.decode"``) to trace; the time of all others is their caller's. Empty: all.
    :param skip: the same, to leave out.
    :param subtract: with ``mode="calls"``: takes what tracing costs, as it is measured at the start, out of the times.
    :param interval: with ``mode="alloc"``: bytes between two samples, on average. The profile has the estimated
        ``alloc_bytes`` and ``allocs`` (all that was allocated), ``live_bytes`` (what is not freed at the end), ``peak_bytes``
        (what was not when most was allocated), ``leaked_bytes`` (what looks like a leak) and ``mapped_bytes`` (anonymous memory
        that is still mapped).
    :param max_overhead: with ``mode="alloc"``: the part of the process's CPU time that sampling may use. Where it would use
        more, fewer samples are taken, which stand for more bytes each.

    There can be one at a time. After :func:`os.fork` it continues in the parent only.

    :raises ValueError: an argument is wrong, or ``cpu``, ``only``, ``skip`` or ``subtract`` has no effect with this ``mode``.
    """

    def __init__(
        self,
        rate: int = 100,
        native: bool = True,
        mode: str = "cpu",
        threads: Threads = None,
        *,
        cpu: bool = False,
        only: Iterable[str] = (),
        skip: Iterable[str] = (),
        subtract: bool = False,
        interval: int = 512 * 1024,
        max_overhead: float = 0.01,
    ) -> None:
        if not isinstance(interval, int) or isinstance(interval, bool) or not 1 <= interval <= 1 << 40:
            raise ValueError(f"interval must be a number of bytes, got {interval!r}")
        if not 0 < max_overhead <= 1:
            raise ValueError(f"max_overhead must be a part of the CPU time, above 0 and at most 1, got {max_overhead!r}")
        if mode != "alloc" and (interval, max_overhead) != (512 * 1024, 0.01):
            raise ValueError(f'interval and max_overhead are for mode="alloc", not for mode={mode!r}; leave them out')
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
        if not isinstance(rate, int) or isinstance(rate, bool) or not 1 <= rate <= 10_000:
            raise ValueError(f"rate must be between 1 and 10000 samples per second, got {rate!r}")
        idents, by_thread = _idents(threads), threads is True
        filters = list(only), list(skip)
        self._make: Callable[[], _Recorder]
        if (cpu or subtract) and mode != "calls":
            raise ValueError(
                f'cpu and subtract are for mode="calls": mode={mode!r} does not time calls; leave them out, or use mode="calls"'
            )
        if mode in ("cpu", "wall", "alloc"):
            if filters != ([], []):
                raise ValueError(
                    f"only and skip are for traced calls: mode={mode!r} only samples; leave them out, or use "
                    f'mode="calls", "counts" or "counts+{"cpu" if mode == "alloc" else mode}"'
                )
        if mode == "alloc":
            if idents is not None:
                raise ValueError('mode="alloc" samples the allocations of all threads; leave threads out, or use threads=True')
            self._make = lambda: _native.AllocationRecorder(interval, max_overhead, bool(native), by_thread)
        elif mode in ("cpu", "wall"):
            self._make = lambda: _native.SampleRecorder(rate, bool(native), mode == "wall", idents, by_thread)
        elif mode.startswith("counts+"):
            self._make = lambda: _CountsAndSamples(
                (rate, bool(native), mode == "counts+wall", idents, by_thread), (idents, by_thread, *filters)
            )
        else:
            kind = "times" if mode == "calls" else mode
            self._make = lambda: _calls(subtract, kind, bool(native), bool(cpu), idents, by_thread, *filters)
        self._recorder: _Recorder | None = None
        self._profile: Profile | None = None

    def start(self) -> None:
        """Begins to sample. What an earlier run of this profiler gathered is dropped.

        :raises RuntimeError: another profiler is already running in this process.
        """
        self._start()

    def _start(self) -> None:
        global _running
        if _running is not None and _running._is_running():
            _running._give_way()
        if _running is not None and _running._is_running():
            raise RuntimeError(
                "another Profiler is already running in this process; stop it first"
                if _running is not self
                else "this Profiler is already running; call stop() first"
            )
        self._profile = None
        self._recorder = self._make()
        _running = self
        # A recording that is never stopped ends before the interpreter does.
        atexit.register(self._abandon)
        limitation = None if isinstance(self._recorder, _native.CallRecorder) else self._recorder.limitation()
        if limitation:
            try:
                warnings.warn(limitation, RuntimeWarning, stacklevel=3)
            except RuntimeWarning:
                self.stop()
                raise

    def stop(self) -> Profile:
        """Ends sampling; returns the profile, which is also in :attr:`profile`.

        :raises RuntimeError: it is not running, or runs in the process that this one was forked from.
        """
        global _running
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise RuntimeError("this Profiler is not running; call start() first")
        if _running is self:
            _running = None
        atexit.unregister(self._abandon)
        is_sampled = isinstance(recorder, _WITHOUT_SIGNALS) or recorder.signal() is not None
        has_hooks = not isinstance(recorder, _native.AllocationRecorder) or recorder.are_hooks_in_place()
        self._profile = Profile(recorder.stop())
        if not has_hooks:
            said = (
                "another tool replaced nativeprof's hooks on the allocators: allocations are missing, and blocks that were freed "
                "count as live; start that tool before the recording and stop it after, or leave it out"
            )
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        if not is_sampled:
            said = "another signal handler replaced nativeprof's: samples are missing"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return self._profile

    def take(self) -> Profile:
        """What was gathered since the start or the last call; sampling continues."""
        if self._recorder is None:
            raise RuntimeError("this Profiler is not running; call start() first")
        return Profile(self._recorder.take())

    def _lap(self) -> list[tuple[str, int, str, int]]:
        """File, first line, name and calls of each function called since the last lap. Nothing where calls are not counted."""
        if self._recorder is None or isinstance(self._recorder, (_native.SampleRecorder, _native.AllocationRecorder)):
            return []
        return self._recorder.lap()

    def _is_running(self) -> bool:
        return self._recorder is not None and self._recorder.is_current_process()

    def _give_way(self) -> None:
        """Called when another profiler is to start while this one runs; one that may be interrupted stops itself."""

    def _abandon(self) -> None:
        if self._is_running():
            self.stop()

    @property
    def profile(self) -> Profile:
        """What the last run gathered. :raises RuntimeError: it is still running, or never ran."""
        if self._profile is None:
            why = "is still running; call stop()" if self._is_running() else "has not run in this process; call start()"
            raise RuntimeError(f"there is no profile yet: this Profiler {why} first")
        return self._profile

    def save(self, path: os.PathLike[str] | str, format: str | None = None) -> None:
        """As :meth:`Profile.save`."""
        self.profile.save(path, format)

    def to_dict(self) -> dict[str, Any]:
        """As :meth:`Profile.to_dict`."""
        return self.profile.to_dict()

    def top(self, count: int = 20, value: str | None = None) -> Rows:
        """As :meth:`Profile.top`."""
        return self.profile.top(count, value)

    def _repr_html_(self) -> str | None:
        return self._profile._repr_html_() if self._profile else None

    def __enter__(self) -> Profiler:
        self._start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._recorder is not None and not self._recorder.is_current_process():
            self._recorder = None  # a forked child leaves the block too; the recording is its parent's
        elif self._recorder is not None:
            self.stop()
