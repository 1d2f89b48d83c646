"""The interface of ``cProfile`` and ``profile`` on nativeprof's event engine: every call is counted and timed.

``Profile``, ``run``, ``runctx`` and ``python -m nativeprof.tracing`` are used as those of ``cProfile``; ``pstats`` reads
the results. Beyond that: each thread has its own stack, so callers and times are right with many threads, and all threads
are seen on every version.
"""

from __future__ import annotations

import marshal
import sys
import time
from types import CodeType
from typing import Any, Callable, TypeVar, cast

from . import _native, _overhead

__all__ = ["Profile", "run", "runctx"]

_Result = TypeVar("_Result")
_Function = tuple[str, int, str]


def label(code: str | CodeType) -> _Function:
    """The key of a function in ``pstats``: file, first line, name. C functions have the file ``~`` and the line 0."""
    if isinstance(code, str):
        return ("~", 0, code)
    return (code.co_filename, code.co_firstlineno, code.co_name)


class Profile(_native.Profiler):
    """Profile(timer=None, timeunit=0.0, subcalls=True, builtins=True, *, threads="all", only=(), skip=())

    :param timer: a function that returns the time; None: wall time, by the cheapest steady clock of this machine.
    :param timeunit: seconds per unit, if ``timer`` returns integers; 0: it returns seconds.
    :param subcalls: figures for each pair of caller and callee too.
    :param builtins: functions that are written in C too; else their time is their caller's.
    :param threads: ``"all"``, or ``"current"``: only the thread that calls :meth:`enable`.
    :param only: modules (``"json"`` is ``json`` and ``json.*``) or functions (``"json.decoder:JSONDecoder.decode"``)
        to trace; the time of all others is their caller's. Empty: all.
    :param skip: the same, to leave out.
    :param bias: sets :attr:`bias`. :param subtract: sets :attr:`subtract`.
    """

    #: Seconds to subtract for each call and for each return, as ``profile.Profile`` has it; see :meth:`calibrate`.
    bias: float = 0.0
    #: Whether to subtract what tracing costs, as measured at the first :meth:`enable`, where :attr:`bias` is 0.
    subtract: bool = False

    stats: dict[_Function, tuple[int, int, float, float, dict[_Function, tuple[int, int, float, float]]]]

    def __init__(
        self,
        timer: Callable[[], Any] | None = None,
        timeunit: float = 0.0,
        subcalls: bool = True,
        builtins: bool = True,
        *,
        bias: float | None = None,
        subtract: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(timer, timeunit, subcalls, builtins, **options)
        if bias is not None:
            self.bias = bias
        if subtract:
            self.subtract = True

    def _costs(self, builtins: bool) -> _overhead.Costs | None:
        if not self.subtract or _native.is_tracing():
            return None
        return _overhead.costs("times", builtins)

    def overhead(self) -> float:
        """Seconds that tracing what this profiler has seen has taken, by a measurement on this machine.

        :raises RuntimeError: a profiler runs.
        """
        if _native.is_tracing():
            raise RuntimeError("the overhead can only be measured while nothing is traced; call disable() first")
        entries = self.getstats()
        c = sum(entry.callcount for entry in entries if isinstance(entry.code, str))
        python = sum(entry.callcount for entry in entries) - c
        per_python, per_c, ignored = _overhead.costs("times", c > 0)
        overhead: float = python * (per_python + ignored) + c * per_c
        return overhead

    def calibrate(self, m: int, verbose: int = 0) -> float:
        """Seconds per event that tracing adds to times, to set :attr:`bias` to.

        Runs ``m`` calls of a loop with and without the profiler, as ``profile.Profile.calibrate`` does.
        """
        if type(self) is not Profile:
            raise TypeError("Subclasses must override .calibrate().")

        def loop(count: int) -> None:
            for _ in range(count):
                x = 1  # noqa: F841

        def calls(count: int) -> None:
            for _ in range(count):
                loop(100)

        clock = time.perf_counter
        calls(m)
        begin = clock()
        calls(m)
        plain = clock() - begin
        profile = Profile()
        profile.bias = 0.0
        profile.runcall(calls, m)
        codes = (loop.__code__, calls.__code__)
        entries = [entry for entry in profile.getstats() if entry.code in codes]
        reported = sum(entry.inlinetime for entry in entries)
        count = sum(entry.callcount for entry in entries)
        if count != m + 1:
            raise ValueError(f"internal error: total calls = {count}")
        if verbose:
            print(f"elapsed time without profiling = {plain}\n'CPU seconds' profiler reported = {reported}")
        bias: float = (reported - plain) / 2.0 / count
        return bias

    def print_stats(self, sort: Any = -1) -> None:
        """Prints a report. ``sort``: a key of ``pstats.Stats.sort_stats``, or a tuple of keys."""
        import pstats

        keys = sort if isinstance(sort, tuple) else (sort,)
        pstats.Stats(cast(Any, self)).strip_dirs().sort_stats(*keys).print_stats()

    def dump_stats(self, file: Any) -> None:
        """Stops, and writes the figures to a file for ``pstats.Stats``."""
        with open(file, "wb") as out:
            self.create_stats()
            marshal.dump(self.stats, out)

    def create_stats(self) -> None:
        """Stops, and sets :attr:`stats`."""
        self.disable()
        self.snapshot_stats()

    def snapshot_stats(self) -> None:
        """Sets :attr:`stats`, which ``pstats.Stats`` reads."""
        entries = self.getstats()
        self.stats = {}
        for entry in entries:
            # Functions of one file, line and name (those that dataclasses make, say) are one in `pstats`: their sum. (cProfile
            # keeps the last one and loses the others.)
            key = label(entry.code)
            calls = entry.callcount
            figures = (calls - entry.reccallcount, calls, entry.inlinetime, entry.totaltime)
            before = self.stats.get(key)
            if before is not None:
                figures = tuple(a + b for a, b in zip(figures, before))
            self.stats[key] = (*figures, before[4] if before is not None else {})
        for entry in entries:
            caller = label(entry.code)
            for callee in entry.calls or ():
                found = self.stats.get(label(callee.code))
                if found is None:
                    continue  # none of its calls has ended
                callers = found[4]
                calls = callee.callcount
                of_pair = (calls, calls - callee.reccallcount, callee.inlinetime, callee.totaltime)
                of_others = callers.get(caller)
                if of_others is not None:
                    of_pair = tuple(a + b for a, b in zip(of_pair, of_others))
                callers[caller] = of_pair

    def run(self, cmd: str | CodeType) -> Profile:
        """Runs a statement in ``__main__``."""
        import __main__

        return self.runctx(cmd, __main__.__dict__, __main__.__dict__)

    def runctx(self, cmd: str | CodeType, globals: dict[str, Any], locals: Any) -> Profile:
        """Runs a statement in these namespaces."""
        self.enable()
        try:
            exec(cmd, globals, locals)
        finally:
            self.disable()
        return self

    def runcall(self, func: Callable[..., _Result], /, *args: Any, **kw: Any) -> _Result:
        """Calls a function; returns what it returns."""
        self.enable()
        try:
            return func(*args, **kw)
        finally:
            self.disable()

    def __enter__(self) -> Profile:
        self.enable()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()


def run(statement: str | CodeType, filename: Any = None, sort: Any = -1) -> None:
    """Runs a statement in ``__main__`` and prints a report, or writes the figures to a file."""
    import __main__

    runctx(statement, __main__.__dict__, __main__.__dict__, filename, sort)


def runctx(statement: str | CodeType, globals: dict[str, Any], locals: Any, filename: Any = None, sort: Any = -1) -> None:
    """As :func:`run`, in these namespaces."""
    profile = Profile()
    try:
        profile.runctx(statement, globals, locals)
    except SystemExit:
        pass
    finally:
        if filename is not None:
            profile.dump_stats(filename)
        else:
            profile.print_stats(sort)


def main() -> Any:
    """``python -m nativeprof.tracing``: options, output and exit codes of ``python -m cProfile``."""
    import io
    import os
    import pstats
    import runpy
    import types
    from optparse import OptionParser

    parser = OptionParser(usage="python -m nativeprof.tracing [-o output_file_path] [-s sort] [-m module | scriptfile] [arg] ...")
    parser.allow_interspersed_args = False
    parser.add_option("-o", "--outfile", dest="outfile", help="Save stats to <outfile>", default=None)
    parser.add_option(
        "-s",
        "--sort",
        dest="sort",
        help="Sort order when printing to stdout, based on pstats.Stats class",
        default=2 if sys.version_info >= (3, 12) else -1,
        choices=sorted(pstats.Stats.sort_arg_dict_default),
    )
    parser.add_option("-m", dest="module", action="store_true", help="Profile a library module", default=False)
    if not sys.argv[1:]:
        parser.print_usage()
        sys.exit(2)
    options, arguments = parser.parse_args()
    sys.argv[:] = arguments
    # The program may change its directory.
    if options.outfile is not None:
        options.outfile = os.path.abspath(options.outfile)
    if not arguments:
        parser.print_usage()
        return parser
    program = arguments[0]
    if options.module:
        code: Any = "run_module(modname, run_name='__main__')"
        names: dict[str, Any] = {"run_module": runpy.run_module, "modname": program}
    else:
        sys.path.insert(0, os.path.dirname(program))
        with io.open_code(program) as file:
            code = compile(file.read(), program, "exec")
        # What the program defines is found in `__main__`, by pickle for one.
        module = types.ModuleType("__main__")
        names = module.__dict__
        names.update(
            __spec__=None,  # as of any script: multiprocessing reads there what it runs in a new process
            __file__=program,
            __package__=None,
            __cached__=None,
            __builtins__=__builtins__,
        )
        sys.modules["__main__"] = module
    try:
        runctx(code, names, None, options.outfile, options.sort)
    except BrokenPipeError as error:
        sys.stdout = None
        sys.exit(error.errno)
    return parser


if __name__ == "__main__":
    main()
