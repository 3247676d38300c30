# Generated from aio_socket_events.py by scripts/generate_sync_client.py: edit that, run this.
"""Durable streams on a WebSocket for blocking code: events that are acked or read again.

They are the same events as over HTTP, and share the socket's connection. When it breaks, they go on
with the next one: see `socket_event_channels`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Self, TypeVar

from penstock.client import positions, streams
from penstock.client.calls import Call
from penstock.client.feeds import ReceivedEvent
from penstock.client.positions import HandledEvents
from penstock.client.socket_event_channels import DurableChannel, NamedEventsChannel, StartedChannel
from penstock.client.streams import Start
from penstock.client.sync_events import StreamEvent
from penstock.client.sync_socket_feeds import SocketFeed
from penstock.model.errors import FailedPrecondition, PenstockError
from penstock.model.tenancy import Path

if TYPE_CHECKING:
    from penstock.client.sync_socket import Socket

T = TypeVar("T")


class SocketEvents(SocketFeed[StreamEvent]):
    """The events of a durable stream. Iterate over it in a `with`.

    After a reconnect it goes on: without a name behind the last event, so that none is missing and
    none comes twice; with a name as the same owner, so that every event comes until it is acked. It
    raises OutOfRange if the stream does not keep the next event any more, or if the stream was
    deleted and created again. With `resume=False` it
    raises Unavailable when the connection breaks. With `once`, events that were handled before are
    acked and left out, and `ack` remembers the event first.
    """

    def __init__(
        self,
        socket: Socket,
        path: Path,
        name: str | None,
        start: Start | None,
        owner: str | None,
        lease_ms: int,
        prefetch: int,
        once: HandledEvents | None,
        wait_s: float | None,
        stream_id: int | None,
        *,
        resume: bool,
    ) -> None:
        self._once = once
        self._has_begun = False
        wanted_id = positions.expected_id(once, path, stream_id)
        self._events: DurableChannel[StreamEvent]
        begin = streams.start_text(start)
        if name is None:
            self._events = StartedChannel(
                path, begin, self._event, resumes=resume, stream_id=wanted_id
            )
        else:
            self._events = NamedEventsChannel(
                path,
                name,
                begin,
                owner,
                lease_ms,
                prefetch,
                self._event,
                resumes=resume,
                stream_id=wanted_id,
            )
        self._settling = Settling(socket, self._events)
        super().__init__(socket, self._events, wait_s)

    def _event(self, received: ReceivedEvent) -> StreamEvent:
        return StreamEvent(self._settling, self._once, received)

    @property
    def subscription_id(self) -> str:
        """Empty while it is not open. Another one after a reconnect."""
        return self._events.id

    @property
    def stream_id(self) -> int | None:
        """The id of the stream, which a later one of the same name does not have. None while it is
        not open. Keep it with offsets of your own."""
        return self._events.stream_id

    def open(self) -> Self:
        super().open()
        if not self._has_begun and not self.ended:
            try:
                positions.begin(self._once, self._events.path, self.stream_id)
            except BaseException:
                self.close()
                raise
            self._has_begun = True
        return self

    def close(self) -> None:
        """Ends it, also for another thread that is waiting for its next event. Events of a
        name that were not taken go back to the others, without counting an attempt."""
        if self.ended or not isinstance(self._events, NamedEventsChannel):
            super().close()
            return
        self.ended = True
        left = [*self._taken, *self._socket.leave_channel(self._events)]
        self._taken.clear()
        refs = [event.ref for event in left if isinstance(event, StreamEvent)]
        if refs:
            # What cannot be released comes again when its lease ends.
            with suppress(PenstockError):
                self._socket.client.send(streams.release_events(refs))

    def poll(self) -> StreamEvent | None:
        while True:
            event = super().poll()
            if event is None or self._once is None or not self._once.has(event.offset):
                return event
            # Refused if its lease has ended: it comes again, or has gone to another.
            with suppress(FailedPrecondition):
                event.ack()


class Settling:
    """Sends the acks of one subscription: over the socket while it is open there or will be again,
    otherwise over HTTP."""

    def __init__(self, socket: Socket, channel: DurableChannel[StreamEvent]) -> None:
        self._socket = socket
        self._channel = channel

    def send(self, call: Call[T]) -> T:
        return self._socket.settle(self._channel, call)
