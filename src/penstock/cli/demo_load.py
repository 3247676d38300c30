"""The load of the cluster demo: producers and consumers that go on while processes are killed.

Each message has a number and an idempotency key; a producer repeats it until it is acknowledged.
Afterwards the topic is read and compared with what was acknowledged. Must not know which processes
there are.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import count

from penstock.client.aio import AsyncClient
from penstock.model.envelope import Envelope
from penstock.model.errors import PenstockError

TOPIC = "demo"
GROUP = "readers"
PARTITIONS = 4
PRODUCERS = 8
CONSUMERS = 8
PACE_S = 0.005
"""The pause of a producer between two messages, so that a small machine is not overloaded."""
RETRY_S = 0.02
POLL_S = 0.01


class DemoLoad:
    """`acknowledged` has the numbers of messages whose produce was answered with a success, `acked`
    the places of deliveries whose ack was. `longest_s` is the longest time between two successes of
    any producer since `measure`."""

    def __init__(self, addresses: str) -> None:
        self.acknowledged: set[str] = set()
        self.received: set[str] = set()
        self.came_again = 0
        self.longest_s = 0.0
        self._acked: set[tuple[int, int]] = set()
        self._last = time.monotonic()
        self._is_over = False
        self._numbers = count(1)
        self._client = AsyncClient(addresses)
        self._producers: list[asyncio.Task[None]] = []
        self._consumers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._client.create_topic(TOPIC, partitions=PARTITIONS)
        self._producers = [asyncio.create_task(self._produce()) for _ in range(PRODUCERS)]
        self._consumers = [asyncio.create_task(self._consume()) for _ in range(CONSUMERS)]

    def measure(self) -> None:
        """Begins to measure the longest time without an answer."""
        self._last, self.longest_s = time.monotonic(), 0.0

    async def wait_for_answers(self, number: int, within_s: float) -> None:
        """Waits until as many more messages are acknowledged. Raises TimeoutError."""
        wanted = len(self.acknowledged) + number
        async with asyncio.timeout(within_s):
            while len(self.acknowledged) < wanted:
                self._check()
                await asyncio.sleep(POLL_S)

    async def finish(self, within_s: float) -> None:
        """Ends the producers, and waits until everything that they stored has been received."""
        self._is_over = True
        async with asyncio.timeout(within_s):
            await asyncio.gather(*self._producers)
            while not self.acknowledged <= self.received:
                self._check()
                await asyncio.sleep(POLL_S)

    async def stored(self) -> Counter[str]:
        """Reads the whole topic: how often it has each message."""
        found: Counter[str] = Counter()
        for partition in range(PARTITIONS):
            async with self._client.read_range(TOPIC, partition) as rows:
                found.update([str(row["value"]) async for row in rows])
        return found

    async def close(self) -> None:
        for task in (*self._producers, *self._consumers):
            task.cancel()
        await asyncio.gather(*self._producers, *self._consumers, return_exceptions=True)
        await self._client.close()

    def _check(self) -> None:
        """Raises the error of a task that has ended with one."""
        for task in (*self._producers, *self._consumers):
            if task.done() and not task.cancelled():
                task.result()

    async def _produce(self) -> None:
        while not self._is_over:
            value = f"message {next(self._numbers)}"
            envelope = Envelope(idempotency_key=value)
            while True:
                try:
                    await self._client.produce(TOPIC, value, key=value, envelope=envelope)
                    break
                except PenstockError as error:
                    if not error.retryable:
                        raise
                    await asyncio.sleep(RETRY_S)
            now = time.monotonic()
            self.longest_s, self._last = max(self.longest_s, now - self._last), now
            self.acknowledged.add(value)
            await asyncio.sleep(PACE_S)

    async def _consume(self) -> None:
        client = self._client
        async with client.consume(TOPIC, GROUP) as stream:
            async for delivery in stream:
                place = delivery.partition, delivery.offset
                self.came_again += place in self._acked
                self.received.add(delivery.value)
                while True:
                    try:
                        await client.ack(delivery)
                        self._acked.add(place)
                        break
                    except PenstockError as error:
                        if not error.retryable:
                            # Its lease is another's now: it comes again.
                            break
                        await asyncio.sleep(RETRY_S)
