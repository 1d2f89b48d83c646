"""The magics in an IPython of its own."""

import pytest
from IPython.core.error import UsageError
from IPython.testing.globalipapp import start_ipython

import nativeprof

WORK = "t = 0\nfor i in range(3_000_000):\n    t += i * i\n"


@pytest.fixture(scope="module")
def shell():
    shell = start_ipython()
    shell.run_line_magic("load_ext", "nativeprof")
    return shell


def test_a_cell_is_profiled_and_leaves_its_names(shell, tmp_path):
    path = tmp_path / "cell.svg"
    profile = shell.run_cell_magic("nativeprof", f"-r 200 --mode wall -o {path}", WORK)
    assert isinstance(profile, nativeprof.Profile)
    assert profile.facts["rate"] == 200 and profile.facts["taken"] > 0
    assert shell.user_ns["t"] > 0
    assert path.read_text().startswith("<?xml")
    assert "<table>" in profile._repr_html_()


def test_a_statement_keeps_its_quotes(shell):
    profile = shell.run_line_magic("nativeprof", "--mode wall word = 'a  b' + \"-c\"")
    assert isinstance(profile, nativeprof.Profile)
    assert shell.user_ns["word"] == "a  b-c"


def test_an_error_is_shown_and_the_profiler_stops(shell):
    assert shell.run_cell_magic("nativeprof", "", "1 / 0") is None
    assert shell.run_line_magic("nativeprof", "x = 1") is not None, "a profiler was left running"


@pytest.mark.parametrize("line, cell", [("", None), ("x = 1", "x = 2"), ("--rate 0 x = 1", None), ("--what", "x")])
def test_wrong_words(shell, line, cell):
    with pytest.raises(UsageError):
        if cell is None:
            shell.run_line_magic("nativeprof", line)
        else:
            shell.run_cell_magic("nativeprof", line, cell)
