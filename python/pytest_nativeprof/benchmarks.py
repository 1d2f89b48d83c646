"""Timed rounds of pytest-benchmark: what a benchmark takes is what these take, by iteration."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Callable

from .recording import Recording, span, untimed
from .results import Calls


class TimedRounds:
    """CPU time (seconds), calls and iterations of the timed rounds of one test."""

    def __init__(self) -> None:
        self.cpu = 0.0
        self.iterations = 0
        self.calls: Calls = {}
        # Of the last round: pytest-benchmark has not said yet whether it counts.
        self._last: tuple[float, int, Calls] | None = None

    def measured(self, runner: Callable[..., Any], recording: Recording, loops: range | None, labels: Any) -> Any:
        """Runs a round."""
        if recording.counts_calls:
            recording.lap()
        begin = time.process_time()
        with labels:
            result = runner(loops)
        seconds = time.process_time() - begin
        self._last = (seconds, len(loops) if loops else 1, recording.lap() if recording.counts_calls else {})
        return result

    def count_last(self) -> None:
        """The last round was a timed one."""
        if self._last is None:
            return
        seconds, iterations, calls = self._last
        self._last = None
        self.cpu += seconds
        self.iterations += iterations
        for function, count in calls.items():
            self.calls[function] = self.calls.get(function, 0) + count

    def calls_of_iteration(self) -> Calls:
        """Calls in one iteration, rounded if they differ."""
        counts = ((function, round(count / self.iterations)) for function, count in self.calls.items())
        return {function: count for function, count in counts if count}


@contextmanager
def around(fixture: Any, recording: Recording, labels: AbstractContextManager[Any]) -> Iterator[None]:
    """The labels of a call with a benchmark.

    It also keeps pytest-benchmark from taking away the profile hook, by which calls are counted before CPython 3.12. That
    could not be put back: ``sys.setprofile`` takes no hooks that are written in C.
    """
    module = sys.modules.get(type(fixture).__module__)
    pause = getattr(module, "PauseInstrumentation", None)
    if not recording.counts_calls or sys.version_info >= (3, 12) or pause is None:
        with labels:
            yield
        return
    module.PauseInstrumentation = functools.partial(pause, profiler=False)  # type: ignore[union-attr]
    try:
        with labels:
            yield
    finally:
        module.PauseInstrumentation = pause  # type: ignore[union-attr]


def follow(fixture: Any, recording: Recording, label: str) -> TimedRounds | None:
    """Measures the rounds of a fixture ``benchmark`` from now on.

    None if it times nothing, or is not as that of pytest-benchmark 5.3 (``pytest_benchmark/fixture.py``).
    """
    names = ("_make_runner", "_make_stats", "_raw_pedantic")
    if not getattr(fixture, "enabled", False) or not all(callable(getattr(fixture, name, None)) for name in names):
        return None
    rounds = TimedRounds()
    make_runner, make_stats, raw_pedantic = (getattr(fixture, name) for name in names)
    # Whether the next round is a timed one: after the calibration, and after rounds that warm up. Of a benchmark with such rounds
    # the first timed one is known when it has ended, so its samples have no label of the test.
    state = {"warmup": bool(getattr(fixture, "_warmup", False)), "is_timed": False}

    def runner_for(*arguments: Any, **named: Any) -> Callable[..., Any]:
        runner = make_runner(*arguments, **named)

        def run(loops: range | None) -> Any:
            labels = span(label, "call") if state["is_timed"] else untimed(label)
            return rounds.measured(runner, recording, loops, labels)

        return run

    def stats_for(iterations: int) -> Any:
        stats = make_stats(iterations)
        update = stats.update
        state["is_timed"] = not state["warmup"]

        def counted(duration: float) -> None:
            rounds.count_last()
            state["is_timed"] = True
            update(duration)

        stats.update = counted
        return stats

    def pedantic(*arguments: Any, **named: Any) -> Any:
        state["warmup"] = bool(named.get("warmup_rounds"))
        return raw_pedantic(*arguments, **named)

    fixture._make_runner, fixture._make_stats, fixture._raw_pedantic = runner_for, stats_for, pedantic
    return rounds
