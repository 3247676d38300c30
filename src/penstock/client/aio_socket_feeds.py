"""Subscriptions and watches on a WebSocket for asyncio.

They have the names of those over HTTP, and share the socket's connection. When it breaks, they go
on with the next one. This module reads the channels of `socket_channels`; they decide what is kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self, TypeVar

from penstock.client.aio_feeds import AsyncFeed
from penstock.client.calls import Call, SocketForm, reader
from penstock.client.connection import HEARTBEAT_MS
from penstock.client.socket_channels import (
    ChangesChannel,
    GapMark,
    SocketChannel,
    SubscriptionChannel,
)
from penstock.client.streams import SocketLag
from penstock.model.caching import WatchEvent
from penstock.model.errors import NotFound, PenstockError
from penstock.model.streams import Lag
from penstock.model.tenancy import Path

if TYPE_CHECKING:
    from penstock.client.aio_socket import AsyncSocket

T = TypeVar("T")


class AsyncSocketFeed(AsyncFeed[T]):
    """One open subscription or watch. One task at a time may read it.

    `ended`: nothing more will arrive. `timed_out`: it ended because nothing arrived for `wait_s`.
    `gaps` counts the places, up to the item read last, where items may be missing because the
    connection was made again, or this reader was too slow.
    """

    def __init__(
        self, socket: AsyncSocket, channel: SocketChannel[T], wait_s: float | None
    ) -> None:
        self.ended = False
        self.timed_out = False
        self.gaps = 0
        self._socket = socket
        self._channel = channel
        self._wait_s = wait_s
        self._taken: deque[T | GapMark] = deque()
        self._waiting_since: float | None = None

    async def open(self) -> Self:
        """Begins it. Raises the error with which the broker refuses."""
        if not self._channel.was_open and not self.ended:
            await self._socket.open_channel(self._channel)
        return self

    async def poll(self) -> T | None:
        """Returns the next item; None if there was none for a while, or if the feed has ended."""
        await self.open()
        if not self._taken and not self.ended:
            await self._fill()
        while self._taken:
            self._waiting_since = None
            item = self._taken.popleft()
            if not isinstance(item, GapMark):
                return item
            self.gaps += 1
        return None

    async def close(self) -> None:
        """Ends it, also for another task that is waiting for its next item."""
        if not self.ended:
            self.ended = True
            self._taken.clear()
            await self._socket.close_channel(self._channel)

    @property
    def dropped(self) -> int:
        """The number of items that were dropped here because nobody read them in time."""
        return self._channel.dropped

    async def _fill(self) -> None:
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        wait_s = HEARTBEAT_MS / 1000
        if self._wait_s is not None:
            wait_s = min(wait_s, self._waiting_since + self._wait_s - now)
        try:
            self._taken.extend(await self._socket.take(self._channel, max(wait_s, 0.0)))
        except PenstockError:
            self.ended = True
            raise
        waited_s = time.monotonic() - self._waiting_since
        if not self._taken and self._wait_s is not None and waited_s >= self._wait_s:
            self.timed_out = True
            await self.close()


class AsyncSocketSubscription(AsyncSocketFeed[bytes]):
    """The payloads of a stream's events, beginning when the subscription is open.

    After a reconnect it goes on with the events that are published from then on, and `gaps`
    increases: events in between are lost. With `resume=False` it raises Unavailable instead, as
    over HTTP. It ends when it is closed or after `wait_s`, and raises NotFound if the stream was
    deleted.
    """

    def __init__(
        self,
        socket: AsyncSocket,
        path: Path,
        event_queue_depth: int | None,
        wait_s: float | None,
        *,
        resume: bool,
    ) -> None:
        self._events = SubscriptionChannel(path, event_queue_depth, resumes=resume)
        super().__init__(socket, self._events, wait_s)
        self._since_ms = 0

    @property
    def subscription_id(self) -> str:
        """Empty while it is not open. Another one after a reconnect."""
        return self._events.id

    async def open(self) -> Self:
        if not self._since_ms:
            self._since_ms = time.time_ns() // 1_000_000
        return await super().open()

    async def lag(self) -> Lag:
        """Returns how many events it is behind and how many were dropped, by the broker since the
        last reconnect and here. Raises NotFound while it is not open."""
        if not self.subscription_id:
            raise NotFound("the subscription is not open, or has ended")
        form = SocketForm("lag", {"subscription_id": self.subscription_id}, is_read=True)
        call: Call[SocketLag] = Call("GET", "lag", reader(SocketLag), form=form)
        found = await self._socket.send(call)
        here = self._channel.unread() + len(self._taken)
        return found.lag(here, self.dropped, self._since_ms)


class AsyncSocketWatch(AsyncSocketFeed[WatchEvent]):
    """The changes of a cache's keys, in order, beginning when the watch is open.

    A `gap` event means that changes may be missing: read the keys again. After a reconnect there is
    one if the cache has changed since the last event.
    """

    def __init__(
        self,
        socket: AsyncSocket,
        path: Path,
        key: str | None,
        prefix: str | None,
        include: Iterable[str],
        since_version: int | None,
        wait_s: float | None,
        *,
        resume: bool,
    ) -> None:
        self._changes = ChangesChannel(path, key, prefix, include, since_version, resumes=resume)
        super().__init__(socket, self._changes, wait_s)

    async def poll(self) -> WatchEvent | None:
        event = await super().poll()
        if event is not None and event.event == "gap":
            self.gaps += 1
        return event

    @property
    def watch_id(self) -> str:
        """Empty while it is not open. Another one after a reconnect."""
        return self._changes.id

    @property
    def version(self) -> int:
        """The cache's version when the watch began. The watch reports every later change."""
        return self._changes.version
