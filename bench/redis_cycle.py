"""The same cycle against Redis Streams, with the Python client: XADD, XREADGROUP, XACK.

It is written in the two ways that give Redis its best figures: three connections that each send
everything that is ready in one pipeline; or one connection that handles all messages of a round
together. One task per command, and threads, reached half of that or less.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import redis.asyncio

from bench.batches import GROUP, VALUE
from bench.processes import TOPIC

_WAIT_MS = 100


class RedisCycle:
    def __init__(self, in_the_air: int, *, batch_acks: bool) -> None:
        self._in_the_air = in_the_air
        self._batch_acks = batch_acks
        self._done = 0
        self._until = 0.0
        self._freed: asyncio.Queue[int] = asyncio.Queue()
        self._arrived: asyncio.Queue[list[bytes]] = asyncio.Queue()

    async def run_in_three(self, port: int, seconds: float) -> float:
        """Returns the cycles per second with separate connections for XADD, XREADGROUP and XACK."""
        clients = [_client(port) for _ in range(3)]
        producer, consumer, acker = clients
        await producer.xgroup_create(TOPIC, GROUP, id="0", mkstream=True)
        began = self._begin(seconds)
        self._freed.put_nowait(self._in_the_air)
        await asyncio.gather(self._produce(producer), self._consume(consumer), self._ack(acker))
        took = time.perf_counter() - began
        for client in clients:
            await client.aclose()
        return self._done / took

    async def run_in_rounds(self, port: int, seconds: float) -> float:
        """Returns the cycles per second when all messages of a round are handled together."""
        client = _client(port)
        await client.xgroup_create(TOPIC, GROUP, id="0", mkstream=True)
        began = self._begin(seconds)
        while time.perf_counter() < self._until:
            await _add(client, self._in_the_air)
            await self._settle(client, await self._read(client))
        took = time.perf_counter() - began
        await client.aclose()
        return self._done / took

    def _begin(self, seconds: float) -> float:
        began = time.perf_counter()
        self._until = began + seconds
        return began

    async def _produce(self, client: Any) -> None:
        while time.perf_counter() < self._until:
            freed = await self._freed.get()
            while not self._freed.empty():
                freed += self._freed.get_nowait()
            await _add(client, freed)

    async def _consume(self, client: Any) -> None:
        while ids := await self._read(client):
            self._arrived.put_nowait(ids)
        self._arrived.put_nowait([])

    async def _ack(self, client: Any) -> None:
        while ids := await self._arrived.get():
            while not self._arrived.empty():
                ids = ids + self._arrived.get_nowait()
            self._freed.put_nowait(await self._settle(client, ids))

    async def _read(self, client: Any) -> list[bytes]:
        """Reads the messages that are there or arrive soon; returns none only after the timeout."""
        while True:
            got = await client.xreadgroup(
                GROUP, "bench", {TOPIC: ">"}, count=self._in_the_air, block=_WAIT_MS
            )
            if got or time.perf_counter() >= self._until:
                return [entry_id for _, entries in got for entry_id, _ in entries]

    async def _settle(self, client: Any, ids: list[bytes]) -> int:
        if self._batch_acks:
            acked = int(await client.xack(TOPIC, GROUP, *ids))
        else:
            pipeline = client.pipeline(transaction=False)
            for entry_id in ids:
                pipeline.xack(TOPIC, GROUP, entry_id)
            acked = sum(await pipeline.execute())
        self._done += acked
        return acked


def _client(port: int) -> Any:
    return redis.asyncio.Redis(port=port, single_connection_client=True)


async def _add(client: Any, count: int) -> None:
    pipeline = client.pipeline(transaction=False)
    for _ in range(count):
        pipeline.xadd(TOPIC, {"value": VALUE})
    await pipeline.execute()
