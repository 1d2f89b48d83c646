"""The hooks of a session that is recorded: in a process that runs tests, and in the controller of pytest-xdist."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from nativeprof import _files

from . import benchmarks, comparison, limits, memory, results
from .recording import RATE, Recording, command, span, untimed
from .results import Results, Run, TestResult

# Tests that the summary has, at most.
_MOST = 10


def start(config: pytest.Config) -> None:
    """Registers the hooks.

    :raises pytest.UsageError: options do not fit together.
    """
    mode = config.getoption("nativeprof_mode") or "samples"
    tests = _TestProcess(mode)
    config.pluginmanager.register(tests, "nativeprof-tests")
    config.pluginmanager.register(memory.MemoryLimits(tests.active), "nativeprof-memory")
    session = _WorkerReports(tests) if hasattr(config, "workerinput") else _Session(config, mode, tests)
    config.pluginmanager.register(session, "nativeprof-session")
    if mode != "samples":
        config.pluginmanager.register(_CountedCalls(tests), "nativeprof-counts")


class _TestProcess:
    """Records the process that runs tests, and gives each test's report its figures."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.recording: Recording | None = None
        #: CPU time of the session (seconds), when it has ended.
        self.cpu = 0.0
        self._begin = 0.0
        # Those of the test that runs.
        self.result = TestResult()
        self._nodeid = self._label = ""
        self._limits = limits.NONE
        self._rounds: benchmarks.TimedRounds | None = None
        self._exit = os._exit
        self._capture: Any = None

    def active(self) -> Recording | None:
        """The recording, unless this is a process that a test has forked, or one that runs no tests."""
        recording = self.recording
        return recording if recording is not None and recording.is_current_process() else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if session.config.pluginmanager.hasplugin("dsession"):
            return  # its workers run the tests
        self.recording = Recording(self.mode, session.config.rootpath)
        self.recording.start()
        self._begin = time.process_time()
        self._capture = session.config.pluginmanager.getplugin("capturemanager")
        os._exit = self._exit_with_a_word  # type: ignore[assignment]

    def _exit_with_a_word(self, status: int) -> None:
        if self.active() is not None:
            said = f"\nnativeprof: {self._label or 'a module'} ends pytest by os._exit: what was recorded is lost\n"
            if self._capture is not None:
                self._capture.suspend()
            os.write(2, said.encode("utf-8", "backslashreplace"))
        self._exit(status)

    # The three phases do not share a generator: with thousands of short tests, that would take longer than what they do.

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.result, self._rounds = TestResult(), None
        recording = self.active()
        if recording is None:
            return (yield)
        self._nodeid, self._label = item.nodeid, results.label_of(item.nodeid)
        wrong, self._limits = "", limits.NONE
        try:
            self._limits = limits.limits_of(item)
        except ValueError as error:
            wrong = str(error)
        # Also if an earlier test has stopped it.
        recording.start(self._limits.rate or RATE)
        begin = time.process_time()
        try:
            with span(self._label, "setup"):
                result = yield
        finally:
            self.result.cpu["setup"] = time.process_time() - begin
        if wrong:
            # Not before: what has not been set up cannot be torn down.
            pytest.fail(wrong, pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        recording = self.active()
        if recording is None:
            return (yield)
        benchmark = getattr(item, "funcargs", {}).get("benchmark")
        labels: AbstractContextManager[Any] = span(self._label, "call")
        if benchmark is not None:
            self._rounds = benchmarks.follow(benchmark, recording, self._label)
            labels = benchmarks.around(benchmark, recording, labels if self._rounds is None else untimed(self._label))
        begin = time.process_time()
        try:
            with labels:
                result = yield
        finally:
            self.result.cpu["call"] = time.process_time() - begin
            self._count_rounds()
        if self._limits is not limits.NONE and self.active() is not None:
            limits.check(self._limits, self.result)
            if self._limits.max_calls is not None and self.result.calls is None:
                recording.notes["max_calls was not checked: it needs --nativeprof-mode=counts"] += 1
        return result

    def _count_rounds(self) -> None:
        rounds, result = self._rounds, self.result
        if rounds is not None and rounds.iterations:
            result.cpu["untimed"] = max(result.cpu["call"] - rounds.cpu, 0.0)
            result.cpu["call"] = rounds.cpu
            result.iterations = rounds.iterations
            if result.calls is not None:
                result.calls = rounds.calls_of_iteration()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if self.active() is None:
            return (yield)
        begin = time.process_time()
        try:
            with span(self._label, "teardown"):
                return (yield)
        finally:
            self.result.cpu["teardown"] = time.process_time() - begin
            # Not those of an earlier attempt, if a plugin repeats tests that fail.
            kept = [entry for entry in item.user_properties if not entry[0].startswith("nativeprof_")]
            item.user_properties[:] = [*kept, *properties(self.result)]

    def finished(self, report: pytest.TestReport) -> tuple[str, TestResult] | None:
        """The label and the results of a test, if this is its last report, and it ran in this process."""
        if report.when == "teardown" and report.nodeid == self._nodeid and self.active() is not None:
            return self._label, self.result
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        recording = self.active()
        if recording is None:
            return
        os._exit = self._exit
        self.cpu = time.process_time() - self._begin
        recording.stop()
        worker: Any = session.config
        if hasattr(worker, "workerinput"):
            name = worker.workerinput["workerid"]
            try:
                recording.saved(Path(worker.workerinput["nativeprof_parts"]), name)
            except (KeyError, OSError) as error:
                recording.notes[f"the profile of the worker {name} is lost: {error}"] += 1
            worker.workeroutput["nativeprof"] = {"cpu": self.cpu, "notes": dict(recording.notes), **recording.amounts()}


class _WorkerReports:
    """Sends the results of tests from a worker of pytest-xdist to the controller, with their reports."""

    def __init__(self, tests: _TestProcess) -> None:
        self._tests = tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        finished = self._tests.finished(report)
        if finished is not None:
            report.nativeprof = {"label": finished[0], **finished[1].to_json()}


class _CountedCalls:
    """Counts the calls of a test: of its function, where that can be told from what pytest calls around it."""

    def __init__(self, tests: _TestProcess) -> None:
        self._tests = tests

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        recording = self._tests.active()
        if recording is None:
            return (yield)
        function: Any = getattr(item, "obj", None)
        if not isinstance(item, pytest.Function) or inspect.iscoroutinefunction(inspect.unwrap(function)):
            self._begin(recording)
            try:
                return (yield)
            finally:
                self._end(recording)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            self._begin(recording)
            try:
                return function(*arguments, **named)
            finally:
                self._end(recording)

        item.obj = call
        try:
            return (yield)
        finally:
            item.obj = function

    @staticmethod
    def _begin(recording: Recording) -> None:
        recording.check_hook()
        recording.lap()

    def _end(self, recording: Recording) -> None:
        if self._tests.active() is not None:
            self._tests.result.calls = recording.lap()
            recording.check_hook()


def properties(result: TestResult, suffix: str = "") -> list[tuple[str, object]]:
    """The properties of a test in reports, such as those of JUnit: CPU time in seconds, and calls."""
    found: list[tuple[str, object]] = [(f"nativeprof_cpu{suffix}", f"{result.seconds:.6f}")]
    if result.iterations:
        found.append((f"nativeprof_cpu_per_iteration{suffix}", f"{result.cpu_of_call:.9f}"))
    if result.calls is not None:
        found.append((f"nativeprof_calls{suffix}", result.number_of_calls))
    return found


class _Session:
    """Gathers the results of all tests, writes the profile of the session, compares it, and shows a summary."""

    def __init__(self, config: pytest.Config, mode: str, tests: _TestProcess) -> None:
        self._mode = mode
        self._tests = tests
        self._results: Results = {}
        self._notes: Counter[str] = Counter()
        self._amounts: Counter[str] = Counter()
        self._cpu = 0.0
        self._saved: Path | None = None
        self._comparison: comparison.Comparison | None = None
        here = config.invocation_params.dir
        save, compare, limit = (config.getoption(f"nativeprof_{name}") for name in ("save", "compare", "fail_above"))
        self._save = here / save if save else None
        self._limit = comparison.Limit.parse(limit, mode) if limit is not None else None
        if limit is not None and not compare:
            raise pytest.UsageError("--nativeprof-fail-above needs runs to compare with; add --nativeprof-compare=DIR")
        self._before: list[Run] = self._runs(here / compare) if compare else []
        if compare and not self._before:
            why = "; ".join(self._notes) or f"there is no profile in {here / compare}"
            raise pytest.UsageError(
                f"--nativeprof-compare has nothing to compare with: {why}; make one with --nativeprof-save={compare}"
            )
        self._newest = comparison.newest(self._before)
        self._parts = Path(tempfile.mkdtemp(prefix="nativeprof-"))
        # Also where pytest itself is ended by an exception.
        config.add_cleanup(lambda: shutil.rmtree(self._parts, ignore_errors=True))

    def _runs(self, directory: Path) -> list[Run]:
        notes: list[str] = []
        runs = results.runs(directory, notes)
        self._notes.update(notes)
        return runs

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["nativeprof_parts"] = str(self._parts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {}).get("nativeprof")
        if output is None:
            self._notes[f"the worker {node.gateway.id} has crashed: what it recorded is lost"] += 1
            return
        self._cpu += output["cpu"]
        self._amounts.update({name: output[name] for name in ("samples", "calls")})
        self._notes.update(output["notes"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        given = getattr(report, "nativeprof", None)
        if given is not None:
            finished: tuple[str, TestResult] | None = given["label"], TestResult.from_json(given)
        else:
            finished = self._tests.finished(report)
        if finished is None:
            return
        label, result = finished
        known = self._results.setdefault(label, result)
        if known is not result:
            known.add(result)
        earlier = self._newest.get(label)
        if earlier is not None:
            report.user_properties.extend(properties(earlier, "_before"))

    # After the process of the tests, which may be this one, has written its part.
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        recording = self._tests.recording
        if recording is not None:
            if self._tests.active() is None:
                return
            self._cpu = self._tests.cpu
            self._amounts.update(recording.amounts())
            self._notes.update(recording.notes)
        if self._save is None and not self._before:
            return
        try:
            if recording is not None:
                recording.saved(self._parts, "session")
            self._finish(self._save)
        except OSError as error:
            self._notes[f"the profile is not saved, or not compared: {error}"] += 1
            self._fail(session)
        if self._comparison is not None and self._comparison.fails:
            self._fail(session)

    @staticmethod
    def _fail(session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _finish(self, save: Path | None) -> None:
        """Writes the profile and the results of this run, and compares them."""
        earlier = {run.profile.resolve() for run in self._before}
        after: list[Run] = []
        if save is not None:
            save.mkdir(parents=True, exist_ok=True)
            if self._before:
                after = [run for run in self._runs(save) if run.profile.resolve() not in earlier]
        name = results.new_name()
        profile = (save or self._parts) / f"{name}.json.gz"
        parts = [path for path in sorted(self._parts.iterdir()) if path.is_file()]
        merge(parts, profile)
        if save is not None:
            results.write(save, name, self._mode, self._results)
            self._saved = profile
        if self._before:
            after.append(Run(profile, self._results))
            self._comparison = comparison.compared(self._before, after, self._mode, self._limit)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("nativeprof")
        phases = {phase: sum(r.cpu.get(phase, 0.0) for r in self._results.values()) for phase in (*results.PHASES, "untimed")}
        # Workers that have crashed have not said how much they used in all.
        total = max(self._cpu, sum(phases.values()))
        outside = total - sum(phases.values())
        if not phases["untimed"]:
            del phases["untimed"]
        parts = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in [*phases.items(), ("outside of tests", outside)])
        write(f"{total:.2f} s CPU: {parts}")
        hottest = results.hottest(self._results, _MOST)
        counts = self._mode != "samples"
        if hottest:
            write("   CPU s      %" + ("         calls" if counts else "") + "  test")
        for label, result in hottest:
            calls = f"  {result.number_of_calls or 0:>12,}" if counts else ""
            write(f"{result.seconds:8.3f}  {100 * result.seconds / max(total, 1e-9):5.1f}{calls}  {label}")
        if self._comparison is not None:
            for line in self._comparison.lines:
                write(line)
        for note, count in self._notes.items():
            write(f"note: {note}" + (f" ({count} times)" if count > 1 else ""))
        if self._save is None:
            write("the profile is not saved; add --nativeprof-save=DIR")
        if self._saved is not None:
            kinds = {"samples": "samples", "counts": "calls"}.get(self._mode)
            amounts = [f"{self._amounts[kind]:,} {kind}" for kind in ("samples", "calls") if kinds in (None, kind)]
            write(f"profile of {' and '.join(amounts)}: {self._saved}")


def merge(parts: list[Path], path: Path) -> None:
    """Makes one profile of several.

    :raises OSError: it cannot be written.
    """
    if len(parts) == 1:
        with _files.replacing(path) as new:
            shutil.copyfile(parts[0], new)
        return
    if not parts:
        raise OSError("nothing was recorded")
    program = command()
    if program is None:
        raise OSError("the command nativeprof, which merges the profiles of workers, is not in this environment")
    done = subprocess.run(
        [program, "merge", *map(os.fspath, parts), "-o", path], capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        raise OSError(f"nativeprof merge: {done.stderr.strip()}")
