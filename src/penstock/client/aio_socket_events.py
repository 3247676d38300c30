"""Durable streams on a WebSocket for asyncio: events that are acked or read again.

They are the same events as over HTTP, and share the socket's connection. When it breaks, they go on
with the next one: see `socket_event_channels`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Self, TypeVar

from penstock.client import positions, streams
from penstock.client.aio_events import AsyncStreamEvent
from penstock.client.aio_socket_feeds import AsyncSocketFeed
from penstock.client.calls import Call
from penstock.client.feeds import ReceivedEvent
from penstock.client.positions import HandledEvents
from penstock.client.socket_event_channels import DurableChannel, NamedEventsChannel, StartedChannel
from penstock.client.streams import Start
from penstock.model.errors import FailedPrecondition, PenstockError
from penstock.model.tenancy import Path

if TYPE_CHECKING:
    from penstock.client.aio_socket import AsyncSocket

T = TypeVar("T")


class AsyncSocketEvents(AsyncSocketFeed[AsyncStreamEvent]):
    """The events of a durable stream. Iterate over it in an `async with`.

    After a reconnect it goes on: without a name behind the last event, so that none is missing and
    none comes twice; with a name as the same owner, so that every event comes until it is acked. It
    raises OutOfRange if the stream does not keep the next event any more, or if the stream was
    deleted and created again. With `resume=False` it
    raises Unavailable when the connection breaks. With `once`, events that were handled before are
    acked and left out, and `ack` remembers the event first.
    """

    def __init__(
        self,
        socket: AsyncSocket,
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
        self._events: DurableChannel[AsyncStreamEvent]
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
        self._settling = AsyncSettling(socket, self._events)
        super().__init__(socket, self._events, wait_s)

    def _event(self, received: ReceivedEvent) -> AsyncStreamEvent:
        return AsyncStreamEvent(self._settling, self._once, received)

    @property
    def subscription_id(self) -> str:
        """Empty while it is not open. Another one after a reconnect."""
        return self._events.id

    @property
    def stream_id(self) -> int | None:
        """The id of the stream, which a later one of the same name does not have. None while it is
        not open. Keep it with offsets of your own."""
        return self._events.stream_id

    async def open(self) -> Self:
        await super().open()
        if not self._has_begun and not self.ended:
            try:
                positions.begin(self._once, self._events.path, self.stream_id)
            except BaseException:
                await self.close()
                raise
            self._has_begun = True
        return self

    async def close(self) -> None:
        """Ends it, also for another task that is waiting for its next event. Events of a
        name that were not taken go back to the others, without counting an attempt."""
        if self.ended or not isinstance(self._events, NamedEventsChannel):
            await super().close()
            return
        self.ended = True
        left = [*self._taken, *await self._socket.leave_channel(self._events)]
        self._taken.clear()
        refs = [event.ref for event in left if isinstance(event, AsyncStreamEvent)]
        if refs:
            # What cannot be released comes again when its lease ends.
            with suppress(PenstockError):
                await self._socket.client.send(streams.release_events(refs))

    async def poll(self) -> AsyncStreamEvent | None:
        while True:
            event = await super().poll()
            if event is None or self._once is None or not self._once.has(event.offset):
                return event
            # Refused if its lease has ended: it comes again, or has gone to another.
            with suppress(FailedPrecondition):
                await event.ack()


class AsyncSettling:
    """Sends the acks of one subscription: over the socket while it is open there or will be again,
    otherwise over HTTP."""

    def __init__(self, socket: AsyncSocket, channel: DurableChannel[AsyncStreamEvent]) -> None:
        self._socket = socket
        self._channel = channel

    async def send(self, call: Call[T]) -> T:
        return await self._socket.settle(self._channel, call)
