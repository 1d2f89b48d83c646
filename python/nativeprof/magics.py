"""IPython magics: ``%load_ext nativeprof`` gives ``%nativeprof`` and ``%%nativeprof``."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import threading
from typing import Any, cast

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from . import _native
from .profiler import Profile, Profiler

# What a cell with %%nativeprof on top calls: before it, and then for its profile.
_MAGICS = "get_ipython().magics_manager.registry['NativeprofMagics']"
_BEGIN = f"{_MAGICS}._begin_cell"


@magics_class
class NativeprofMagics(Magics):
    """``%nativeprof STATEMENT`` and ``%%nativeprof``."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        # What the cells that run now have begun: one, except where a cell runs another one.
        self._begun: list[tuple[Profiler, str | None]] = []

    @magic_arguments()
    @argument("-r", "--rate", type=int, default=100, help="samples per second of each thread (100)")
    @argument("--all-threads", action="store_true", help="sample all threads, not only the one that runs the cell")
    @argument("-m", "--mode", choices=("cpu", "wall"), default="cpu", help="CPU time or wall-clock time (cpu)")
    @argument("--no-native", action="store_true", help="Python frames only")
    @argument("-o", "--output", help="save the profile too; the extension determines the format (x.svg, x.json)")
    @argument("-h", "--help", action="store_true", help="print this")
    @argument("statement", nargs="*", help="what to run; with %%%%nativeprof the cell")
    @no_var_expand
    @line_cell_magic
    def nativeprof(self, line: str, cell: str | None = None) -> Profile | None:
        """Runs a statement or a cell and shows where its time went, Python and native functions in one profile.

        The value is a :class:`nativeprof.Profile`; what ran has the names of the session and leaves its own there. An
        error is that of the cell, without a profile. At the top of a cell with ``%%nativeprof``, ``await`` works.
        """
        words, statement = _split(line)
        # The statement as it was typed: what the parser took apart has lost its quotes, and braces are its own.
        options = parse_argstring(self.nativeprof, self.shell.var_expand(words))
        if options.help:
            print(_plain(self.nativeprof.parser.format_help()))
            return None
        if cell is None:
            cell = statement
        elif statement:
            raise UsageError("%%nativeprof takes options only: it runs the cell")
        if not cell.strip():
            raise UsageError("nothing to run: %nativeprof STATEMENT, or %%nativeprof above a cell")
        self._begin(options)
        try:
            self._run(cell)
        finally:
            # What it raises is raised here, too: the cell has failed.
            profiler, output = self._end()
        return _saved(profiler, output)

    def _begin(self, options: Any) -> None:
        try:
            if options.output:
                _native.format_of(options.output)  # refused before anything has run
            profiler = Profiler(
                rate=options.rate,
                native=not options.no_native,
                mode=options.mode,
                threads=None if options.all_threads else [threading.current_thread()],
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        profiler.start()
        self._begun.append((profiler, options.output))

    def _end(self) -> tuple[Profiler, str | None]:
        profiler, output = self._begun.pop()
        profiler.stop()
        return profiler, output

    def _run(self, text: str) -> None:
        """Runs a text as a cell, and shows its last value. Raises what it raises, with its lines in the traceback."""
        shell = self.shell
        source = shell.transform_cell(text)
        name = shell.compile.cache(source, shell.execution_count, raw_code=text)
        tree = shell.transform_ast(shell.compile.ast_parse(source, filename=name))
        last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        flags = shell.compile.flags | (ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0)
        with shell.builtin_trap, shell.display_trap:
            # The last value is shown as that of any cell.
            for part, kind in ((tree, "exec"), (ast.Interactive(last), "single")):
                if not part.body:
                    continue
                code = compile(part, name, kind, flags, dont_inherit=True)
                if not code.co_flags & inspect.CO_COROUTINE:
                    exec(code, shell.user_ns)
                elif _has_running_loop():
                    raise UsageError("await needs %%nativeprof in the first line of the cell: an event loop runs already")
                else:
                    shell.loop_runner(eval(code, shell.user_ns))

    def _begin_cell(self, line: str) -> None:
        """What a cell does first that has ``%%nativeprof`` in its first line."""
        words, statement = _split(line)
        if statement:
            raise UsageError("%%nativeprof takes options only: it runs the cell")
        self._begin(parse_argstring(self.nativeprof, self.shell.var_expand(words)))
        self._last: tuple[Profiler, str | None] | None = None

    def _end_cell(self) -> None:
        self._last = self._end()

    def _profile_of_cell(self) -> Profile | None:
        last, self._last = self._last, None
        return _saved(*last) if last else None


def _plain(text: str) -> str:
    """A help text without the markup that it has for the documentation."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", text)
    text = text.replace("``", "").replace("%%%%", "%%")
    return re.sub(r"\A\s*::\n\n", "", text)


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _saved(profiler: Profiler, output: str | None) -> Profile:
    """The profile, written to the file if there is one."""
    if output:
        try:
            profiler.profile.save(output)
        except OSError as error:
            why = error.strerror or error
            text = f"nativeprof: {output} could not be written: {why}; the profile is the value of this cell: "
            print(text + "_.save(FILE) writes it", file=sys.stderr)
    return profiler.profile


# A word of options: `-r`, `-r99`, `--rate`, `--rate=99`. Nothing else that begins with a dash is one: `-1`, `-f(x)`.
_OPTION = re.compile(r"--?[a-zA-Z][a-zA-Z-]*(=\S*)?(?=\s|$)|-[rmo]\S+(?=\s|$)")
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|\S+")
_WITH_VALUE = ("--rate", "--mode", "--output")


def _split(line: str) -> tuple[str, str]:
    """Splits a line into its options and the statement, which begins at the first word that belongs to no option."""
    at = 0
    while True:
        at += len(line[at:]) - len(line[at:].lstrip())
        if re.match(r"--(\s|$)", line[at:]):
            return line[:at], line[at + 2 :].lstrip()
        option = _OPTION.match(line, at)
        if not option:
            return line[:at], line[at:]
        word, at = option.group(), option.end()
        is_long = len(word) > 2 and word.startswith("--") and any(name.startswith(word) for name in _WITH_VALUE)
        if word in ("-r", "-m", "-o") or is_long:
            at += len(line[at:]) - len(line[at:].lstrip())
            value = _VALUE.match(line, at)
            at = value.end() if value else at


def _transform_lines(lines: list[str]) -> list[str]:
    """Lets IPython run a cell with ``%%nativeprof`` in its first line as any other, with a call instead of that line: its errors
    are its own, with its lines, and ``await`` works where it works in other cells."""
    first = re.match(r"%%nativeprof(?=\s|$)(.*)", lines[0]) if lines else None
    if first is None or not "".join(lines[1:]).strip() or lines[1].startswith("%%"):
        return lines
    words, statement = _split(first.group(1).strip())
    if statement or re.search(r"(^|\s)(-h|--h(e(lp?)?)?)(\s|$)", words):
        return lines
    return [f"{_BEGIN}({words!r})\n", *lines[1:]]


def _expression(text: str, where: ast.stmt) -> ast.Expr:
    """An expression as a statement, all of it in the place of another one."""
    statement = cast(ast.Expr, ast.parse(text).body[0])
    for node in ast.walk(statement):
        ast.copy_location(node, where)
    return statement


class _CellTransformer(ast.NodeTransformer):
    """Lets the profiler end with the cell, however that ends, and makes the profile its last value."""

    def visit_Module(self, tree: ast.Module) -> ast.Module:
        begin, *body = tree.body or [ast.Pass()]
        is_ours = isinstance(begin, ast.Expr) and isinstance(begin.value, ast.Call) and ast.unparse(begin.value.func) == _BEGIN
        if not is_ours:
            return tree
        if body and isinstance(body[-1], ast.Expr):
            # IPython shows the last value of a cell.
            shown = _expression("__import__('sys').displayhook(None)", body[-1])
            cast(ast.Call, shown.value).args = [body[-1].value]
            body[-1] = shown
        end, value = _expression(f"{_MAGICS}._end_cell()", begin), _expression(f"{_MAGICS}._profile_of_cell()", begin)
        whole = ast.copy_location(ast.Try(body=body or [ast.Pass()], handlers=[], orelse=[], finalbody=[end]), begin)
        tree.body = [begin, whole, value]
        return ast.fix_missing_locations(tree)


def load(ipython: Any) -> None:
    """Called by ``%load_ext nativeprof``."""
    ipython.register_magics(NativeprofMagics)
    if _transform_lines not in ipython.input_transformers_cleanup:
        ipython.input_transformers_cleanup.append(_transform_lines)
        ipython.ast_transformers.append(_CellTransformer())
