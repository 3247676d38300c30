"""A connection that reads into one buffer of its own, so that received bytes are copied once.

An error on it, also one that a callback raises, fails `ready` until the connection is ready, and
goes to `on_error` after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar, cast

from bench.lean_client import OnError
from bench.rows import BenchFailed

OnCount = Callable[[int], None]
"""Called once per read with the number of counted things in it."""

_BUFFER_BYTES = 256 << 10
_Socket = TypeVar("_Socket", bound="BufferedSocket")


class BufferedSocket(asyncio.BufferedProtocol):
    def __init__(self, on_error: OnError) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_error = on_error
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._is_closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.write = self._transport.write

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_closing:
            self._fail(BenchFailed(f"the server closed the connection ({exc})"))

    def close(self) -> None:
        self._is_closing = True
        self._transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        end = self._filled + nbytes
        try:
            taken = self._take(end)
            left = end - taken
            if left == _BUFFER_BYTES:
                raise BenchFailed(f"more than {_BUFFER_BYTES} bytes in one piece")
        except Exception as error:  # noqa: BLE001 - the loop would only log it, and the load hang
            self.close()
            self._fail(error)
            return
        if taken and left:
            self._buffer[:left] = self._buffer[taken:end]
        self._filled = left

    def _take(self, end: int) -> int:
        """Takes the complete messages from the buffer up to `end`; returns their length."""
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        if self.ready.done():
            self._on_error(error)
        else:
            self.ready.set_exception(error)


async def open_socket(port: int, socket: _Socket) -> _Socket:
    """Connects `socket` and returns it once it is ready."""
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: socket, "127.0.0.1", port)
    await socket.ready
    return socket
