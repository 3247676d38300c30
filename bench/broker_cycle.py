"""Produces, consumes and acks with a fixed number of messages in progress, against a broker.

A message is in progress from the write of its produce until the answer to its ack; then the next
one starts. One connection produces, one consumes, one acks; all are pipelined.
"""

from __future__ import annotations

import asyncio
import time

from bench.batches import GROUP, VALUE
from bench.lean_client import Connection, Item, ack_body, connect, consume, post
from bench.processes import TOPIC
from bench.rows import BenchFailed

_PRODUCE = post("/v1/produce", f'{{"topic":"{TOPIC}","key":"k","value":"{VALUE}"}}'.encode())


class BrokerCycle:
    def __init__(self, in_the_air: int, *, batch_acks: bool) -> None:
        self.done = 0
        self._in_the_air = in_the_air
        self._batch_acks = batch_acks
        self._freed = 0
        self._until = 0.0
        self._produces: Connection
        self._acks: Connection
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future[None]

    async def run(self, port: int, seconds: float) -> float:
        """Returns the cycles per second, from the first produce to the last ack."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        stream = await consume(port, TOPIC, GROUP, self._arrived, self._failed)
        self._produces = await connect(port, _ignore, self._failed)
        self._acks = await connect(port, self._acked, self._failed)
        began = time.perf_counter()
        self._until = began + seconds
        self._produces.write(_PRODUCE * self._in_the_air)
        await self._ended
        took = time.perf_counter() - began
        for connection in (stream, self._produces, self._acks):
            connection.close()
        return self.done / took

    def _arrived(self, items: list[Item]) -> None:
        if any(item.attempts != 1 for item in items):
            raise BenchFailed("a message was delivered twice")
        bodies = [ack_body(TOPIC, GROUP, item) for item in items]
        if self._batch_acks:
            self._acks.write(post("/v1/ack/batch", b"[" + b",".join(bodies) + b"]"))
        else:
            self._acks.write(b"".join([post("/v1/ack", body) for body in bodies]))

    def _acked(self, _: int, body: bytes) -> None:
        if not self._freed:
            # Acks that are answered together lead to produces that are sent together.
            self._loop.call_soon(self._go_on)
        self._freed += body.count(b'"acked"') if self._batch_acks else 1

    def _go_on(self) -> None:
        freed, self._freed = self._freed, 0
        self.done += freed
        if time.perf_counter() < self._until:
            self._produces.write(_PRODUCE * freed)
        else:
            self._in_the_air -= freed
            if self._in_the_air < 0:
                self._failed(BenchFailed("more was acked than produced: the topic was not empty"))
            elif not self._in_the_air and not self._ended.done():
                self._ended.set_result(None)

    def _failed(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


def _ignore(status: int, body: bytes) -> None:
    """Ignores the answer to a produce: the message itself shows that it worked."""
