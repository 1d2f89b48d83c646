"""Native and CPython stacks of live processes in one profile.

PYTEST_DONT_REWRITE: pytest would warn where this was imported before it, since the wheel has a plugin for it.
"""

from typing import Any

from ._native import __version__, span
from .profiler import Profile, Profiler, Stats

__all__ = ["Profile", "Profiler", "Stats", "__version__", "span"]


def load_ipython_extension(ipython: Any) -> None:
    """Called by ``%load_ext nativeprof``: gives the magics ``%nativeprof`` and ``%%nativeprof``."""
    from .magics import load

    load(ipython)
