import os
from collections.abc import Collection, Sequence
from typing import Any, Callable, Literal, TypeVar, final

__all__ = [
    "AllocationRecorder",
    "CallRecorder",
    "EventLog",
    "Profile",
    "Profiler",
    "SampleRecorder",
    "TaskRecorder",
    "__version__",
    "announcing_exit",
    "before_end_by_signal",
    "cell_files",
    "clock",
    "combine",
    "create",
    "current_labels",
    "events_after_fork",
    "format_of",
    "formats",
    "get_profile",
    "hook_slots",
    "is_tracing",
    "llprocess",
    "merge",
    "notebook_view",
    "plot_data",
    "print_uncaught",
    "process",
    "read",
    "release_end",
    "span",
    "spans_are_published",
    "this_machine",
    "thread_stack",
]

__version__: str

def create() -> dict[str, Any]:
    """A new, empty tree."""

def process(
    frame: Any,
    child: object | None,
    state: dict[str, Any],
    *,
    stop: str | None = None,
    omit: Collection[str] | None = None,
    depth: int | None = None,
) -> dict[str, Any] | None: ...
def llprocess(frames: list[Any] | None, child: object | None, state: dict[str, Any] | None) -> dict[str, Any] | None: ...
def merge(*args: dict[str, Any]) -> dict[str, Any]: ...
def get_profile(
    history: Sequence[tuple[float, dict[str, Any]]],
    recent: dict[str, Any] | None,
    start: float | None,
    stop: float | None,
    exact: bool,
) -> dict[str, Any]: ...
def plot_data(state: dict[str, Any], profile_interval: float) -> dict[str, list[Any]]: ...
def thread_stack(tid: int, maxdepth: int, show_python: bool) -> list[tuple[int, str, int, bool]]: ...
def this_machine() -> dict[str, str | int]:
    """What is known of this machine, with the keys of files."""

def formats() -> list[str]: ...
def before_end_by_signal(finish: Callable[[], None]) -> None: ...
def release_end() -> None: ...
def announcing_exit(exit: Callable[[int], Any], line: str) -> Callable[[int], Any]: ...
def format_of(path: str | os.PathLike[str]) -> str: ...
def print_uncaught(error: BaseException) -> None: ...

@final
class SampleRecorder:
    def __new__(cls, rate: int, native: bool, wall: bool, threads: list[int] | None, by_thread: bool) -> SampleRecorder: ...
    def take(self) -> Profile: ...
    def stop(self) -> Profile: ...
    def is_current_process(self) -> bool: ...
    def limitation(self) -> str | None: ...
    def signal(self) -> int | None: ...

@final
class AllocationRecorder:
    def __new__(cls, interval: int, max_overhead: float, native: bool, by_thread: bool) -> AllocationRecorder: ...
    def take(self) -> Profile: ...
    def limitation(self) -> str | None: ...
    def are_hooks_in_place(self) -> bool: ...
    def stop(self) -> Profile: ...
    def is_current_process(self) -> bool: ...

@final
class CallRecorder:
    def __new__(
        cls,
        mode: str,
        builtins: bool,
        cpu: bool,
        threads: list[int] | None,
        by_thread: bool,
        only: list[str],
        skip: list[str],
    ) -> CallRecorder: ...
    def start(self, costs: tuple[float, float, float], subtract: bool) -> None: ...
    def take(self) -> Profile: ...
    def lap(self) -> list[tuple[str, int, str, int]]: ...
    def stop(self) -> Profile: ...
    def is_current_process(self) -> bool: ...

class Profiler:
    def __init__(
        self,
        timer: Callable[[], float] | None = None,
        timeunit: float = 0.0,
        subcalls: bool = True,
        builtins: bool = True,
        *,
        threads: str = "all",
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
    ) -> None: ...
    def enable(self, subcalls: bool | None = None, builtins: bool | None = None) -> None: ...
    def disable(self) -> None: ...
    def clear(self) -> None: ...
    def getstats(self) -> list[Any]: ...

@final
class EventLog:
    def __new__(cls, size: int, python: bool, native: bool, waits: bool, file: int | None, limit: int) -> EventLog: ...
    def start(self, calls: bool, stacks: list[tuple[int, list[Any]]], left_out: list[Any]) -> None: ...
    def stop(self) -> None: ...
    def is_running(self) -> bool: ...
    def append(self, key: int, event: int) -> None: ...
    def rows(self) -> tuple[bytearray, bytearray, int, list[tuple[int, Any, bool]]]: ...
    def counts(self) -> tuple[int, int, int]: ...

@final
class TaskRecorder:
    def __new__(
        cls,
        measure: str | Callable[[], tuple[float, ...]],
        values: list[tuple[str, str]],
        builtins: bool,
        skip: list[str],
        library: str,
        hooks: bool,
    ) -> TaskRecorder: ...
    def start(self, costs: tuple[float, float, float]) -> None: ...
    def stop(self) -> None: ...
    def is_running(self) -> bool: ...
    def total(self) -> int: ...
    def start_ticks(self) -> int: ...
    def charges(
        self,
    ) -> tuple[
        list[tuple[int, int, Any, bool]],
        list[tuple[int, int, int, int, int, list[float], list[float]]],
    ]:
        """What ``functions`` gives; number of the function, calls, suspended, own and aggregate time (ns), own and aggregate
        values."""

    def calls(self) -> tuple[list[tuple[int, int, Any, bool]], list[tuple[int, int, int]]]: ...
    def functions(self) -> list[tuple[int, int, Any, bool]]: ...
    def profile(self) -> Profile: ...

def hook_slots() -> list[tuple[str, str, int, int]]:
    """The address slots of the functions that profilers hook: module, function, address, content."""

def events_after_fork() -> None: ...

@final
class Profile:
    def render(self, format: str) -> bytes: ...
    def tree(self) -> bytes: ...
    def top(self, most: int, value: str | None) -> tuple[str, int, list[tuple[str, str, int, str, int, int]]]: ...
    def stats(self) -> dict[str, Any]: ...
    def summary(self, written: str) -> str: ...

def read(content: bytes) -> Profile:
    """The profile that a file in the format ``json`` holds. Raises ValueError if it is none."""

def cell_files(profile: Profile) -> list[str]:
    """The files of the cells of IPython that a profile has functions of."""

def notebook_view(profile: Profile, names: dict[str, str]) -> dict[str, Any]:
    """What a notebook shows; ``names`` has the names of cells by their files."""

def clock() -> tuple[str, float]:
    """Name of the clock of events, and seconds per tick."""

def is_tracing() -> bool:
    """Whether a profiler that traces calls runs."""

def combine(samples: Profile, counts: Profile) -> Profile:
    """A sampled profile with the calls of a recording of ``counts with samples``."""

def current_labels() -> list[tuple[str, str]]:
    """What samples of this thread are labeled with now, the labels of the outermost span first."""

def spans_are_published() -> bool:
    """Whether profilers can read the spans of this process."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

@final
class span:
    """Marks what the program works on: profiles label their samples with it.

    A context manager, and a decorator of functions and coroutine functions::

        with nativeprof.span("request", route="/users"):
            ...

    Samples get the label ``span=request``, and a label for each keyword argument. Spans nest: within an inner span, samples have
    the names of both, and of a keyword argument that both have, the inner one's value. A span belongs to the context that it is
    entered in (see :mod:`contextvars`): an asyncio task's spans are active only while the task runs, and a task begins in the
    spans of the code that creates it. New threads begin without any.

    :param name: name of the span, in UTF-8 at most 255 bytes; more is cut off.
    :param labels: keys (at most 63 bytes) and values (:class:`str` of anything, at most 255 bytes). Names and labels of nested
        spans together have room for 511 bytes: what does not fit is left out, outermost first.

    A span object can be entered again, also in several threads and tasks at a time.
    """

    def __new__(cls, name: str, /, **labels: object) -> span: ...
    def __enter__(self) -> span: ...
    def __exit__(self, *exception: object) -> Literal[False]: ...
    def __call__(self, function: _Function) -> _Function: ...
