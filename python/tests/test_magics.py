"""The magics in an IPython of its own."""

import asyncio
import base64
import html
import re
import threading

import pytest
from chance import likely, repeated
from IPython.core.error import UsageError
from IPython.testing.globalipapp import start_ipython

import nativeprof
from nativeprof import magics

pytestmark = pytest.mark.few_versions

WORK = "t = 0\nfor i in range(3_000_000):\n    t += i * i\n"


@pytest.fixture(scope="module")
def shell():
    shell = start_ipython()
    shell.run_line_magic("load_ext", "nativeprof")
    return shell


@repeated
def test_a_cell_is_profiled_and_leaves_its_names(shell, tmp_path):
    path = tmp_path / "cell.svg"
    profile = shell.run_cell_magic("nativeprof", f"-r 200 --mode wall -o {path}", WORK)
    assert isinstance(profile, nativeprof.Profile)
    assert profile.stats["rate"] == 200
    likely(profile.stats["taken"] > 0, profile.stats)
    assert shell.user_ns["t"] > 0
    assert path.read_text().startswith("<?xml")
    assert "<table>" in profile._repr_html_()


def graph(profile):
    """The flame graph that a notebook shows, and the height of its frame."""
    shown = re.search(r"height:(\d+)px.*base64,([^']*)'", profile._repr_html_())
    return base64.b64decode(shown.group(2)).decode(), int(shown.group(1))


def test_the_graph_begins_at_the_cell_and_is_of_its_thread(shell):
    ended = threading.Event()

    def elsewhere():
        while not ended.is_set():
            sum(range(1000))

    other = threading.Thread(target=elsewhere)
    other.start()
    try:
        cell = "def of_cell():\n    return sum(i * i for i in range(200_000))\nfor _ in range(40):\n    of_cell()\n"
        profile = shell.run_cell_magic("nativeprof", "-r 500", cell)
        everything = shell.run_cell_magic("nativeprof", "-r 500 --all-threads", cell)
    finally:
        ended.set()
        other.join()
    svg, height = graph(profile)
    assert "of_cell" in svg and "run_cell" not in svg and "elsewhere" not in svg
    assert height < 700, "as high as its stacks"
    names = {row.name for row in everything.top(1000)}
    assert any("elsewhere" in name for name in names)
    assert not any("elsewhere" in row.name for row in profile.top(1000))


def test_the_top_functions_are_a_table(shell):
    profile = shell.run_cell_magic("nativeprof", "-r 500", "for _ in range(30): sorted(range(200_000), key=str)")
    rows = profile.top(5)
    assert len(rows) == 5 and str(rows).splitlines()[0].split() == ["SELF", "%", "TOTAL", "%", "FUNCTION", "WHERE"]
    assert rows._repr_html_().count("<tr>") == 6
    for row in profile.top(1000):
        assert row.line < 100_000, "a line, not an address"
        assert row.line == 0 or row.filename != "<low-level>"


def test_help_has_no_markup(shell, capsys):
    assert shell.run_line_magic("nativeprof", "-h") is None
    said = capsys.readouterr().out
    assert "--all-threads" in said and "%%nativeprof" in said
    assert "`" not in said and "::" not in said and "%%%%" not in said


def shown(profile):
    """What a notebook shows without the graph: rows of texts, a list of one for what is not in a table."""
    page = re.sub(r"<iframe.*?</iframe>", "", profile._repr_html_())
    rows = re.findall(r"<p>(.*?)</p>|<tr>(.*?)</tr>", page)
    cells = [[text] if text else re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for text, row in rows]
    return [[html.unescape(re.sub("<.*?>", "", cell)) for cell in row] for row in cells]


@repeated
def test_functions_and_lines_of_the_cell_are_shown(shell):
    defined = shell.run_cell("def busy(n):\n    return sorted(range(n), key=str)\n", store_history=True)
    defined.raise_error()
    first = shell.execution_count - 1
    done = shell.run_cell("%%nativeprof -r 200\nfor _ in range(100):\n    busy(50_000)\nx = '<b>'\n", store_history=True)
    done.raise_error()
    number = shell.execution_count - 1
    rows = shown(done.result)
    likely(done.result.stats["taken"] >= 10, rows)
    functions = rows.index(["self", "in libraries", "in C", "total", "function", "line"])
    own, in_libraries, in_c, total, name, place = rows[functions + 1]
    assert name == "busy" and place == f"In [{first}]:2", rows
    assert own == total and float(own[:-1]) > 80 and float(in_c[:-1]) > 50 and in_libraries == "0.0%", rows
    at = rows.index([f"In [{number}]: total with all that a line calls"])
    assert rows[at + 1] == ["time", "total", "self", "line", "source"]
    sources = {row[3]: row for row in rows[at + 2 : at + 6]}
    assert [row[4] for row in sources.values()] == ["%%nativeprof", "for _ in range(100):", "    busy(50_000)", "x = '<b>'"]
    assert float(sources["3"][1][:-1]) > 80 and sources["3"][0].endswith("s") and sources["4"][:3] == ["", "", ""], rows
    text = str(shell.display_formatter.format(done.result)[0]["text/plain"])
    assert "busy  In [" in text and "<nativeprof.Profile: " in text


def test_a_cell_without_samples_says_why(shell):
    profile = shell.run_cell("%%nativeprof -r 1\npass\n").result
    assert profile.stats["taken"] == 0
    assert "less CPU time than a period of 1000 ms. Use a higher rate" in profile._repr_html_()
    assert "There are no samples" in shell.display_formatter.format(profile)[0]["text/plain"]


def test_a_statement_keeps_its_quotes(shell):
    profile = shell.run_line_magic("nativeprof", "--mode wall word = 'a  b' + \"-c\"")
    assert isinstance(profile, nativeprof.Profile)
    assert shell.user_ns["word"] == "a  b-c"


def run(shell, cell):
    """Runs a cell as a terminal does."""
    return shell.run_cell(cell, store_history=False)


def run_in_kernel(shell, cell):
    """Runs a cell as ipykernel does: in the event loop that runs already."""

    async def kernel():
        return await shell.run_cell_async(cell, store_history=False, transformed_cell=shell.transform_cell(cell))

    return asyncio.run(kernel())


@pytest.mark.parametrize("run", [run, run_in_kernel])
@pytest.mark.parametrize(
    "cell, line, error",
    [
        ("%%nativeprof\nx = 1\n1 / 0\n", 3, ZeroDivisionError),
        ("\n%%nativeprof -r 99\ndef f():\n    g()\nf()\n", 5, NameError),
        ("%%nativeprof --mode wall\n[1][2]\n", 2, IndexError),
        ("get_ipython().run_cell_magic('nativeprof', '', '1 / 0')\n", 1, ZeroDivisionError),
        ("x = 2\n%nativeprof -r 99 1 / 0\n", 1, ZeroDivisionError),
    ],
)
def test_an_error_is_that_of_the_cell(shell, capsys, run, cell, line, error):
    done = run(shell, cell)
    assert isinstance(done.error_in_exec, error) and not done.success
    trace = done.error_in_exec.__traceback__
    lines = []
    while trace is not None:
        if trace.tb_frame.f_globals is shell.user_ns:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    # The first line of the traceback with IPython 9 is the empty one.
    assert line in lines or line - 1 in lines, lines
    said = capsys.readouterr()
    assert (said.out + said.err).count("Traceback (most recent call last)") <= 1
    assert isinstance(run(shell, "%nativeprof x = 1").result, nativeprof.Profile), "a profiler was left running"


@pytest.mark.parametrize("run", [run, run_in_kernel])
def test_await_works_in_a_cell(shell, run):
    cell = "%%nativeprof --mode wall -r 500\nimport asyncio\nx = await asyncio.sleep(0.05, 'slept')\nawait asyncio.sleep(0, x)\n"
    done = run(shell, cell)
    done.raise_error()
    assert isinstance(done.result, nativeprof.Profile)
    assert shell.user_ns["x"] == "slept"
    failed = run(shell, "%%nativeprof\nawait asyncio.sleep(0)\nraise KeyError\n")
    assert isinstance(failed.error_in_exec, KeyError)
    # In a line only where no event loop runs: a line magic cannot wait for one.
    line = run(shell, "%nativeprof await asyncio.sleep(0)")
    assert isinstance(line.error_in_exec, UsageError) if run is run_in_kernel else line.success


def test_the_last_value_is_shown_and_the_profile_is_the_result(shell, capsys):
    done = run(shell, "%%nativeprof\n'a' + 'b'\n")
    assert isinstance(done.result, nativeprof.Profile)
    assert "'ab'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, words, statement",
    [
        ("", "", ""),
        ("f(-1)", "", "f(-1)"),
        ("-r 99 f(-1)", "-r 99 ", "f(-1)"),
        ("-r99 --mode=wall x -= 1", "-r99 --mode=wall ", "x -= 1"),
        ("--rate 99 -o 'a b.svg' f() --y", "--rate 99 -o 'a b.svg' ", "f() --y"),
        ("--all-threads -m wall a -r 5", "--all-threads -m wall ", "a -r 5"),
        ("-1 + f()", "", "-1 + f()"),
        ("-f(x)", "", "-f(x)"),
        ("--no-native -- -x", "--no-native ", "-x"),
        ("f({1: 'a  b'}) -h", "", "f({1: 'a  b'}) -h"),
    ],
)
def test_options_end_where_the_statement_begins(line, words, statement):
    assert magics._split(line) == (words, statement)


def test_a_statement_is_run_as_it_was_typed(shell):
    shell.user_ns["y"] = 2
    for statement, value in [("x = -1", -1), ("x = y --y", 4), ("x = {y: '{y} $y'}", {2: "{y} $y"}), ("x = [-y, - y][-1]", -2)]:
        profile = shell.run_line_magic("nativeprof", f"-r 99 {statement}")
        assert isinstance(profile, nativeprof.Profile)
        assert shell.user_ns["x"] == value


def test_a_profile_that_cannot_be_saved_is_the_value_all_the_same(shell, tmp_path, capsys):
    profile = shell.run_line_magic("nativeprof", f"-o {tmp_path}/no/x.svg sum(range(10))")
    assert isinstance(profile, nativeprof.Profile)
    said = capsys.readouterr().err
    assert "no/x.svg could not be written: No such file or directory; the profile is the value of this cell" in said


@pytest.mark.parametrize(
    "line, cell",
    [("", None), ("x = 1", "x = 2"), ("--rate 0 x = 1", None), ("--what", "x"), ("-o x.unknown", "raise SystemExit(1)")],
)
def test_wrong_words(shell, line, cell):
    with pytest.raises(UsageError):
        if cell is None:
            shell.run_line_magic("nativeprof", line)
        else:
            shell.run_cell_magic("nativeprof", line, cell)
