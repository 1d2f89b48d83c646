"""What tracing costs on this machine, measured."""

from __future__ import annotations

import sys
from time import perf_counter_ns
from typing import Any, Callable, Dict, Tuple

from . import _native

CALLS = 1000
ROUNDS = 7

# Seconds for the call of a Python function, of a C function, and for an event that is ignored.
Costs = Tuple[float, float, float]

_known: Dict[Tuple[str, bool], Costs] = {}


def _function() -> None:
    pass


def _python_calls(count: int) -> int:
    begin = perf_counter_ns()
    for _ in range(count):
        _function()
    return perf_counter_ns() - begin


def _c_calls(count: int) -> int:
    length, nothing = len, ()
    begin = perf_counter_ns()
    for _ in range(count):
        length(nothing)
    return perf_counter_ns() - begin


class _Counts:
    def __init__(self) -> None:
        self._recorder = _native.CallRecorder("counts", False, False, None, False, [], [])

    def enable(self) -> None:
        self._recorder.start((0.0, 0.0, 0.0), False)

    def disable(self) -> None:
        self._recorder.stop()


def _added(loop: Callable[[int], int], tracer: Any) -> float:
    """Seconds that each call of the loop takes longer under the tracer."""
    plain, traced = [], []
    for _ in range(ROUNDS):
        plain.append(loop(CALLS))
        tracer.enable()
        try:
            loop(CALLS // 10)  # the interpreter adapts the code first
            traced.append(loop(CALLS))
        finally:
            tracer.disable()
    return max(min(traced) - min(plain), 0) / CALLS / 1e9


def costs(mode: str, builtins: bool) -> Costs:
    """Measured at the first call, in some milliseconds; nothing may be traced then."""
    known = _known.get((mode, builtins))
    if known is not None:
        return known
    if mode == "counts":
        result = (_added(_python_calls, _Counts()), 0.0, 0.0)
    else:
        python = _added(_python_calls, _native.Profiler(builtins=False))
        if builtins:
            both = _native.Profiler(builtins=True)
            c = _added(_c_calls, both)
            # From 3.12 on the call of a Python function has an event of its own.
            ignored = max(_added(_python_calls, both) - python, 0.0) if sys.version_info >= (3, 12) else 0.0
        else:
            c = 0.0
            ignored = 0.0 if sys.version_info >= (3, 12) else _added(_c_calls, _native.Profiler(builtins=False)) / 2
        result = (python, c, ignored)
    _known[mode, builtins] = result
    return result
