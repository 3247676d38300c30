"""Subscriptions and watches on a WebSocket: how each begins, begins again, and keeps events. No IO.

Invariants: a channel keeps a bounded number of events and bytes that its reader has not taken. What
does not fit is dropped and leaves a mark in its place, so that a slow reader neither delays other
channels nor takes memory. Events come out in order, and the error that ended a channel after them.
Subscriptions with a start or a name are in `socket_event_channels`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

from penstock.client.caches import cache_members
from penstock.client.calls import SocketForm, list_of
from penstock.client.socket_frames import AnswerHead
from penstock.client.streams import identity_members, stream_members
from penstock.model.caching import WatchEvent
from penstock.model.errors import PenstockError
from penstock.model.limits import MAX_WATCH_EVENTS, MIB
from penstock.model.tenancy import Path

MAX_UNREAD_EVENTS = 16_384
MAX_UNREAD_BYTES = 16 * MIB
"""Events of one subscription that its reader has not taken. As many again may be in its hands."""


class GapMark:
    """Takes the place of events that are missing."""


GAP: Final = GapMark()

T = TypeVar("T")


class SocketChannel(Generic[T]):
    """A subscription or watch. `id` is the broker's name for it, empty while it is not open.

    `news` is set when there is something to take. `is_closed`: the reader wants no more. `resumes`:
    it begins again on the next connection. `is_paused`: the broker was asked to send no more until
    the reader has taken what is here. `must_reopen`: events were left out that the broker sends
    when the channel begins again.
    """

    kind = ""

    def __init__(self, path: Path, *, resumes: bool, max_events: int) -> None:
        self.path = path
        self.resumes = resumes
        self.id = ""
        self.dropped = 0
        self.was_open = False
        self.is_closed = False
        self.is_paused = False
        self.must_reopen = False
        self.news = asyncio.Event()
        self._opening: asyncio.Future[None] | None = None
        self._max_events = max_events
        self._unread: deque[T | GapMark] = deque()
        self._unread_bytes = 0
        self._failure: PenstockError | None = None

    def opening(self) -> asyncio.Future[None]:
        """Returns what is done when the broker has answered for the first time. Fails with the
        error with which it refused."""
        self._opening = asyncio.get_running_loop().create_future()
        return self._opening

    def opened(self, error: PenstockError | None) -> None:
        """Called when the broker has answered."""
        opening, self._opening = self._opening, None
        if opening is None or opening.done():
            return
        if error is None:
            opening.set_result(None)
        else:
            opening.set_exception(error)

    def wake(self) -> None:
        """Called when there is something to take."""
        self.news.set()

    def request(self) -> SocketForm:
        """Returns the message that opens the channel, now and after every reconnect."""
        raise NotImplementedError

    def end_request(self) -> SocketForm:
        """Returns the message that ends the channel."""
        raise NotImplementedError

    def open(self, answer: AnswerHead, version: int) -> None:
        """Notes the answer to the request."""
        raise NotImplementedError

    def take(self) -> list[T | GapMark]:
        """Returns all that can be read. After the last, raises the error that ended the channel."""
        if not self._unread and self._failure is not None:
            raise self._failure
        taken = list(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        return taken

    def has_news(self) -> bool:
        """Tells whether `take` has something to return or to raise."""
        return bool(self._unread) or self._failure is not None or self.is_closed

    def unread(self) -> int:
        return len(self._unread)

    def is_above_mark(self) -> bool:
        """Tells whether so much is unread that the broker should send no more for now."""
        return False

    def fail(self, error: PenstockError) -> None:
        """Ends the channel. What can be read stays."""
        self.id = ""
        self._failure = error
        self.opened(error)
        self.wake()

    def close(self) -> None:
        """Ends the channel for its reader, who takes no more."""
        self.is_closed = True
        self._unread.clear()
        self._unread_bytes = 0
        self.wake()

    def _has_room(self, nbytes: int) -> bool:
        """Returns whether an event fits. One that is too large for the limit fits when nothing else
        waits."""
        if len(self._unread) >= self._max_events:
            return False
        return not self._unread or self._unread_bytes + nbytes <= MAX_UNREAD_BYTES

    def _mark_gap(self) -> None:
        if not (self._unread and self._unread[-1] is GAP):
            self._unread.append(GAP)


class SubscriptionChannel(SocketChannel[bytes]):
    """A subscription of a stream. Each time it begins again, a gap marks the place. That of a
    durable stream begins again at its `position`, the offset of the next event, without a gap. It
    ends if a stream with another `stream_id` has the name by then."""

    kind = "subscription"

    def __init__(self, path: Path, event_queue_depth: int | None, *, resumes: bool) -> None:
        super().__init__(path, resumes=resumes, max_events=MAX_UNREAD_EVENTS)
        self.position: int | None = None
        self.stream_id: int | None = None
        self._event_queue_depth = event_queue_depth

    def request(self) -> SocketForm:
        members = stream_members(self.path) | {"event_queue_depth": self._event_queue_depth}
        if self.position is not None:
            members |= {"start": self.position, **identity_members(self.stream_id)}
        return SocketForm("subscribe", members, is_read=True)

    def end_request(self) -> SocketForm:
        return SocketForm("unsubscribe", {"subscription_id": self.id}, is_read=True)

    def open(self, answer: AnswerHead, version: int) -> None:
        self.id = answer.subscription_id
        if self.position is None:
            self.position, self.stream_id = answer.offset, answer.stream_id
            if self.was_open:
                self._mark_gap()
                self.wake()
        self.was_open = True
        self.opened(None)

    def offer(self, offset: int, payloads: list[bytes]) -> None:
        """Keeps events, and drops those for which there is no room."""
        if self.is_closed:
            return
        if offset >= 0:
            if self.position is not None and offset > self.position:
                # The broker had no room for the events in between.
                self._mark_gap()
            self.position = offset + len(payloads)
        for place, payload in enumerate(payloads):
            if not self._has_room(len(payload)):
                self.dropped += len(payloads) - place
                self._mark_gap()
                break
            self._unread.append(payload)
            self._unread_bytes += len(payload)
        self.wake()


class ChangesChannel(SocketChannel[WatchEvent]):
    """A watch of a cache. It begins again at the last version that it has seen: if the cache has
    changed since then, the broker sends a gap first."""

    kind = "watch"

    def __init__(
        self,
        path: Path,
        key: str | None,
        prefix: str | None,
        include: Iterable[str],
        since_version: int | None,
        *,
        resumes: bool,
    ) -> None:
        super().__init__(path, resumes=resumes, max_events=MAX_WATCH_EVENTS)
        self.version = 0
        self._members = {"key": key, "prefix": prefix, "include": list_of(include, "include")}
        self._seen = since_version

    def request(self) -> SocketForm:
        members: dict[str, Any] = cache_members(self.path) | self._members
        return SocketForm("cache_watch", members | {"since_version": self._seen}, is_read=True)

    def end_request(self) -> SocketForm:
        return SocketForm("cache_unwatch", {"watch_id": self.id}, is_read=True)

    def open(self, answer: AnswerHead, version: int) -> None:
        self.id = answer.watch_id
        if not self.was_open:
            self.version = version
        if self._seen is None:
            self._seen = version
        self.was_open = True
        self.opened(None)

    def offer(self, event: WatchEvent) -> None:
        """Keeps an event. Where there is no room, one gap stands for all that are missing."""
        if self.is_closed:
            return
        size = len(event.value) if event.value else 0
        if self._has_room(size):
            self._unread.append(event)
            self._unread_bytes += size
        else:
            self.dropped += 1
            self._unread.append(WatchEvent("gap", event.version, from_version=self._since(event)))
        self._seen = event.version
        self.wake()

    def _since(self, event: WatchEvent) -> int:
        last = self._unread[-1]
        if isinstance(last, WatchEvent) and last.event == "gap":
            self._unread.pop()
            return last.from_version
        return event.from_version if event.event == "gap" else event.version - 1


AnyChannel = SocketChannel[Any]
