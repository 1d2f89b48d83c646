"""Stacks of threads of this process, on demand."""

from __future__ import annotations

import sys
import threading
from itertools import starmap
from typing import TextIO

from nativeprof._native import thread_stack

from .utils import StackEntry

__all__ = ["get_thread_stack", "print_stack", "print_thread_stack"]


def get_thread_stack(tid: int, maxdepth: int = 100, show_python: bool = True) -> list[StackEntry]:
    """The native stack of a thread, innermost frame first.

    A thread that runs is interrupted by a signal for some microseconds; sleeping threads are read in place. A thread
    that waits for a CPU is late: what it answered to an earlier call may be given instead, if it has had no CPU since
    or the answer is less than 5 s old and was not given before.

    :param tid: the thread's ident (``threading.get_ident()``).
    :param maxdepth: entries at most; outer ones are left out.
    :param show_python: false puts one entry, with ``is_python``, in the place of the interpreter's frames from the
        bytecode loop on, and that again further out; true gives all frames as they are and marks none.
    :returns: the entries; none, and no exception, if there is no such thread or it does not answer within 250 ms.
    """
    try:
        return list(starmap(StackEntry, thread_stack(tid, max(maxdepth, 0), show_python)))
    except (TypeError, OverflowError):
        return []  # no thread has such an ident


def print_stack(file: TextIO | None = None, maxdepth: int = 100, show_python: bool = True, _bufsize: int = 4096) -> None:
    """Prints the native stack of the calling thread, innermost frame first, up to ``_bufsize`` characters."""
    text = ""
    for entry in get_thread_stack(threading.get_ident(), maxdepth, show_python):
        line = f"{entry}\n"
        if len(text) + len(line) > _bufsize:
            break
        text += line
    print(text, end="", file=file or sys.stdout)


def print_thread_stack(tid: int, file: TextIO | None = None, maxdepth: int = 100, show_python: bool = True) -> None:
    """Prints the native stack of a thread, innermost frame first, one line for each entry."""
    for entry in get_thread_stack(tid, maxdepth, show_python):
        print(entry, file=file or sys.stdout)
