"""Runs a program as ``python`` would, with a profiler on it."""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib
import os
import signal
import sys
import threading
import types
from typing import Any, Callable

from . import _files, _native, _start
from .profiler import Profile, Profiler

# How the timeline of `--trace events` is written, by file extension.
_TIMELINES = {"chrome": (".json",), "csv": (".csv",), "arrow": (".arrow", ".feather"), "parquet": (".parquet",)}

# What a program sees that ends by os._exit, which calls nothing of ours.
_LOST = (
    "nativeprof: the profile is lost: the program ended by os._exit, which runs no exit functions; end it by sys.exit, or use: "
    "nativeprof record -- python3 ..."
)


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nativeprof",
        usage="%(prog)s [options] (script.py | directory | application.pyz | - | -m module | -c text) [arguments ...]",
        description="Runs a Python program and samples its stacks from inside, without privileges, or traces its calls.",
    )
    parser.add_argument("-r", "--rate", type=int, metavar="HZ", help="samples per second of each thread (100)")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the profile goes (nativeprof-PID.html)")
    formats = _native.formats() + [name for name in _TIMELINES if name not in _native.formats()]
    parser.add_argument("-f", "--format", choices=formats, help="output format [default: from the file extension]")
    parser.add_argument("--mode", choices=("cpu", "wall"), help="sample CPU time or wall-clock time (cpu)")
    parser.add_argument(
        "--trace",
        choices=("times", "counts", "counts+samples", "events"),
        help="trace calls. times: count and time every call; counts: only count how often each Python function begins; "
        "counts+samples: count, and sample as --mode says; events: the timeline of all calls, returns and allocations, as a "
        "Chrome trace (.json), .csv, .arrow or .parquet",
    )
    parser.add_argument(
        "--alloc",
        action="store_true",
        help="sample what the program allocates, by bytes, instead of its time: all of it, what is not freed, and what was not "
        "when most was allocated",
    )
    parser.add_argument("--interval", type=int, metavar="BYTES", help="with --alloc: bytes between two samples (524288)")
    parser.add_argument(
        "--max-overhead",
        type=_percent,
        metavar="PERCENT",
        help="with --alloc: part of the CPU time that taking stacks may use (1%%)",
    )
    parser.add_argument("--subtract", action="store_true", help="with --trace times: subtract the cost of tracing")
    parser.add_argument("--only", action="append", default=[], metavar="MODULE[:FUNCTION]", help="trace only this")
    parser.add_argument("--skip", action="append", default=[], metavar="MODULE[:FUNCTION]", help="do not trace this")
    parser.add_argument("--no-native", action="store_true", help="Python frames only")
    parser.add_argument("--threads", action="store_true", help="a node per thread (not with events)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no summary")
    # These three are not parsed below: they end our options, and what follows them is the program's.
    parser.add_argument("-m", metavar="MODULE", help="run a module, as python -m does")
    parser.add_argument("-c", metavar="TEXT", help="run this text, as python -c does")
    parser.add_argument("--", dest="end", action="store_true", help="what follows is a program, even if it begins with a dash")
    ours, how, program = _split(parser, words)
    options = parser.parse_args(ours)
    options.how, options.program = how, program
    if not program:
        parser.error("a script, -m module or -c text is missing")
    _refuse_without_effect(parser, options)
    if options.rate is None:
        options.rate = 100
    if options.mode is None:
        options.mode = "cpu"
    if options.interval is None:
        options.interval = 512 * 1024
    if options.max_overhead is None:
        options.max_overhead = 0.01
    if not 1 <= options.interval <= 1 << 40:
        parser.error(f"argument --interval: {options.interval} is not a number of bytes")
    if not 1 <= options.rate <= 10_000:
        parser.error(f"argument -r/--rate: {options.rate} is not between 1 and 10000")
    if options.trace == "events":
        _choose_timeline(parser, options)
    elif options.format in _TIMELINES and options.format not in _native.formats():
        parser.error(f"argument -f/--format: {options.format} is for --trace events")
    if options.output is None:
        options.output = f"nativeprof-{os.getpid()}.{options.format or 'html'}"
    if options.format is None:
        try:
            options.format = _native.format_of(options.output)
        except ValueError as error:
            parser.error(str(error))
    why = _why_not_writable(options.output)
    if why:
        parser.error(f"argument -o/--output: {options.output} cannot be written: {why}")
    # The program may change its directory.
    options.output = os.path.abspath(options.output)
    return options


def _percent(text: str) -> float:
    """A part of the CPU time, which is given in percent as the command takes it."""
    try:
        part = float(text.removesuffix("%")) / 100
    except ValueError:
        part = 0
    if not 0 < part <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage above 0 and at most 100: 1%, 0.5%")
    return part


def _split(parser: argparse.ArgumentParser, words: list[str]) -> tuple[list[str], str, list[str]]:
    """Splits words at the program: our options, how it is started (see :func:`nativeprof._start.prepare`), and the program with
    its arguments."""
    with_value = [option for action in parser._actions if action.nargs is None for option in action.option_strings]
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return words[:at], "file", words[at + 1 :]
        if word == "-" or not word.startswith("-"):
            return words[:at], "file", words[at:]
        if word[:2] in ("-m", "-c"):
            return words[:at], word[:2], [*filter(None, [word[2:]]), *words[at + 1 :]]
        if word.startswith("--"):
            takes_next = any(option.startswith(word) for option in with_value)
        else:
            # Several letters, the first of which that has a value has what follows it.
            ends = [end for end, letter in enumerate(word) if f"-{letter}" in with_value]
            takes_next = ends[:1] == [len(word) - 1]
        at += 2 if takes_next else 1
    return words, "file", []


def _why_not_writable(path: str) -> str:
    """Why a file cannot be written, as far as that is known before; empty if nothing is."""
    if os.path.isdir(path):
        return "it is a directory"
    if os.path.exists(path):
        return "" if os.access(path, os.W_OK) else "it is not writable"
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        return f"the directory {directory} does not exist"
    return "" if os.access(directory, os.W_OK) else f"the directory {directory} is not writable"


def _refuse_without_effect(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program with an error if an option does nothing with the ``--trace`` that was chosen."""
    trace = options.trace
    if (options.only or options.skip) and trace in (None, "events"):
        parser.error("--only and --skip need --trace times, counts or counts+samples")
    if options.subtract and trace != "times":
        parser.error("--subtract needs --trace times: nothing else has the times of calls")
    for name, value in (("-r/--rate", options.rate), ("--mode", options.mode)):
        if value is not None and trace not in (None, "counts+samples"):
            parser.error(f"{name} is for samples, and --trace {trace} takes none: leave it out, or use --trace counts+samples")
    if options.alloc:
        for name, value in (("-r/--rate", options.rate), ("--mode", options.mode), ("--trace", trace)):
            if value is not None:
                parser.error(f"{name} has no effect on allocations: leave it out, or leave out --alloc")
    for name, value in (("--interval", options.interval), ("--max-overhead", options.max_overhead)):
        if value is not None and not options.alloc:
            parser.error(f"{name} is for allocations: leave it out, or add --alloc")
    if options.threads and trace == "events":
        parser.error("--threads has no effect on --trace events: a timeline always has the threads; leave it out")


def _choose_timeline(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Sets output and format for ``--trace events``; ends the program with an error if they are wrong."""
    if options.output is None:
        ending = _TIMELINES.get(options.format or "chrome", ("",))[0]
        options.output = f"nativeprof-{os.getpid()}{ending}"
    if options.format is None:
        name = options.output.lower()
        fitting = [format for format, endings in _TIMELINES.items() if name.endswith(endings)]
        if not fitting:
            parser.error(
                f"argument -o/--output: cannot tell the format of the timeline from {options.output}: use .json (Chrome trace), "
                ".csv, .arrow, .feather or .parquet, or name the format with -f"
            )
        options.format = fitting[0]
    if options.format not in _TIMELINES:
        parser.error(f"argument -f/--format: a timeline of events can be {', '.join(_TIMELINES)}, not {options.format}")
    if options.format in ("arrow", "parquet"):
        try:
            # Now: when the interpreter ends it cannot be imported any more, nor can pandas, which its first array imports.
            importlib.import_module("pyarrow.parquet")
            importlib.import_module("pyarrow").array([0])
        except ImportError:
            parser.error(f"argument -o/--output: {options.format} needs pyarrow: pip install pyarrow, or use .json or .csv")


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """A code object and those of the functions defined in it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return [code, *(found for one in inner for found in _codes(one))]


class _Timeline:
    """What :class:`_Recording` needs of a profiler and its profile, for ``--trace events``."""

    def __init__(self, native: bool) -> None:
        from .events import EventProfiler

        self._events = EventProfiler(native=native)
        things = [*globals().values(), *vars(_start).values()]
        modules = (__name__, _start.__name__)
        own = [thing for thing in things if isinstance(thing, types.FunctionType) and thing.__module__ in modules]
        own += [
            method for kind in (_Recording, _Timeline) for method in vars(kind).values() if isinstance(method, types.FunctionType)
        ]
        self._events._left_out = [*self._events._left_out, *(code for function in own for code in _codes(function.__code__))]

    def start(self) -> None:
        self._events.start()

    def stop(self) -> _Timeline:
        self._events.stop()
        return self

    def _is_running(self) -> bool:
        return self._events._log.is_running()

    def save(self, path: str, format: str) -> None:
        with _files.replacing(path) as new:
            self._write(new, format)

    def _write(self, path: str, format: str) -> None:
        if format == "chrome":
            self._events.to_chrome(path)
        elif format == "csv":
            self._events.to_csv(path)
        elif format == "parquet":
            self._events.to_parquet(path)
        else:
            import pyarrow

            table = self._events.to_arrow()
            with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)

    def summary(self, written: str) -> str:
        dropped = self._events.dropped
        lost = f", {dropped} more did not fit into the temporary file" if dropped else ""
        count = self._events._empty_cache()
        return f"nativeprof: {count} event{'' if count == 1 else 's'}{lost}\n  written:  {written}"


class _Recording:
    """The recording of the program, written when it ends: at exit, after all threads, or before it runs another one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.profiler = _profiler(options)
        self.pid = os.getpid()
        self._lock = threading.RLock()
        self.profiler.start()
        # Registered before what the program registers, it is called after that.
        atexit.register(self.finish)
        if options.trace and sys.version_info < (3, 12):
            # Setting the profile hook of a new thread is audited: a hook for that in Python would let the thread run before.
            for name in ("execv", "execve"):
                setattr(os, name, _after(self.finish, getattr(os, name)))
        else:
            sys.addaudithook(self._handle_event)
        os._exit = _native.announcing_exit(os._exit, _LOST)  # type: ignore[assignment]
        if options.trace == "events" and sys.version_info < (3, 12):
            # Another thread than the one that is traced cannot end that: the timeline would grow while it is written.
            return
        try:
            _native.before_end_by_signal(self.finish)
        except OSError as error:
            _say(f"nativeprof: no thread can be started ({error}): if SIGTERM ends the program, its profile is lost")

    def _handle_event(self, event: str, _: object) -> None:
        if event == "os.exec":
            self.finish()

    def finish(self) -> None:
        if os.getpid() != self.pid:
            return
        # Who comes second waits: the process must not end before the profile is written.
        with self._lock:
            if not self.profiler._is_running():
                return
            try:
                profile: Profile | _Timeline = self.profiler.stop()
                written = self._save(profile)
                if not self.options.quiet:
                    _say(profile.summary(written))
                    _say_of_children("--mode rss --subprocesses" if self.options.alloc else "--subprocesses")
            finally:
                _native.release_end()

    def _save(self, profile: Profile | _Timeline) -> str:
        """Writes the profile, to another directory if its own fails; returns a text with the path."""
        output, format = self.options.output, self.options.format
        try:
            profile.save(output, format)
            return f"{output} ({format})"
        except OSError as error:
            why = error.strerror or error
        try:
            path = _files.write_elsewhere(output, lambda new: profile._write(new, format))
        except OSError as error:
            _say(
                f"nativeprof: cannot write to {output}: {why}; the directory for temporary files failed too: {error}; "
                "free some disk space, or name another file with -o"
            )
            return f"no ({why})"
        _say(f"nativeprof: {output} could not be written: {why}; the profile is in {path}")
        return f"{path} ({format})"


def _say_of_children(option: str) -> None:
    """Says so where child processes did most of the work: they are not in the profile. Those count that have been waited for."""
    times = os.times()
    own, children = times.user + times.system, times.children_user + times.children_system
    if children > own:
        _say(
            f"  hint:     its child processes used {children:.2f} s of CPU time, the process itself {own:.2f} s; they are not in "
            f"the profile: nativeprof record {option} sees them"
        )


def _say(text: str) -> None:
    if sys.__stderr__ is not None:
        print(text, file=sys.__stderr__)


def _after(first: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def both(*arguments: Any, **named: Any) -> Any:
        first()
        return function(*arguments, **named)

    return both


def _profiler(options: argparse.Namespace) -> Profiler | _Timeline:
    if options.trace == "events":
        return _Timeline(not options.no_native)
    if options.alloc:
        return Profiler(
            native=not options.no_native,
            mode="alloc",
            threads=options.threads or None,
            interval=options.interval,
            max_overhead=options.max_overhead,
        )
    mode = options.mode
    if options.trace:
        mode = {"times": "calls", "counts": "counts", "counts+samples": f"counts+{mode}"}[options.trace]
        # Not what runs the program: its own calls only.
        options.skip += ["nativeprof._run", "nativeprof._start", "nativeprof.profiler"]
    return Profiler(
        options.rate,
        not options.no_native,
        mode,
        options.threads or None,
        only=options.only,
        skip=options.skip,
        subtract=options.subtract,
    )


def main(words: list[str]) -> None:
    options = _arguments(words)
    run = _start.prepare(options.how, options.program)
    # Registered first, it is called last.
    interrupted: list[bool] = []
    atexit.register(lambda: _end_by_interrupt() if interrupted else None)
    _Recording(options)
    failed = None
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        failed = error
        if isinstance(error, KeyboardInterrupt):
            interrupted.append(True)
    if failed is not None:
        # Not while it is handled: it is no context of what its hook raises.
        _report(failed)


def _report(error: BaseException) -> None:
    """Ends the program as python does on an exception, with the program's own frames in the traceback."""
    trace = error.__traceback__
    # What runs the program is called first. With -m, the frames of runpy below that are in Python's tracebacks, too.
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, _start.__file__):
        trace = trace.tb_next
    _native.print_uncaught(error.with_traceback(trace))
    _start.remove_file_name()
    sys.exit(1)


def _end_by_interrupt() -> None:
    """Ends the process as a shell expects of one that Ctrl-C has ended."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
