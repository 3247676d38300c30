# Generated from aio_feeds.py by scripts/generate_sync_client.py: edit that, run this.
"""Open streams of rows, deliveries, events and changes for blocking code.

Iterate over one in a `with`. Each has its own connection. This module fills the buffers of
`deliveries`, `ranges` and `feeds`; they decide what a line means.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import httpx

from penstock.client.caches import CachedEntry, EntryBuffer, entries_path, watch_path
from penstock.client.calls import list_of
from penstock.client.connection import half_close, heartbeat_of, lost, silence_limit
from penstock.client.feeds import PayloadBuffer, WatchBuffer
from penstock.client.lines import LineBuffer
from penstock.client.ranges import KeptEvent, KeptEventBuffer, Row, RowBuffer, events_path
from penstock.client.streams import lag_of, subscribe_path, subscriptions
from penstock.client.sync_waiting import close_response, pause, time_limit
from penstock.model.caching import WatchEvent
from penstock.model.errors import PenstockError, Unavailable
from penstock.model.streams import Lag
from penstock.model.tenancy import Path

if TYPE_CHECKING:
    from penstock.client.sync import Client

T = TypeVar("T")

GO_ON_S = 30.0
"""How long a stream tries to go on at another broker."""
STABLE_S = 5.0
"""A stream that has lasted so long goes on without a pause."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


class Feed(Generic[T]):
    """Iterates over items as they arrive, until it has `ended`. Begins in a `with`."""

    ended: bool

    def open(self) -> Self:
        raise NotImplementedError

    def poll(self) -> T | None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            found = self.poll()
            if found is not None:
                return found
            if self.ended:
                raise StopIteration

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class LineStream(Feed[T]):
    """One open stream.

    `ended`: nothing more will arrive. `timed_out`: it ended because nothing arrived for `wait_s`.
    `is_finishing`: the broker was told to send no more. `resumed`: how often it went on over
    another connection.

    A kind of stream that `goes_on` does so, if its client has several addresses: when the
    connection breaks or the broker ends it, it is opened again at once, where the owner is.
    """

    goes_on = False

    def __init__(
        self,
        client: Client,
        path: str,
        buffer: LineBuffer[T],
        wait_s: float | None,
        heartbeat_ms: int,
    ) -> None:
        self.ended = False
        self.timed_out = False
        self.is_finishing = False
        self.resumed = 0
        self._goes_on = self.goes_on and client.has_several_addresses
        self._opened_at = 0.0
        self._short_lives = 0
        self._client = client
        self._path = path
        self._buffer = buffer
        self._wait_s = wait_s
        self._silence_s = silence_limit(heartbeat_ms)
        self._is_filling = False
        self._response: httpx.Response | None = None
        self._chunks: Iterator[bytes] | None = None

    def open(self) -> Self:
        """Connects. Raises the error with which the broker refuses the request."""
        if self._response is None and not self.ended:
            self._connect()
            while not self._buffer.is_open and not self.ended:
                self._fill()
        return self

    def poll(self) -> T | None:
        """Returns the next item; None if a heartbeat came instead, or if the stream has ended."""
        self.open()
        found = self._take()
        if found is not None or self.ended:
            return found
        self._fill()
        found = self._take()
        if found is None and self._is_over():
            self.timed_out = True
            self.close()
        return found

    def close(self) -> None:
        """Ends the stream, also for another thread that is waiting for its next item."""
        self.ended = True
        self._buffer.close()
        response, self._response = self._response, None
        if response is not None:
            close_response(response)

    def finish(self) -> bool:
        """Tells the broker to send no more. Items that it sent before still arrive; then the stream
        ends. Returns False if this connection cannot say so: the caller should close it."""
        response = self._response
        # Set first, because the reader may see the end before half_close returns.
        self.is_finishing = True
        if self.ended or response is None or not half_close(response):
            self.is_finishing = False
        return self.is_finishing

    def rest(self, within_s: float) -> list[T]:
        """Ends the stream. Returns the items that had arrived and nobody has taken; waits at most
        `within_s` for those that the broker had already sent."""
        self._drain(within_s)
        self.close()
        found = []
        while (each := self._buffer.take(0.0)) is not None:
            found.append(each)
        return found

    def _drain(self, within_s: float) -> None:
        """Ends the stream, and reads what the broker had already sent."""
        until = time.monotonic() + within_s
        # An error ends the wait; items that were read before it are kept.
        with suppress(PenstockError, TimeoutError):
            if self.is_finishing or self.finish():
                with time_limit(within_s):
                    while not self.ended and time.monotonic() < until:
                        self._fill()

    def _fill(self) -> None:
        if self._chunks is None:
            return
        self._is_filling = True
        try:
            chunk = next(self._chunks, None)
        except (httpx.TransportError, httpx.StreamError) as error:
            if self.ended:
                return
            if self._goes_on and not self.is_finishing:
                return self._go_on(lost(self._client.url, error))
            self.close()
            if self.is_finishing:
                return
            raise lost(self._client.url, error) from error
        finally:
            self._is_filling = False
        if self.ended:
            return
        if chunk is not None:
            self._buffer.feed(chunk)
        elif self._goes_on and not self.is_finishing:
            self._go_on(None)
        else:
            self.close()
            self._buffer.end()

    def _take(self) -> T | None:
        try:
            return self._buffer.take(time.monotonic())
        except PenstockError as error:
            if self._goes_on and isinstance(error, Unavailable) and not self.ended:
                # The broker has said why it ends the stream: it is not the owner any more.
                self._go_on(error)
                return None
            self.close()
            raise

    # -- connecting ----------------------------------------------------------------------------

    def _connect(self) -> None:
        response = self._client.open_stream(self._current_path(), self._silence_s)
        if self.ended:
            # Another thread has closed this stream meanwhile.
            close_response(response)
            return
        self._response, self._chunks = response, response.iter_raw()
        self._opened_at = time.monotonic()

    def _current_path(self) -> str:
        """Returns the address of the stream, from what was read last on."""
        return self._path

    def _is_end(self, error: PenstockError) -> bool:
        """Tells whether the stream ends without an error if it cannot be opened again."""
        return False

    def _go_on(self, failure: PenstockError | None) -> None:
        """Opens the stream again after it broke or the broker ended it. Raises the failure if that
        takes too long. A stream that ends again and again is opened less and less often."""
        response, self._response, self._chunks = self._response, None, None
        if response is not None:
            close_response(response)
        if failure is None:
            try:
                self._buffer.end()
            except PenstockError as error:
                failure = error
        now = time.monotonic()
        is_stable = now - self._opened_at >= STABLE_S
        self._short_lives = 0 if is_stable else self._short_lives + 1
        pause_s = 0.0 if is_stable else FIRST_PAUSE_S * 2 ** min(self._short_lives - 1, 16)
        until = now + self._patience_s(now)
        while not self.ended and (failure is None or failure.retryable):
            self._client.doubt_owner()
            pause_s = min(pause_s, LONGEST_PAUSE_S)
            pause(pause_s)
            self._buffer.begin_again()
            try:
                self._connect()
                self.resumed += not self.ended
                return
            except PenstockError as error:
                failure = error
            pause_s = max(2 * pause_s, FIRST_PAUSE_S)
            if time.monotonic() + pause_s > until:
                break
        is_wanted = not self.ended
        self.close()
        if is_wanted and failure is not None and not self._is_end(failure):
            raise failure

    def _patience_s(self, now: float) -> float:
        if self._wait_s is None:
            return GO_ON_S
        return min(GO_ON_S, max(0.0, self._wait_s - self._buffer.waited_s(now)))

    def _is_over(self) -> bool:
        waited_s = self._buffer.waited_s(time.monotonic())
        return self._wait_s is not None and waited_s >= self._wait_s


class OpenRows(LineStream[Row]):
    """The rows of a range, each a dict by column. Raises Unavailable if the connection breaks
    before the last row, so that no caller takes a part for the whole."""

    def __init__(self, client: Client, path: str) -> None:
        super().__init__(client, path, RowBuffer(), None, 0)


class KeptEvents(LineStream[KeptEvent]):
    """The events of a range of a durable stream. Raises Unavailable if the connection breaks before
    the last one."""

    def __init__(
        self,
        client: Client,
        path: Path,
        start: int | None,
        end: int | None,
        from_ms: int | None,
        to_ms: int | None,
    ) -> None:
        url_path = events_path(path, start, end, from_ms, to_ms)
        super().__init__(client, url_path, KeptEventBuffer(), None, 0)


class Entries(LineStream[CachedEntry]):
    """All entries of a cache as of one moment. Raises Unavailable if the connection breaks before
    the last one."""

    def __init__(self, client: Client, path: Path) -> None:
        super().__init__(client, entries_path(path), EntryBuffer(), None, 0)


class Subscription(LineStream[bytes]):
    """The payloads of a stream's events, beginning when the subscription is open.

    It ends when it is closed or after `wait_s`. Any other end raises an error: NotFound if the
    stream was deleted, Unavailable if the connection is lost. It does not reconnect by itself,
    because events that were published in between are lost, and only the application knows whether
    that matters. To continue, subscribe again.

    If the client has several addresses, it goes on at the next owner instead. `gaps` counts the
    places where events may be missing; a durable stream leaves none.
    """

    goes_on = True

    def __init__(
        self, client: Client, path: Path, event_queue_depth: int | None, wait_s: float | None
    ) -> None:
        heartbeat_ms = heartbeat_of(wait_s)
        self._events = PayloadBuffer()
        self._stream = path
        url_path = subscribe_path(
            path, event_queue_depth=event_queue_depth, heartbeat_ms=heartbeat_ms
        )
        super().__init__(client, url_path, self._events, wait_s, heartbeat_ms)

    @property
    def subscription_id(self) -> str:
        """Empty until the stream is open."""
        return self._events.subscription_id

    @property
    def gaps(self) -> int:
        return self._events.gaps

    def _current_path(self) -> str:
        if self._events.position is None:
            return self._path
        return f"{self._path}&start={self._events.position}"

    def lag(self) -> Lag:
        """Returns how many events it is behind and how many the broker dropped. Raises NotFound
        once it has ended."""
        found = self._client.send(subscriptions(self._stream))
        return lag_of(self.subscription_id, found)


class Watch(LineStream[WatchEvent]):
    """The changes of a cache's keys, in order, beginning when the watch is open.

    A `gap` event means that changes may be missing: read the keys again. A watch ends in the same
    ways as a subscription. If the client has several addresses, it goes on at the next owner, with
    a gap if the cache has changed meanwhile.
    """

    goes_on = True

    def __init__(
        self,
        client: Client,
        path: Path,
        key: str | None,
        prefix: str | None,
        include: Iterable[str],
        since_version: int | None,
        wait_s: float | None,
    ) -> None:
        heartbeat_ms = heartbeat_of(wait_s)
        self._events = WatchBuffer()
        self._path_since = partial(
            watch_path,
            path,
            key,
            prefix,
            list_of(include, "include"),
            heartbeat_ms=heartbeat_ms,
        )
        url_path = self._path_since(since_version)
        super().__init__(client, url_path, self._events, wait_s, heartbeat_ms)

    def _current_path(self) -> str:
        seen = self._events.seen
        return self._path if seen is None else self._path_since(seen)

    @property
    def watch_id(self) -> str:
        """Empty until the stream is open."""
        return self._events.watch_id

    @property
    def version(self) -> int:
        """The cache's version when the watch began. The watch reports every later change."""
        return self._events.version
