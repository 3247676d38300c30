"""Publishes at a steady pace, and measures the time to each ack and the subscribers' losses."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from bench.pace import keep_pace
from bench.pubsub import PubSub
from bench.rows import BenchFailed

_GIVE_UP_S = 2.0
_LOOK_S = 0.02


class PacedPublish:
    """Publishes without waiting for acks, so that a stall of the broker shows in the times."""

    def __init__(self, pubsub: PubSub, subscribers: int, per_second: int) -> None:
        self.took: list[float] = []
        """In ms."""
        self.lost = 0
        self._pubsub = pubsub
        self._subscribers = subscribers
        self._per_second = per_second
        self._sent: deque[float] = deque()
        self._arrived = 0
        self._last_sign = 0.0
        self._error: Exception | None = None

    async def run(self, seconds: float) -> None:
        subscribers = [
            await self._pubsub.subscribe(self._on_events, self._failed)
            for _ in range(self._subscribers)
        ]
        publisher = await self._pubsub.publisher(1, self._on_acks, self._failed)

        def publish(_: int) -> None:
            if self._error is not None:
                raise self._error
            self._sent.append(time.perf_counter())
            publisher.publish()

        await keep_pace(self._per_second, seconds, publish)
        await self._settle()
        for socket in (*subscribers, publisher):
            socket.close()

    async def _settle(self) -> None:
        """Waits until everything is acked and received, or nothing has arrived for a while."""
        while self._sent or self._missing():
            if self._error is not None:
                raise self._error
            if time.perf_counter() - self._last_sign > _GIVE_UP_S:
                break
            await asyncio.sleep(_LOOK_S)
        if self._sent:
            raise BenchFailed(f"{len(self._sent)} publishes were not acked")
        self.lost = self._missing()

    def _missing(self) -> int:
        return len(self.took) * self._subscribers - self._arrived

    def _on_events(self, count: int) -> None:
        self._arrived += count
        self._last_sign = time.perf_counter()

    def _on_acks(self, count: int) -> None:
        self._last_sign = now = time.perf_counter()
        for _ in range(count):
            self.took.append((now - self._sent.popleft()) * 1000)

    def _failed(self, error: Exception) -> None:
        self._error = error
