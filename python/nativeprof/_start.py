"""Ways of starting a program, with what ``python`` puts into ``sys.argv``, ``sys.path`` and ``__main__`` for each of them.

What is said here of Python is in ``Modules/main.c`` (``pymain_run_python``) and ``Python/pythonrun.c``
(``_PyRun_SimpleFile``) of CPython 3.9 to 3.15.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import linecache
import marshal
import os
import pkgutil
import runpy
import sys
import textwrap
import types
from typing import Any, Callable, cast


def prepare(how: str, words: list[str]) -> Callable[[], None]:
    """Sets ``sys.argv``, ``sys.path`` and ``__main__`` for a program, and returns the function that runs it.

    ``how`` is ``"-m"`` or ``"-c"`` (as options of Python), or ``"file"`` for a script, a ``.pyc``, a directory, a zip
    application or ``-`` (the standard input), and ``words`` the program with its arguments. Ends the process as Python does if
    there is no such file.
    """
    program = words[0]
    if how == "-m":
        # While the module is searched, the name of the program is "-m"; the directory is first on the path already.
        sys.argv = ["-m", *words[1:]]
        return _module(program, True)
    if how == "-c":
        sys.argv = ["-c", *words[1:]]
        _set_first_on_path("")
        return _text(program)
    sys.argv = words
    if program == "-":
        source = sys.stdin.buffer.read() if sys.stdin is not None else b""
        _set_first_on_path("")
        return _input(source)
    # As Python names it: with the current directory before it, and otherwise as it was typed.
    path = program if os.path.isabs(program) else os.path.join(os.getcwd(), program)
    if pkgutil.get_importer(path) is not None:
        # Whatever else is first on the path, -P and -I too.
        if _has_own_directory_on_path():
            sys.path[0] = path
        else:
            sys.path.insert(0, path)
        return _module("__main__", False)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    _set_first_on_path(os.path.dirname(os.path.realpath(program)))
    return _file(path, content)


def _has_own_directory_on_path() -> bool:
    """Whether Python has put the current directory first on ``sys.path``, as it does for ``-m nativeprof``."""
    return not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def _set_first_on_path(directory: str) -> None:
    if _has_own_directory_on_path():
        sys.path[0] = directory


def _new_main() -> dict[str, Any]:
    """Makes a new ``__main__`` as it is when the interpreter has started, and returns its namespace."""
    module = types.ModuleType("__main__")
    names = vars(module)
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    names["__builtins__"] = builtins
    names["__loader__"] = importlib.machinery.BuiltinImporter
    sys.modules["__main__"] = module
    return names


def _module(name: str, sets_name: bool) -> Callable[[], None]:
    _new_main()

    def run() -> None:
        cast(Any, runpy)._run_module_as_main(name, sets_name)

    return run


def _text(text: str) -> Callable[[], None]:
    names = _new_main()

    def run() -> None:
        source = text
        if sys.version_info >= (3, 14):
            source = textwrap.dedent(source)
        code = compile(source.encode("utf-8", "surrogatepass"), "<string>", "exec", dont_inherit=True)
        # From 3.13 on tracebacks have lines of it: found by the name, later by the code object.
        register = getattr(linecache, "_register_code", None)
        if register is not None:
            register(code if hasattr(linecache, "_interactive_cache") else "<string>", source, "<string>")
        exec(code, names)

    return run


def _input(source: bytes) -> Callable[[], None]:
    names = _new_main()
    _set_file(names, "<stdin>")
    return lambda: _execute(lambda: compile(source, "<stdin>", "exec", dont_inherit=True), names)


def _file(path: str, content: bytes) -> Callable[[], None]:
    names = _new_main()
    _set_file(names, path)
    is_compiled = path.endswith(".pyc") or content[:2] == importlib.util.MAGIC_NUMBER[:2]
    kind = importlib.machinery.SourcelessFileLoader if is_compiled else importlib.machinery.SourceFileLoader
    names["__loader__"] = kind("__main__", path)

    def compiled() -> types.CodeType:
        if not is_compiled:
            return compile(content, path, "exec", dont_inherit=True)
        if content[:4] != importlib.util.MAGIC_NUMBER:
            raise RuntimeError("Bad magic number in .pyc file")
        code = marshal.loads(content[16:])
        if not isinstance(code, types.CodeType):
            raise RuntimeError("Bad code object in .pyc file")
        return code

    return lambda: _execute(compiled, names)


def _set_file(names: dict[str, Any], path: str) -> None:
    names["__file__"] = path
    if sys.version_info < (3, 15):
        names["__cached__"] = None
    _named.append(names)


# The namespace that has a file name which Python removes at the end.
_named: list[dict[str, Any]] = []


def remove_file_name() -> None:
    """Removes what names the file of the program, as Python does when it has ended (before 3.14 not by ``sys.exit``)."""
    while _named:
        names = _named.pop()
        for name in ("__file__", "__cached__"):
            names.pop(name, None)


def _execute(compiled: Callable[[], types.CodeType], names: dict[str, Any]) -> None:
    try:
        exec(compiled(), names)
    finally:
        # Python does this for files only.
        for stream in (sys.stderr, sys.stdout):
            try:
                stream.flush()
            except Exception:
                pass
        if sys.version_info >= (3, 14):
            # Since then also before `sys.exit` and before an exception is shown.
            remove_file_name()
    remove_file_name()
