"""`python -m nativeprof` starts programs as plain Python does: output, exit code, `sys.argv`, `sys.path`, `__main__` and
tracebacks are the same in each way of starting."""

import os
import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import nativeprof

pytestmark = pytest.mark.every_version

# What a program sees of its start, then how it ends; nothing that differs from run to run.
PROGRAM = r"""
import atexit, os, re, signal, sys

def show(what, value):
    print(what, re.sub(r" at 0x\w+", "", ascii(value)))

def names():
    return {name: value for name, value in globals().items() if name != "__builtins__" and not callable(value)}

show("names", names())
show("all", list(globals()))
show("loader", __loader__)
show("main", sys.modules["__main__"].__dict__ is globals())
show("builtins", __builtins__)
show("argv", sys.argv)
show("path", sys.path)
show("flags", sys.flags)
show("doc", __doc__)
atexit.register(lambda: show("at exit", names()))

def fail():
    raise ValueError("boom")

how = sys.argv[-1]
if how == "change":
    os.chdir("/")
    print(os.path.exists(sys.path[0]), os.getcwd())
if how == "hook":
    def hook(*_):
        show("hook", names())
        raise KeyError("in the hook")
    sys.excepthook = hook
if how == "exit":
    sys.exit(3)
if how == "text":
    sys.exit("a text")
if how == "interrupt":
    signal.raise_signal(signal.SIGINT)
if how == "_exit":
    sys.stdout.flush()
    os._exit(4)
if how == "deep":
    try:
        fail()
    except ValueError as error:
        raise RuntimeError("another") from error
if how != "end":
    fail()
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A directory with the program in each of its forms."""
    at = tmp_path_factory.mktemp("start")
    for directory in ("tree", "package", "empty", "libraries"):
        (at / directory).mkdir()
    names = ("program.py", "a name.py", "-dash.py", "tree/__main__.py", "package/__main__.py", "package/module.py")
    for name in (*names, os.fsdecode(b"caf\xe9.py")):
        (at / name).write_text(PROGRAM)
    (at / "package" / "__init__.py").write_text("import sys; print(ascii(sys.argv))")
    (at / "link.py").symlink_to("tree/__main__.py")
    (at / "text").write_text(PROGRAM)
    (at / "wrong.py").write_text("x = 1\ny = = 2\n")
    (at / "wrong.pyc").write_bytes(b"not compiled")
    with zipfile.ZipFile(at / "application.pyz", "w") as file:
        file.writestr("__main__.py", PROGRAM)
    py_compile.compile(str(at / "program.py"), str(at / "compiled.pyc"), doraise=True)
    (at / "compiled").write_bytes((at / "compiled.pyc").read_bytes())
    return at


# Name, options of Python, what is started, its environment, whether the program is the standard input.
WAYS = [
    ("relative path", [], ["program.py", "a", "-m", "--", "-q", ""], {}, False),
    ("path with a dot", [], ["./program.py"], {}, False),
    ("absolute path", [], ["{at}/program.py"], {}, False),
    ("linked path", [], ["link.py"], {}, False),
    ("space", [], ["a name.py"], {}, False),
    ("leading dash", [], ["--", "-dash.py", "--", "-o"], {}, False),
    ("undecodable bytes", [], [os.fsdecode(b"caf\xe9.py"), os.fsdecode(b"\xff")], {}, False),
    ("no extension", [], ["text"], {}, False),
    ("module", [], ["-m", "program", "-m", "--", "x"], {}, False),
    ("package", [], ["-m", "package", "-o", "x"], {}, False),
    ("module of a package", [], ["-m", "package.module"], {}, False),
    ("unknown module", [], ["-m", "no_such_module"], {}, False),
    ("directory", [], ["tree", "x"], {}, False),
    ("directory with a slash", [], ["./tree/", "x"], {}, False),
    ("directory without a program", [], ["empty"], {}, False),
    ("directory, isolated", ["-I"], ["tree"], {}, False),
    ("zip application", [], ["application.pyz", "x"], {}, False),
    ("pyc", [], ["compiled.pyc", "x"], {}, False),
    ("pyc by its content", [], ["compiled"], {}, False),
    ("wrong pyc", [], ["wrong.pyc"], {}, False),
    ("text", [], ["-c", PROGRAM, "-m", "x"], {}, False),
    ("indented text", [], ["-c", "\n  def f():\n    g()\n  f()", "x"], {}, False),
    ("standard input", [], ["-", "-x"], {}, True),
    ("-I", ["-I"], ["program.py"], {"PYTHONPATH": "{at}/libraries"}, False),
    ("-E", ["-E"], ["program.py"], {"PYTHONPATH": "{at}/libraries"}, False),
    ("-S", ["-S"], ["program.py"], {"PYTHONPATH": "{installed}"}, False),
    ("-O", ["-O"], ["program.py"], {}, False),
    ("-X utf8", ["-X", "utf8"], ["program.py"], {}, False),
    ("PYTHONPATH", [], ["program.py"], {"PYTHONPATH": "{at}/libraries"}, False),
    ("missing", [], ["missing.py"], {}, False),
    ("syntax error", [], ["wrong.py"], {}, False),
    *((f"ends by {how}", [], ["program.py", how], {}, False) for how in ("exit", "text", "interrupt", "_exit", "end", "change")),
    *((f"ends by {how}", [], ["program.py", how], {}, False) for how in ("hook", "deep")),
    ("module, interrupted", [], ["-m", "program", "interrupt"], {}, False),
]
if sys.version_info >= (3, 11):
    WAYS += [
        ("-P", ["-P"], ["program.py"], {}, False),
        ("-P, module", ["-P"], ["-m", "this_is_not_on_the_path"], {}, False),
        ("-P, text", ["-P"], ["-c", PROGRAM], {}, False),
        ("PYTHONSAFEPATH", [], ["program.py"], {"PYTHONSAFEPATH": "1"}, False),
    ]
# tests/python.rs gives each version but the newest a third of them, beginning with a different one.
if "FIRST_WAY" in os.environ:
    WAYS = WAYS[int(os.environ["FIRST_WAY"]) % 3 :: 3]


@pytest.mark.parametrize("way", WAYS, ids=[way[0] for way in WAYS])
def test_a_program_is_started_as_python_starts_it(programs, way):
    _, options, words, environment, is_input = way
    places = {"at": str(programs), "installed": str(Path(nativeprof.__file__).parents[1])}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables = {name: value.format(**places) for name, value in environment.items()}
    words = [word.replace("{at}", places["at"]) for word in words]

    def run(*before):
        command = [sys.executable, "-B", *options, *before, *words]
        # One pipe: the order of what is written belongs to it.
        done = subprocess.run(
            command,
            cwd=programs,
            env={**inherited, **variables},
            input=PROGRAM.encode() if is_input else b"",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout.decode(errors="backslashreplace")

    out = programs / "out.json"
    out.unlink(missing_ok=True)
    plain, ours = run(), run("-m", "nativeprof", "-q", "-o", str(out))
    # Only a program that leaves no profile gets a line of ours.
    lines = ours[1].splitlines()
    said = [line for line in lines if line.startswith("nativeprof: ")]
    assert len(said) == (way[0] == "ends by _exit"), said
    # By line, so that a difference is shown.
    assert (ours[0], [line for line in lines if line not in said]) == (plain[0], plain[1].splitlines())
