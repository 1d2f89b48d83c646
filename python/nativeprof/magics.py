"""IPython magics: ``%load_ext nativeprof`` gives ``%nativeprof`` and ``%%nativeprof``."""

from __future__ import annotations

import sys
import threading
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from . import _native
from .profiler import Profile, Profiler


@magics_class
class NativeprofMagics(Magics):
    """``%nativeprof STATEMENT`` and ``%%nativeprof``."""

    @magic_arguments()
    @argument("-r", "--rate", type=int, default=100, help="samples per second of each thread (100)")
    @argument("--all-threads", action="store_true", help="sample all threads, not only the one that runs the cell")
    @argument("-m", "--mode", choices=("cpu", "wall"), default="cpu", help="CPU time or wall-clock time (cpu)")
    @argument("--no-native", action="store_true", help="Python frames only")
    @argument("-o", "--output", help="save the profile too; the extension determines the format (x.svg, x.json)")
    @argument("-h", "--help", action="store_true", help="print this")
    @argument("statement", nargs="*", help="what to run; with %%%%nativeprof the cell")
    @line_cell_magic
    def nativeprof(self, line: str, cell: str | None = None) -> Profile | None:
        """Runs a statement or a cell and shows where its time went, Python and native functions in one profile.

        The value is a :class:`nativeprof.Profile`; what ran has the names of the session and leaves its own there. An
        error is shown as that of any cell, without a profile.
        """
        options = parse_argstring(self.nativeprof, line)
        if options.help:
            print(self.nativeprof.parser.format_help())
            return None
        if cell is None:
            # The statement as it was typed: what the parser took apart has lost its quotes.
            cell = _after_options(line)
        elif options.statement:
            raise UsageError("%%nativeprof takes options only: it runs the cell")
        if not cell.strip():
            raise UsageError("nothing to run: %nativeprof STATEMENT, or %%nativeprof above a cell")
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
        with profiler:
            done = self.shell.run_cell(cell)
        if not done.success:
            return None
        if options.output:
            try:
                profiler.profile.save(options.output)
            except OSError as error:
                why = error.strerror or error
                text = f"nativeprof: {options.output} could not be written: {why}; the profile is the value of this cell: "
                print(text + "_.save(FILE) writes it", file=sys.stderr)
        return profiler.profile


def _after_options(line: str) -> str:
    """The line from its first word that is not an option on."""
    rest = line.lstrip()
    while rest.startswith("-"):
        word, _, rest = rest.partition(" ")
        rest = rest.lstrip()
        if word == "--":
            break
        if word in ("-r", "--rate", "-m", "--mode", "-o", "--output"):
            rest = rest.partition(" ")[2].lstrip()
    return rest


def load(ipython: Any) -> None:
    """Called by ``%load_ext nativeprof``."""
    ipython.register_magics(NativeprofMagics)
