"""What grew since the runs of ``--nativeprof-compare``: calls by their exact numbers, CPU time by its spread between runs.

The intervals of CPU time are those of ``nativeprof diff``, which is given what the clock of the process has shown for each test:
even a short test has a time, though hardly a sample.
"""

from __future__ import annotations

import enum
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from . import results
from .recording import command
from .results import PHASES, Run, TestResult, printable

#: The exit status of pytest if all tests have passed, but ``--nativeprof-fail-above`` cannot be decided.
UNDECIDED = 6

# Rows that are shown, at most.
_MOST = 10
# Runs of a side, at most, as `nativeprof diff` has it: the newest are taken.
_MOST_RUNS = 400
# CPU time (seconds) by which a test may have grown without leaving a limit undecided.
_LEAST = 0.01
# Counts of the files for `nativeprof diff`, each of so many ns.
_STEP = 100


class Verdict(enum.Enum):
    """The answer to ``--nativeprof-fail-above``."""

    PASSED = 0
    UNDECIDED = 1
    GROWN = 2

    @property
    def status(self) -> int:
        """The exit status of a session whose tests have passed."""
        return {Verdict.UNDECIDED: UNDECIDED, Verdict.GROWN: int(pytest.ExitCode.TESTS_FAILED)}.get(self, 0)


_ANSWERS = {
    Verdict.PASSED: "passed, nothing grew by more",
    Verdict.GROWN: "failed",
    Verdict.UNDECIDED: f"undecided, so the exit status is {UNDECIDED} if all tests pass",
}


@dataclass(frozen=True)
class Limit:
    """What ``--nativeprof-fail-above`` says: percent of what a test had, or a number of calls."""

    amount: float
    is_calls: bool

    def __str__(self) -> str:
        return f"{self.amount:g} {'calls' if self.is_calls else '%'}"

    @staticmethod
    def parse(text: str, mode: str) -> Limit:
        """Reads ``5``, ``5%`` or ``10 calls``.

        :raises pytest.UsageError: it is none, or calls are not counted in this mode.
        """
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|calls?)?\s*", text)
        if found is None or ((found[2] or "%") != "%" and "." in found[1]):
            raise pytest.UsageError(f"--nativeprof-fail-above must be percent, or a number of calls (`10 calls`), got {text!r}")
        limit = Limit(float(found[1]), (found[2] or "%") != "%")
        if limit.is_calls and mode == "samples":
            raise pytest.UsageError(
                f"--nativeprof-fail-above={text!r} needs numbers of calls, which are not counted; add --nativeprof-mode=counts"
            )
        return limit


@dataclass
class Comparison:
    """The answer, and the lines to show."""

    lines: list[str] = field(default_factory=list)
    verdict: Verdict = Verdict.PASSED

    def judge(self, verdict: Verdict) -> None:
        """Takes the answer for a part: the whole is as good as its worst part."""
        self.verdict = max(self.verdict, verdict, key=lambda verdict: verdict.value)

    def leave_open(self, limit: Limit | None, why: str, hint: str) -> None:
        """Says why something is not compared, which leaves a limit undecided."""
        if limit is None:
            self.lines.append(f"{why}; {hint}")
        else:
            self.lines.append(f"undecided: {why}; {hint}")
            self.judge(Verdict.UNDECIDED)


def compared(before: list[Run], after: list[Run], mode: str, limit: Limit | None) -> Comparison:
    """Compares two sides, of which each has one run at least. The last one of ``after`` is the present one."""
    comparison = Comparison()
    runs = f"{_counted(len(before), 'earlier run')} and {_counted(len(after), 'present run')}"
    comparison.lines.append(f"compared: {runs}")
    now, earlier = after[-1].results, results.newest(before)
    new, gone = len(now.keys() - earlier.keys()), len(earlier.keys() - now.keys())
    if new:
        comparison.lines.append(f"{_counted(new, 'test')} of {len(now)} not compared: no earlier run has them")
    if gone:
        comparison.lines.append(f"{_counted(gone, 'test')} of earlier runs not compared: they did not run now")
    if mode != "samples":
        _compare_calls(comparison, before, after, limit)
    if mode != "counts" and not (limit is not None and limit.is_calls):
        _compare_time(comparison, before, after, limit)
    if limit is not None:
        comparison.lines.insert(0, f"--nativeprof-fail-above={limit}: {_ANSWERS[comparison.verdict]}")
    return comparison


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


Range = tuple[int, int]


@dataclass
class _Grown:
    label: str
    # None: all functions together.
    function: str | None
    before: Range
    after: Range
    whole: int

    @property
    def by(self) -> int:
        return self.after[0] - self.before[1]

    def is_above(self, limit: Limit) -> bool:
        if limit.is_calls:
            return self.by > limit.amount
        return self.whole > 0 and 100 * self.by / self.whole > limit.amount


def _ranges(before: list[dict[str, int]], after: list[dict[str, int]]) -> Iterable[tuple[str | None, Range, Range]]:
    """Lowest and highest count of each function on both sides, and of all together."""

    def range_of(amounts: Iterable[int]) -> Range:
        found = list(amounts)
        return min(found), max(found)

    sides = (before, after)
    yield (None, *(range_of(sum(calls.values()) for calls in side) for side in sides))  # type: ignore[misc]
    for function in dict.fromkeys(function for side in sides for calls in side for function in calls):
        yield (function, *(range_of(calls.get(function, 0) for calls in side) for side in sides))  # type: ignore[misc]


def _compare_calls(comparison: Comparison, before: list[Run], after: list[Run], limit: Limit | None) -> None:
    grown: list[_Grown] = []
    tests = varying = 0
    for label, result in after[-1].results.items():
        if not result.passed:
            continue
        found = [[run.results[label] for run in runs if label in run.results] for runs in (before, after)]
        known = [[result.calls for result in side if result.passed and result.calls is not None] for side in found]
        if not known[0] or not known[1]:
            continue
        tests += 1
        whole = max(sum(calls.values()) for calls in known[0])
        for function, older, newer in _ranges(*known):
            if function is not None and (older[0] != older[1] or newer[0] != newer[1]):
                varying += 1
            row = _Grown(label, function, older, newer, whole)
            if row.by > 0:
                grown.append(row)
    if not tests:
        why = "no earlier run has counted the calls of a test that has passed now, too"
        comparison.leave_open(limit, why, "make one with --nativeprof-mode=counts")
        return
    above = [row for row in grown if limit is not None and row.is_above(limit)]
    if above:
        comparison.judge(Verdict.GROWN)
    rows = above or grown
    said = f"calls of {_counted(tests, 'test')}: " + ("grew" if grown else "none grew")
    if limit is not None:
        text = f"{limit.amount:g} calls" if limit.is_calls else f"{limit.amount:g} % of those of the test"
        said += f", by more than {text}" if above else f", none by more than {text}" if grown else ""
    comparison.lines.append(said)
    if varying:
        comparison.lines.append(
            f"{_counted(varying, 'number')} of calls vary between runs of one side, and count outside of their ranges only"
        )
    if rows:
        comparison.lines.append(f"{'BEFORE':>12} {'AFTER':>12} {'CHANGE':>10}  TEST, FUNCTION")
    rows.sort(key=lambda row: -row.by)
    for row in rows[:_MOST]:
        where = row.label if row.function is None else f"{row.label}, {printable(row.function)}"
        comparison.lines.append(f"{_shown(row.before):>12} {_shown(row.after):>12} {row.by:>+10,}  {where}")
    if len(rows) > _MOST:
        comparison.lines.append(f"and {len(rows) - _MOST} more")


def _shown(amounts: Range) -> str:
    low, high = amounts
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def _compare_time(comparison: Comparison, before: list[Run], after: list[Run], limit: Limit | None) -> None:
    before, after = before[-_MOST_RUNS:], after[-_MOST_RUNS:]
    labels = _compared_by_time(comparison, before, after)
    if not labels:
        hint = "add runs with --nativeprof-save"
        comparison.leave_open(limit, "CPU time: no test has passed in each of these runs", hint)
        return
    if len(before) == len(after) == 1:
        _show_differences(comparison, before[0], after[0], labels)
        why = "one run of each side cannot tell growth of CPU time from noise"
        comparison.leave_open(limit, why, "add runs with --nativeprof-save, or use --nativeprof-mode=counts")
        return
    try:
        machines, rows = _difference(before, after, labels)
    except (OSError, ValueError) as error:
        comparison.leave_open(limit, f"CPU time is not compared: {error}", "compare counts with --nativeprof-mode=counts")
        return
    if machines:
        why = f"CPU time is not compared, since machines or Pythons differ: {'; '.join(machines)}"
        comparison.leave_open(limit, why, "make both sides on one machine, or use --nativeprof-mode=counts")
        return
    grown = [row for row in rows if row.has_grown]
    above = [row for row in grown if limit is not None and row.proved > limit.amount]
    if above:
        comparison.judge(Verdict.GROWN)
    said = f"CPU time of {_counted(len(labels), 'test')}: {len(grown)} grew significantly"
    if limit is not None:
        said += f", {len(above)} by more than {limit.amount:g} %"
    comparison.lines.append(said)
    if grown:
        comparison.lines.append(f"{'BEFORE s':>12} {'AFTER s':>12} {'CHANGE':>10}  {'INTERVAL':18}  TEST")
    for row in sorted(above or grown, key=lambda row: -row.change)[:_MOST]:
        amounts = f"{row.before:>12.4f} {row.after:>12.4f} {row.change:>+10.4f}"
        comparison.lines.append(f"{amounts}  {f'{row.low:+.4f} to {row.high:+.4f}':18}  {row.name}")
    if limit is None or above:
        return
    undecided = [row for row in rows if row.may_be_above(limit.amount)]
    if undecided:
        worst = max(undecided, key=lambda row: row.high / row.before)
        span = f"{worst.percent(worst.low):+.1f} % to {worst.percent(worst.high):+.1f} %"
        number = _counted(len(undecided), "test")
        why = f"{number} may have grown by more than {limit.amount:g} %, such as {worst.name} by {span}"
        hint = "save more runs of both sides, allow more, or use --nativeprof-mode=counts"
        comparison.leave_open(limit, why, hint)


def _is_measured(result: TestResult | None) -> bool:
    """Whether the time of a call says what the test takes: it has passed, at once, and ran for no time that it was given."""
    return result is not None and result.passed and not result.iterations and "repeated" not in result.cpu


def _compared_by_time(comparison: Comparison, before: list[Run], after: list[Run]) -> list[str]:
    """The tests whose times all runs have."""
    runs = [*before, *after]
    known = {label for run in before for label in run.results}
    both = {label: result for label, result in after[-1].results.items() if label in known}
    labels = [label for label in both if all(_is_measured(run.results.get(label)) for run in runs)]
    benchmarks = [label for label, result in both.items() if result.iterations]
    if benchmarks:
        comparison.lines.append(
            f"{_counted(len(benchmarks), 'benchmark')} not compared by time, since more rounds follow if they are faster; "
            "see --benchmark-compare"
        )
    others = len(both) - len(labels) - len(benchmarks)
    if others > 0:
        comparison.lines.append(
            f"{_counted(others, 'test')} not compared by time: not in all of these runs, or failed, skipped or repeated in one"
        )
    return labels


@dataclass
class _Change:
    """How the CPU time (seconds) of the calls of a test, or of the setup or teardown of all tests, has changed."""

    name: str
    before: float
    after: float
    # None: too little time for an interval.
    interval: tuple[float, float] | None
    is_significant: bool

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def low(self) -> float:
        return self.interval[0] if self.interval else -self.before

    @property
    def high(self) -> float:
        return self.interval[1] if self.interval else self.after

    @property
    def has_grown(self) -> bool:
        return self.is_significant and self.change > 0

    def percent(self, seconds: float) -> float:
        """A change in percent of what it was."""
        return 100 * seconds / self.before if self.before > 0 else 0.0

    @property
    def proved(self) -> float:
        """Percent by which it has grown at least."""
        return self.percent(self.low)

    def may_be_above(self, limit: float) -> bool:
        return self.high >= _LEAST and self.percent(self.high) > limit


def _show_differences(comparison: Comparison, before: Run, after: Run, labels: list[str]) -> None:
    """Shows what took longer than in the only earlier run, though that need not mean anything."""
    pairs = [(before.results[label].cpu_of_call, after.results[label].cpu_of_call, label) for label in labels]
    longer = sorted((pair for pair in pairs if pair[1] - pair[0] >= _LEAST), key=lambda pair: pair[0] - pair[1])
    comparison.lines.append(f"CPU time of {_counted(len(labels), 'test')}: {len(longer)} took at least {_LEAST:g} s more")
    if longer:
        comparison.lines.append(f"{'BEFORE s':>12} {'AFTER s':>12} {'CHANGE':>10}  TEST")
    for older, newer, label in longer[:_MOST]:
        comparison.lines.append(f"{older:>12.4f} {newer:>12.4f} {newer - older:>+10.4f}  {label}")


def _difference(before: list[Run], after: list[Run], labels: list[str]) -> tuple[list[str], list[_Change]]:
    """How machines differ, and the changes, as ``nativeprof diff`` has them.

    :raises OSError: it fails. :raises ValueError: it prints something else.
    """
    program = command()
    if program is None:
        raise OSError("the command nativeprof is not in this environment")
    names = [*labels, *(f"{phase} of all tests" for phase in PHASES if phase != "call")]
    with tempfile.TemporaryDirectory(prefix="nativeprof-") as directory:
        words = [program, "diff", "--normalize", "time", "--value", "cpu", "--all", "--json"]
        for side, runs in (("before", before), ("after", after)):
            words.append(f"--{side}")
            for number, run in enumerate(runs):
                path = os.path.join(directory, f"{side}-{number}.json")
                with open(path, "w", encoding="utf-8") as file:
                    json.dump(_profile(run, labels), file)
                words.append(path)
        done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise OSError(f"nativeprof diff: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    if not isinstance(answer, dict) or answer.get("version") != 1:
        raise ValueError("nativeprof diff of another version has printed it")
    rows = []
    for row in answer["rows"]:
        interval = row["interval"]
        name = names[int(row["name"])]
        rows.append(_Change(name, row["before"], row["after"], interval and (interval[0], interval[1]), row["significant"]))
    return answer["machines"], rows


def _profile(run: Run, labels: list[str]) -> dict[str, Any]:
    """A profile in which the functions are the tests, by their numbers, and then the other phases of all of them."""
    found = [run.results[label] for label in labels]
    seconds = [result.cpu_of_call for result in found]
    seconds += [sum(result.cpu.get(phase, 0.0) for result in found) for phase in PHASES if phase != "call"]
    children = {}
    for number, amount in enumerate(seconds):
        identifier = f"{number};tests;0"
        children[identifier] = {**_node(identifier, str(number), "tests", round(amount * 1e9)), "children": {}}
    root = _node("root", "", "", sum(child["values"]["cpu_ns"] for child in children.values()))
    meta = {
        "format": 1,
        "event": "calls",
        "python": f"CPython {run.python}",
        "machine": run.machine,
        "value_types": [{"name": "calls", "unit": "count", "per_count": 1}, {"name": "cpu", "unit": "nanoseconds"}],
    }
    return {**root, "children": children, "nativeprof": meta}


def _node(identifier: str, name: str, file: str, nanoseconds: int) -> dict[str, Any]:
    description = {"filename": file, "name": name, "line_number": 0, "line": ""}
    # The count is the resolution that `diff` takes for granted: fine enough to leave the spread between runs as the error.
    count = max(nanoseconds // _STEP, 1)
    return {"identifier": identifier, "description": description, "count": count, "values": {"cpu_ns": nanoseconds}}
