"""The marker ``nativeprof``: limits of a test, and its sampling rate."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from . import memory
from .results import TestResult


@dataclass
class Limits:
    """Most calls of Python functions, most CPU time (seconds), samples per second (Hz); None: not given."""

    max_calls: int | None = None
    max_cpu: float | None = None
    rate: int | None = None


#: Of a test without the marker.
NONE = Limits()


def may_have_limits(item: pytest.Item) -> bool:
    """Whether a marker, or something that is called like it, is found for a test: most have none, and this is quick."""
    return "nativeprof" in item.keywords


def limits_of(item: pytest.Item) -> Limits:
    """Those that the markers of a test set, the closest one first.

    :raises ValueError: a marker is wrong.
    """
    limits = NONE
    for marker in item.iter_markers("nativeprof"):
        if limits is NONE:
            limits = Limits()
        if marker.args:
            raise ValueError(f"the marker nativeprof has no positional arguments, got {marker.args!r}; write max_calls=N")
        for name, value in marker.kwargs.items():
            _check(name, value)
            if name in memory.LIMITS:
                continue  # checked apart
            if getattr(limits, name) is None:
                setattr(limits, name, value)
    return limits


def _check(name: str, value: object) -> None:
    if name in memory.LIMITS:
        memory.size(value, f"{name} of the marker nativeprof")
        return
    if name not in ("max_calls", "max_cpu", "rate"):
        known = ", ".join(("max_calls", "max_cpu", *memory.LIMITS))
        raise ValueError(f"the marker nativeprof has no argument {name!r}; it has {known} and rate")
    whole = isinstance(value, int) and not isinstance(value, bool)
    if name == "rate" and not (whole and 1 <= value <= 10_000):  # type: ignore[operator]
        raise ValueError(f"rate of the marker nativeprof must be between 1 and 10000 samples per second, got {value!r}")
    if not (whole or (name == "max_cpu" and isinstance(value, float))) or not value >= 0:  # type: ignore[operator]
        unit = "a number of seconds" if name == "max_cpu" else "a whole number"
        raise ValueError(f"{name} of the marker nativeprof must be {unit}, got {value!r}")


def check(limits: Limits, result: TestResult) -> None:
    """Fails the test that runs if its call was above a limit."""
    calls, cpu = result.number_of_calls, result.cpu_of_call
    if limits.max_calls is not None and calls is not None and calls > limits.max_calls:
        most = sorted((result.calls or {}).items(), key=lambda item: -item[1])[:5]
        lines = "".join(f"\n{count:>12,}  {function}" for function, count in most)
        pytest.fail(
            f"{calls:,} calls of Python functions{result.by}, max_calls={limits.max_calls:,}; most of them:{lines}", pytrace=False
        )
    if limits.max_cpu is not None and cpu > limits.max_cpu:
        pytest.fail(f"{cpu:.3f} s CPU{result.by}, max_cpu={limits.max_cpu}", pytrace=False)
