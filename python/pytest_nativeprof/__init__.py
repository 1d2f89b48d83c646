"""The plugin for pytest: ``pytest --nativeprof`` records a profile in which samples have the labels of tests.

Every run of pytest imports this module. The rest, and nativeprof itself, is imported with ``--nativeprof`` only.
PYTEST_DONT_REWRITE: the package has no assertions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from .memory import MemoryUse

_MARKER = (
    "nativeprof(max_calls=N, max_cpu=SECONDS, max_peak=BYTES, max_leaked=BYTES, rate=HZ): with --nativeprof, fail the test if "
    "its call makes more calls of Python functions, takes more CPU time, or allocates more memory, at a time or without freeing "
    "it; sample it at another rate"
)


class MeasuresMemory(Protocol):
    """What the fixture ``nativeprof_memory`` gives."""

    def __call__(
        self, *, max_peak: int | str | None = None, max_leaked: int | str | None = None
    ) -> AbstractContextManager[MemoryUse]:
        """A context manager that measures what its block allocates, and fails the test above a limit."""


@pytest.fixture
def nativeprof_memory() -> Iterator[MeasuresMemory]:
    """Measures what a block allocates: ``with nativeprof_memory(max_peak="10 MB") as use: ...``; ``use.peak_bytes``."""
    from . import memory

    yield memory.limited


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("nativeprof", "profile the tests (nativeprof)")
    group.addoption(
        "--nativeprof", action="store_true", help="measure the CPU time of each test, and label samples with tests and phases"
    )
    group.addoption(
        "--nativeprof-mode",
        choices=("samples", "counts", "counts+samples"),
        metavar="MODE",
        help="samples: of CPU time (default); counts: how often Python functions are called, exactly; counts+samples: both",
    )
    group.addoption("--nativeprof-save", metavar="DIR", help="add the profile of this run to those in DIR")
    group.addoption("--nativeprof-compare", metavar="DIR", help="compare with the runs in DIR, which --nativeprof-save has made")
    group.addoption(
        "--nativeprof-fail-above",
        metavar="LIMIT",
        help="with --nativeprof-compare: fail if a test grew by more than LIMIT percent, or `N calls`; exit status 6: undecided",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begins to record, if that is wanted."""
    config.addinivalue_line("markers", _MARKER)
    if config.getoption("nativeprof"):
        if not config.getoption("collectonly"):
            from .session import start

            start(config)
        return
    for name in ("mode", "save", "compare", "fail_above"):
        if config.getoption(f"nativeprof_{name}") is not None:
            option = name.replace("_", "-")
            raise pytest.UsageError(f"--nativeprof-{option} has no effect, since nothing is recorded; add --nativeprof")
