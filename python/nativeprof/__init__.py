"""Native and CPython stacks of live processes in one profile."""

from ._native import __version__

__all__ = ["__version__"]
