"""What is recorded in this process: samples and counts, in parts with different rates."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import nativeprof
from nativeprof.profiler import Profile, Profiler

#: Samples per second of CPU time.
RATE = 100

# Modules of pytest itself, whose calls are not those of the tests.
_MACHINERY = ("_pytest", "pytest", "pluggy", "iniconfig", "xdist", "execnet", "pytest_benchmark", "pytest_nativeprof", "nativeprof")

_MODES = {"samples": "cpu", "counts": "counts", "counts+samples": "counts+cpu"}


class _SessionProfiler(Profiler):
    """A profiler that stops when a test starts one of its own."""

    stopping: Callable[[], None]

    def _give_way(self) -> None:
        self.stopping()


class Recording:
    """The recording of this process.

    :param mode: ``samples``, ``counts`` or ``counts+samples``.
    """

    def __init__(self, mode: str) -> None:
        self.process = os.getpid()
        #: What is to be known about the recording, and how often it happened.
        self.notes: Counter[str] = Counter()
        self._mode = _MODES[mode]
        self._rate = RATE
        self._profiler: _SessionProfiler | None = None
        self._parts: list[Profile] = []

    def is_current_process(self) -> bool:
        """Whether this process is recorded: not one that a test has forked."""
        return os.getpid() == self.process

    def start(self, rate: int = RATE) -> None:
        """Records with this rate (Hz) from now on."""
        if self._profiler is not None:
            if rate == self._rate:
                return
            self.stop()
        profiler = _SessionProfiler(rate, mode=self._mode, skip=_MACHINERY if self._mode != "cpu" else ())
        profiler.stopping = self._give_way
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                profiler.start()
        except (OSError, RuntimeError, ValueError) as error:
            self.notes[f"not recorded: {error}"] += 1
            return
        self._note(said)
        self._profiler, self._rate = profiler, rate

    def stop(self) -> None:
        """Keeps what was recorded."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self._parts.append(profiler.stop())
        self._note(said)

    def _note(self, said: list[warnings.WarningMessage]) -> None:
        for warning in said:
            if issubclass(warning.category, RuntimeWarning):
                self.notes[str(warning.message)] += 1

    def _give_way(self) -> None:
        self.notes["not recorded while a test had a nativeprof.Profiler of its own"] += 1
        self.stop()

    def saved(self, directory: Path, name: str) -> list[Path]:
        """Writes the parts to files in the directory, and returns their paths."""
        paths = []
        for at, part in enumerate(self._parts):
            path = directory / f"{name}-{at}.json.gz"
            part.save(path)
            paths.append(path)
        return paths

    @property
    def samples(self) -> int:
        """How many samples were taken."""
        return sum(part.stats["taken"] for part in self._parts)


def span(label: str, phase: str) -> nativeprof.span:
    """The labels of a phase of a test."""
    return nativeprof.span("pytest", test=label, phase=phase)


def command() -> str | None:
    """The path of the command ``nativeprof`` of this environment."""
    import shutil
    import sysconfig

    places = (os.path.dirname(sys.executable), sysconfig.get_path("scripts"))
    return shutil.which("nativeprof", path=os.pathsep.join(places)) or shutil.which("nativeprof")
