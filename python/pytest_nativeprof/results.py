"""What is known of each test: CPU time by phase, and calls. The runs in a directory."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nativeprof import _files
from nativeprof._native import this_machine

PHASES = ("setup", "call", "teardown")
#: What else ``cpu`` may have: around the timed rounds of a benchmark, and of attempts before the last one.
OTHERS = ("untimed", "repeated")

_PYTHON = sys.version.split()[0]

# A label has room for 255 bytes.
_MOST_BYTES = 200
# Of a file of results that is read.
_MOST_FILE = 1 << 28

# How often functions were called: by their name and file, as `name (file)`.
Calls = dict[str, int]


def printable(text: str) -> str:
    """The text with escapes for what is not printable."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def label_of(nodeid: str) -> str:
    """The value of the label ``test``: the id, with escapes for what is not printable.

    Long ones are cut, and end in a hash, so different ids have different labels.
    """
    return bounded(nodeid, _MOST_BYTES)


def bounded(text: str, most: int) -> str:
    """The text with escapes for what is not printable, in so many bytes at most: if it is cut, it ends in a hash."""
    shown = printable(text)
    if len(shown) * 4 <= most:
        return shown
    content = shown.encode("utf-8", "backslashreplace")
    if len(content) <= most:
        return shown
    import hashlib

    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{content[: most - 16].decode('utf-8', 'ignore')}...{digest}"


# Paths of the standard library and of installed packages are relative to these.
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("/site-packages/", "/dist-packages/")


def file_of(path: str, root: str) -> str:
    """A path of code as it is the same in another checkout or environment, if possible.

    Calls no function of Python: calls are counted. :param root: a directory of the tests, with a slash at its end.
    """
    for place in _INSTALLED:
        _, found, rest = path.rpartition(place)
        if found:
            return rest
    for start in (root, _LIBRARY):
        if path.startswith(start):
            return path[len(start) :]
    return path


@dataclass
class TestResult:
    """What a test took, by its label.

    ``cpu`` has seconds of the process's CPU time for each phase, which lasts until the next one begins; ``calls`` how often its
    call began each Python function, if that was counted. Of a test of pytest-benchmark, ``iterations`` were timed: ``cpu`` of
    ``call`` is that of all of them, ``calls`` are those of one, and what was done around them is in ``cpu`` under ``untimed``.
    Of a test that a plugin ran several times, all else is of the last attempt, and the CPU time of the others is in ``cpu``
    under ``repeated``. ``passed``: the call has ended without an error.
    """

    __test__ = False

    cpu: dict[str, float] = field(default_factory=dict)
    calls: Calls | None = None
    iterations: int = 0
    passed: bool = False

    def add(self, other: TestResult) -> None:
        """Adds another test with the same id."""
        for phase, seconds in other.cpu.items():
            self.cpu[phase] = self.cpu.get(phase, 0.0) + seconds
        self.iterations += other.iterations
        self.passed &= other.passed
        if other.calls is not None:
            calls = self.calls = self.calls or {}
            for function, count in other.calls.items():
                calls[function] = calls.get(function, 0) + count

    @property
    def seconds(self) -> float:
        """CPU time of the three phases."""
        get = self.cpu.get  # without a loop: it is called for each test
        return get("setup", 0.0) + get("call", 0.0) + get("teardown", 0.0)

    @property
    def cpu_of_call(self) -> float:
        """CPU time (seconds) of the call, or of one iteration."""
        return self.cpu.get("call", 0.0) / max(self.iterations, 1)

    @property
    def number_of_calls(self) -> int | None:
        """Calls of all Python functions, if they were counted."""
        return None if self.calls is None else sum(self.calls.values())

    @property
    def by(self) -> str:
        """What follows an amount of the call."""
        return " per iteration" if self.iterations else ""

    def to_json(self) -> dict[str, Any]:
        """As it is in files and reports."""
        found: dict[str, Any] = {"cpu": self.cpu, "passed": self.passed}
        if self.calls is not None:
            found["calls"] = self.calls
        if self.iterations:
            found["iterations"] = self.iterations
        return found

    @staticmethod
    def from_json(value: Any) -> TestResult:
        """The opposite. What has another form is left out."""
        found = value if isinstance(value, dict) else {}

        def is_amount(value: Any, kinds: Any) -> bool:
            """Not NaN, nor what no clock and no counter shows."""
            return isinstance(value, kinds) and not isinstance(value, bool) and bool(0 <= value < 1e15)

        def numbers(key: str, kinds: tuple[type, ...]) -> dict[str, Any] | None:
            given = found.get(key)
            if not isinstance(given, dict):
                return None
            return {str(name): value for name, value in given.items() if is_amount(value, kinds)}

        iterations = found.get("iterations")
        return TestResult(
            cpu=numbers("cpu", (int, float)) or {},
            calls=numbers("calls", (int,)),
            iterations=iterations if isinstance(iterations, int) else 0,
            # Files of earlier versions do not say.
            passed=found.get("passed") is not False,
        )


Results = dict[str, TestResult]


@dataclass
class Run:
    """A run in a directory: the file of its profile, its results, and where they are from."""

    profile: Path
    results: Results
    python: str = _PYTHON
    #: As profiles have it; empty: unknown.
    machine: dict[str, Any] = field(default_factory=dict)


def new_name() -> str:
    """A name for the files of this run, which no other one has; in the order of time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"


def write(directory: Path, name: str, mode: str, results: Results) -> None:
    """Writes the results of a run to ``DIRECTORY/tests/NAME.json``."""
    (directory / "tests").mkdir(exist_ok=True)
    content = {
        "version": 1,
        "mode": mode,
        "python": _PYTHON,
        "machine": this_machine(),
        "tests": {label: result.to_json() for label, result in results.items()},
    }
    with _files.replacing(directory / "tests" / f"{name}.json") as path, open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(content))


def runs(directory: Path, notes: list[str]) -> list[Run]:
    """The runs in a directory, oldest first. What cannot be read is left out, and added to ``notes``."""
    found = []
    for profile in sorted(directory.glob("*.json.gz")):
        path = directory / "tests" / (profile.name[: -len(".json.gz")] + ".json")
        try:
            if path.stat().st_size > _MOST_FILE:
                raise ValueError(f"it is larger than {_MOST_FILE >> 20} MiB")
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict) or content.get("version") != 1 or not isinstance(content.get("tests"), dict):
                raise ValueError("it has another format")
        except (OSError, ValueError, RecursionError) as error:
            notes.append(f"{path} is left out, with the profile of its run: {error}")
            continue
        python, machine = content.get("python"), content.get("machine")
        if python != _PYTHON:
            notes.append(f"{profile} is of Python {python!r}, this run of {_PYTHON}")
        tests = {printable(label): TestResult.from_json(value) for label, value in content["tests"].items()}
        found.append(Run(profile, tests, str(python), machine if isinstance(machine, dict) else {}))
    return found


def hottest(results: Results, most: int) -> list[tuple[str, TestResult]]:
    """The tests with the most CPU time, most first."""
    return sorted(results.items(), key=lambda item: -item[1].seconds)[:most]


def newest(before: list[Run]) -> Results:
    """Of each test, the results of the newest run that has it."""
    found: Results = {}
    for run in before:
        found.update(run.results)
    return found
