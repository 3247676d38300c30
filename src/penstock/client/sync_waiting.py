"""Waiting in blocking code: the parts of the clients that `aio_waiting` has to do differently.

Both modules are written by hand and offer the same names. The other `sync*.py` modules are
generated from their `aio*.py` counterparts.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx

pause = time.sleep


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Does nothing: a blocking read cannot be interrupted. The code inside checks the time between
    its reads."""
    yield


def close_response(response: httpx.Response) -> None:
    """Closes an open stream. Wakes the thread that reads from it, which closing alone does not."""
    stream = response.extensions.get("network_stream")
    connected = stream and stream.get_extra_info("socket")
    if connected is not None:
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)
    response.close()


class StopFlag:
    """Tells a worker to stop. A signal handler may set it, which an Event does not allow: its lock
    may be held by the very thread that the handler interrupts."""

    CHECK_S = 0.05

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Waits until the flag is set, at most `seconds`. Returns whether it is set."""
        until = time.monotonic() + seconds
        while not self._is_set and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, self.CHECK_S))
        return self._is_set
