"""Limits of memory in the plugin for pytest, in sessions of their own."""

import re

import pytest
from chance import likely, repeated
from test_pytest_plugin import PLAIN, session

from pytest_nativeprof import memory

pytestmark = pytest.mark.few_versions

# Each block of bytes has 33 bytes more, and 8 in its list: `fill(5_000)` are about 5.2 MB.
TESTS = """
import gc
import pytest

kept = []

def fill(count):
    return [bytes(1000) for _ in range(count)]

def deeper(count, depth):
    return deeper(count, depth - 1) if depth else fill(count)

@pytest.mark.nativeprof(max_peak="1 MB")
def test_peak():
    fill(5_000)

@pytest.mark.nativeprof(max_peak="1GB", max_leaked="2 MiB")
def test_within():
    fill(5_000)

@pytest.mark.nativeprof(max_leaked=1_000_000)
def test_leaked():
    kept.append(deeper(5_000, 40))

@pytest.mark.nativeprof(max_leaked="1 MB")
def test_cycle():
    first, second = [fill(5_000)], []
    first.append(second)
    second.append(first)

@pytest.mark.nativeprof(max_peak="1 MB")
class TestClass:
    @pytest.mark.nativeprof(max_peak="500 MB")
    def test_closest(self):
        bytearray(60_000_000)

    def test_large(self):
        bytearray(60_000_000)

@pytest.mark.nativeprof(max_peak="10 potatoes")
def test_wrong():
    pass

@pytest.mark.nativeprof(max_peak="1 MB")
def test_raises():
    kept.append(fill(5_000))
    raise KeyError("its own")

@pytest.mark.nativeprof(max_peak="1 MB")
def test_other_profiler():
    import nativeprof
    with nativeprof.Profiler():
        pass
"""

FIXTURE = """
import pytest

kept = []

def fill(count):
    return [bytes(1000) for _ in range(count)]

def test_measured(nativeprof_memory):
    with nativeprof_memory() as use:
        block = bytearray(30_000_000)
        del block
        kept.append(bytearray(10_000_000))
    assert 30_000_000 <= use.peak_bytes < 31_000_000
    assert 10_000_000 <= use.live_bytes < 11_000_000

def test_above(nativeprof_memory):
    fill(5_000)
    with nativeprof_memory(max_leaked="1 MB"):
        kept.append(fill(5_000))

def test_wrong(nativeprof_memory):
    with pytest.raises(ValueError, match="max_peak must be a number of bytes"):
        nativeprof_memory(max_peak=-1)
"""


@repeated
def test_limits_fail_a_test_and_show_its_stack(tmp_path):
    ran = session(tmp_path, "--nativeprof", *PLAIN, test_memory=TESTS)
    assert ran.code == 1, ran.text
    failed = {line.split("::")[-1].split(" ")[0] for line in ran.text.splitlines() if line.startswith(("FAILED ", "ERROR "))}
    # Estimates may miss a test that is above its limit, if the machine is busy; none fails that is within.
    assert not failed & {"test_within", "test_cycle", "test_closest"}, ran.text
    assert {"test_large", "test_wrong", "test_raises", "test_other_profiler"} <= failed, ran.text
    likely({"test_peak", "test_leaked"} <= failed, ran.text)
    # The machinery may have allocated something as well.
    large = ran.text.split("test_large ___")[1].split("\n____")[0]
    assert re.search(r"57\.\d+ MiB (\(± [^)]+\) )?were allocated at the peak, above max_peak=976\.56 KiB", large), large
    assert "got '10 potatoes'" in ran.text and "KeyError: 'its own'" in ran.text
    assert "another Profiler is already running" in ran.text
    leaked = ran.text.split("test_leaked ___")[1].split("\n____")[0]
    assert "MiB (± " in leaked and " were allocated and not freed, above max_leaked=976.56 KiB" in leaked, leaked
    assert re.search(r"\.\.\. 1[89] frames \.\.\.\n    deeper \(", leaked), leaked
    # Up to CPython 3.11 the comprehension is a function.
    assert leaked.rstrip().splitlines()[-1].strip().startswith(("fill (", "<listcomp> (")), leaked
    assert "_pytest" not in leaked and "note: not recorded: the call of a test with a limit of memory" in ran.text


@repeated
def test_the_fixture_measures_a_block(tmp_path):
    for options in ((), ("--nativeprof",)):
        ran = session(tmp_path, *options, *PLAIN, test_fixture=FIXTURE)
        likely("1 failed, 2 passed" in ran.text, ran.text)
        assert "FAILED test_fixture.py::test_above" in ran.text, ran.text
        assert "were allocated and not freed, above max_leaked=976.56 KiB" in ran.text
        assert "    fill (" in ran.text, ran.text


def test_limits_of_memory_need_a_recording(tmp_path):
    """As other limits of the marker: without --nativeprof nothing is measured."""
    ran = session(tmp_path, *PLAIN, "-k", "test_peak or test_large", test_memory=TESTS)
    assert ran.code == 0, ran.text


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), (7, 7), ("7", 7), ("10 MB", 10_000_000), ("1.5KiB", 1536), (" 2 gib ", 2 << 30), ("0.5 B", 0)],
)
def test_sizes(value, expected):
    assert memory.size(value, "max_peak") == expected


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "", "MB", "1 XB", "1e9", "-1 MB", "9" * 30, "1 M B", b"1"])
def test_what_is_no_size(value):
    with pytest.raises(ValueError, match="max_peak must be a number of bytes"):
        memory.size(value, "max_peak")
