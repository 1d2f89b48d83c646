"""The plugin for pytest, in sessions of their own: labels of tests, the summary, files, xdist, and what tests may do to it."""

import gzip
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from chance import likely, repeated

from pytest_nativeprof import comparison, results
from pytest_nativeprof.comparison import Verdict

BURN = """
import time

def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))
"""


SAVED = ("--nativeprof", "--nativeprof-save=saved")
# What the session does not need takes longer to import than the tests take.
PLAIN = ("-p", "no:xdist", "-p", "no:benchmark")
WITH_BENCHMARK = ("-p", "no:xdist", "--benchmark-quiet")


class Ran:
    """A session of pytest that has ended: its code, what it printed, and the runs that it has saved."""

    def __init__(self, directory, done):
        self.directory, self.code = directory, done.returncode
        self.text = done.stdout + done.stderr

    def runs(self, name="saved"):
        return sorted((self.directory / name).glob("*.json.gz"))

    def labels(self, path=None):
        """How many samples have each set of labels, and how many have none."""
        tree = json.loads(gzip.decompress((path or self.runs()[-1]).read_bytes()))
        samples = tree["nativeprof"]["samples"]
        sets = samples.get("labels", {"sets": [[]], "set": [0] * len(samples["time"])})
        counts = {}
        for number in sets["set"]:
            labels = dict(map(tuple, sets["sets"][number]))
            key = (labels.get("test"), labels.get("phase"))
            counts[key] = counts.get(key, 0) + 1
        return counts

    def results(self, name="saved"):
        """The results of the last run, by label."""
        return json.loads(sorted((self.directory / name / "tests").iterdir())[-1].read_text())["tests"]

    def properties(self):
        """The properties of tests in the JUnit file, by the names of tests."""
        cases = ElementTree.parse(self.directory / "junit.xml").iter("testcase")
        return {case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")} for case in cases}


def session(directory, *options, **files):
    """Runs pytest on files, which are given by their names without the extension."""
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text, encoding="utf-8")
    (directory / "pytest.ini").touch()  # none of the directories above
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NATIVEPROF_"))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        "--strict-markers",
        "--junit-xml=junit.xml",
    ]
    done = subprocess.run([*command, *options], cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    return Ran(directory, done)


PHASES = """
import asyncio, contextvars, os, threading
import pytest
from burning import burn

@pytest.fixture
def slow():
    burn(0.1)
    yield
    burn(0.1)

def test_phases(slow):
    burn(0.2)

@pytest.mark.parametrize("x", ["a\\nb", "\\u2603", "z" * 10_000], ids=str)
def test_ids(x):
    burn(0.06)

def test_thread():
    thread = threading.Thread(target=contextvars.copy_context().run, args=(burn, 0.2))
    thread.start()
    thread.join()

def test_asyncio():
    async def work():
        await asyncio.sleep(0)
        burn(0.2)
    asyncio.run(work())

def test_fork():
    child = os.fork()
    if child == 0:
        burn(0.05)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    burn(0.1)

def test_fails():
    assert 0
"""


@repeated
def test_a_session_is_recorded(tmp_path):
    """One session with all phases, and with what keeps its labels."""
    ran = session(tmp_path, *SAVED, *PLAIN, burning=BURN, test_it=PHASES)
    assert ran.code == 1, ran.text
    assert "1 failed, 7 passed" in ran.text
    check_figures(ran)
    check_labels(ran)
    for run in ran.runs():
        run.unlink()


def check_figures(ran):
    """Results add up to the session; the tests with most CPU time are shown, most first; reports have them."""
    numbers = r"^([\d.]+) s CPU: setup ([\d.]+) s, call ([\d.]+) s, teardown ([\d.]+) s, outside of tests ([\d.]+) s$"
    total, *parts = map(float, re.search(numbers, ran.text, re.M).groups())
    assert abs(total - sum(parts)) < 0.03
    tests = ran.results()
    assert len(tests) == 8
    assert abs(sum(sum(result["cpu"].values()) for result in tests.values()) + parts[-1] - total) < 0.03
    shown = [float(seconds) for seconds in re.findall(r"^ +([\d.]+) +[\d.]+  test_it", ran.text, re.M)]
    assert shown == sorted(shown, reverse=True) and len(shown) == 8
    properties = ran.properties()
    assert float(properties["test_phases"]["nativeprof_cpu"]) > 0.4
    assert all("nativeprof_cpu" in found for found in properties.values())


def check_labels(ran):
    """Samples have the labels of tests and phases, in the shares of their times."""
    labels = ran.labels()
    seconds = {
        ("test_it.py::test_phases", "setup"): 0.1,
        ("test_it.py::test_phases", "call"): 0.2,
        ("test_it.py::test_phases", "teardown"): 0.1,
        ("test_it.py::test_thread", "call"): 0.2,
        ("test_it.py::test_asyncio", "call"): 0.2,
        ("test_it.py::test_fork", "call"): 0.1,
    }
    count = sum(labels.get(key, 0) for key in seconds)
    likely(count > 40, "the machine is too busy", labels)
    for key, time_of_it in seconds.items():
        share = time_of_it / sum(seconds.values())
        deviation = (share * (1 - share) / count) ** 0.5
        likely(abs(labels.get(key, 0) / count - share) < 4 * deviation + 0.03, key, labels)
    of_ids = {key[0] for key in labels if key[0] and "test_ids" in key[0]}
    likely(len(of_ids) == 3, of_ids)
    assert all(len(label.encode()) <= 255 and label.isprintable() for label in of_ids)
    command = os.path.join(os.path.dirname(sys.executable), "nativeprof")
    words = ["report", ran.runs()[0], "--label", "test=test_it.py::test_thread", "--json"]
    done = subprocess.run([command, *words], check=True, capture_output=True, text=True)
    assert any(row["name"].startswith("burn") for row in json.loads(done.stdout)["rows"])


def test_without_the_option_nothing_is_imported(tmp_path):
    text = (
        "import sys\nimport pytest\n"
        "@pytest.mark.nativeprof(max_calls=0)\ndef test_it():\n"
        "    assert not {'nativeprof', 'pytest_nativeprof.session'}.intersection(sys.modules)\n"
    )
    ran = session(tmp_path, test_it=text)
    assert ran.code == 0, ran.text
    assert "nativeprof" not in ran.text
    # Nor does pytest warn of modules that were imported before it, as by `python -m nativeprof -m pytest`.
    program = "import sys, nativeprof, stacktrace, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *PLAIN, "-p", "no:cacheprovider", "--collect-only"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "rewritten" not in done.stdout, done.stdout


def test_wrong_options_are_refused(tmp_path):
    for options, said in [
        (("--nativeprof-save=x",), "--nativeprof-save has no effect, since nothing is recorded; add --nativeprof"),
        (("--nativeprof", "--nativeprof-compare=x"), "make one with --nativeprof-save=x"),
    ]:
        ran = session(tmp_path, *PLAIN, *options)
        assert ran.code == 4 and said in ran.text, ran.text
    for limit, said in [("10 calls", "add --nativeprof-mode=counts"), ("1.5 calls", "percent, or a number"), ("x", "got 'x'")]:
        with pytest.raises(pytest.UsageError, match=said):
            comparison.Limit.parse(limit, "samples")
    assert comparison.Limit.parse(" 2.5 % ", "samples") == comparison.Limit(2.5, False)
    assert comparison.Limit.parse("1 call", "counts") == comparison.Limit(1, True)


@repeated
def test_workers_of_xdist_are_merged(tmp_path):
    text = "import pytest\nfrom burning import burn\n@pytest.mark.parametrize('n', range(4))\ndef test_it(n):\n    burn(0.1)\n"
    ran = session(tmp_path, *SAVED, "-n", "2", "-p", "no:benchmark", burning=BURN, test_it=text)
    assert ran.code == 0, ran.text
    tests = [f"test_it.py::test_it[{n}]" for n in range(4)]
    assert sorted(ran.results()) == tests
    (run,) = ran.runs()
    labels = ran.labels()
    run.unlink()
    # Each is in the profile, though none ran in this process.
    likely(all((test, "call") in labels for test in tests), labels)


def test_a_crashing_worker_loses_only_its_own(tmp_path):
    text = "import os\ndef test_good():\n    pass\ndef test_crash():\n    os.abort()\n"
    ran = session(tmp_path, *SAVED, "-n", "1", "-p", "no:benchmark", test_it=text)
    assert ran.code == 1
    assert "has crashed: what it recorded is lost" in ran.text, ran.text
    assert "test_it.py::test_good" in ran.results()


OTHER_PROFILERS = """
import cProfile, sys
import nativeprof
import pytest
from burning import burn

def test_own():
    with nativeprof.Profiler(rate=100) as profiler:
        burn(0.2)
    assert profiler.profile.stats["taken"] > 0

@pytest.mark.nativeprof(rate=200)
def test_after():
    burn(0.2)

def test_c_profile():
    profile = cProfile.Profile()
    profile.runcall(burn, 0.01)
    assert profile.getstats()

def test_hook():
    seen = []
    sys.setprofile(lambda *a: seen.append(a))
    burn(0.01)
    sys.setprofile(None)
    assert seen
"""


@repeated
def test_other_profilers_in_tests_work(tmp_path):
    ran = session(tmp_path, *SAVED, "--nativeprof-mode=counts+samples", *PLAIN, burning=BURN, test_it=OTHER_PROFILERS)
    assert ran.code == 0, ran.text
    assert "not recorded while a test had a nativeprof.Profiler of its own" in ran.text
    # Parts of different rates are merged.
    likely(("test_it.py::test_after", "call") in ran.labels(), ran.text)
    if sys.version_info < (3, 12):
        assert "calls are missing in a test that used sys.setprofile" in ran.text


COUNTED = """
import asyncio, os, unittest
import pytest

MORE = int(os.environ["MORE"])

def f(x):
    return x

def test_empty():
    pass

def test_calls():
    for n in range(5000 + MORE):
        f(n)

class TestUnit(unittest.TestCase):
    def setUp(self):
        f(1)

    def test_unit(self):
        f(2)

@pytest.mark.nativeprof(max_calls=11)
class TestLimits:
    def test_kept(self):
        [f(n) for n in range(9)]

    @pytest.mark.nativeprof(max_calls=5)
    def test_exceeded(self):
        for n in range(9):
            f(n)

    def test_fails_first(self):
        assert f(0)

    @pytest.mark.nativeprof(max_cpu=1e-9)
    def test_cpu(self):
        pass

    @pytest.mark.nativeprof(max_call=5)
    def test_wrong(self):
        pass

def test_benchmark(benchmark):
    f(0)
    benchmark.pedantic(lambda: [f(n) for n in range(30)], rounds=3, iterations=2, warmup_rounds=2)
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("counted")
    os.environ["MORE"] = "0"
    first = session(directory, *SAVED, "--nativeprof-mode=counts", *WITH_BENCHMARK, test_it=COUNTED)
    os.environ["MORE"] = "1"
    options = ("--nativeprof", "--nativeprof-mode=counts", "--nativeprof-compare=saved", "--nativeprof-fail-above=0 calls")
    selected = ("-k", "empty or calls or unit or kept or benchmark", *WITH_BENCHMARK)
    more = session(directory, *options, *selected, test_it=COUNTED)
    os.environ["MORE"] = "0"
    equal = session(directory, *options, *selected, test_it="# A comment.\n\n" + COUNTED)
    del os.environ["MORE"]
    return first, more, equal


def test_calls_of_tests_are_exact(counted):
    results = counted[0].results()
    is_inlined = sys.version_info >= (3, 12)  # comprehensions have no frame of their own
    calls = {label.rpartition("::")[2]: sum(found.get("calls", {}).values()) for label, found in results.items()}
    assert calls["test_empty"] == 1
    assert calls["test_calls"] == 5001
    assert calls["test_unit"] == 2
    assert calls["test_kept"] == (10 if is_inlined else 11)
    of_iteration = results["test_it.py::test_benchmark"]
    assert calls["test_benchmark"] == (31 if is_inlined else 32)
    assert of_iteration["iterations"] == 6
    assert of_iteration["calls"]["f (test_it.py)"] == 30


def test_limits_of_markers_fail_tests(counted):
    text = counted[0].text
    assert "4 failed" in text and " error" not in text, text
    assert "10 calls of Python functions, max_calls=5; most of them:" in text
    assert re.search(r"^ +9  f \(test_it.py\)$", text, re.M)
    assert "s CPU, max_cpu=1e-09" in text
    assert "the marker nativeprof has no argument 'max_call'; it has max_calls, max_cpu, max_peak, max_leaked and rate" in text


def test_one_call_more_is_found_always(counted):
    _, more, equal = counted
    assert more.code == 1 and "5 passed" in more.text, more.text
    assert "calls of 5 tests: grew, by more than 0 calls" in more.text
    assert re.search(r"^ +5,001 +5,002 +\+1  test_it.py::test_calls$", more.text, re.M)
    assert re.search(r"^ +5,000 +5,001 +\+1  test_it.py::test_calls, f \(test_it.py\)$", more.text, re.M)
    assert equal.code == 0 and "calls of 5 tests: none grew" in equal.text, equal.text


def test_properties_have_the_earlier_figures(counted):
    found = counted[2].properties()["test_calls"]
    assert found["nativeprof_calls"] == found["nativeprof_calls_before"] == "5001"


def test_an_exit_is_announced(tmp_path):
    ran = session(tmp_path, "--nativeprof", *PLAIN, test_it="import os\ndef test_it():\n    os._exit(7)\n")
    assert ran.code == 7
    assert "test_it.py::test_it ends pytest by os._exit: what was recorded is lost" in ran.text


def test_labels_differ_and_fit():
    assert results.label_of("test_a.py::test_b[1]") == "test_a.py::test_b[1]"
    assert results.label_of("a\nb\x1b\u2603\ud800") == "a\\nb\\x1b\u2603\\ud800"
    long = [results.label_of("é" * 10_000 + end) for end in "ab"]
    assert long[0] != long[1] and all(len(label.encode()) <= 200 for label in long)


def runs(*values):
    """Runs whose only test calls functions so often."""
    return [results.Run(Path("none"), {"t": results.TestResult({}, dict(calls), passed=True)}) for calls in values]


def test_calls_that_vary_count_outside_of_their_ranges():
    before = runs({"f (a)": 5, "g (a)": 1}, {"f (a)": 9, "g (a)": 1})
    for f, percent, fails in [(9, "0", False), (10, "0", True), (10, "10", False), (12, "10", True), (10, "0 calls", True)]:
        limit = comparison.Limit.parse(percent, "counts")
        found = comparison.compared(before, runs({"f (a)": f, "g (a)": 1}), "counts", limit)
        assert found.verdict is (Verdict.GROWN if fails else Verdict.PASSED), (f, percent, found.lines)
        assert found.lines[0].startswith(f"--nativeprof-fail-above={limit}: {'failed' if fails else 'passed'}"), found.lines
        assert any(line.startswith("1 number of calls vary") for line in found.lines)


def test_a_baseline_of_another_kind_is_named(tmp_path):
    (tmp_path / "tests").mkdir()
    for name, content in [("a", None), ("b", "{"), ("c", "[]"), ("d", '{"version": 2, "tests": {}}'), ("e", "[" * 100_000)]:
        (tmp_path / f"{name}.json.gz").touch()
        if content is not None:
            (tmp_path / "tests" / f"{name}.json").write_text(content)
    (tmp_path / "f.json.gz").touch()
    given = {"t": {"cpu": {"call": 1}, "calls": {"f": True, "g": 2}}, "u": [], "v": {"cpu": {"call": "1"}}}
    (tmp_path / "tests" / "f.json").write_text(json.dumps({"version": 1, "python": "2.7", "tests": given}))
    notes = []
    (run,) = results.runs(tmp_path, notes)
    assert len([note for note in notes if "is left out" in note]) == 5, notes
    assert "is of Python '2.7'" in notes[-1]
    assert [(r.cpu, r.calls) for r in run.results.values()] == [({"call": 1}, {"g": 2}), ({}, None), ({}, None)]


def timed(*seconds, machine=None, python="3.13.0", **changes):
    """Runs in which the call of the test `t` took so many seconds of CPU time, and the calls of two others."""
    made = []
    for amount in seconds:
        calls = {"same": 0.1 + amount / 1000, "t": amount, "short": (100 + amount) / 1e6}
        tests = {label: results.TestResult({"setup": 1e-4, "call": call}, passed=True) for label, call in calls.items()}
        for name, value in changes.items():
            setattr(tests["t"], name, value)
        made.append(results.Run(Path("none"), tests, python, machine or {}))
    return made


HERE = {"cpu": "A", "cores": 2, "kernel": "6.1", "governor": ""}
BASE = (0.1, 0.1005, 0.0995, 0.1002)


@pytest.mark.parametrize(
    "before, after, verdict, said",
    [
        (timed(*BASE), timed(0.4), Verdict.GROWN, r"0\.1\d+ +0\.4000 +\+0\.\d+ .* t$"),
        (timed(*BASE), timed(0.1003), Verdict.PASSED, "CPU time of 3 tests: 0 grew significantly, 0 by more than 50 %"),
        # It may be chance, and that is not green.
        (timed(0.1, 0.2, 0.15), timed(0.2), Verdict.UNDECIDED, "undecided: 1 test may have grown by more than 50 %, such as t"),
        (timed(0.1), timed(0.4), Verdict.UNDECIDED, "undecided: one run of each side cannot tell"),
        (timed(*BASE, machine=HERE), timed(0.4, machine={**HERE, "cpu": "B"}), Verdict.UNDECIDED, "CPU: A before, B after"),
        (timed(*BASE, machine=HERE), timed(0.4, machine={}), Verdict.GROWN, "1 by more than 50 %"),
        (timed(*BASE), timed(0.4, python="3.14.0"), Verdict.UNDECIDED, "CPython 3.13.0 before, CPython 3.14.0 after"),
        # What is no measure of the test.
        (timed(*BASE), timed(0.4, passed=False), Verdict.PASSED, "1 test not compared by time: not in all of these runs"),
        (timed(*BASE, passed=False), timed(0.4), Verdict.PASSED, "CPU time of 2 tests: 0 grew significantly"),
        (timed(*BASE), timed(0.4, iterations=9), Verdict.PASSED, "1 benchmark not compared by time"),
        (timed(*BASE), timed(0.4, cpu={"call": 0.4, "repeated": 0.4}), Verdict.PASSED, "1 test not compared by time"),
    ],
)
def test_growth_of_time_is_judged_by_the_spread_between_runs(before, after, verdict, said):
    limit = comparison.Limit.parse("50", "samples")
    found = comparison.compared(before, after, "samples", limit)
    assert found.verdict is verdict, found.lines
    assert found.lines[0].startswith("--nativeprof-fail-above=50 %: " + verdict.name.lower().replace("grown", "failed"))
    assert any(re.search(said, line) for line in found.lines), found.lines
    # A test of less than 10 ms is no reason.
    assert not any("such as short" in line for line in found.lines)
    # Without a limit, the same is shown, and nothing is judged.
    shown = comparison.compared(before, after, "samples", None)
    assert shown.verdict is Verdict.PASSED and not any("undecided" in line for line in shown.lines), shown.lines


def test_an_undecided_limit_has_an_exit_status_of_its_own(tmp_path):
    """One earlier run of tests that pass: `--nativeprof-fail-above` cannot be decided by time, and the tests have not failed."""
    text = "def test_it():\n    pass\n"
    assert session(tmp_path, *SAVED, *PLAIN, test_it=text).code == 0
    compare = ("--nativeprof", "--nativeprof-compare=saved", *PLAIN)
    ran = session(tmp_path, *compare, "--nativeprof-fail-above=50")
    assert ran.code == comparison.UNDECIDED == 6, ran.text
    assert "undecided, so the exit status is 6" in ran.text and "1 passed" in ran.text
    assert session(tmp_path, *compare).code == 0
    (tmp_path / "test_other.py").write_text("def test_fails():\n    assert 0\n")
    assert session(tmp_path, *compare, "--nativeprof-fail-above=50").code == 1


HOSTILE = """
import os, unittest
import pytest
import nativeprof
from burning import burn

@pytest.fixture(scope="class")
def shared():
    burn(0.05)
    yield
    burn(0.05)

class TestScoped:
    def test_first(self, shared):
        pass

    def test_last(self, shared):
        pass

class TestUnit(unittest.TestCase):
    def setUp(self):
        burn(0.01)

    def test_parts(self):
        for n in range(3):
            with self.subTest(n=n):
                burn(0.05)
                self.assertNotEqual(n, 1)

    @unittest.skip("not now")
    def test_skipped(self):
        pass

# Two tests with one id.
def test_twice():
    burn(0.02)

def test_open_span():
    nativeprof.span("left open", left="open").__enter__()

def test_after_open_span():
    assert dict(nativeprof._native.current_labels()) == {
        "span": "call", "test": "test_it.py::test_after_open_span", "phase": "call",
    }

@pytest.mark.skip
def test_skipped():
    pass

def test_skipped_first():
    pass

def test_repeated():
    burn(0.1)
    assert os.environ.setdefault("HAS_RUN", "0") != "0" or os.environ.update(HAS_RUN="1")

def test_fork_that_leaves():
    child = os.fork()
    if child == 0:
        raise SystemExit  # of the test, and then of pytest
    os.waitpid(child, 0)
"""
PLUGINS = """
import pytest
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.name == "test_skipped_first":
        pytest.skip("before other plugins")

def pytest_collection_modifyitems(items):
    items.extend([item.from_parent(item.parent, name=item.name) for item in items if item.name == "test_twice"])

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if item.name != "test_repeated":
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for attempt in range(2):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if hasattr(item, "_request"):
            item._initrequest()
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""


def test_tests_that_are_run_otherwise(tmp_path):
    ran = session(tmp_path, *SAVED, "--nativeprof-mode=counts", *PLAIN, burning=BURN, test_it=HOSTILE, conftest=PLUGINS)
    tests = {label.rpartition("::")[2]: result for label, result in ran.results().items()}
    properties = ran.properties()
    assert "test_repeated" in tests, ran.text
    # What a class shares is set up with its first test, and torn down with its last one.
    assert tests["test_first"]["cpu"]["setup"] > 0.04 and tests["test_last"]["cpu"]["teardown"] > 0.04
    assert tests["test_first"]["cpu"]["call"] < 0.04
    # Reports of subtests come while the call runs.
    assert tests["test_parts"]["cpu"]["call"] > 0.1 > tests["test_parts"]["cpu"]["teardown"]
    assert tests["test_twice"]["cpu"]["call"] > 0.04 and tests["test_twice"]["passed"]
    assert tests["test_twice"]["calls"]["test_twice (test_it.py)"] == 2
    assert tests["test_after_open_span"]["passed"], ran.text
    for name in ("test_skipped", "test_skipped_first"):
        assert not tests[name]["passed"] and "call" not in tests[name]["cpu"] and "calls" not in tests[name]
    # The last attempt counts, and the report has only its figures.
    repeated = tests["test_repeated"]
    assert repeated["passed"] and repeated["calls"]["test_repeated (test_it.py)"] == 1, ran.text
    assert 0.1 < repeated["cpu"]["call"] < 0.2 and repeated["cpu"]["repeated"] > 0.1
    of_last = sum(seconds for phase, seconds in repeated["cpu"].items() if phase != "repeated")
    assert float(properties["test_repeated"]["nativeprof_cpu"]) == pytest.approx(of_last, abs=1e-5)
    # The child has left the profile, and its parts, to its parent.
    assert ran.runs() and "is not saved" not in ran.text, ran.text


def test_nothing_is_sampled_for_a_profile_that_is_not_kept(tmp_path):
    text = "import nativeprof\ndef test_it():\n    nativeprof.Profiler().start()\n"
    ran = session(tmp_path, "--nativeprof", *PLAIN, test_it=text)
    assert ran.code == 0 and "no profile was made; add --nativeprof-save=DIR" in ran.text, ran.text
    assert "a nativeprof.Profiler of its own" not in ran.text


def test_hostile_names_in_files_are_shown_as_text(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "a.json.gz").touch()
    long, calls = "f" * 10_000, {"\x1b[2Jf\n": 1}
    tests = {"a\x1b[31m\n": {"cpu": {"call": float("nan"), "setup": -1, "teardown": 1e300}, "calls": calls}, long: {}}
    (tmp_path / "tests" / "a.json").write_text(json.dumps({"version": 1, "tests": tests, "machine": [], "python": None}))
    (run,) = results.runs(tmp_path, [])
    assert list(run.results) == ["a\\x1b[31m\\n", long] and run.results["a\\x1b[31m\\n"].cpu == {}
    now = results.TestResult({}, {"\x1b[2Jf\n": 2}, passed=True)
    after = [results.Run(Path("none"), {"a\\x1b[31m\\n": now})]
    found = comparison.compared([run], after, "counts", comparison.Limit.parse("0", "counts"))
    assert found.verdict is Verdict.GROWN and all(line.isprintable() for line in found.lines), found.lines
