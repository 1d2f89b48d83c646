"""Checks that can fail by chance, or because the machine was busy with something else: they are repeated."""

import functools

ATTEMPTS = 3


class Unlikely(AssertionError):
    """Fails a test if it is raised in all attempts."""


def likely(holds, *seen):
    """Like `assert`, for what can fail by chance, in a test that is `repeated`."""
    if not holds:
        raise Unlikely(*seen)


def repeated(test):
    """Tries a test again if `likely` failed."""

    @functools.wraps(test)
    def attempts(*args, **keywords):
        for _ in range(ATTEMPTS - 1):
            try:
                return test(*args, **keywords)
            except Unlikely as unlikely:
                print("tried again:", unlikely)
        return test(*args, **keywords)

    return attempts
