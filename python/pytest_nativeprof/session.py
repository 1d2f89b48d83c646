"""The hooks of a session that is recorded: in a process that runs tests, and in the controller of pytest-xdist."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any, Callable

import pytest

from nativeprof import _files, span
from nativeprof._native import this_machine

from . import limits, memory, results
from .recording import RATE, Recording, command, untimed
from .results import Results, Run, TestResult, label_of

if TYPE_CHECKING:
    from .benchmarks import TimedRounds
    from .comparison import Comparison, Limit

Properties = list[tuple[str, object]]

_SETUP, _CALL, _TEARDOWN = (span(phase, phase=phase) for phase in results.PHASES)

_NOTHING = nullcontext()

# Tests that the summary has, at most.
_MOST = 10


def start(config: pytest.Config) -> None:
    """Registers the hooks.

    :raises pytest.UsageError: options do not fit together.
    """
    mode = config.getoption("nativeprof_mode") or "samples"
    manager = config.pluginmanager
    if hasattr(config, "workerinput"):
        worker = _Worker()
        tests = _TestProcess(config, mode, worker.finished)
        manager.register(worker, "nativeprof-worker")
    else:
        session = _Session(config, mode)
        tests = session.tests
        manager.register(session, "nativeprof-session")
    manager.register(tests, "nativeprof-tests")
    manager.register(memory.MemoryLimits(lambda: tests.recording), "nativeprof-memory")
    if mode != "samples":
        manager.register(_CountedCalls(tests), "nativeprof-counts")


class _TestProcess:
    """Records the process that runs tests, and measures each test.

    What is done for each test costs all sessions: with thousands of short tests, it is a part of the time.

    :param finished: is given the label and the result of each test that has ended, and returns properties for its report.
    """

    def __init__(self, config: pytest.Config, mode: str, finished: Callable[[str, TestResult], Properties]) -> None:
        self._mode = mode
        self._is_saved = config.getoption("nativeprof_save") is not None
        self._finished = finished
        #: None in a process that a test has forked, and in one that runs no tests.
        self.recording: Recording | None = None
        #: CPU time of the session (seconds), when it has ended.
        self.cpu = 0.0
        self._begin = 0.0
        # Those of the test that runs.
        self.result = TestResult()
        self._item: pytest.Item | None = None
        self._label = ""
        self._labels: span | None = None
        # When its phase has begun, by the clock of CPU time.
        self._since = 0.0
        # What is wrong with its markers.
        self._wrong = ""
        self._limits = limits.NONE
        self._rounds: TimedRounds | None = None
        self._exit = os._exit
        self._capture: Any = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        manager = session.config.pluginmanager
        if manager.hasplugin("dsession"):
            return  # its workers run the tests
        self.recording = Recording(self._mode, session.config.rootpath, self._is_saved)
        os.register_at_fork(after_in_child=self._forget)
        self.recording.start()
        self._begin = process_time()
        self._capture = manager.getplugin("capturemanager")
        self._exit, os._exit = os._exit, self._exit_with_a_word  # type: ignore[assignment]

    def _forget(self) -> None:
        self.recording = None

    def _exit_with_a_word(self, status: int) -> None:
        if self.recording is not None:
            said = f"\nnativeprof: {self._label or 'a module'} ends pytest by os._exit: what was recorded is lost\n"
            if self._capture is not None:
                self._capture.suspend()
            os.write(2, said.encode("utf-8", "backslashreplace"))
        self._exit(status)

    # A phase lasts until the next one begins, with what pytest does in between: so the clock is read four times, not six.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.recording is not None:
            self._begin_test(item, self.recording)

    def _begin_test(self, item: pytest.Item, recording: Recording) -> None:
        cpu: dict[str, float] = {}
        if item is self._item:
            # A plugin repeats it, as if it had failed.
            cpu["repeated"] = sum(self.result.cpu.values())
        else:
            self._item, self._label = item, label_of(item.nodeid)
        self.result, self._rounds, self._limits, self._wrong = TestResult(cpu), None, limits.NONE, ""
        if limits.may_have_limits(item):
            try:
                self._limits = limits.limits_of(item)
            except ValueError as error:
                self._wrong = str(error)
        # Also if an earlier test has stopped it.
        recording.start(self._limits.rate or RATE)
        if self._labels is not None:
            self._labels.__exit__()  # the earlier test was not torn down
        self._labels = span("pytest", test=self._label)
        self._labels.__enter__()
        _SETUP.__enter__()
        self._since = process_time()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        recording, found = self.recording, self.result
        if recording is None or item is not self._item:
            return (yield)
        if self._wrong:
            pytest.fail(self._wrong, pytrace=False)
        around: AbstractContextManager[None] = _NOTHING
        benchmark = getattr(item, "funcargs", {}).get("benchmark")
        if benchmark is not None and self._labels is not None:
            from . import benchmarks

            self._rounds = benchmarks.follow(benchmark, recording, self._label)
            of_rest = None if self._rounds is None else untimed(self._label)
            around = benchmarks.around(benchmark, recording, self._labels, of_rest)
        _SETUP.__exit__()
        _CALL.__enter__()
        begin = process_time()
        found.cpu["setup"] = begin - self._since
        try:
            with around:
                result = yield
        finally:
            self._since = process_time()
            _CALL.__exit__()
            _TEARDOWN.__enter__()
            found.cpu["call"] = self._since - begin
            if self._rounds is not None:
                self._rounds.put_into(found)
        if self._limits is not limits.NONE and self.recording is not None:
            limits.check(self._limits, found)
            if self._limits.max_calls is not None and found.calls is None:
                recording.notes["max_calls was not checked: it needs --nativeprof-mode=counts"] += 1
        found.passed = True
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if self.recording is None:
            return (yield)
        if item is not self._item:
            self._begin_test(item, self.recording)  # another plugin has skipped it before its setup
        cpu = self.result.cpu
        if "call" not in cpu:
            _SETUP.__exit__()
            _TEARDOWN.__enter__()
            end = process_time()
            cpu["setup"], self._since = end - self._since, end
        try:
            return (yield)
        finally:
            cpu["teardown"] = process_time() - self._since
            if self._labels is not None:
                self._labels.__exit__()  # and with it the phase within
                self._labels = None
            if self.recording is not None:
                if "repeated" in cpu:
                    # Not the properties of an earlier attempt.
                    kept = [entry for entry in item.user_properties if not entry[0].startswith("nativeprof_")]
                    item.user_properties[:] = kept
                item.user_properties += self._finished(self._label, self.result)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        recording = self.recording
        # A process may also be forked without Python, which then does not know.
        if recording is None or not recording.is_current_process():
            self.recording = None
            return
        if os._exit == self._exit_with_a_word:
            os._exit = self._exit
        self.cpu = process_time() - self._begin
        recording.stop()
        worker: Any = session.config
        if hasattr(worker, "workerinput"):
            name = worker.workerinput["workerid"]
            try:
                recording.saved(Path(worker.workerinput["nativeprof_parts"]), name)
            except (KeyError, OSError) as error:
                recording.notes[f"the profile of the worker {name} is lost: {error}"] += 1
            worker.workeroutput["nativeprof"] = {"cpu": self.cpu, "notes": dict(recording.notes), **recording.amounts()}


class _Worker:
    """Sends the results of tests from a worker of pytest-xdist to the controller, with their reports."""

    def __init__(self) -> None:
        self._result: dict[str, Any] | None = None

    def finished(self, label: str, result: TestResult) -> Properties:
        """Keeps the result for the report that follows."""
        self._result = {"label": label, **result.to_json()}
        return properties(result)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown" and self._result is not None:
            report.nativeprof, self._result = self._result, None


class _CountedCalls:
    """Counts the calls of a test: of its function, where that can be told from what pytest calls around it."""

    def __init__(self, tests: _TestProcess) -> None:
        self._tests = tests

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        recording = self._tests.recording
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
        if self._tests.recording is not None:
            self._tests.result.calls = recording.lap()
            recording.check_hook()


def properties(result: TestResult, suffix: str = "") -> Properties:
    """The properties of a test in reports, such as those of JUnit: CPU time in seconds, and calls."""
    found: Properties = [("nativeprof_cpu", f"{result.seconds:.6f}")]
    if result.iterations:
        found.append(("nativeprof_cpu_per_iteration", f"{result.cpu_of_call:.9f}"))
    if result.calls is not None:
        found.append(("nativeprof_calls", result.number_of_calls))
    return [(name + suffix, value) for name, value in found] if suffix else found


class _Session:
    """Gathers the results of all tests, writes the profile of the session, compares it, and shows a summary."""

    def __init__(self, config: pytest.Config, mode: str) -> None:
        self._process = os.getpid()
        self._mode = mode
        self.tests = _TestProcess(config, mode, self.finished)
        self._results: Results = {}
        self._notes: Counter[str] = Counter()
        self._amounts: Counter[str] = Counter()
        self._cpu = 0.0
        self._saved: Path | None = None
        self._comparison: Comparison | None = None
        self._limit: Limit | None = None
        here = config.invocation_params.dir
        save, compare, limit = (config.getoption(f"nativeprof_{name}") for name in ("save", "compare", "fail_above"))
        self._save = here / save if save else None
        if limit is not None:
            from . import comparison

            self._limit = comparison.Limit.parse(limit, mode)
            if not compare:
                raise pytest.UsageError("--nativeprof-fail-above needs runs to compare with; add --nativeprof-compare=DIR")
        self._before: list[Run] = self._runs(here / compare) if compare else []
        if compare and not self._before:
            why = "; ".join(self._notes) or f"there is no profile in {here / compare}"
            raise pytest.UsageError(
                f"--nativeprof-compare has nothing to compare with: {why}; make one with --nativeprof-save={compare}"
            )
        self._newest = results.newest(self._before)
        self._parts = Path(tempfile.mkdtemp(prefix="nativeprof-"))
        # Also where pytest itself is ended by an exception.
        config.add_cleanup(self._remove_parts)

    def _is_own_process(self) -> bool:
        """Not one that a test has forked, and that has left the test."""
        return os.getpid() == self._process

    def _remove_parts(self) -> None:
        if self._is_own_process():
            shutil.rmtree(self._parts, ignore_errors=True)

    def _runs(self, directory: Path) -> list[Run]:
        notes: list[str] = []
        runs = results.runs(directory, notes)
        self._notes.update(notes)
        return runs

    def finished(self, label: str, result: TestResult) -> Properties:
        """Adds the result of a test; returns the properties of its report."""
        known = self._results.get(label)
        # All attempts of a test that is repeated are in the last one's result.
        if known is None or "repeated" in result.cpu:
            self._results[label] = result
        else:
            known.add(result)
        earlier = self._newest.get(label)
        return properties(result) if earlier is None else [*properties(result), *properties(earlier, "_before")]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        manager = session.config.pluginmanager
        if manager.hasplugin("dsession"):
            manager.register(_Controller(self), "nativeprof-controller")

    def start_worker(self, node: Any) -> None:
        """Says where a worker is to put its profile."""
        node.workerinput["nativeprof_parts"] = str(self._parts)

    def end_worker(self, node: Any) -> None:
        """Takes what a worker says at its end."""
        output = getattr(node, "workeroutput", {}).get("nativeprof")
        if output is None:
            self._notes[f"the worker {node.gateway.id} has crashed: what it recorded is lost"] += 1
            return
        self._cpu += output["cpu"]
        self._amounts.update({name: output[name] for name in ("samples", "calls")})
        self._notes.update(output["notes"])

    # After the process of the tests, which may be this one, has written its part.
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._is_own_process():
            return
        recording = self.tests.recording
        if recording is not None:
            self._cpu = self.tests.cpu
            self._amounts.update(recording.amounts())
            self._notes.update(recording.notes)
        if self._save is None and not self._before:
            return
        try:
            if self._save is not None:
                if recording is not None:
                    recording.saved(self._parts, "session")
                self._write(self._save)
            if self._before:
                self._compare()
        except OSError as error:
            self._notes[f"the profile is not saved, or not compared: {error}"] += 1
            status: int = pytest.ExitCode.TESTS_FAILED
        else:
            status = self._comparison.verdict.status if self._comparison is not None else pytest.ExitCode.OK
        # What tests have done goes before.
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = status

    def _write(self, save: Path) -> None:
        """Writes the profile and the results of this run."""
        save.mkdir(parents=True, exist_ok=True)
        name = results.new_name()
        profile = save / f"{name}.json.gz"
        merge(sorted(path for path in self._parts.iterdir() if path.is_file()), profile)
        results.write(save, name, self._mode, self._results)
        self._saved = profile

    def _compare(self) -> None:
        """Compares this run, and those that are saved at the same place."""
        from . import comparison

        after: list[Run] = []
        if self._save is not None:
            earlier = {run.profile.resolve() for run in self._before}
            after = [run for run in self._runs(self._save) if run.profile.resolve() not in earlier and run.profile != self._saved]
        after.append(Run(self._saved or self._parts, self._results, machine=this_machine()))
        self._comparison = comparison.compared(self._before, after, self._mode, self._limit)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._is_own_process():
            return

        def write(line: str) -> None:
            terminalreporter.write_line(results.printable(line))

        terminalreporter.section("nativeprof")
        found = self._results.values()
        phases = {phase: sum(r.cpu.get(phase, 0.0) for r in found) for phase in (*results.PHASES, *results.OTHERS)}
        # Workers that have crashed have not said how much they used in all.
        total = max(self._cpu, sum(phases.values()))
        outside = total - sum(phases.values())
        phases = {phase: seconds for phase, seconds in phases.items() if seconds or phase in results.PHASES}
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
            write("no profile was made; add --nativeprof-save=DIR")
        if self._saved is not None:
            kinds = {"samples": "samples", "counts": "calls"}.get(self._mode)
            amounts = [f"{self._amounts[kind]:,} {kind}" for kind in ("samples", "calls") if kinds in (None, kind)]
            write(f"profile of {' and '.join(amounts)}: {self._saved}")


class _Controller:
    """What comes from the workers of pytest-xdist."""

    def __init__(self, session: _Session) -> None:
        self._session = session

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        self._session.start_worker(node)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._session.end_worker(node)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        given = getattr(report, "nativeprof", None)
        if given is not None:
            has = {name for name, _ in report.user_properties}
            of_test = self._session.finished(given["label"], TestResult.from_json(given))
            # The worker has set those that it knows.
            report.user_properties.extend(entry for entry in of_test if entry[0] not in has)


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
