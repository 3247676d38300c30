"""One channel of a WebSocket: a subscription or a watch, whose events leave in turns.

Invariant of a named subscription: deliveries wait here until there is room for their frames. While
more than a frame's worth of them waits, or the client has paused the subscription, the consumer is
paused, so that the engine gives the next ones to others. Must not know how deliveries are decided.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from penstock.api.consumers import Consumer
from penstock.model.errors import NotFound, PenstockError, Unavailable
from penstock.model.item import EventItem
from penstock.model.streams import SubscribeNamed
from penstock.model.tenancy import Path
from penstock.server.access import HandlerNeeds
from penstock.server.http.responses import encode_json, subscribe_error
from penstock.server.named_events import encode_frames
from penstock.server.websocket.events import BurstSize

SUBSCRIBE = HandlerNeeds("subscribe", "stream")
WATCH = HandlerNeeds("cache_read", "cache")

FIRST_FRAME_EVENTS = 64
"""Events in the first frame of a channel, before it is known how large they are."""


class Outlet(Protocol):
    """The part of a connection that channels need."""

    is_binary: bool

    def has_room(self) -> bool: ...

    def send_text(self, payload: bytes) -> None: ...

    def send_binary(self, payload: bytes) -> None: ...

    def schedule_turn(self) -> None: ...


class ChannelOwner(Protocol):
    """The channels of a connection, as one of them sees them."""

    outlet: Outlet

    def schedule(self, channel: Channel) -> None: ...

    def drop(self, channel: Channel) -> None: ...


class Channel:
    """The sink of a subscription or watch of the stream or cache `path`. It ends when its principal
    loses the permission that it `needs`. `is_ready` says that it waits for its turn to send,
    `is_paused` that the client wants no events for now. `_end` is the error that ended it before
    its reply was sent."""

    def __init__(self, channels: ChannelOwner, needs: HandlerNeeds, path: Path) -> None:
        self._channels = channels
        self.needs = needs
        self.path = path
        self._outlet = channels.outlet
        self.id = ""
        self.is_open = False
        self.is_ready = False
        self.is_paused = False
        self._burst = BurstSize(FIRST_FRAME_EVENTS)
        self._end: PenstockError | None = None

    def open(self) -> None:
        """Lets events leave: the reply that names the channel has left."""
        self.is_open = True
        if self._end is not None:
            self.ended(self._end)
        else:
            self.wake()

    def wake(self) -> None:
        if self.is_open and not self.is_paused:
            self._channels.schedule(self)

    def pause(self) -> None:
        """Sends nothing more until `resume`. The engine's own buffer, or its pause, bounds what
        waits meanwhile."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self.wake()

    def ended(self, error: PenstockError) -> None:
        if not self.is_open:
            self._end = error
            return
        self._channels.drop(self)
        self.send_end(error)

    def send_end(self, error: PenstockError) -> None:
        raise NotImplementedError

    def take(self) -> bool:
        """Sends a frame of events. Returns False when there are no more."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


MAX_WAITING = 256
"""Deliveries that wait for room before the consumer is paused."""


class NamedChannel(Channel):
    """The sink of a consumer of a stream."""

    consumer: Consumer

    def __init__(self, channels: ChannelOwner, command: SubscribeNamed) -> None:
        super().__init__(channels, SUBSCRIBE, command.path)
        self.command = command
        self._waiting: deque[EventItem] = deque()
        self._is_full = False

    def write(self, items: list[EventItem]) -> None:
        was_empty = not self._waiting
        self._waiting.extend(items)
        if len(self._waiting) > MAX_WAITING and not self._is_full:
            self._is_full = True
            self.consumer.pause()
        if was_empty:
            self.wake()

    def end(self, reason: str) -> None:
        self.ended(NotFound(reason) if self.consumer.closed else Unavailable(reason))

    def take(self) -> bool:
        waiting = self._waiting
        some = [waiting.popleft() for _ in range(min(len(waiting), self._burst.events))]
        nbytes = 0
        for frame in encode_frames(self.id, some):
            self._outlet.send_text(frame)
            nbytes += len(frame)
        if some:
            self._burst.learn(len(some), nbytes)
        if self._is_full and not waiting:
            self._is_full = False
            self.consumer.resume()
        return bool(waiting)

    def pause(self) -> None:
        super().pause()
        self._is_full = True
        self.consumer.pause()

    def send_end(self, error: PenstockError) -> None:
        self._outlet.send_text(encode_json(subscribe_error(error, subscription_id=self.id)))

    def take_all(self) -> list[EventItem]:
        """Returns the deliveries that have not left, which then never do."""
        left = list(self._waiting)
        self._waiting.clear()
        return left

    def close(self) -> None:
        self.consumer.close()
