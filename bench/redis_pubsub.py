"""Publishing and subscribing against Redis, with a client as minimal as the broker's.

It sends one PUBLISH per event, and a batch in one write. All messages have the same length, so
that the received bytes give their number.
"""

from __future__ import annotations

import asyncio

from bench.buffered_socket import BufferedSocket, OnCount, open_socket
from bench.lean_client import OnError
from bench.pubsub import EVENT, Closable, Publisher
from bench.rows import BenchFailed

_CHANNEL = b"bench"


def _command(*words: bytes) -> bytes:
    strings = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return b"*%d\r\n%b" % (len(words), strings)


_MESSAGE = _command(b"message", _CHANNEL, EVENT)
_SUBSCRIBED = b"*3\r\n$9\r\nsubscribe\r\n$5\r\nbench\r\n:1\r\n"
_REPLY_END = b"\r\n"


class RedisPubSub:
    def __init__(self, port: int) -> None:
        self._port = port

    async def subscribe(self, on_events: OnCount, on_error: OnError) -> Closable:
        return await open_socket(self._port, _RedisSubscriber(on_events, on_error))

    async def publisher(self, events: int, on_acks: OnCount, on_error: OnError) -> Publisher:
        return await open_socket(self._port, _RedisPublisher(events, on_acks, on_error))

    def dropped(self) -> int:
        """Returns 0: Redis disconnects a slow subscriber instead of dropping events."""
        return 0


class _RedisSubscriber(BufferedSocket):
    """Ready once it is subscribed."""

    def __init__(self, on_events: OnCount, on_error: OnError) -> None:
        super().__init__(on_error)
        self._on_events = on_events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write(_command(b"SUBSCRIBE", _CHANNEL))

    def _take(self, end: int) -> int:
        if not self.ready.done():
            return self._confirmed(end)
        size = len(_MESSAGE)
        count = end // size
        if count:
            if not self._buffer.startswith(_MESSAGE):
                raise BenchFailed(f"not what was published: {self._buffer[:end].decode()}")
            self._on_events(count)
        return count * size

    def _confirmed(self, end: int) -> int:
        if end < len(_SUBSCRIBED):
            return 0
        if self._buffer[:end] != _SUBSCRIBED:
            raise BenchFailed(f"Redis answered {self._buffer[:end].decode()}")
        self.ready.set_result(None)
        return end


class _RedisPublisher(BufferedSocket):
    def __init__(self, events: int, on_acks: OnCount, on_error: OnError) -> None:
        super().__init__(on_error)
        self._events = events
        self._on_acks = on_acks
        self._batch = _command(b"PUBLISH", _CHANNEL, EVENT) * events
        self._answered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.ready.set_result(None)

    def publish(self, batches: int = 1) -> None:
        self.write(self._batch * batches)

    def _take(self, end: int) -> int:
        if self._buffer.find(b"-", 0, end) >= 0:
            raise BenchFailed(f"Redis answered {self._buffer[:end].decode()}")
        # A reply may arrive in parts; it counts when its end is there.
        replies = self._buffer.count(_REPLY_END, 0, end)
        acks, self._answered = divmod(self._answered + replies, self._events)
        if acks:
            self._on_acks(acks)
        return self._buffer.rfind(_REPLY_END, 0, end) + len(_REPLY_END) if replies else 0
