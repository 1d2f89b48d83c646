"""A timer that takes stacks, and a flat profiler made of it."""

from .profile import Profiler
from .timer import Timer

__all__ = ["Profiler", "Timer"]
