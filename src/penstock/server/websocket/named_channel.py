"""A named subscription on a WebSocket: deliveries wait here until there is room for their frames.

Invariant: while more than a frame's worth of deliveries waits, or the client has paused the
subscription, the consumer is paused, so that the engine gives the next ones to others. Must not
know how deliveries are decided.
"""

from __future__ import annotations

from collections import deque

from penstock.api.consumers import Consumer
from penstock.model.errors import NotFound, PenstockError, Unavailable
from penstock.model.item import EventItem
from penstock.model.streams import SubscribeNamed
from penstock.server.http.responses import encode_json, subscribe_error
from penstock.server.named_events import encode_frames
from penstock.server.websocket.channel import SUBSCRIBE, Channel, ChannelOwner

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
