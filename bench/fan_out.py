"""Sends events to many subscribers: as fast as possible, or one at a time to measure latency."""

from __future__ import annotations

import asyncio
import time

import msgspec

from bench.pubsub import Closable, Publisher, PubSub
from bench.rows import BenchFailed

_QUIET_S = 0.3


class Delivered(msgspec.Struct, frozen=True):
    """Counts received events over all subscribers; `dropped` events will never arrive."""

    arrived: int
    dropped: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.arrived / self.seconds

    @property
    def dropped_percent(self) -> float:
        return 100 * self.dropped / (self.arrived + self.dropped)


class _Subscribed:
    """A publisher and its subscribers; counts published and received events."""

    def __init__(self, pubsub: PubSub, subscribers: int, events: int) -> None:
        self._pubsub = pubsub
        self._subscribers = subscribers
        self._events = events
        self._batches = 0
        self._arrived = 0
        self._last_arrival = 0.0
        self._until = 0.0
        self._sockets: list[Closable] = []
        self._publisher: Publisher
        self._ended: asyncio.Future[None]

    async def _open(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        for _ in range(self._subscribers):
            self._sockets.append(await self._pubsub.subscribe(self._on_events, self._failed))
        self._publisher = await self._pubsub.publisher(self._events, self._on_acks, self._failed)
        self._sockets.append(self._publisher)

    def _publish(self, batches: int) -> None:
        self._batches += batches
        self._publisher.publish(batches)

    async def _drain(self) -> int:
        """Waits until no more events arrive; returns how many were dropped."""
        seen = -1
        while seen != self._arrived:
            seen = self._arrived
            await asyncio.sleep(_QUIET_S)
        published = self._batches * self._events * self._subscribers
        dropped = self._pubsub.dropped()
        if self._arrived + dropped != published:
            raise BenchFailed(f"of {published} events {self._arrived} arrived, {dropped} dropped")
        return dropped

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close()

    def _on_events(self, count: int) -> None:
        self._arrived += count
        self._last_arrival = time.perf_counter()

    def _on_acks(self, count: int) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _failed(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


class FanOut(_Subscribed):
    """Publishes batches as fast as they are acked, with a fixed number of them unacked."""

    def __init__(self, pubsub: PubSub, subscribers: int, events: int, in_the_air: int) -> None:
        super().__init__(pubsub, subscribers, events)
        self._in_the_air = in_the_air

    async def run(self, seconds: float) -> Delivered:
        """Measures from the first publish to the last arrival."""
        await self._open()
        began = time.perf_counter()
        self._until = began + seconds
        self._publish(self._in_the_air)
        await self._ended
        dropped = await self._drain()
        self._close()
        return Delivered(self._arrived, dropped, self._last_arrival - began)

    def _on_acks(self, count: int) -> None:
        if time.perf_counter() < self._until:
            self._publish(count)
            return
        self._in_the_air -= count
        if not self._in_the_air:
            self._end()


class OneAtATime(_Subscribed):
    """Publishes an event when the previous one is acked and has reached every subscriber."""

    def __init__(self, pubsub: PubSub, subscribers: int) -> None:
        super().__init__(pubsub, subscribers, 1)
        self._began = 0.0
        self._awaited = 0
        self._took: list[float] = []

    async def run(self, seconds: float) -> list[float]:
        """Returns the time until the last subscriber had each event, in ms."""
        await self._open()
        self._until = time.perf_counter() + seconds
        self._next()
        await self._ended
        if await self._drain():
            raise BenchFailed("an event was dropped, with one at a time")
        self._close()
        return self._took

    def _next(self) -> None:
        self._awaited = self._subscribers + 1
        self._began = time.perf_counter()
        self._publish(1)

    def _on_events(self, count: int) -> None:
        super()._on_events(count)
        if self._arrived == self._batches * self._subscribers:
            self._took.append((self._last_arrival - self._began) * 1000)
        self._settle(count)

    def _on_acks(self, count: int) -> None:
        self._settle(count)

    def _settle(self, count: int) -> None:
        self._awaited -= count
        if self._awaited:
            return
        if time.perf_counter() < self._until:
            self._next()
        else:
            self._end()
