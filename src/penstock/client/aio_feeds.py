"""Open streams, subscriptions and watches for asyncio: iterate one in an `async with`.

Each has a connection of its own. What a line means is decided by the buffers of `deliveries` and
`feeds`, which this module only fills.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import httpx

from penstock.client.caches import watch_path
from penstock.client.connection import half_close, heartbeat_of, lost
from penstock.client.feeds import EventBuffer, WatchBuffer
from penstock.client.lines import LineBuffer
from penstock.client.ranges import Row, RowBuffer
from penstock.client.streams import lag_of, subscribe_path, subscriptions
from penstock.model.caching import WatchEvent
from penstock.model.errors import PenstockError
from penstock.model.streams import Lag
from penstock.model.tenancy import Path

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient

T = TypeVar("T")


class AsyncFeed(Generic[T]):
    """`ended`: nothing more will come; `timed_out`: because nothing came for `wait_s`.
    `is_finishing`: the broker was told to send no more."""

    def __init__(
        self,
        client: AsyncClient,
        path: str,
        buffer: LineBuffer[T],
        wait_s: float | None,
        heartbeat_ms: int,
    ) -> None:
        self.ended = False
        self.timed_out = False
        self.is_finishing = False
        self._client = client
        self._path = path
        self._buffer = buffer
        self._wait_s = wait_s
        self._heartbeat_ms = heartbeat_ms
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    async def open(self) -> Self:
        """Connects now, so that an error of the request is raised here."""
        if self._response is None and not self.ended:
            self._response = await self._client.open_stream(self._path, self._heartbeat_ms)
            self._chunks = self._response.aiter_raw()
            while not self._buffer.is_open and not self.ended:
                await self._fill()
        return self

    async def poll(self) -> T | None:
        """The next one; None when a heartbeat came instead, or the stream has ended."""
        await self.open()
        found = await self._take()
        if found is not None or self.ended:
            return found
        await self._fill()
        found = await self._take()
        if found is None and self._is_over():
            self.timed_out = True
            await self.close()
        return found

    async def close(self) -> None:
        """Ends the stream. Another task that waits for it sees its end."""
        self.ended = True
        self._buffer.close()
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()

    def finish(self) -> bool:
        """Asks the broker for no more. What it has sent already still comes, and then the end.
        False if that cannot be said on this connection, which is to be closed then."""
        response = self._response
        # First the flag: whoever reads may see the end before this returns.
        self.is_finishing = True
        if self.ended or response is None or not half_close(response):
            self.is_finishing = False
        return self.is_finishing

    async def rest(self, within_s: float) -> list[T]:
        """Ends the stream, and returns what had come by then and was not taken."""
        try:
            if self.is_finishing or self.finish():
                async with asyncio.timeout(within_s):
                    while not self.ended:
                        await self._fill()
        except (PenstockError, TimeoutError):
            pass  # what was read before is returned
        await self.close()
        found = []
        while (each := self._buffer.take(0.0)) is not None:
            found.append(each)
        return found

    async def _fill(self) -> None:
        if self._chunks is None:
            return
        try:
            chunk = await anext(self._chunks, None)
        except (httpx.TransportError, httpx.StreamError) as error:
            if self.ended:
                return
            await self.close()
            if self.is_finishing:
                return
            raise lost(self._client.url, error) from error
        if self.ended:
            return
        if chunk is None:
            await self.close()
            self._buffer.end()
        else:
            self._buffer.feed(chunk)

    async def _take(self) -> T | None:
        try:
            return self._buffer.take(time.monotonic())
        except PenstockError:
            await self.close()
            raise

    def _is_over(self) -> bool:
        waited_s = self._buffer.waited_s(time.monotonic())
        return self._wait_s is not None and waited_s >= self._wait_s

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            found = await self.poll()
            if found is not None:
                return found
            if self.ended:
                raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncRows(AsyncFeed[Row]):
    """The rows of a range, each by its columns; it ends with the last. One that breaks off raises
    Unavailable: nobody takes half a range for a whole one."""

    def __init__(self, client: AsyncClient, path: str) -> None:
        super().__init__(client, path, RowBuffer(), None, 0)


class AsyncSubscription(AsyncFeed[bytes]):
    """The payloads of a stream's events, from the moment that it is open.

    It ends when it is closed, or after `wait_s`. Everything else that ends it is raised: NotFound
    when the stream is deleted, Unavailable when the connection is lost. It does not connect again
    by itself: what was published meanwhile is gone, and only the application knows whether that
    matters. To go on, subscribe again.
    """

    def __init__(
        self, client: AsyncClient, path: Path, event_queue_depth: int | None, wait_s: float | None
    ) -> None:
        heartbeat_ms = heartbeat_of(wait_s)
        self._events = EventBuffer()
        self._stream = path
        url_path = subscribe_path(path, event_queue_depth, heartbeat_ms)
        super().__init__(client, url_path, self._events, wait_s, heartbeat_ms)

    @property
    def subscription_id(self) -> str:
        """Empty until it is open."""
        return self._events.subscription_id

    async def lag(self) -> Lag:
        """How far behind the broker sees it, and what was dropped; NotFound once it has ended."""
        found = await self._client.send(subscriptions(self._stream))
        return lag_of(self.subscription_id, found)


class AsyncWatch(AsyncFeed[WatchEvent]):
    """The changes of a cache's keys, in their order, from the moment that it is open.

    A `gap` among them says that changes may be missing: read the keys again. It ends as a
    subscription does.
    """

    def __init__(
        self,
        client: AsyncClient,
        path: Path,
        key: str | None,
        prefix: str | None,
        include: Iterable[str],
        since_version: int | None,
        wait_s: float | None,
    ) -> None:
        heartbeat_ms = heartbeat_of(wait_s)
        self._events = WatchBuffer()
        url_path = watch_path(path, key, prefix, include, since_version, heartbeat_ms)
        super().__init__(client, url_path, self._events, wait_s, heartbeat_ms)

    @property
    def watch_id(self) -> str:
        """Empty until it is open."""
        return self._events.watch_id

    @property
    def version(self) -> int:
        """The cache's version when the watch began: every later change is seen."""
        return self._events.version
