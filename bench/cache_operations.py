"""Cache operations over a WebSocket, with a fixed number of unanswered frames."""

from __future__ import annotations

import asyncio
import time
from itertools import cycle, islice

from bench.buffered_socket import open_socket
from bench.lean_socket import JSON, AskingSocket, text_frame
from bench.pubsub import EVENT_TEXT, SCOPE

KEYS = 1024
PUT, GET = "cache_put", "cache_get"
_EXPECTED = {PUT: b'"type":"ok"', GET: b'"value":"'}
"""Occurs in every good answer and in no other: a miss has the value null."""


class CacheOperations:
    """Sends `per_frame` operations in each frame, as an array if there are several."""

    def __init__(self, operation: str, per_frame: int, in_the_air: int) -> None:
        self.done = 0
        self._operation = operation
        self._per_frame = per_frame
        self._in_the_air = in_the_air
        self._frames = cycle(_frames(operation, per_frame))
        self._until = 0.0
        self._socket: AskingSocket
        self._ended: asyncio.Future[None]

    async def run(self, port: int, seconds: float) -> float:
        """Returns the operations per second, from the first frame to the last answer."""
        self._ended = asyncio.get_running_loop().create_future()
        expected = _EXPECTED[self._operation]
        self._socket = await open_socket(
            port,
            AskingSocket(JSON, expected, self._answered, self._failed, per_frame=self._per_frame),
        )
        began = time.perf_counter()
        self._until = began + seconds
        self._send(self._in_the_air)
        await self._ended
        took = time.perf_counter() - began
        self._socket.close()
        return self.done / took

    def _send(self, frames: int) -> None:
        self._socket.write(b"".join(islice(self._frames, frames)))

    def _answered(self, frames: int) -> None:
        self.done += frames * self._per_frame
        if time.perf_counter() < self._until:
            self._send(frames)
            return
        self._in_the_air -= frames
        if not self._in_the_air and not self._ended.done():
            self._ended.set_result(None)

    def _failed(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


def _frames(operation: str, per_frame: int) -> list[bytes]:
    """Makes the frames for all keys, in order."""
    value = f',"value":"{EVENT_TEXT}"' if operation == PUT else ""
    operations = [
        f'{{"type":"{operation}",{SCOPE},"cache":"default","key":"key-{key}"{value}}}'
        for key in range(KEYS)
    ]
    if per_frame == 1:
        return [text_frame(single.encode()) for single in operations]
    groups = [operations[at : at + per_frame] for at in range(0, KEYS, per_frame)]
    return [text_frame(f"[{','.join(group)}]".encode()) for group in groups]
