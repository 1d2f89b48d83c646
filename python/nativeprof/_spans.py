"""``nativeprof.span`` as a decorator."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from ._native import span


def decorate(active: span, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function within a span; a coroutine function until its coroutine ends.

    :raises TypeError: a generator function, whose caller would be within the span wherever the generator is suspended.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"span cannot decorate the generator function {function.__qualname__}: its caller would be within the span, too; "
            "write `with nativeprof.span(NAME):` inside, around what does not yield"
        )
    if not callable(function):
        raise TypeError(f"span decorates functions, not {function!r}")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with active:
                return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with active:
            return function(*args, **kwargs)

    return called
