"""The hooks of a session that is recorded: in the process that runs the tests, in workers of pytest-xdist, and in their controller."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from . import results
from .recording import Recording, command, span
from .results import Results, TestResult


def start(config: pytest.Config) -> None:
    """Registers the hooks.

    :raises pytest.UsageError: options do not fit together.
    """
    mode = config.getoption("nativeprof_mode") or "samples"
    plugin = _TestProcess(config, mode)
    config.pluginmanager.register(plugin, "nativeprof-tests")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Session(config, mode, plugin), "nativeprof-session")


class _TestProcess:
    """Records the process that runs tests, and gives each test's report its figures."""

    def __init__(self, config: pytest.Config, mode: str) -> None:
        self.mode = mode
        self.recording: Recording | None = None
        #: CPU time of the session (seconds), when it has ended.
        self.cpu = 0.0
        self._begin = 0.0
        # Those of the test that runs.
        self._label = ""
        self._result = TestResult()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if session.config.pluginmanager.hasplugin("dsession"):
            return  # its workers run the tests
        self.recording = Recording(self.mode)
        self.recording.start()
        self._begin = time.process_time()

    def _phase(self, phase: str) -> Generator[None, Any, Any]:
        """Runs a phase of the test within its labels, and adds its CPU time to its results."""
        recording = self.recording
        if recording is None or not recording.is_current_process():
            return (yield)
        begin = time.process_time()
        try:
            with span(self._label, phase):
                return (yield)
        finally:
            if recording.is_current_process():
                self._result.cpu[phase] = time.process_time() - begin

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._label = results.label_of(item.nodeid)
        self._result = TestResult()
        if self.recording is not None and self.recording.is_current_process():
            self.recording.start()  # if an earlier test has stopped it
        return (yield from self._phase("setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        return (yield from self._phase("call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        try:
            return (yield from self._phase("teardown"))
        finally:
            # Of an earlier attempt to run it, if a plugin repeats tests that fail.
            kept = [entry for entry in item.user_properties if not entry[0].startswith("nativeprof_")]
            item.user_properties[:] = [*kept, *properties(self._result)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            # As JSON: workers of pytest-xdist send it.
            report.nativeprof = {"label": self._label, **self._result.to_json()}
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        recording = self.recording
        if recording is None or not recording.is_current_process():
            return
        self.cpu = time.process_time() - self._begin
        recording.stop()
        given = getattr(session.config, "workerinput", {}).get("nativeprof_parts")
        if given is not None:
            name = session.config.workerinput["workerid"]  # type: ignore[attr-defined]
            try:
                recording.saved(Path(given), name)
            except OSError as error:
                recording.notes[f"the profile of the worker {name} is lost: {error}"] += 1
            output = {"cpu": self.cpu, "samples": recording.samples, "notes": dict(recording.notes)}
            session.config.workeroutput["nativeprof"] = output  # type: ignore[attr-defined]


def properties(result: TestResult) -> list[tuple[str, object]]:
    """The properties of a test in reports, such as those of JUnit: CPU time in seconds, and calls."""
    found: list[tuple[str, object]] = [("nativeprof_cpu", f"{result.seconds:.6f}")]
    if result.calls is not None:
        found.append(("nativeprof_calls", result.number_of_calls))
    return found


class _Session:
    """Gathers the results of all tests, writes the profile of the session, and shows a summary."""

    def __init__(self, config: pytest.Config, mode: str, tests: _TestProcess) -> None:
        self._mode = mode
        self._tests = tests
        self._results: Results = {}
        self._notes: Counter[str] = Counter()
        self._samples = 0
        self._cpu = 0.0
        self._saved: Path | None = None
        save = config.getoption("nativeprof_save")
        self._save = config.invocation_params.dir / save if save else None
        self._parts = Path(tempfile.mkdtemp(prefix="nativeprof-"))
        # Also where pytest itself is ended by an exception.
        config.add_cleanup(lambda: shutil.rmtree(self._parts, ignore_errors=True))

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
        self._samples += output["samples"]
        self._notes.update(output["notes"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        given = getattr(report, "nativeprof", None)
        if given is not None:
            self._results.setdefault(given["label"], TestResult()).add(TestResult.from_json(given))

    # After the test process of this session, and the workers of pytest-xdist, have written their parts.
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        recording = self._tests.recording
        if recording is not None:
            if not recording.is_current_process():
                return
            self._cpu, self._samples = self._tests.cpu, recording.samples
            self._notes.update(recording.notes)
            recording.saved(self._parts, "session")
        if self._save is not None:
            try:
                self._saved = self._written(self._save)
            except OSError as error:
                self._notes[f"the profile was not saved: {error}"] += 1
                session.exitstatus = session.exitstatus or pytest.ExitCode.INTERNAL_ERROR

    def _written(self, directory: Path) -> Path:
        """Adds the profile and the results of this run to a directory. Returns the path of the profile."""
        directory.mkdir(parents=True, exist_ok=True)
        name = results.new_name()
        path = directory / f"{name}.json.gz"
        merge(sorted(self._parts.iterdir()), path)
        results.write(directory, name, self._mode, self._results)
        return path

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write, total = terminalreporter.write_line, self._cpu
        terminalreporter.section("nativeprof")
        phases = {phase: sum(r.cpu.get(phase, 0.0) for r in self._results.values()) for phase in results.PHASES}
        outside = max(total - sum(phases.values()), 0.0)
        parts = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in [*phases.items(), ("outside of tests", outside)])
        write(f"{total:.2f} s CPU: {parts}")
        hottest = results.hottest(self._results, 10)
        if hottest:
            write("   CPU s      %  test")
        for label, result in hottest:
            write(f"{result.seconds:8.3f}  {100 * result.seconds / max(total, 1e-9):5.1f}  {label}")
        for note, count in self._notes.items():
            write(f"note: {note}" + (f" ({count} times)" if count > 1 else ""))
        if self._saved is not None:
            write(f"profile of {self._samples} samples: {self._saved}")
            write("of a test: nativeprof report FILE --label test=...")


def merge(parts: list[Path], path: Path) -> None:
    """Makes one profile of several.

    :raises OSError: it cannot be written.
    """
    if len(parts) == 1:
        shutil.copyfile(parts[0], path)
        return
    if not parts:
        raise OSError("nothing was recorded")
    program = command()
    if program is None:
        raise OSError("the command nativeprof, which merges the profiles of workers, is not in this environment")
    done = subprocess.run([program, "merge", *map(os.fspath, parts), "-o", path], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise OSError(f"nativeprof merge: {done.stderr.strip()}")
