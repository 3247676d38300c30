"""Events of subscriptions and watches, and how to read them from lines. No IO.

A feed begins with a line that names it, followed by events. If the broker ends it, the last line
says why. Invariant: a caller gets all events before the error that ended the feed, and the end of a
feed is an error unless the caller closed it, because it would miss later events without noticing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from penstock.client.calls import ErrorAnswer, error_from
from penstock.client.lines import LineBuffer
from penstock.model.caching import WatchEvent, WatchKind
from penstock.model.errors import PenstockError, Unavailable
from penstock.model.tenancy import Path

T = TypeVar("T")


class _Line(ErrorAnswer):
    """The members that every line has. Lines of an unknown `type` are ignored."""

    type: str = ""


class _StreamLine(_Line):
    subscription_id: str = ""
    payload: bytes = b""
    offset: int = -1
    attempt: int = 0
    delivery_id: str = ""
    last_error: str = ""
    name: str = ""
    owner: str = ""
    stream_id: int | None = None


class EventRef(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a delivered event: all that ack, nack and extend need. `name` and `owner` are
    empty if the subscription has no name; such events are not acked."""

    stream: Path
    offset: int
    name: str = ""
    owner: str = ""
    delivery_id: str = ""


def shown(payload: bytes) -> str:
    """Returns a payload for a person, cut if it is long."""
    return repr(payload) if len(payload) <= 64 else f"{payload[:64]!r}... {len(payload)} bytes"


class ReceivedEvent(EventRef, frozen=True, kw_only=True):
    """An event of a durable stream. `attempt` counts its deliveries; `last_error` says why the one
    before failed."""

    payload: bytes
    attempt: int = 0
    last_error: str = ""


class _CacheLine(_Line):
    watch_id: str = ""
    version: int = 0
    event: WatchKind = "put"
    key: str = ""
    value: bytes | None = None
    from_version: int = 0


_stream_lines = msgspec.json.Decoder(_StreamLine).decode_lines
_cache_lines = msgspec.json.Decoder(_CacheLine).decode_lines


class FeedBuffer(LineBuffer[T]):
    def __init__(self) -> None:
        super().__init__()
        self.is_open = False
        self._failure: PenstockError | None = None

    def take(self, now_s: float) -> T | None:
        """Returns the next event or None. After the last, raises the error that ended the feed."""
        event = super().take(now_s)
        if event is None and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return event

    def begin_again(self) -> None:
        super().begin_again()
        self.is_open = False
        self._failure = None

    def end(self) -> None:
        raise self._failure or Unavailable("the broker ended the connection; it may be restarting")

    def close(self) -> None:
        """Drops the events that were not taken."""
        self._ready.clear()

    def _note(self, line: _Line) -> None:
        """Reads a line that is no event. Older brokers call a failed publish `publish_error`."""
        if line.type in ("error", "publish_error"):
            self._failure = error_from(line.code, line)


class PayloadBuffer(FeedBuffer[bytes]):
    """Reads the payloads of a subscription.

    `position` is the offset of the next event of a durable stream, None for other streams. `gaps`
    counts the places where events may be missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.subscription_id = ""
        self.position: int | None = None
        self.gaps = 0

    def _read(self, lines: bytes) -> Iterator[bytes]:
        for line in _stream_lines(lines):
            if line.type == "event":
                self._place(line.offset)
                yield line.payload
            elif line.type == "subscribed":
                self._begin(line)
            else:
                self._note(line)

    def _begin(self, line: _StreamLine) -> None:
        if self.position is None:
            self.gaps += bool(self.subscription_id)
            self.position = line.offset if line.offset >= 0 else None
        self.subscription_id, self.is_open = line.subscription_id, True

    def _place(self, offset: int) -> None:
        if offset >= 0:
            self.gaps += self.position is not None and offset > self.position
            self.position = offset + 1


class ReceivedEventBuffer(FeedBuffer[T]):
    """Reads the events of a durable stream. `make` wraps each of them for its client.
    `next_offset` is that of the next event, None until it is known."""

    def __init__(self, stream: Path, make: Callable[[ReceivedEvent], T]) -> None:
        super().__init__()
        self._make = make
        self.next_offset: int | None = None
        self.subscription_id = ""
        self.stream_id: int | None = None
        self.name = ""
        self.owner = ""
        self._stream = stream

    def close(self) -> None:
        """Keeps the events of a name that were not taken, for `take_all`."""
        if not self.name:
            super().close()

    def take_all(self) -> list[T]:
        """Returns the events that were not taken, and forgets them."""
        left = list(self._ready)
        self._ready.clear()
        return left

    def _read(self, lines: bytes) -> Iterator[T]:
        for line in _stream_lines(lines):
            if line.type == "event":
                event = ReceivedEvent(
                    stream=self._stream,
                    offset=line.offset,
                    name=self.name,
                    owner=self.owner,
                    delivery_id=line.delivery_id,
                    payload=line.payload,
                    attempt=line.attempt,
                    last_error=line.last_error,
                )
                self.next_offset = line.offset + 1
                yield self._make(event)
            elif line.type == "subscribed":
                self.subscription_id, self.is_open = line.subscription_id, True
                if self.next_offset is None and line.offset >= 0:
                    self.next_offset = line.offset
                self.name, self.owner = line.name, line.owner
                self.stream_id = line.stream_id
            else:
                self._note(line)


class WatchBuffer(FeedBuffer[WatchEvent]):
    """Reads the changes of a watch. `version` is the cache's when the watch began, `seen` that of
    the last change, None before it began."""

    def __init__(self) -> None:
        super().__init__()
        self.watch_id = ""
        self.version = 0
        self.seen: int | None = None

    def _read(self, lines: bytes) -> Iterable[WatchEvent]:
        for line in _cache_lines(lines):
            if line.type == "cache_event":
                self.seen = line.version
                yield WatchEvent(line.event, line.version, line.key, line.value, line.from_version)
            elif line.type == "ok":
                self.watch_id, self.is_open = line.watch_id, True
                if self.seen is None:
                    self.seen = self.version = line.version
            else:
                self._note(line)
