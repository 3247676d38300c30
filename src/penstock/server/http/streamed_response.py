"""A response that goes on until one side ends it: what a consumer's stream and a feed share.

Invariants: the head leaves at once. A source is closed when its reader is gone, and a reader that
has closed its side before the first byte is gone. Heartbeats are written only while the connection
accepts bytes. Must not know what a source gives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from penstock.model.errors import MethodNotAllowed, PenstockError, PermissionDenied, Unavailable

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.dispatch import RequestDispatch
    from penstock.server.http.open_streams import OpenStreams
    from penstock.server.http.requests import Request
    from penstock.server.http.response_order import Reply

MIN_HEARTBEAT_MS = 100

Guard = Callable[[], None] | None
"""Raises PermissionDenied once the reader may no longer have the stream."""


class Source(Protocol):
    def close(self) -> None: ...


S = TypeVar("S", bound=Source)


class StreamedResponse(Generic[S]):
    """The `stream` of a connection. `_connection` and `_source` are None before it begins and after
    it has ended. `heartbeat_ms` 0: there are no heartbeats."""

    is_answer = False

    def __init__(
        self,
        reply: Reply,
        guard: Guard,
        head: bytes,
        heartbeat_ms: int,
        heartbeat: bytes = b"\n",
    ) -> None:
        self._reply = reply
        self._head = head
        self._heartbeat = heartbeat
        self._heartbeat_s = max(heartbeat_ms, MIN_HEARTBEAT_MS) / 1000 if heartbeat_ms else 0
        self._connection: HttpConnection | None = None
        self._source: S | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._guarded: OpenStreams | None = None
        self._guard = guard

    # -- for subclasses ------------------------------------------------------------------------

    def send_opening(self, connection: HttpConnection, source: S) -> None:
        """Writes the first bytes after the head, if there are any."""

    def begin(self, connection: HttpConnection, source: S) -> None:
        """Starts to take from the source, or lets it give."""
        raise NotImplementedError

    # -- called by the engine ------------------------------------------------------------------

    def opened(self, outcome: S | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            self._reply.send_error(outcome)
            return
        if not self._reply.is_wanted():
            outcome.close()
            return
        if self._guard is not None:
            try:
                # The rules may have changed while the engine opened it.
                self._guard()
            except PermissionDenied as error:
                outcome.close()
                self._reply.send_error(error)
                return
        self._source = outcome
        connection = self._connection = self._reply.open_stream(self._head)
        connection.stream = self
        if self._guard is not None:
            self._guarded = connection.dispatch.open_streams
            self._guarded.add(self)
        self.send_opening(connection, outcome)
        if connection.is_half_closed:
            # Nothing else would ever tell that this client is gone.
            self.disconnected()
            connection.end_stream()
            return
        self._schedule_heartbeat(connection)
        self.begin(connection, outcome)

    # -- called by the connection --------------------------------------------------------------

    def pause(self) -> None:
        """Called when the connection is above its high-water mark."""

    def resume(self) -> None:
        """Called when the connection accepts bytes again."""

    def half_closed(self) -> bool:
        """Called when the client sends nothing more. Returns whether the connection stays open."""
        return False

    def disconnected(self) -> None:
        """Called when the connection is gone."""
        source = self._source
        self.detach()
        if source is not None:
            source.close()

    def detach(self) -> None:
        """Forgets connection and source, and stops all timers."""
        self._connection = self._source = None
        if self._guarded is not None:
            self._guarded.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    # -- called when access rules change ---------------------------------------------------------

    def recheck(self) -> None:
        if self._guard is None or self._source is None:
            return
        try:
            self._guard()
        except PermissionDenied as error:
            self._source.close()
            self.refuse(error)

    def refuse(self, error: PermissionDenied) -> None:
        """Ends the stream. Its source is closed already."""
        raise NotImplementedError

    # -- heartbeats ----------------------------------------------------------------------------

    def beat(self) -> None:
        connection = self._connection
        if connection is not None:
            if not connection.flow.write_paused:
                connection.write_chunk(self._heartbeat)
            self._schedule_heartbeat(connection)

    def _schedule_heartbeat(self, connection: HttpConnection) -> None:
        if self._heartbeat_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = connection.loop.call_later(self._heartbeat_s, self.beat)


def check_streamable(dispatch: RequestDispatch, request: Request) -> None:
    """Raises for a request that cannot be answered by a stream: HEAD, or any while the broker
    stops."""
    if request.method == b"HEAD":
        raise MethodNotAllowed("GET")
    if dispatch.is_draining:
        raise Unavailable("the broker is stopping")
