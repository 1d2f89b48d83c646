"""The plugin for pytest, in sessions of their own: labels of tests, the summary, files, xdist, and what tests may do to it."""

import gzip
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from chance import likely, repeated

import nativeprof
from pytest_nativeprof import comparison, results

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


def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))


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
    assert "4 failed" not in text and "3 failed" in text and "1 error" in text, text
    assert "10 calls of Python functions, max_calls=5; most of them:" in text
    assert re.search(r"^ +9  f \(test_it.py\)$", text, re.M)
    assert "s CPU, max_cpu=1e-09" in text
    assert "the marker nativeprof has no argument 'max_call'; it has max_calls, max_cpu, max_peak, max_leaked and rate" in text


def test_one_call_more_is_found_always(counted):
    _, more, equal = counted
    assert more.code == 1 and " failed" not in more.text, more.text
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
    return [results.Run(Path("none"), {"t": results.TestResult({}, dict(calls))}) for calls in values]


def test_calls_that_vary_count_outside_of_their_ranges():
    before = runs({"f (a)": 5, "g (a)": 1}, {"f (a)": 9, "g (a)": 1})
    for f, percent, fails in [(9, "0", False), (10, "0", True), (10, "10", False), (12, "10", True), (10, "0 calls", True)]:
        limit = comparison.Limit.parse(percent, "counts")
        found = comparison.compared(before, runs({"f (a)": f, "g (a)": 1}), "counts", limit)
        assert found.fails == fails, (f, percent, found.lines)
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


@repeated
def test_growth_of_time_is_significant_as_diff_has_it(tmp_path):
    """Two runs before, and one each after: one with the same times, one in which a test takes four times as long."""

    def run(name, seconds):
        labels = {"t::same": 0.1, "t::slower": seconds}
        with nativeprof.Profiler(rate=200) as profiler:
            for label, amount in labels.items():
                with nativeprof.span("pytest", test=label, phase="call"):
                    burn(amount)
        profiler.profile.save(tmp_path / f"{name}.json.gz")
        return results.Run(tmp_path / f"{name}.json.gz", {label: results.TestResult({"call": s}) for label, s in labels.items()})

    before, same, slower = [run("a", 0.1), run("b", 0.1)], run("same", 0.1), run("slower", 0.4)
    limit = comparison.Limit.parse("50", "samples")
    found = comparison.compared(before, [slower], "samples", limit)
    likely(found.fails and any(line.endswith("t::slower") for line in found.lines), found.lines)
    likely(not any(line.endswith("t::same") for line in found.lines), found.lines)
    found = comparison.compared(before, [same], "samples", limit)
    likely(not found.fails and "CPU time of tests: 0 grew significantly" in found.lines, found.lines)
    single = comparison.compared(before[:1], [same], "samples", limit)
    assert single.fails and any(line.startswith("undecided: ") for line in single.lines), single.lines
