"""cache_get and cache_put over one WebSocket, with 1 and 64 per frame and several open frames."""

from __future__ import annotations

import asyncio
import time
from itertools import cycle, islice

import uvloop

from bench.buffered_socket import open_socket
from bench.cores import BusyCores
from bench.lean_socket import JSON, AskingSocket, text_frame
from bench.processes import Broker
from bench.pubsub import EVENT_TEXT, SCOPE
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting

LOAD = "cache_socket"
SINGLE, MANY = 1, 64
IN_THE_AIR = {SINGLE: 64, MANY: 4}
TARGETS = {SINGLE: Target(10_000), MANY: Target(80_000)}
WARM_S = 0.5


def measure(setting: Setting) -> list[Row]:
    rows = {(op, per_frame): _row(op, per_frame) for per_frame in TARGETS for op in (PUT, GET)}
    for _ in setting.each_run(LOAD):
        with setting.broker("cache") as broker:
            for (operation, per_frame), row in rows.items():
                row.values.append(_rate(setting, broker, row, operation, per_frame))
    return list(rows.values())


def _row(operation: str, per_frame: int) -> Row:
    how = "one a frame" if per_frame == SINGLE else f"{per_frame} a frame"
    what = f"{operation}, {how}, {IN_THE_AIR[per_frame]} frames in the air"
    return Row(LOAD, what, "operations/s", [], TARGETS[per_frame])


def _rate(setting: Setting, broker: Broker, row: Row, operation: str, per_frame: int) -> float:
    before = broker.cache_version()
    warm = CacheOperations(operation, per_frame, IN_THE_AIR[per_frame])
    uvloop.run(warm.run(broker.port, WARM_S))
    load = CacheOperations(operation, per_frame, IN_THE_AIR[per_frame])
    with BusyCores(setting.cores) as busy:
        rate: float = uvloop.run(load.run(broker.port, setting.seconds))
    row.note = str(busy)
    puts = broker.cache_version() - before - 1
    if puts != (warm.done + load.done if operation == PUT else 0):
        raise BenchFailed(f"{warm.done + load.done} {operation}s were answered, {puts} were puts")
    return rate


# -- the load --------------------------------------------------------------------------------------

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
