"""The plugin for pytest, in sessions of their own: labels of tests, the summary, files, xdist, and what tests may do to it."""

import gzip
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from chance import likely

BURN = """
import time

def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))
"""


SAVED = ("--nativeprof", "--nativeprof-save=saved")


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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "--strict-markers", "--junit-xml=junit.xml"]
    done = subprocess.run([*command, *options], cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    return Ran(directory, done)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A session with all phases, and with what keeps its labels."""
    text = (
        "import asyncio, contextvars, os, threading\nimport pytest\nfrom burning import burn\n"
        "@pytest.fixture\ndef slow():\n    burn(0.15)\n    yield\n    burn(0.1)\n"
        "def test_phases(slow):\n    burn(0.3)\n"
        "@pytest.mark.parametrize('x', ['a\\nb', '\\u2603', 'z' * 10_000], ids=str)\n"
        "def test_ids(x):\n    burn(0.1)\n"
        "def test_thread():\n"
        "    thread = threading.Thread(target=contextvars.copy_context().run, args=(burn, 0.2))\n"
        "    thread.start()\n    thread.join()\n"
        "def test_asyncio():\n"
        "    async def work():\n        await asyncio.sleep(0)\n        burn(0.2)\n"
        "    asyncio.run(work())\n"
        "def test_fork():\n"
        "    child = os.fork()\n"
        "    if child == 0:\n        burn(0.05)\n        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n    burn(0.1)\n"
        "def test_fails():\n    assert 0\n"
    )
    directory = tmp_path_factory.mktemp("sampled")
    return session(directory, *SAVED, burning=BURN, test_it=text)


def test_the_session_is_as_without(sampled):
    assert sampled.code == 1, sampled.text
    assert "1 failed, 7 passed" in sampled.text


def test_samples_have_the_labels_of_tests_and_phases(sampled):
    labels = sampled.labels()
    seconds = {
        ("test_it.py::test_phases", "setup"): 0.15,
        ("test_it.py::test_phases", "call"): 0.3,
        ("test_it.py::test_phases", "teardown"): 0.1,
        ("test_it.py::test_thread", "call"): 0.2,
        ("test_it.py::test_asyncio", "call"): 0.2,
        ("test_it.py::test_fork", "call"): 0.1,
    }
    # 100 per second; the timer of a thread is late by a tick, and a busy machine loses some.
    for key, time in seconds.items():
        assert 70 * time - 3 <= labels.get(key, 0) <= 130 * time + 3, (key, labels)
    of_ids = [key[0] for key in labels if key[0] and "test_ids" in key[0]]
    likely(len(of_ids) == 3, of_ids)
    assert all(len(label.encode()) <= 255 and label.isprintable() for label in of_ids)


def test_results_add_up_to_the_session(sampled):
    summary = re.search(r"^([\d.]+) s CPU: setup ([\d.]+) s, call ([\d.]+) s, teardown ([\d.]+) s, outside of tests ([\d.]+) s$",
                        sampled.text, re.M)
    total, *parts = map(float, summary.groups())
    assert abs(total - sum(parts)) < 0.03
    results = sampled.results()
    assert len(results) == 8
    assert abs(sum(sum(result["cpu"].values()) for result in results.values()) + parts[-1] - total) < 0.03
    samples = sum(sampled.labels().values())
    assert abs(samples / 100 - total) < 0.2 * total + 0.05
    # The tests with most CPU time are shown, most first.
    shown = [float(s) for s in re.findall(r"^ +([\d.]+) +[\d.]+  test_it", sampled.text, re.M)]
    assert shown == sorted(shown, reverse=True) and len(shown) == 8


def test_results_are_properties_of_junit(sampled):
    properties = sampled.properties()
    assert 0.5 < float(properties["test_phases"]["nativeprof_cpu"]) < 1
    assert all("nativeprof_cpu" in found for found in properties.values())


def test_reports_select_a_test(sampled):
    command = os.path.join(os.path.dirname(sys.executable), "nativeprof")
    words = ["report", sampled.runs()[0], "--label", "test=test_it.py::test_thread", "--json"]
    done = subprocess.run([command, *words], check=True, capture_output=True, text=True)
    assert any(row["name"].startswith("burn") for row in json.loads(done.stdout)["rows"])


def test_without_the_option_nothing_is_imported(tmp_path):
    text = "import sys\ndef test_it():\n    assert not [m for m in sys.modules if m == 'nativeprof' or m.startswith('nativeprof.')]\n"
    ran = session(tmp_path, test_it=text)
    assert ran.code == 0, ran.text
    assert "nativeprof" not in ran.text
    ran = session(tmp_path, "--nativeprof-save=x")
    assert ran.code == 4 and "nothing is recorded; add --nativeprof" in ran.text


def test_workers_of_xdist_are_merged(tmp_path):
    text = "import pytest\nfrom burning import burn\n@pytest.mark.parametrize('n', range(4))\ndef test_it(n):\n    burn(0.1)\n"
    ran = session(tmp_path, *SAVED, "-n", "2", "-p", "no:benchmark", burning=BURN, test_it=text)
    assert ran.code == 0, ran.text
    labels = {key[0]: count for key, count in ran.labels().items() if key[1] == "call"}
    tests = [f"test_it.py::test_it[{n}]" for n in range(4)]
    assert all(4 <= labels.get(test, 0) <= 16 for test in tests), labels
    assert sorted(ran.results()) == tests
    assert len(ran.runs()) == 1


def test_a_crashing_worker_loses_only_its_own(tmp_path):
    text = "import os\ndef test_good():\n    pass\ndef test_crash():\n    os.abort()\n"
    ran = session(tmp_path, *SAVED, "-n", "1", "-p", "no:benchmark", test_it=text)
    assert ran.code == 1
    assert "has crashed: what it recorded is lost" in ran.text, ran.text
    assert "test_it.py::test_good" in ran.results()


def test_a_profiler_in_a_test_works(tmp_path):
    text = (
        "import cProfile, sys\nimport nativeprof\nfrom burning import burn\n"
        "def test_own():\n"
        "    with nativeprof.Profiler(rate=100) as profiler:\n        burn(0.2)\n"
        "    assert profiler.profile.stats['taken'] > 5\n"
        "def test_after():\n    burn(0.2)\n"
        "def test_other():\n"
        "    profile = cProfile.Profile()\n    profile.runcall(burn, 0.01)\n"
        "    assert profile.getstats()\n"
        "def test_hook():\n"
        "    seen = []\n    sys.setprofile(lambda *a: seen.append(a))\n    burn(0.01)\n    sys.setprofile(None)\n"
        "    assert seen\n"
    )
    ran = session(tmp_path, *SAVED, burning=BURN, test_it=text)
    assert ran.code == 0, ran.text
    assert "not recorded while a test had a nativeprof.Profiler of its own" in ran.text
    assert ran.labels().get(("test_it.py::test_after", "call"), 0) > 10
