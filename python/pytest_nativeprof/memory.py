"""Limits of the memory of a test: what its call allocates is sampled, and the stack that holds most is shown."""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable

import pytest

from nativeprof.profiler import Profiler

from .recording import Recording

_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
#: Arguments of the marker, and what each limits.
LIMITS = {"max_peak": "peak_bytes", "max_leaked": "live_bytes"}
# A limit of so many intervals between samples is known to 5 %.
_PRECISION = 400
_INTERVALS = 1 << 10, 512 << 10
# Standard deviations of an estimate that a limit may be exceeded by: tests do not fail by chance.
_SURE = 3.0
# Frames of a stack that are shown.
_MOST = 25


def size(value: object, name: str) -> int:
    """A number of bytes, or a text such as ``10 MB`` or ``64KiB``.

    :raises ValueError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"{name} must be a number of bytes, or a text such as '10 MB' or '64 KiB', got {value!r}")
    return round(float(found[1]) * _UNITS[found[2].upper()])


def shown(count: float) -> str:
    """An amount of bytes as text."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


@dataclass
class MemoryUse:
    """What a part of a program has allocated. Amounts are estimates in bytes; they are 0 until it has ended."""

    #: What was allocated and not freed when that was most.
    peak_bytes: int = 0
    #: What was allocated and not freed at the end, after a collection of garbage.
    live_bytes: int = 0
    #: Standard deviations of the two.
    errors: dict[str, float] = field(default_factory=dict)
    #: The stack that held most at each of the two times, outermost frame first, and how much.
    stacks: dict[str, tuple[list[str], int]] = field(default_factory=dict)

    def exceeded(self, max_peak: int | None, max_leaked: int | None) -> str:
        """What to say of limits that were exceeded; empty: none was."""
        lines = []
        for name, limit in (("max_peak", max_peak), ("max_leaked", max_leaked)):
            value = LIMITS[name]
            amount, error = getattr(self, value), self.errors.get(value, 0.0)
            if limit is None or amount - _SURE * error <= limit:
                continue
            what = "allocated at the peak" if name == "max_peak" else "allocated and not freed"
            about = f" (± {shown(error)})" if error >= 1 else ""
            lines.append(f"{shown(amount)}{about} were {what}, above {name}={shown(limit)}")
            stack, held = self.stacks.get(value, ([], 0))
            lines.append(f"the stack that held most, {shown(held)}:")
            lines += [f"    {frame}" for frame in stack]
        return "\n".join(lines)


def limits_of(item: pytest.Item) -> dict[str, int]:
    """The limits of memory that the markers of a test set, the closest one first.

    :raises ValueError: one is no size.
    """
    limits: dict[str, int] = {}
    for marker in item.iter_markers("nativeprof"):
        for name in LIMITS:
            if name in marker.kwargs:
                limits.setdefault(name, size(marker.kwargs[name], f"{name} of the marker nativeprof"))
    return limits


@contextmanager
def measured(max_peak: int | None = None, max_leaked: int | None = None) -> Iterator[MemoryUse]:
    """Measures what is allocated in its block, closely enough for these limits, and fails the test above them.

    :raises RuntimeError: another profiler runs in this process. :raises OSError: allocations cannot be sampled here.
    """
    use = MemoryUse()
    smallest = min((limit for limit in (max_peak, max_leaked) if limit is not None), default=100 << 20)
    interval = min(max(smallest // _PRECISION, _INTERVALS[0]), _INTERVALS[1])
    # With a fixed interval: it is known how close estimates are.
    profiler = Profiler(mode="alloc", native=False, interval=interval, max_overhead=1.0)
    profiler.start()
    try:
        yield use
        gc.collect()
    finally:
        profile = profiler.stop()
    tree: dict[str, Any] = json.loads(profile._native.render("json"))
    for value in LIMITS.values():
        setattr(use, value, tree.get("values", {}).get(value, 0))
        use.errors[value] = _error(tree, value)
        use.stacks[value] = _largest(tree, value)
    said = use.exceeded(max_peak, max_leaked)
    if said:
        pytest.fail(said, pytrace=False)


def limited(*, max_peak: int | str | None = None, max_leaked: int | str | None = None) -> AbstractContextManager[MemoryUse]:
    """As :func:`measured`, with limits that may be texts such as ``10 MB``.

    :raises ValueError: one is no size.
    """
    sizes = {"max_peak": max_peak, "max_leaked": max_leaked}
    return measured(**{name: size(value, name) for name, value in sizes.items() if value is not None})


class MemoryLimits:
    """Checks the limits of tests that have a marker.

    :param active: the recording of the session, if this process is recorded.
    """

    def __init__(self, active: Callable[[], Recording | None]) -> None:
        self._active = active

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        # Most tests have no marker, and this is quick.
        recording = self._active() if "nativeprof" in item.keywords else None
        limits = limits_of(item) if recording is not None else {}
        if recording is None or not limits:
            return (yield)
        recording.stop()
        recording.notes["not recorded: the call of a test with a limit of memory, whose allocations are sampled instead"] += 1
        with measured(**limits):
            return (yield)


def _error(tree: dict[str, Any], value: str) -> float:
    """The standard deviation of an estimate, which is the sum of independent samples of known probability."""
    columns = tree["nativeprof"].get("samples", {}).get("values", {})
    amounts = columns.get(value, [])
    # A sample stands for so many blocks: the inverse of its probability.
    variance = sum(amount * amount * (1 - 1 / max(blocks, 1)) for amount, blocks in zip(amounts, columns.get("allocs", [])))
    # What no stack was taken of, since there were too many at once, may have been one sample.
    rest = tree.get("values", {}).get(value, 0) - sum(amounts)
    return math.sqrt(variance + rest * rest)


def _largest(tree: dict[str, Any], value: str) -> tuple[list[str], int]:
    """The stack with the largest amount, without what called the test."""
    largest: tuple[list[dict[str, Any]], int] = [], -1
    waiting: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [([], tree)]
    while waiting:
        path, node = waiting.pop()
        children = [child for child in node["children"].values() if child.get("values", {}).get(value)]
        own = node.get("values", {}).get(value, 0) - sum(child["values"][value] for child in children)
        if own > largest[1]:
            largest = path, own
        waiting += [([*path, child], child) for child in children]
    path, amount = largest
    calls = [at for at, node in enumerate(path) if _is_call_of_test(node["description"])]
    frames = [_frame(node) for node in path[calls[0] + 1 if calls else 0 :]]
    if len(frames) > _MOST:
        frames = [f"... {len(frames) - _MOST} frames ...", *frames[-_MOST:]]
    return frames, amount


def _is_call_of_test(description: dict[str, Any]) -> bool:
    """Whether it is what pytest calls the function of a test with."""
    return description["name"] == "pytest_pyfunc_call" and "_pytest" in description["filename"]


def _frame(node: dict[str, Any]) -> str:
    description, lines = node["description"], node.get("lines", {})
    line = max(lines, key=lines.__getitem__) if lines else description["line_number"]
    return f"{description['name']} ({description['filename']}:{line})"
