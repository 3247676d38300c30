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

from penstock.engine.protocol import Subscription, WatchHandle
from penstock.model.errors import InvalidArgument, MethodNotAllowed, PenstockError, Unavailable
from penstock.model.limits import KIB
from penstock.model.streams import Lag
from penstock.model.tenancy import Path
from penstock.server.felix.answers import Ok, Subscribed, lag_answer
from penstock.server.felix.events import EventLines, encode_watch
from penstock.server.felix.forms import subscribe_of, watch_of
from penstock.server.felix.reach import is_unreachable, probe_when_idle
from penstock.server.hub import Hub
from penstock.server.replies import CLOSE, NDJSON_TYPE, encode_json, typed_error
from penstock.server.requests import Request, truth, whole_number

if TYPE_CHECKING:
    from penstock.server.lane import Lane
    from penstock.server.turns import Reply

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


class Form(msgspec.Struct, frozen=True):
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
NDJSON = Form(NDJSON_TYPE + CLOSE, b"\n", is_sse=False)
SSE = Form(_SSE_TYPE + CLOSE, b":\n\n", is_sse=True)


class Tap(Protocol):
    """What a feed takes from: a subscription or a watch."""

    def opening(self, form: Form) -> bytes:
        """The first line."""
        ...

    def take(self, max_events: int) -> tuple[int, bytes]:
        """How many there were, and all of them as bytes."""
        ...

    def ids(self) -> dict[str, str]: ...

    def close(self) -> None: ...


class SubscriptionTap:
    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._lines: EventLines

    def opening(self, form: Form) -> bytes:
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


class WatchTap:
    def __init__(self, handle: WatchHandle) -> None:
        self._handle = handle
        self._form = NDJSON

    def opening(self, form: Form) -> bytes:
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


class Feed:
    """Sink of a subscription or a watch, and stream of a connection."""

    def __init__(self, reply: Reply, form: Form, heartbeat_ms: int, look_s: float) -> None:
        self._reply = reply
        self._form = form
        self._heartbeat_ms = heartbeat_ms
        self._look_s = look_s
        self._lane: Lane | None = None
        self._tap: Tap | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._is_doubtful = False
        self._lag: Lag | None = None
        self._burst = 1

    # -- called by the engine ------------------------------------------------------------------

    def subscribed(self, outcome: Subscription | PenstockError) -> None:
        self._open(outcome if isinstance(outcome, PenstockError) else SubscriptionTap(outcome))

    def watched(self, outcome: WatchHandle | PenstockError) -> None:
        self._open(outcome if isinstance(outcome, PenstockError) else WatchTap(outcome))

    def wake(self) -> None:
        lane, tap = self._lane, self._tap
        if lane is None or tap is None:
            return
        if self._lag is not None:
            self._write_lag(lane)
        while not lane.flow.write_paused:
            count, data = tap.take(self._burst)
            if not count:
                break
            lane.write_chunk(data)
            self._burst = max(1, min(MAX_WRITE_EVENTS, WRITE_BYTES * count // len(data)))
            if self._lag is not None:
                self._write_lag(lane)

    def lagging(self, lag: Lag) -> None:
        """Written when the connection takes something: told at once, it could not be read."""
        self._lag = lag
        if self._lane is not None and not self._lane.flow.write_paused:
            self._lane.loop.call_soon(self.wake)

    def ended(self, error: PenstockError) -> None:
        lane, tap = self._lane, self._tap
        self._leave()
        if lane is None or tap is None:
            return
        lane.write_chunk(self._form.encode("error", typed_error(error, **tap.ids())))
        lane.end_stream()
        if lane.flow.write_paused:
            lane.loop.call_later(END_GRACE_S, lane.transport.abort)

    # -- called by the connection --------------------------------------------------------------

    def pause(self) -> None:
        """Nothing is taken while the connection is full; `wake` looks by itself."""

    def resume(self) -> None:
        self.wake()

    def disconnected(self) -> None:
        tap = self._tap
        self._leave()
        if tap is not None:
            tap.close()

    # -- within --------------------------------------------------------------------------------

    def _open(self, outcome: Tap | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            self._reply.send_error(outcome)
            return
        if not self._reply.is_wanted():
            outcome.close()
            return
        self._tap = outcome
        lane = self._lane = self._reply.open_stream(self._form.head)
        lane.stream = self
        lane.write_chunk(outcome.opening(self._form))
        if lane.is_half_closed:
            # Nothing else would ever tell that this client is gone.
            self.disconnected()
            lane.end_stream()
            return
        self._set_heartbeat(lane)
        probe_when_idle(lane.transport, self._look_s)
        self._next_look = lane.loop.call_later(self._look_s, self._look)
        self.wake()

    def _leave(self) -> None:
        self._lane = self._tap = None
        for timer in (self._timer, self._next_look):
            if timer is not None:
                timer.cancel()

    def _look(self) -> None:
        """A reader that cannot be reached, now and the last time, is gone: nothing would tell."""
        lane = self._lane
        if lane is None:
            return
        was_doubtful, self._is_doubtful = self._is_doubtful, is_unreachable(lane.transport)
        if was_doubtful and self._is_doubtful:
            lane.transport.abort()
        else:
            self._next_look = lane.loop.call_later(self._look_s, self._look)

    def _write_lag(self, lane: Lane) -> None:
        lag, self._lag = self._lag, None
        if lag is not None:
            lane.write_chunk(self._form.encode("lag", lag_answer(lag)))

    def _beat(self) -> None:
        lane = self._lane
        if lane is not None:
            if not lane.flow.write_paused:
                lane.write_chunk(self._form.heartbeat)
            self._set_heartbeat(lane)

    def _set_heartbeat(self, lane: Lane) -> None:
        if self._heartbeat_ms:
            self._timer = lane.loop.call_later(self._heartbeat_ms / 1000, self._beat)


def get_subscribe(path: Path, hub: Hub, request: Request, reply: Reply) -> None:
    params = request.params()
    feed = _feed(hub, request, params, reply)
    depth = whole_number(params, "event_queue_depth")
    command = subscribe_of(path, depth, truth(params, "lag"))
    reply.when_first(partial(hub.engine.streams.subscribe, command, feed, feed.subscribed))


def get_watch(path: Path, hub: Hub, request: Request, reply: Reply) -> None:
    params = request.params()
    feed = _feed(hub, request, params, reply)
    include = [text for text in params.get("include", "").split(",") if text]
    since = whole_number(params, "since_version")
    command = watch_of(path, params.get("key"), params.get("prefix"), include, since)
    reply.when_first(partial(hub.engine.caches.watch, command, feed, feed.watched))


def _feed(hub: Hub, request: Request, params: dict[str, str], reply: Reply) -> Feed:
    if request.method == b"HEAD":
        raise MethodNotAllowed("GET")
    if hub.is_draining:
        raise Unavailable("the broker is stopping")
    wanted = params.get("format") or ("sse" if request.wants_events else "ndjson")
    if wanted not in ("sse", "ndjson"):
        raise InvalidArgument("format must be ndjson or sse")
    form = SSE if wanted == "sse" else NDJSON
    heartbeat_ms = whole_number(params, "heartbeat_ms")
    if heartbeat_ms is None:
        heartbeat_ms = SSE_HEARTBEAT_MS if form.is_sse else 0
    if not 0 <= heartbeat_ms <= MAX_HEARTBEAT_MS:
        raise InvalidArgument(f"heartbeat_ms must be 0 to {MAX_HEARTBEAT_MS}")
    return Feed(reply, form, heartbeat_ms and max(heartbeat_ms, MIN_HEARTBEAT_MS), hub.ws_ping_s)
