"""A recording that ``nativeprof attach PID --alloc`` makes of this process, which it controls through a socket.

The other end of the socket says when it ends; if it is closed, the recording ends too, and its profile is dropped. Then this
process is as it was before, but for the modules that it has imported.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading

from .profiler import Profiler

# Longest time for the other end to take the profile.
_TIMEOUT = 60.0
# Longest text of an error.
_MAX_TEXT = 1000


def record(channel: socket.socket, interval: int, max_overhead: float, native: bool, by_thread: bool) -> None:
    """Records until the other end of the socket says so, and hands over the profile."""
    with channel:
        try:
            profiler = Profiler(
                native=native, mode="alloc", threads=by_thread or None, interval=interval, max_overhead=max_overhead
            )
            profiler.start()
        except Exception as error:
            _send(channel, _failure(error))
            return
        recording = _Recording(profiler, channel)
        # Called before the profiler's own function, which drops the profile.
        atexit.register(recording.finish)
        try:
            recording.wait()
        finally:
            atexit.unregister(recording.finish)


class _Recording:
    def __init__(self, profiler: Profiler, channel: socket.socket) -> None:
        self._profiler = profiler
        self._channel = channel
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def wait(self) -> None:
        """Waits for the word of the other end."""
        word = b""
        if _send(self._channel, b"started\n"):
            try:
                word = self._channel.recv(16)
            except OSError:
                pass
        self.finish(is_wanted=word == b"stop\n")

    def finish(self, is_wanted: bool = True) -> None:
        """Ends the recording and hands over the profile, once. Also called when the program ends first."""
        if os.getpid() != self._pid:
            # In a forked child the lock may be in any state.
            return
        with self._lock:
            if not self._profiler._is_running():
                return
            try:
                content = self._profiler.stop()._native.render("json")
            except Exception as error:
                _send(self._channel, _failure(error))
                return
            if is_wanted:
                _send(self._channel, b"profile\t%d\n" % len(content) + content)


def _failure(error: Exception) -> bytes:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_TEXT]
    return f"failed\t{text}\n".encode("utf-8", "replace")


def _send(channel: socket.socket, content: bytes) -> bool:
    """Sends all of it; false if the other end is gone."""
    try:
        channel.settimeout(_TIMEOUT)
        channel.sendall(content)
        channel.settimeout(None)
    except OSError:
        return False
    return True
