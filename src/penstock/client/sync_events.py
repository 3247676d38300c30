# Generated from aio_events.py by scripts/generate_sync_client.py: edit that, run this.
"""Durable streams for blocking code: events that are acked or read again, and a producer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self

from penstock.client import positions, streams
from penstock.client.calls import Payload, bytes_of, list_of
from penstock.client.connection import heartbeat_of
from penstock.client.deliveries import DEFAULT_LEASE_MS
from penstock.client.feeds import EventRef, ReceivedEvent, ReceivedEventBuffer, shown
from penstock.client.positions import HandledEvents
from penstock.client.streams import Start
from penstock.client.sync_feeds import LineStream
from penstock.client.sync_waiting import pause
from penstock.model.errors import FailedPrecondition, InvalidArgument, PenstockError
from penstock.model.tenancy import Path

if TYPE_CHECKING:
    from penstock.client.sync import Client
    from penstock.client.sync_handles import Sender
    from penstock.client.sync_socket import Socket

FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 2.0
LAST_EVENTS_S = 5.0
"""How long a subscription that is closed waits for events that the broker had already sent."""


class StreamEvent:
    """An event of a durable stream. `attempt` counts its deliveries; `last_error` says why the one
    before failed. Events of a subscription without a name cannot be acked, and have attempt 0."""

    __slots__ = ("_once", "_ref", "_sender", "attempt", "last_error", "offset", "payload")

    def __init__(self, sender: Sender, once: HandledEvents | None, received: ReceivedEvent) -> None:
        self.payload = received.payload
        self.offset = received.offset
        self.attempt = received.attempt
        self.last_error = received.last_error
        self._sender = sender
        self._once = once
        self._ref = received

    def __repr__(self) -> str:
        kind, payload = type(self).__name__, shown(self.payload)
        return f"{kind}(offset={self.offset}, attempt={self.attempt}, payload={payload})"

    @property
    def ref(self) -> EventRef:
        """All that ack, nack, release and extend need."""
        return self._ref

    def ack(self) -> None:
        """Finishes the event: it does not come again. Raises InvalidArgument without a name."""
        if not self._ref.name:
            raise InvalidArgument(
                "this subscription has no name, so its events are not acked: subscribe with a name"
            )
        if self._once is not None:
            self._once.add(self.offset)
        self._sender.send(streams.ack_event(self._ref))

    def nack(self, reason: str = "", *, delay_ms: int | None = None) -> None:
        """Reports that the event could not be handled. It comes again after `delay_ms`, or after
        the broker's backoff."""
        self._sender.send(streams.nack_event(self._ref, reason, delay_ms=delay_ms))

    def extend(self, lease_ms: int = DEFAULT_LEASE_MS) -> None:
        """Extends the lease: it ends `lease_ms` from now."""
        self._sender.send(streams.extend_event(self._ref, lease_ms))


class Events(LineStream[StreamEvent]):
    """The events of a durable stream. Iterate over it in a `with`.

    With a name, ack every event: what is not acked comes again. Those who use the same name share
    its events. If the connection is lost, subscribe again with the same name to go on. With `once`,
    events that were handled before are acked and left out, and `ack` remembers the event first.
    With `stream_id` it raises OutOfRange if the stream is another one, created later under the same
    name.

    When it is closed, events that arrived and were not taken go back to the others of the name. If
    the client has several addresses, it goes on at the next owner, without losing an event.
    """

    goes_on = True

    def __init__(
        self,
        client: Client,
        path: Path,
        name: str | None,
        start: Start | None,
        owner: str | None,
        lease_ms: int,
        prefetch: int,
        once: HandledEvents | None,
        wait_s: float | None,
        stream_id: int | None,
    ) -> None:
        heartbeat_ms = heartbeat_of(wait_s)
        self._once = once
        self._is_leaving = False
        self._has_begun = False
        self._stream = path
        self._events = ReceivedEventBuffer(
            path, lambda received: StreamEvent(client, once, received)
        )
        numbers = {"lease_ms": lease_ms, "prefetch": prefetch} if name is not None else {}
        self._path_from = partial(
            streams.subscribe_path,
            path,
            name=name,
            owner=owner,
            heartbeat_ms=heartbeat_ms,
            **numbers,
        )
        self._start = start
        expected = positions.expected_id(once, path, stream_id)
        url_path = self._path_from(start=streams.start_text(start), stream_id=expected)
        super().__init__(client, url_path, self._events, wait_s, heartbeat_ms)

    @property
    def subscription_id(self) -> str:
        """Empty until the stream is open."""
        return self._events.subscription_id

    @property
    def stream_id(self) -> int | None:
        """The id of the stream, which a later one of the same name does not have. None until it is
        open. Keep it with offsets of your own."""
        return self._events.stream_id

    def open(self) -> Self:
        super().open()
        if not self._has_begun and not self.ended:
            try:
                positions.begin(self._once, self._stream, self.stream_id)
            except BaseException:
                self.close()
                raise
            self._has_begun = True
        return self

    def _current_path(self) -> str:
        """Goes on in the very stream that it began with: never in one of the same name."""
        events = self._events
        if events.stream_id is None:
            return self._path
        start = self._start if events.name else events.next_offset
        return self._path_from(start=streams.start_text(start), stream_id=events.stream_id)

    def close(self) -> None:
        """Ends the subscription, also for another thread that is waiting for its next event. Events
        of a name that were not taken are released, those that the broker had sent already too."""
        if self._is_leaving or self.ended or not self._events.name:
            super().close()
            return
        self._is_leaving = True
        if not self._is_filling:
            self._drain(LAST_EVENTS_S)
        super().close()
        left = [event.ref for event in self._events.take_all()]
        if left:
            # What cannot be released comes again when its lease ends.
            with suppress(PenstockError):
                self._client.send(streams.release_events(left))

    def poll(self) -> StreamEvent | None:
        while True:
            event = super().poll()
            if event is None or self._once is None or not self._once.has(event.offset):
                return event
            # Refused if its lease has ended: it comes again, or has gone to another.
            with suppress(FailedPrecondition):
                event.ack()


class Producer:
    """Publishes to a durable stream, each event once: it numbers its publishes, and repeats one
    whose answer did not come.

    One thread at a time may use it. After an error that it raises, call `publish` again with the
    same payload, or give up this producer: until that is repeated, its number is taken.
    `next_sequence` counts the publishes that were answered. A program that goes on with the same
    `producer_id` after a restart passes the number it had reached: `stream.next_sequence(id)`.
    """

    def __init__(
        self,
        sender: Client | Socket,
        path: Path,
        producer_id: str | None,
        next_sequence: int,
        retry_s: float,
    ) -> None:
        self.producer_id = producer_id or secrets.token_hex(12)
        self.next_sequence = next_sequence
        self._sender = sender
        self._path = path
        self._retry_s = retry_s

    def __repr__(self) -> str:
        place = f"{'/'.join(self._path)!r}, {self.producer_id!r}"
        return f"{type(self).__name__}({place}, next_sequence={self.next_sequence})"

    def publish(self, payload: Payload) -> int | None:
        """Publishes one event and returns its offset. Repeats the publish while the broker cannot
        be reached or is overloaded, up to `retry_s` seconds."""
        return self.publish_batch([payload])

    def publish_batch(self, payloads: Iterable[Payload]) -> int | None:
        """Publishes events as one step and returns the offset of the first."""
        events = [bytes_of(payload) for payload in list_of(payloads, "payloads")]
        until = time.monotonic() + self._retry_s
        wait_s = FIRST_RETRY_S
        while True:
            call = streams.publish_batch(
                self._path, events, producer_id=self.producer_id, sequence=self.next_sequence
            )
            try:
                offset = self._sender.send(call)
            except PenstockError as error:
                is_over = self._sender.is_closed or time.monotonic() + wait_s > until
                if not error.retryable or is_over:
                    raise
                pause(wait_s)
                wait_s = min(2 * wait_s, LONGEST_RETRY_S)
            else:
                self.next_sequence += 1
                return offset
