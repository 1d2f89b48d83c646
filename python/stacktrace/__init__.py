"""Native stacks of threads of this process; the module that Dask's low-level profiling searches for.

PYTEST_DONT_REWRITE: as of ``nativeprof``.
"""

from .core import get_thread_stack, print_stack, print_thread_stack
from .utils import StackEntry

__all__ = ["StackEntry", "get_thread_stack", "print_stack", "print_thread_stack"]
