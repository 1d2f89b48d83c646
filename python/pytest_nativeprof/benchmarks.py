"""Timed rounds of pytest-benchmark: what a benchmark takes is what these take, by iteration."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

from nativeprof import span

from .recording import Recording, untimed
from .results import Calls, TestResult


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

    def put_into(self, result: TestResult) -> None:
        """Makes what was measured the result of the test, if there was a timed round."""
        if self.iterations:
            result.cpu["untimed"] = max(result.cpu["call"] - self.cpu, 0.0)
            result.cpu["call"], result.iterations = self.cpu, self.iterations
            if result.calls is not None:
                result.calls = self.calls_of_iteration()

    def calls_of_iteration(self) -> Calls:
        """Calls in one iteration, rounded if they differ."""
        counts = ((function, round(count / self.iterations)) for function, count in self.calls.items())
        return {function: count for function, count in counts if count}


@contextmanager
def around(fixture: Any, recording: Recording, of_test: span, of_rest: span | None) -> Iterator[None]:
    """The labels of a call with a benchmark.

    :param of_test: the active labels of the test, which only timed rounds have.
    :param of_rest: those of the rest; None if the fixture times nothing.

    It also keeps pytest-benchmark from taking away the profile hook, by which calls are counted before CPython 3.12. That
    could not be put back: ``sys.setprofile`` takes no hooks that are written in C.
    """
    module: Any = sys.modules.get(type(fixture).__module__)
    pause: Any = getattr(module, "PauseInstrumentation", None)
    is_taken = recording.counts_calls and sys.version_info < (3, 12) and pause is not None
    if is_taken:
        module.PauseInstrumentation = functools.partial(pause, profiler=False)
    try:
        if of_rest is None:
            yield
            return
        of_test.__exit__()
        try:
            with of_rest:
                yield
        finally:
            of_test.__enter__()
    finally:
        if is_taken:
            module.PauseInstrumentation = pause


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
            labels = span("pytest", test=label, phase="call") if state["is_timed"] else untimed(label)
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
