"""Count trees of sampled stacks: every function of ``distributed.profile``, with the work done in native code.

A tree is made of dictionaries with four keys::

    {"identifier": str,      # what makes a function one: "name;filename;first line"; the root's is "root"
     "count": int,           # samples (not seconds) in which it was here, its callees included
     "children": {identifier: tree},   # what it called
     "description": {"filename": str, "name": str, "line_number": int, "line": str}}   # as first seen

Native functions have the filename ``<low-level>`` and the identifier ``name;<low-level>;0xADDRESS``.

Names, arguments and results are those of distributed 2026.8.0. Where that is surprising, the docstring says so and names
what to use for the other behavior. One thing is never copied: no tree is too deep, where the original leaves subtrees out.
"""

from __future__ import annotations

import dis
import hashlib
import linecache
import sys
import threading
import time as _time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, Callable

from . import _native
from ._native import create, llprocess, merge, process

__all__ = [
    "add_sample",
    "call_stack",
    "create",
    "get_profile",
    "identifier",
    "info_frame",
    "ll_get_stack",
    "llprocess",
    "lock",
    "merge",
    "plot_data",
    "plot_figure",
    "process",
    "repr_frame",
    "watch",
]

Tree = dict[str, Any]

#: Held by :func:`watch` while it holds a frame: who has it knows that no watcher keeps an object alive.
lock = threading.Lock()


def identifier(frame: Any) -> str:
    """What makes two frames one node: ``name;filename;first line`` of the function.

    ``None`` gives ``"None"``. A frame whose code is a built-in function gives ``module.qualname:line``. Two functions of
    one name that begin in one line of one file are not distinguished.
    """
    if frame is None:
        return "None"
    code = frame.f_code
    try:
        return ";".join((code.co_name, code.co_filename, str(code.co_firstlineno)))
    except AttributeError:
        place = f"{code.__qualname__}:{_f_lineno(frame)}"
        return f"{code.__module__}.{place}" if code.__module__ else place


def _f_lineno(frame: Any) -> int:
    """The line that a frame is at; from its instruction where the interpreter says None. -1 where that fails."""
    line: int | None = frame.f_lineno
    if line is not None:
        return line
    try:
        at: int = frame.f_code.co_firstlineno
        for start, line in dis.findlinestarts(frame.f_code):
            if start > frame.f_lasti:
                break
            at = line or at
        return at
    except Exception:
        return -1


def repr_frame(frame: Any) -> str:
    """A frame as two lines of a traceback, the second one the source (empty where it cannot be read)."""
    code, at = frame.f_code, _f_lineno(frame)
    source = linecache.getline(code.co_filename, at, frame.f_globals).lstrip()
    return f'  File "{code.co_filename}", line {at}, in {code.co_name}\n\t{source}'


def info_frame(frame: Any) -> dict[str, Any]:
    """The ``description`` of a frame: filename, name, line_number, and line (its text, with the line's end)."""
    code, at = frame.f_code, _f_lineno(frame)
    try:
        name, filename = code.co_name, code.co_filename
        line = linecache.getline(filename, at, frame.f_globals).lstrip()
    except (AttributeError, IndexError):
        name, filename, line = code.__qualname__, "<built-in>", ""
    return {"filename": filename, "name": name, "line_number": at, "line": line}


def call_stack(frame: Any) -> list[str]:
    """The stack that ends in ``frame`` as text, :func:`repr_frame` of each, outermost first."""
    stack = []
    while frame:
        stack.append(repr_frame(frame))
        frame = frame.f_back
    return stack[::-1]


def add_sample(
    state: Tree,
    frame: Any,
    native: Sequence[Any] = (),
    *,
    stop: str | None = None,
    omit: str | Collection[str] = (),
    depth: int | None = None,
) -> None:
    """Counts one complete sample, each function on the stack once, the innermost too.

    What :func:`process` and :func:`llprocess` together do, without their surprises: the innermost Python function is
    counted whether native frames follow or not, ``omit`` may be one string, and ``native`` is left as it is.

    :param state: the tree, changed in place.
    :param frame: innermost Python frame.
    :param native: native frames that it called, outermost first, as :func:`ll_get_stack` gives them.
    :param stop: suffix of file names; frames from the innermost such caller outward are left out.
    :param omit: suffix, or suffixes, of file names; a sample that ends in such a file is not counted.
    :param depth: callers that are kept; None: as :func:`process`.
    """
    suffixes = (omit,) if isinstance(omit, str) else omit
    if native:
        inner = process(frame, True, state, stop=stop, omit=suffixes, depth=depth)
        if inner is not None:
            llprocess(list(native), None, inner)
    else:
        process(frame, None, state, stop=stop, omit=suffixes, depth=depth)


def get_profile(
    history: Sequence[tuple[float, Tree]],
    recent: Tree | None = None,
    start: float | None = None,
    stop: float | None = None,
    key: Any = None,
    *,
    exact: bool = False,
) -> Tree:
    """The merged tree of a span of time.

    :param history: ``(timestamp, tree)``, ascending, timestamps in seconds; a list or a deque.
    :param recent: a tree that is not in the history yet.
    :param start: first timestamp; None: the beginning.
    :param stop: last timestamp; None: the end.
    :param key: ignored, as in the original.
    :param exact: by default, as in the original, one tree *after* ``stop`` is taken too, ``recent`` is merged whatever
        ``stop`` is, and dropped where no tree of the history lies in the span. With ``exact`` those with
        ``start <= timestamp <= stop`` are taken, and ``recent`` if no later one was left out.
    :raises ValueError: the trees have different roots.
    """
    return _native.get_profile(history, recent, start, stop, exact)


_UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1,
    "m": 60,
    "h": 3600,
    "d": 86400,
    "w": 604800,
    "nanosecond": 1e-9,
    "microsecond": 1e-6,
    "millisecond": 1e-3,
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86400,
    "week": 604800,
}


def _seconds(span: str | float | timedelta) -> float:
    """Seconds of ``"20ms"``, ``"2 s"``, ``0.02`` or a timedelta, as dask.utils.parse_timedelta reads them."""
    if isinstance(span, timedelta):
        return span.total_seconds()
    text = str(span).replace(" ", "").lower()
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :] or "s"
    scale = _UNITS.get(unit, _UNITS.get(unit[:-1]) if len(unit) > 3 and unit.endswith("s") else None)
    try:
        if scale is None:
            raise ValueError
        return float(number or 1) * scale
    except ValueError:
        raise ValueError(f"{span!r} is not a duration: a number followed by one of {', '.join(_UNITS)}") from None


_FROM_CONFIG: Any = object()


def _configured_length() -> int | None:
    """Dask's distributed.admin.low-level-log-length where Dask is loaded, else its default."""
    if "distributed" in sys.modules:
        import dask.config

        length: int | None = dask.config.get("distributed.admin.low-level-log-length", 1000)
        return length
    return 1000


def watch(
    thread_id: int | None = None,
    interval: str | float | timedelta = "20ms",
    cycle: str | float | timedelta = "2s",
    maxlen: int | None = _FROM_CONFIG,
    omit: str | Collection[str] = (),
    stop: Callable[[], bool] = lambda: False,
    *,
    every_interval: bool = False,
) -> deque[tuple[float, Tree]]:
    """Starts a thread that samples the Python frames of a thread; returns at once the log that it writes.

    :param thread_id: the thread's ident (``threading.get_ident()``); None or 0: the caller's.
    :param interval: pause between samples; a number of seconds or text such as ``"20ms"``.
    :param cycle: length of a period.
    :param maxlen: most periods that are kept, None: all; by default Dask's setting
        ``distributed.admin.low-level-log-length`` (1000).
    :param omit: suffixes of file names; samples that end in such a file are not counted.
    :param stop: called before each sample; True ends the watcher, as the end of the thread does.
    :param every_interval: by default, as in the original since 2022, there is *one* sample per cycle, appended with the
        time at which the period began. With this a sample is taken at each interval, and each period's tree is
        appended when it is complete, stamped with its end, which is what :func:`get_profile` assumes.
    :returns: ``(timestamp, tree)`` for each period; timestamps in seconds since the epoch.
    """
    if every_interval and isinstance(omit, str):
        omit = (omit,)
    log: deque[tuple[float, Tree]] = deque(maxlen=_configured_length() if maxlen is _FROM_CONFIG else maxlen)
    ident = thread_id or threading.get_ident()
    arguments = (ident, log, _seconds(interval), _seconds(cycle), omit, stop)
    target = _watch_intervals if every_interval else _watch_cycles
    threading.Thread(target=target, name="Profile", args=arguments, daemon=True).start()
    return log


def _sample(ident: int, tree: Tree, omit: Collection[str]) -> bool:
    """Counts one sample of a thread; False if it is gone. The lock is held."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return False
    process(frame, None, tree, omit=omit)
    return True


def _watch_cycles(
    ident: int,
    log: deque[tuple[float, Tree]],
    interval: float,
    cycle: float,
    omit: Collection[str],
    stop: Callable[[], bool],
) -> None:
    last = _time.time()
    while not stop():
        if _time.time() > last + cycle:
            tree = create()
            with lock:
                last = _time.time()
                log.append((last, tree))
                if not _sample(ident, tree, omit):
                    return
        _time.sleep(interval)


def _watch_intervals(
    ident: int,
    log: deque[tuple[float, Tree]],
    interval: float,
    cycle: float,
    omit: Collection[str],
    stop: Callable[[], bool],
) -> None:
    tree, began = create(), _time.time()
    alive = True
    while alive and not stop():
        with lock:
            alive = _sample(ident, tree, omit)
            now = _time.time()
            if now >= began + cycle:
                log.append((now, tree))
                tree, began = create(), now
        if alive:
            _time.sleep(interval)
    if tree["count"]:
        with lock:
            log.append((_time.time(), tree))


# The colors that Dask's dashboard has: 18 steps of viridis.
_PALETTE = (
    "#440154 #471669 #472A79 #433C84 #3C4D8A #355D8C #2E6C8E #287A8E #23898D "
    "#1E978A #20A585 #2EB27C #45BF6F #64CB5D #88D547 #AFDC2E #D7E219 #FDE724"
).split()


def _color_of(filename: str) -> str:
    if filename == "<low-level>":
        return "lightgray"
    digits = hashlib.md5(str(filename).encode(), usedforsecurity=False).hexdigest()[:8]
    return _PALETTE[int(digits, 16) % len(_PALETTE)]


def plot_data(state: Tree, profile_interval: float = 0.010) -> dict[str, list[Any]]:
    """A tree as the bars of an icicle graph.

    :param profile_interval: seconds that a sample represents.
    :returns: thirteen lists of one length, a row for each node with samples, each followed by what it called:
        ``left`` and ``right`` (shares of the root, 0 to 1), ``width`` (their difference), ``bottom`` (depth), ``top``
        (depth + 1), ``color``, ``states`` (the node), ``filename``, ``line``, ``line_number``, ``name``, ``time`` (text),
        ``percentage`` (text). A node without samples hides what is below it.
    """
    return _native.plot_data(state, profile_interval)


_HOVER = "".join(
    f'<div><span style="font-size: 14px; font-weight: bold;">{title}:</span>&nbsp;'
    f'<span style="font-size: 10px; font-family: Monaco, monospace;">@{column}</span></div>'
    for title, column in [
        ("Name", "name"),
        ("Filename", "filename"),
        ("Line number", "line_number"),
        ("Line", "line"),
        ("Time", "time"),
        ("Percentage", "percentage"),
    ]
)


def plot_figure(data: dict[str, list[Any]], **kwargs: Any) -> tuple[Any, Any]:
    """The data of :func:`plot_data` as a Bokeh figure: ``(figure, ColumnDataSource)``.

    Other arguments go to :func:`bokeh.plotting.figure`.

    :raises ImportError: Bokeh is not installed.
    """
    from bokeh.models import HoverTool
    from bokeh.plotting import ColumnDataSource, figure

    source = ColumnDataSource(data={name: column for name, column in data.items() if name != "states"})
    plot = figure(tools="tap,box_zoom,xwheel_zoom,reset", **kwargs)
    bars = plot.quad(
        left="left",
        right="right",
        top="top",
        bottom="bottom",
        color="color",
        line_color="black",
        line_width=2,
        source=source,
    )
    bars.selection_glyph = None
    bars.nonselection_glyph = None
    plot.add_tools(HoverTool(point_policy="follow_mouse", tooltips=_HOVER))
    plot.xaxis.visible = False
    plot.yaxis.visible = False
    plot.grid.visible = False
    return plot, source


def _remove_py_stack(frames: Iterable[Any]) -> Iterable[Any]:
    """Entries up to the first Python one."""
    for entry in frames:
        if entry.is_python:
            return
        yield entry


def ll_get_stack(tid: int) -> list[Any]:
    """The native frames that the innermost Python function of a thread called, outermost first.

    :param tid: the thread's ident (``threading.get_ident()``), not the kernel's number.
    :returns: entries as :func:`stacktrace.get_thread_stack` makes them; empty when the thread is gone.
    """
    from stacktrace import get_thread_stack

    return list(_remove_py_stack(get_thread_stack(tid, show_python=False)))[::-1]
