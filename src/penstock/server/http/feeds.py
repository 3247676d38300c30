"""Feeds: the events of a stream or a cache over plain HTTP, as NDJSON or server-sent events.

A feed takes events only while its connection is below the high-water mark. What a slow reader does
not read waits, and overflows, in its own subscription or watch; the consumer of a named
subscription is paused, and gets nothing. The first line says that the feed has begun; if the broker
ends it, the last line says why. A feed ends when its reader disconnects, or when the reader could
not be reached twice in a row.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.api.caches import WatchHandle
from penstock.api.consumers import Consumer
from penstock.api.streams import Subscription
from penstock.model.errors import (
    InvalidArgument,
    NotFound,
    PenstockError,
    PermissionDenied,
    Unavailable,
)
from penstock.model.item import EventItem
from penstock.model.options import check_number
from penstock.model.streams import Lag, SubscribeNamed
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, whole_number
from penstock.server.http.responses import CLOSE, NDJSON_TYPE, encode_json, typed_error
from penstock.server.http.streamed_response import Guard, StreamedResponse, check_streamable
from penstock.server.http.tcp_liveness import is_unreachable, probe_when_idle, reset
from penstock.server.named_events import encode_lines, encode_sse
from penstock.server.websocket.answers import Ok, lag_answer, named_answer, subscribed_answer
from penstock.server.websocket.events import BurstSize, EventLines, encode_watch

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply


class NamedFeed(StreamedResponse[Consumer]):
    """The sink of a consumer of a stream."""

    def __init__(
        self,
        reply: Reply,
        guard: Guard,
        form: FeedFormat,
        heartbeat_ms: int,
        command: SubscribeNamed,
    ) -> None:
        super().__init__(reply, guard, form.head, heartbeat_ms, form.heartbeat)
        self._form = form
        self._command = command
        self._id = ""
        self._stream_id = 0

    def send_opening(self, connection: HttpConnection, source: Consumer) -> None:
        self._id = f"n{source.id}"
        self._stream_id = source.topic_id
        opening = named_answer(self._id, self._command, source)
        connection.write_chunk(self._form.encode("subscribed", opening))

    def begin(self, connection: HttpConnection, source: Consumer) -> None:
        if connection.flow.write_paused:
            source.pause()

    # -- called by the engine ----------------------------------------------------------------

    def write(self, items: list[EventItem]) -> None:
        if self._connection is not None:
            self._connection.write_chunk(self._encode(items))

    def _encode(self, items: list[EventItem]) -> bytes:
        if self._form.is_sse:
            return encode_sse(self._id, self._stream_id, items)
        return encode_lines(self._id, items)

    def end(self, reason: str) -> None:
        source = self._source
        is_gone = source is not None and source.closed
        self.refuse(NotFound(reason) if is_gone else Unavailable(reason))

    def refuse(self, error: PenstockError) -> None:
        connection = self._connection
        self.detach()
        if connection is not None:
            body = typed_error(error, subscription_id=self._id)
            connection.write_chunk(self._form.encode("error", body))
            connection.end_stream()

    # -- called by the connection --------------------------------------------------------------

    def pause(self) -> None:
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        if self._source is not None:
            self._source.resume()


MAX_HEARTBEAT_MS = 3_600_000
SSE_HEARTBEAT_MS = 15_000
"""Browsers and proxies take a silent stream for a dead one."""

END_GRACE_S = 2.0
"""How long a reader that does not read has, to read why its feed was ended."""

_SSE_TYPE = b"content-type: text/event-stream\r\ncache-control: no-store\r\n"


class FeedFormat(msgspec.Struct, frozen=True):
    """The bytes around the events of a feed."""

    head: bytes
    heartbeat: bytes
    is_sse: bool

    def before(self, kind: str) -> bytes:
        return b"event: %b\ndata: " % kind.encode() if self.is_sse else b""

    @property
    def after(self) -> bytes:
        return b"\n\n" if self.is_sse else b"\n"

    def encode(self, kind: str, body: Any) -> bytes:
        return b"%b%b%b" % (self.before(kind), encode_json(body), self.after)


# The connection closes after the feed. A client that is not told might use it again.
NDJSON = FeedFormat(NDJSON_TYPE + CLOSE, b"\n", is_sse=False)
SSE = FeedFormat(_SSE_TYPE + CLOSE, b":\n\n", is_sse=True)


class FeedSource(Protocol):
    """A subscription or a watch, encoded in the format of the feed."""

    def opening(self) -> bytes:
        """Returns the first line."""
        ...

    def take(self, max_events: int) -> tuple[int, bytes]:
        """Returns how many events it took, and their bytes."""
        ...

    def ids(self) -> dict[str, str]:
        """Returns the ids that the error at the end has."""
        ...

    def close(self) -> None: ...


class SubscriptionSource:
    def __init__(self, subscription: Subscription, form: FeedFormat) -> None:
        self._subscription = subscription
        self._form = form
        self._lines = EventLines(
            subscription.id,
            form.before("event"),
            form.after,
            stream_id=subscription.stream_id if form.is_sse else None,
        )

    def opening(self) -> bytes:
        return self._form.encode("subscribed", subscribed_answer(self._subscription))

    def take(self, max_events: int) -> tuple[int, bytes]:
        runs = self._subscription.take(max_events)
        if not runs:
            return 0, b""
        return sum(run.end - run.start for run in runs), self._lines.encode(runs)

    def ids(self) -> dict[str, str]:
        return {"subscription_id": self._subscription.id}

    def close(self) -> None:
        self._subscription.close()


class WatchSource:
    def __init__(self, handle: WatchHandle, form: FeedFormat) -> None:
        self._handle = handle
        self._form = form

    def opening(self) -> bytes:
        handle = self._handle
        return self._form.encode("ok", Ok(version=handle.version, watch_id=handle.id))

    def take(self, max_events: int) -> tuple[int, bytes]:
        events = encode_watch(self._handle.id, self._handle.take(max_events))
        before, after = self._form.before("cache_event"), self._form.after
        return len(events), b"".join([b"%b%b%b" % (before, event, after) for event in events])

    def ids(self) -> dict[str, str]:
        return {"watch_id": self._handle.id}

    def close(self) -> None:
        self._handle.close()


class EventFeed(StreamedResponse[FeedSource]):
    """The sink of a subscription or a watch. Every `check_s` it checks that the reader can still
    be reached."""

    def __init__(
        self, reply: Reply, guard: Guard, form: FeedFormat, heartbeat_ms: int, check_s: float
    ) -> None:
        super().__init__(reply, guard, form.head, heartbeat_ms, form.heartbeat)
        self._form = form
        self._check_s = check_s
        self._next_check: asyncio.TimerHandle | None = None
        self._is_doubtful = False
        self._lag: Lag | None = None
        self._burst = BurstSize(first_events=1)

    def send_opening(self, connection: HttpConnection, source: FeedSource) -> None:
        connection.write_chunk(source.opening())

    def begin(self, connection: HttpConnection, source: FeedSource) -> None:
        probe_when_idle(connection.transport, self._check_s)
        self._next_check = connection.loop.call_later(self._check_s, self._check)
        self.wake()

    # -- called by the engine ------------------------------------------------------------------

    def subscribed(self, outcome: Subscription | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            self.opened(outcome)
        else:
            self.opened(SubscriptionSource(outcome, self._form))

    def watched(self, outcome: WatchHandle | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            self.opened(outcome)
        else:
            self.opened(WatchSource(outcome, self._form))

    def wake(self) -> None:
        connection, source = self._connection, self._source
        if connection is None or source is None:
            return
        self._write_lag(connection)
        while not connection.flow.write_paused:
            count, data = source.take(self._burst.events)
            if not count:
                break
            connection.write_chunk(data)
            self._burst.learn(count, len(data))
            self._write_lag(connection)

    def lagging(self, lag: Lag) -> None:
        """Keeps the alert until the connection accepts bytes: before, nobody could read it."""
        self._lag = lag
        if self._connection is not None and not self._connection.flow.write_paused:
            self._connection.loop.call_soon(self.wake)

    def ended(self, error: PenstockError) -> None:
        connection, source = self._connection, self._source
        self.detach()
        if connection is None or source is None:
            return
        connection.write_chunk(self._form.encode("error", typed_error(error, **source.ids())))
        connection.end_stream()
        if connection.flow.write_paused:
            connection.loop.call_later(END_GRACE_S, reset, connection.transport)

    # -- called when access rules change ---------------------------------------------------------

    def refuse(self, error: PermissionDenied) -> None:
        self.ended(error)

    # -- called by the connection --------------------------------------------------------------

    def resume(self) -> None:
        self.wake()

    def detach(self) -> None:
        super().detach()
        if self._next_check is not None:
            self._next_check.cancel()

    # -- within --------------------------------------------------------------------------------

    def _check(self) -> None:
        """Ends the connection of a reader that could not be reached, neither now nor the last
        time."""
        connection = self._connection
        if connection is None:
            return
        was_doubtful, self._is_doubtful = self._is_doubtful, is_unreachable(connection.transport)
        if was_doubtful and self._is_doubtful:
            connection.transport.abort()
        else:
            self._next_check = connection.loop.call_later(self._check_s, self._check)

    def _write_lag(self, connection: HttpConnection) -> None:
        lag, self._lag = self._lag, None
        if lag is not None:
            connection.write_chunk(self._form.encode("lag", lag_answer(lag)))


def open_feed(
    dispatch: RequestDispatch,
    request: Request,
    params: dict[str, str],
    reply: Reply,
    guard: Guard,
) -> EventFeed:
    """Returns the feed in the format that the request asks for; nothing is sent yet."""
    form, heartbeat_ms = feed_format(dispatch, request, params)
    return EventFeed(reply, guard, form, heartbeat_ms, dispatch.ws_ping_s)


def feed_format(
    dispatch: RequestDispatch, request: Request, params: dict[str, str]
) -> tuple[FeedFormat, int]:
    """Reads the format and the interval of heartbeats from the request."""
    check_streamable(dispatch, request)
    wanted = params.get("format") or ("sse" if request.notes.wants_events else "ndjson")
    if wanted not in ("sse", "ndjson"):
        raise InvalidArgument("format must be ndjson or sse")
    form = SSE if wanted == "sse" else NDJSON
    heartbeat_ms = whole_number(params, "heartbeat_ms")
    if heartbeat_ms is None:
        heartbeat_ms = SSE_HEARTBEAT_MS if form.is_sse else 0
    return form, check_number("heartbeat_ms", heartbeat_ms, 0, MAX_HEARTBEAT_MS)
