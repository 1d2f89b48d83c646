"""What is recorded in this process: samples and counts, in parts with different rates."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

import nativeprof
from nativeprof.profiler import Profile, Profiler

from .results import Calls, bounded, file_of

#: Samples per second of CPU time.
RATE = 100

# Modules of pytest itself, whose calls are not those of the tests.
_MACHINERY = ("_pytest", "pytest", "pluggy", "xdist", "execnet", "pytest_benchmark", "pytest_nativeprof", "nativeprof")

# Bytes of a function's name with its file.
_MOST_OF_NAME = 400

# By the mode, what a profiler records: with the samples of a profile that is saved, and without.
_MODES = {"samples": ("cpu", None), "counts": ("counts", "counts"), "counts+samples": ("counts+cpu", "counts")}


class _SessionProfiler(Profiler):
    """A profiler that stops when a test starts one of its own."""

    stopping: Callable[[], None]

    def _give_way(self) -> None:
        self.stopping()


class Recording:
    """The recording of this process.

    :param mode: ``samples``, ``counts`` or ``counts+samples``.
    :param root: the directory to which paths of functions are relative.
    :param is_saved: whether the profile is kept. If not, nothing is sampled: what each test took is measured by clocks.
    """

    def __init__(self, mode: str, root: Path, is_saved: bool) -> None:
        self.process = os.getpid()
        #: What is to be known about the recording, and how often it happened.
        self.notes: Counter[str] = Counter()
        self.counts_calls = mode != "samples"
        self._mode = _MODES[mode][0 if is_saved else 1]
        self._root = os.path.join(root, "")
        self._files: dict[str, str] = {}
        self._rate = RATE
        self._profiler: _SessionProfiler | None = None
        self._hook: object = None
        self._parts: list[Profile] = []

    def is_current_process(self) -> bool:
        """Whether this process is recorded: not one that a test has forked."""
        return os.getpid() == self.process

    def start(self, rate: int = RATE) -> None:
        """Records with this rate (Hz) from now on."""
        if self._mode is None:
            return
        if self._profiler is not None:
            if rate == self._rate:
                return
            self.stop()
        profiler = _SessionProfiler(rate, mode=self._mode, skip=_MACHINERY if self.counts_calls else ())
        profiler.stopping = self._give_way
        try:
            with self._noting_warnings(), _leaving_profilers_tool(self.counts_calls):
                profiler.start()
        except (OSError, RuntimeError, ValueError) as error:
            self.notes[f"not recorded: {error}"] += 1
            return
        self._profiler, self._rate, self._hook = profiler, rate, sys.getprofile()

    def stop(self) -> None:
        """Keeps what was recorded."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with self._noting_warnings():
                self._parts.append(profiler.stop())

    @contextmanager
    def _noting_warnings(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield
        for warning in said:
            if issubclass(warning.category, RuntimeWarning):
                self.notes[str(warning.message)] += 1

    def _give_way(self) -> None:
        self.notes["not recorded while a test had a nativeprof.Profiler of its own"] += 1
        self.stop()

    def check_hook(self) -> None:
        """Continues to count calls if a test has taken the profile hook (before CPython 3.12), which counts them."""
        if self._profiler is not None and self._hook is not None and sys.getprofile() is not self._hook:
            self.notes["calls are missing in a test that used sys.setprofile, or a profiler that does"] += 1
            self.stop()
            self.start(self._rate)

    def lap(self) -> Calls:
        """How often each Python function was called since the last lap, by the end of its path and its name."""
        calls: Calls = {}
        if self._profiler is not None:
            for file, _, name, count in self._profiler._lap():
                known = self._files.get(file)
                if known is None:
                    known = self._files[file] = file_of(file, self._root)
                # Without its line, which changes with what is above it.
                function = bounded(f"{name} ({known})", _MOST_OF_NAME)
                calls[function] = calls.get(function, 0) + count
        return calls

    def saved(self, directory: Path, name: str) -> None:
        """Writes the parts to files in the directory whose names begin with ``name``.

        :raises OSError: a file cannot be written.
        """
        for at, part in enumerate(self._parts):
            part.save(directory / f"{name}-{at}.json.gz")

    def amounts(self) -> dict[str, int]:
        """How many samples were taken, and calls counted."""
        samples = calls = 0
        for part in self._parts:
            stats = part.stats
            if stats["counts"] == "samples":
                samples += stats["taken"]
            if self.counts_calls:
                calls += part._native.top(0, "calls")[1]
        return {"samples": samples, "calls": calls}


@contextmanager
def _leaving_profilers_tool(counts_calls: bool) -> Iterator[None]:
    """Leaves the identifier of ``sys.monitoring`` for profilers to the tests: cProfile needs it."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if not counts_calls or monitoring is None or monitoring.get_tool(monitoring.PROFILER_ID) is not None:
        yield
        return
    monitoring.use_tool_id(monitoring.PROFILER_ID, "nativeprof")
    try:
        yield
    finally:
        monitoring.free_tool_id(monitoring.PROFILER_ID)


def untimed(label: str) -> nativeprof.span:
    """The labels of what a benchmark does around its timed rounds."""
    return nativeprof.span("pytest", benchmark=label, phase="untimed")


def command() -> str | None:
    """The path of the command ``nativeprof`` of this environment."""
    import shutil
    import sysconfig

    places = (os.path.dirname(sys.executable), sysconfig.get_path("scripts"))
    return shutil.which("nativeprof", path=os.pathsep.join(places)) or shutil.which("nativeprof")
