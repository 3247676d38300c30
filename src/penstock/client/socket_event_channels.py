"""Subscriptions of durable streams on a WebSocket, with a start or with a name. No IO.

Invariants: one with a start gives every event once and in order, over any number of connections: it
begins again behind the last event that it has kept. One with a name joins again under its name and
owner, so that events that were delivered before can still be acked. Both end with OutOfRange if the
stream was deleted and created again meanwhile, since offsets then mean other events. Neither drops
what a slow reader has not taken: it pauses the broker, and what arrives nevertheless beyond a hard
limit is left to come again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.client.calls import SocketForm
from penstock.client.feeds import ReceivedEvent
from penstock.client.socket_channels import MAX_UNREAD_EVENTS, SocketChannel
from penstock.client.socket_frames import AnswerHead, NamedEventFrame
from penstock.client.streams import identity_members, stream_members
from penstock.model.limits import MIB
from penstock.model.tenancy import Path

PAUSE_EVENTS = 4096
PAUSE_BYTES = 4 * MIB
"""Events that the reader has not taken, beyond which the broker is asked to send no more until it
has. What is under way by then still arrives."""

T = TypeVar("T")

Make = Callable[[ReceivedEvent], T]


class DurableChannel(SocketChannel[T]):
    """`make` wraps an event for its client. `stream_id` is that of the stream, None until the
    caller or the broker has told it."""

    kind = "subscription"

    def __init__(
        self, path: Path, make: Make[T], *, resumes: bool, stream_id: int | None = None
    ) -> None:
        super().__init__(path, resumes=resumes, max_events=MAX_UNREAD_EVENTS)
        self.stream_id = stream_id
        self._make = make

    def request(self) -> SocketForm:
        members = stream_members(self.path) | identity_members(self.stream_id) | self.members()
        return SocketForm("subscribe", members, is_read=True)

    def members(self) -> dict[str, Any]:
        """Returns the members of the request that say where and how to begin."""
        raise NotImplementedError

    def end_request(self) -> SocketForm:
        return SocketForm("unsubscribe", {"subscription_id": self.id}, is_read=True)

    def open(self, answer: AnswerHead, version: int) -> None:
        self.id = answer.subscription_id
        self.stream_id = answer.stream_id
        self.was_open = True
        self.is_paused = self.must_reopen = False
        self.opened(None)

    def is_above_mark(self) -> bool:
        return len(self._unread) >= PAUSE_EVENTS or self._unread_bytes >= PAUSE_BYTES

    def _keep(self, event: ReceivedEvent) -> None:
        self._unread.append(self._make(event))
        self._unread_bytes += len(event.payload)


class StartedChannel(DurableChannel[T]):
    """A subscription that reads from a start on. `position` is the offset of the next event, None
    until the broker has told it."""

    def __init__(
        self,
        path: Path,
        start: str | None,
        make: Make[T],
        *,
        resumes: bool,
        stream_id: int | None = None,
    ) -> None:
        super().__init__(path, make, resumes=resumes, stream_id=stream_id)
        self.position: int | None = None
        self._start = start

    def members(self) -> dict[str, Any]:
        return {"start": self._start if self.position is None else self.position}

    def open(self, answer: AnswerHead, version: int) -> None:
        if self.position is None:
            self.position = answer.offset
        super().open(answer, version)

    def offer(self, offset: int, payloads: list[bytes]) -> None:
        """Keeps the events for which there is room, without those that it has had. If it leaves
        some out, it has to begin again at its position."""
        if self.is_closed:
            return
        at = offset if self.position is None else self.position
        for payload in payloads[max(0, at - offset) :]:
            if offset > at or not self._has_room(len(payload)):
                self.must_reopen = True
                break
            self._keep(ReceivedEvent(stream=self.path, offset=at, payload=payload))
            at += 1
        self.position = at
        self.wake()


class NamedEventsChannel(DurableChannel[T]):
    """A subscription that shares the events of a name. What it has no room for comes again when its
    lease ends."""

    def __init__(
        self,
        path: Path,
        name: str,
        start: str | None,
        owner: str | None,
        lease_ms: int,
        prefetch: int,
        make: Make[T],
        *,
        resumes: bool,
        stream_id: int | None = None,
    ) -> None:
        super().__init__(path, make, resumes=resumes, stream_id=stream_id)
        self.name = name
        # The same after a reconnect, or acks of events that came before it would be refused.
        self.owner = secrets.token_hex(8) if owner is None else owner
        self._members = {
            "name": name,
            "owner": self.owner,
            "start": start,
            "lease_ms": lease_ms,
            "prefetch": prefetch,
        }

    def members(self) -> dict[str, Any]:
        return self._members

    def open(self, answer: AnswerHead, version: int) -> None:
        # As the broker spells them, without blanks around.
        self.name, self.owner = answer.name or self.name, answer.owner or self.owner
        super().open(answer, version)

    def offer(self, frame: NamedEventFrame) -> None:
        if self.is_closed:
            return
        if not self._has_room(len(frame.payload)):
            self.dropped += 1
            return
        event = ReceivedEvent(
            stream=self.path,
            offset=frame.offset,
            name=self.name,
            owner=self.owner,
            delivery_id=frame.delivery_id,
            payload=frame.payload,
            attempt=frame.attempt,
            last_error=frame.last_error,
        )
        self._keep(event)
        self.wake()
