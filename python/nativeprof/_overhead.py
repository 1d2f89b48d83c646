"""What tracing costs on this machine, measured."""

from __future__ import annotations

import sys
from time import perf_counter_ns
from typing import Any, Callable

from . import _native

# Short and many, so that some are not interrupted.
ROUNDS = 40
# Calls of one round: of `_function` (with what they call), and of C functions.
CALLS = 177
C_CALLS = 200

# Seconds for the call of a Python function, of a C function, and for an event that is ignored.
Costs = tuple[float, float, float]

_known: dict[tuple[Any, bool], Costs] = {}


def _function(n: int) -> int:
    return n if n < 2 else _function(n - 1) + _function(n - 2)


def _python_calls() -> int:
    begin = perf_counter_ns()
    _function(10)
    return perf_counter_ns() - begin


def _c_calls() -> int:
    length, items = len, [0]
    begin = perf_counter_ns()
    for _ in range(C_CALLS // 4):
        length(items)
        items.append(1)
        items.pop()
        length(items)
    return perf_counter_ns() - begin


class _Counts:
    def __init__(self) -> None:
        self._recorder = _native.CallRecorder("counts", False, False, None, False, [], [])

    def enable(self) -> None:
        self._recorder.start((0.0, 0.0, 0.0), False)

    def disable(self) -> None:
        self._recorder.stop()


def _added(work: Callable[[], int], calls: int, tracer: Any) -> float:
    """Seconds that each call of the work takes longer under the tracer."""
    plain, traced = [], []
    for _ in range(ROUNDS):
        work()  # the interpreter adapts the code first
        plain.append(work())
        tracer.enable()
        try:
            work()
            traced.append(work())
        finally:
            tracer.disable()
    return max(min(traced) - min(plain), 0) / calls / 1e9


def costs(mode: Any, builtins: bool, make: Callable[[], Any] | None = None) -> Costs:
    """Measured at the first call, in some milliseconds; nothing may be traced then.

    :param mode: ``"counts"`` or ``"times"``, or with ``make`` anything that represents its tracers, which see functions
        that are written in C as ``builtins`` says.
    """
    known = _known.get((mode, builtins))
    if known is not None:
        return known
    if mode == "counts":
        result = (_added(_python_calls, CALLS, _Counts()), 0.0, 0.0)
    elif make is not None:
        tracer = make()
        result = (_added(_python_calls, CALLS, tracer), _added(_c_calls, C_CALLS, tracer) if builtins else 0.0, 0.0)
    else:
        python = _added(_python_calls, CALLS, _native.Profiler(builtins=False))
        if builtins:
            both = _native.Profiler(builtins=True)
            c = _added(_c_calls, C_CALLS, both)
            # From 3.12 on the call of a Python function has an event of its own.
            ignored = max(_added(_python_calls, CALLS, both) - python, 0.0) if sys.version_info >= (3, 12) else 0.0
        else:
            c = 0.0
            ignored = 0.0 if sys.version_info >= (3, 12) else _added(_c_calls, C_CALLS, _native.Profiler(builtins=False)) / 2
        result = (python, c, ignored)
    _known[mode, builtins] = result
    return result
