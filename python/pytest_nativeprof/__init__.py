"""The plugin for pytest: ``pytest --nativeprof`` records a profile in which samples have the labels of tests.

Every run of pytest imports this module. The rest, and nativeprof itself, is imported with ``--nativeprof`` only.
PYTEST_DONT_REWRITE: the package has no assertions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_MARKER = (
    "nativeprof(max_calls=N, max_cpu=SECONDS, rate=HZ): with --nativeprof, fail the test if its call makes more calls of "
    "Python functions, or takes more CPU time; sample it at another rate"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("nativeprof", "profile the tests (nativeprof)")
    group.addoption(
        "--nativeprof", action="store_true", help="record one profile of the session, with labels of tests and phases"
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
        help="with --nativeprof-compare: fail if a test grew significantly by more than LIMIT percent, or `N calls`",
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
            import pytest

            option = name.replace("_", "-")
            raise pytest.UsageError(f"--nativeprof-{option} has no effect, since nothing is recorded; add --nativeprof")
