"""What grew since the runs of ``--nativeprof-compare``: calls by their exact numbers, CPU time by ``nativeprof diff``."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .recording import command
from .results import Results, Run, printable

# Rows that are shown, at most.
_MOST = 10
# Runs of a side, at most, as `nativeprof diff` has it: the newest are taken.
_MOST_RUNS = 400


@dataclass(frozen=True)
class Limit:
    """What ``--nativeprof-fail-above`` says: percent of what a test had, or a number of calls."""

    amount: float
    is_calls: bool

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
    """The answer: lines to show, and whether the gate fails."""

    lines: list[str] = field(default_factory=list)
    fails: bool = False


def compared(before: list[Run], after: list[Run], mode: str, limit: Limit | None) -> Comparison:
    """Compares two sides, of which each has one run at least. The last one of ``after`` is the present one."""
    comparison = Comparison()
    runs = f"{_counted(len(before), 'earlier run')} and {_counted(len(after), 'present run')}"
    comparison.lines.append(f"compared: {runs}")
    now, earlier = after[-1].results, newest(before)
    new, gone = len(now.keys() - earlier.keys()), len(earlier.keys() - now.keys())
    if new:
        comparison.lines.append(f"{_counted(new, 'test')} of {len(now)} not compared: no earlier run has them")
    if gone:
        comparison.lines.append(f"{_counted(gone, 'test')} of earlier runs not compared: they did not run now")
    if mode != "samples":
        _compare_calls(comparison, before, after, limit)
    if mode != "counts" and not (limit is not None and limit.is_calls):
        _compare_time(comparison, before, after, limit)
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
    for label in after[-1].results:
        sides = [[run.results[label].calls for run in runs if label in run.results] for runs in (before, after)]
        known = [[calls for calls in side if calls is not None] for side in sides]
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
        comparison.lines.append("calls: no earlier run has counted those of these tests; make one with --nativeprof-mode=counts")
        comparison.fails |= limit is not None
        return
    above = [row for row in grown if limit is not None and row.is_above(limit)]
    comparison.fails |= bool(above)
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
    try:
        answer = _difference([run.profile for run in before], [run.profile for run in after])
    except (OSError, ValueError) as error:
        comparison.lines.append(f"CPU time is not compared: {error}")
        comparison.fails |= limit is not None
        return
    compared_by_time = _without_benchmarks(comparison, before, after)
    rows = [row for row in answer["rows"] if row["name"].startswith("test=") and row["name"][5:] in compared_by_time]
    grown = [row for row in rows if row["significant"] and row["change"] > 0]
    above, undecided = grown, []
    if limit is not None:
        above = [row for row in grown if row["before"] > 0 and 100 * row["change"] / row["before"] > limit.amount]
        undecided = [row for row in rows if row not in above and _may_be_above(row, limit.amount)]
    shown = above or grown
    percent = "" if limit is None else f" by more than {limit.amount:g} %"
    comparison.lines.append(
        f"CPU time of tests: {len(grown)} grew significantly"
        + (f", {len(above)}{percent}" if limit is not None and grown else "")
    )
    if shown:
        comparison.lines.append(f"{'BEFORE s':>12} {'AFTER s':>12} {'CHANGE':>10}  {'INTERVAL':18}  TEST")
    for row in sorted(shown, key=lambda row: -row["change"])[:_MOST]:
        low, high = row["interval"]
        amounts = f"{row['before']:>12.3f} {row['after']:>12.3f} {row['change']:>+10.3f}"
        comparison.lines.append(f"{amounts}  {f'{low:+.3f} to {high:+.3f}':18}  {row['name'][5:]}")
    is_single = answer["question"] == "recordings"
    if is_single:
        comparison.lines.append("one run of each side: the next two may differ otherwise; add runs with --nativeprof-save")
    if limit is None:
        return
    if undecided and not is_single:
        comparison.lines.append(
            f"{_counted(len(undecided), 'test')} may have grown{percent}: too short, or too few runs, to know"
        )
    if is_single:
        comparison.lines.append("undecided: --nativeprof-fail-above needs several runs of a side, or --nativeprof-mode=counts")
    comparison.fails |= is_single or bool(above)


def _may_be_above(row: dict[str, Any], percent: float) -> bool:
    interval = row["interval"]
    return interval is not None and row["before"] > 0 and 100 * interval[1] / row["before"] > percent


def _without_benchmarks(comparison: Comparison, before: list[Run], after: list[Run]) -> set[str]:
    """The tests of both sides but those of pytest-benchmark, which run for a time that they are given."""
    older = {label for run in before for label in run.results}
    both = {label: result for label, result in after[-1].results.items() if label in older}
    benchmarks = [label for label, result in both.items() if result.iterations]
    if benchmarks:
        comparison.lines.append(
            f"{_counted(len(benchmarks), 'benchmark')} not compared by time, since more rounds follow if they are faster; "
            "see --benchmark-compare"
        )
    return set(both).difference(benchmarks)


def _difference(before: list[Path], after: list[Path]) -> dict[str, Any]:
    """What ``nativeprof diff`` prints.

    :raises OSError: it fails. :raises ValueError: it prints something else.
    """
    program = command()
    if program is None:
        raise OSError("the command nativeprof is not in this environment")
    words = ["--by", "label", "--normalize", "time", "--value", "cpu", "--all", "--json"]
    if len(before) == len(after) == 1:
        files = [before[0], after[0]]
    else:
        files = [Path("--before"), *before[-_MOST_RUNS:], Path("--after"), *after[-_MOST_RUNS:]]
    done = subprocess.run([program, "diff", *words, *map(os.fspath, files)], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise OSError(f"nativeprof diff: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    if not isinstance(answer, dict) or answer.get("version") != 1:
        raise ValueError("nativeprof diff of another version has printed it")
    return answer


def newest(before: list[Run]) -> Results:
    """Of each test, the results of the newest run that has it."""
    found: Results = {}
    for run in before:
        found.update(run.results)
    return found
