"""One channel of a WebSocket: a subscription or a watch, whose events leave in turns.

Must not know what the events are.
"""

from __future__ import annotations

from typing import Protocol

from penstock.model.errors import PenstockError
from penstock.model.tenancy import Path
from penstock.server.access import HandlerNeeds
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
