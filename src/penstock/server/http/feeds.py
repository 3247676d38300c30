"""Streams and caches to listen to over plain HTTP: NDJSON lines, or server-sent events.

A feed takes only while its connection is below the high-water mark, so that what a slow reader
does not read waits, and overflows, in its own subscription or watch. The first line says that it
has begun; if the broker ends it, the last says why. A reader that is gone ends it at once, and one
that went without a word when it has not been reached for a while.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.api.caches import WatchHandle
from penstock.api.streams import Subscription
from penstock.model.errors import InvalidArgument, MethodNotAllowed, PenstockError, Unavailable
from penstock.model.limits import KIB
from penstock.model.streams import Lag
from penstock.model.tenancy import Path
from penstock.server.commands import subscribe_of, watch_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, truth, whole_number
from penstock.server.http.responses import CLOSE, NDJSON_TYPE, encode_json, typed_error
from penstock.server.http.tcp_liveness import is_unreachable, probe_when_idle
from penstock.server.websocket.answers import Ok, Subscribed, lag_answer
from penstock.server.websocket.events import EventLines, encode_watch

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply

MIN_HEARTBEAT_MS = 100
MAX_HEARTBEAT_MS = 3_600_000
SSE_HEARTBEAT_MS = 15_000
"""Browsers and what is between take a silent stream for a dead one."""

WRITE_BYTES = 64 * KIB
"""What one write is to have, by the size of the events before it; it holds one event at least."""
MAX_WRITE_EVENTS = 1024

END_GRACE_S = 2.0
"""For a reader that does not read, to learn why it was ended."""

_SSE_TYPE = b"content-type: text/event-stream\r\ncache-control: no-store\r\n"


class FeedFormat(msgspec.Struct, frozen=True):
    """How a feed looks on the wire."""

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


# The connection ends with the feed: a client that is not told might use it again.
NDJSON = FeedFormat(NDJSON_TYPE + CLOSE, b"\n", is_sse=False)
SSE = FeedFormat(_SSE_TYPE + CLOSE, b":\n\n", is_sse=True)


class FeedSource(Protocol):
    """What a feed takes from: a subscription or a watch."""

    def opening(self, form: FeedFormat) -> bytes:
        """The first line."""
        ...

    def take(self, max_events: int) -> tuple[int, bytes]:
        """How many there were, and all of them as bytes."""
        ...

    def ids(self) -> dict[str, str]: ...

    def close(self) -> None: ...


class SubscriptionSource:
    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._lines: EventLines

    def opening(self, form: FeedFormat) -> bytes:
        subscription_id = self._subscription.id
        self._lines = EventLines(subscription_id, form.before("event"), form.after)
        return form.encode("subscribed", Subscribed(subscription_id))

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
    def __init__(self, handle: WatchHandle) -> None:
        self._handle = handle
        self._form = NDJSON

    def opening(self, form: FeedFormat) -> bytes:
        self._form = form
        handle = self._handle
        return form.encode("ok", Ok(version=handle.version, watch_id=handle.id))

    def take(self, max_events: int) -> tuple[int, bytes]:
        events = encode_watch(self._handle.id, self._handle.take(max_events))
        before, after = self._form.before("cache_event"), self._form.after
        return len(events), b"".join([b"%b%b%b" % (before, event, after) for event in events])

    def ids(self) -> dict[str, str]:
        return {"watch_id": self._handle.id}

    def close(self) -> None:
        self._handle.close()


class EventFeed:
    """Sink of a subscription or a watch, and stream of a connection."""

    is_answer = False

    def __init__(self, reply: Reply, form: FeedFormat, heartbeat_ms: int, look_s: float) -> None:
        self._reply = reply
        self._form = form
        self._heartbeat_ms = heartbeat_ms
        self._look_s = look_s
        self._connection: HttpConnection | None = None
        self._source: FeedSource | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._is_doubtful = False
        self._lag: Lag | None = None
        self._burst = 1

    # -- called by the engine ------------------------------------------------------------------

    def subscribed(self, outcome: Subscription | PenstockError) -> None:
        self._open(outcome if isinstance(outcome, PenstockError) else SubscriptionSource(outcome))

    def watched(self, outcome: WatchHandle | PenstockError) -> None:
        self._open(outcome if isinstance(outcome, PenstockError) else WatchSource(outcome))

    def wake(self) -> None:
        connection, source = self._connection, self._source
        if connection is None or source is None:
            return
        if self._lag is not None:
            self._write_lag(connection)
        while not connection.flow.write_paused:
            count, data = source.take(self._burst)
            if not count:
                break
            connection.write_chunk(data)
            self._burst = max(1, min(MAX_WRITE_EVENTS, WRITE_BYTES * count // len(data)))
            if self._lag is not None:
                self._write_lag(connection)

    def lagging(self, lag: Lag) -> None:
        """Written when the connection takes something: told at once, it could not be read."""
        self._lag = lag
        if self._connection is not None and not self._connection.flow.write_paused:
            self._connection.loop.call_soon(self.wake)

    def ended(self, error: PenstockError) -> None:
        connection, source = self._connection, self._source
        self._leave()
        if connection is None or source is None:
            return
        connection.write_chunk(self._form.encode("error", typed_error(error, **source.ids())))
        connection.end_stream()
        if connection.flow.write_paused:
            connection.loop.call_later(END_GRACE_S, connection.transport.abort)

    # -- called by the connection --------------------------------------------------------------

    def pause(self) -> None:
        """Nothing is taken while the connection is full; `wake` looks by itself."""

    def resume(self) -> None:
        self.wake()

    def disconnected(self) -> None:
        source = self._source
        self._leave()
        if source is not None:
            source.close()

    # -- within --------------------------------------------------------------------------------

    def _open(self, outcome: FeedSource | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            self._reply.send_error(outcome)
            return
        if not self._reply.is_wanted():
            outcome.close()
            return
        self._source = outcome
        connection = self._connection = self._reply.open_stream(self._form.head)
        connection.stream = self
        connection.write_chunk(outcome.opening(self._form))
        if connection.is_half_closed:
            # Nothing else would ever tell that this client is gone.
            self.disconnected()
            connection.end_stream()
            return
        self._set_heartbeat(connection)
        probe_when_idle(connection.transport, self._look_s)
        self._next_look = connection.loop.call_later(self._look_s, self._look)
        self.wake()

    def _leave(self) -> None:
        self._connection = self._source = None
        for timer in (self._timer, self._next_look):
            if timer is not None:
                timer.cancel()

    def _look(self) -> None:
        """A reader that cannot be reached, now and the last time, is gone: nothing would tell."""
        connection = self._connection
        if connection is None:
            return
        was_doubtful, self._is_doubtful = self._is_doubtful, is_unreachable(connection.transport)
        if was_doubtful and self._is_doubtful:
            connection.transport.abort()
        else:
            self._next_look = connection.loop.call_later(self._look_s, self._look)

    def _write_lag(self, connection: HttpConnection) -> None:
        lag, self._lag = self._lag, None
        if lag is not None:
            connection.write_chunk(self._form.encode("lag", lag_answer(lag)))

    def _beat(self) -> None:
        connection = self._connection
        if connection is not None:
            if not connection.flow.write_paused:
                connection.write_chunk(self._form.heartbeat)
            self._set_heartbeat(connection)

    def _set_heartbeat(self, connection: HttpConnection) -> None:
        if self._heartbeat_ms:
            self._timer = connection.loop.call_later(self._heartbeat_ms / 1000, self._beat)


def get_subscribe(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params()
    feed = _feed(dispatch, request, params, reply)
    depth = whole_number(params, "event_queue_depth")
    command = subscribe_of(path, depth, truth(params, "lag"))
    reply.when_first(partial(dispatch.engine.streams.subscribe, command, feed, feed.subscribed))


def get_watch(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params()
    feed = _feed(dispatch, request, params, reply)
    include = [text for each in request.every("include") for text in each.split(",") if text]
    since = whole_number(params, "since_version")
    command = watch_of(path, params.get("key"), params.get("prefix"), include, since)
    reply.when_first(partial(dispatch.engine.caches.watch, command, feed, feed.watched))


def _feed(
    dispatch: RequestDispatch, request: Request, params: dict[str, str], reply: Reply
) -> EventFeed:
    if request.method == b"HEAD":
        raise MethodNotAllowed("GET")
    if dispatch.is_draining:
        raise Unavailable("the broker is stopping")
    wanted = params.get("format") or ("sse" if request.notes.wants_events else "ndjson")
    if wanted not in ("sse", "ndjson"):
        raise InvalidArgument("format must be ndjson or sse")
    form = SSE if wanted == "sse" else NDJSON
    heartbeat_ms = whole_number(params, "heartbeat_ms")
    if heartbeat_ms is None:
        heartbeat_ms = SSE_HEARTBEAT_MS if form.is_sse else 0
    if not 0 <= heartbeat_ms <= MAX_HEARTBEAT_MS:
        raise InvalidArgument(f"heartbeat_ms must be 0 to {MAX_HEARTBEAT_MS}")
    return EventFeed(
        reply, form, heartbeat_ms and max(heartbeat_ms, MIN_HEARTBEAT_MS), dispatch.ws_ping_s
    )
