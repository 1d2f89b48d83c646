"""Counts functions on a thread's stacks."""

from __future__ import annotations

from typing import Any

from ..utils import StackEntry
from .timer import Timer

__all__ = ["Profiler"]


class Profiler:
    """Counts how often each native function is on the stacks of a thread, once for each place on a stack.

    Takes the arguments of :class:`Timer`, but for its function. A context manager.
    """

    def __init__(self, tid: int, **timer: Any) -> None:
        self._counts: dict[int, dict[str, Any]] = {}
        self._timer = Timer(tid, self._count, **timer)

    def _count(self, stack: list[StackEntry]) -> None:
        for entry in stack:
            if not entry.is_python:
                row = self._counts.setdefault(entry.addr - entry.offset, {"count": 0, "name": entry.name})
                row["count"] += 1

    def start(self) -> None:
        """Starts counting."""
        self._timer.start()

    def join(self) -> None:
        """Stops counting."""
        self._timer.join()

    def get_result(self) -> dict[int, dict[str, Any]]:
        """Start of the function -> ``count`` and ``name``."""
        return self._counts

    def get_sorted(self) -> list[tuple[int, dict[str, Any]]]:
        """The same as pairs, highest count first."""
        return sorted(self._counts.items(), key=lambda row: row[1]["count"], reverse=True)

    def __enter__(self) -> Profiler:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.join()
