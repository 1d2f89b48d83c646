"""Native and CPython stacks of live processes in one profile."""

from ._native import __version__
from .profiler import Profile, Profiler

__all__ = ["Profile", "Profiler", "__version__"]
