"""Takes a thread's stack again and again."""

from __future__ import annotations

import threading
from typing import Any, Callable

from ..core import get_thread_stack
from ..utils import StackEntry

__all__ = ["Timer"]


class Timer:
    """Calls ``func`` with the stack of a thread every ``interval`` seconds, in a thread of its own.

    A context manager: starts at the beginning of the block and stops at its end.
    """

    def __init__(
        self,
        tid: int,
        func: Callable[[list[StackEntry]], Any],
        interval: float = 1 / 20,
        maxdepth: int = 100,
        show_python: bool = True,
    ) -> None:
        self._arguments = (tid, maxdepth, show_python)
        self._func = func
        self._interval = interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stacktrace", daemon=True)

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self._func(get_thread_stack(*self._arguments))

    def start(self) -> None:
        """Starts taking stacks."""
        self._thread.start()

    def join(self) -> None:
        """Stops, and waits for the last call to return."""
        self._ended.set()
        self._thread.join()

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.join()
