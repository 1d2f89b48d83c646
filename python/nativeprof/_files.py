"""Output files: an existing one is replaced by the complete new one or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from typing import Callable


@contextlib.contextmanager
def replacing(path: os.PathLike[str] | str) -> Iterator[str]:
    """Gives the path of a new file to write to, which is renamed to ``path`` at the end of the block.

    If the block fails, what was there is as it was. What cannot be replaced, or is a link, device or pipe, is written to
    directly: ``path`` itself is given then.

    :raises OSError: the file cannot be written.
    """
    path = os.fsdecode(path)
    directory = os.path.dirname(path)
    if not _is_replaced(path, directory or os.curdir):
        yield path
        return
    new = os.path.join(directory, f".nativeprof-{os.urandom(8).hex()}")
    try:
        _create(new, 0o666)
        with _removed_on_failure(new):
            yield new
            os.replace(new, path)
    except OSError as error:
        if error.filename != new:
            raise
        # In the words of the caller, who knows nothing of the other name.
        raise OSError(error.errno, error.strerror, path) from None


def write_elsewhere(failed: os.PathLike[str] | str, write: Callable[[str], None]) -> str:
    """Writes a file whose path has failed to the directory for temporary files; returns where it is.

    It is always a new file, under the same name or a similar one, and for its owner only: the original path may have been
    private.

    :param write: writes to the path that it is given. :raises OSError: it failed there too.
    """
    directory, name = tempfile.gettempdir(), os.path.basename(os.fsdecode(failed))
    for ending in ("", *(f".{number}" for number in range(2, 100))):
        path = os.path.join(directory, name + ending)
        try:
            _create(path, 0o600)
        except FileExistsError:
            continue
        with _removed_on_failure(path):
            write(path)
        return path
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.path.join(directory, name))


def _is_replaced(path: str, directory: str) -> bool:
    """Whether there is nothing yet, or an ordinary file that may be both written and replaced."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return True
    return stat.S_ISREG(found.st_mode) and os.access(path, os.W_OK) and os.access(directory, os.W_OK)


def _create(path: str, mode: int) -> None:
    """Creates a file that was not there before, not even as a link."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))


@contextlib.contextmanager
def _removed_on_failure(path: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the first failure is the one to report
            os.unlink(path)
        raise
