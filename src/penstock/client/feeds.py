"""What a subscription or a watch brings, and how it is read from its lines. No IO.

A feed begins with a line that names it, and goes on with events. If the broker ends it, the last
line says why. Invariant: events come before the error that ended the feed, and the end of a feed
is an error unless the caller closed it: what is published from then on would be missed silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from penstock.client.calls import ErrorAnswer, error_from
from penstock.client.lines import LineBuffer
from penstock.model.caching import WatchEvent, WatchKind
from penstock.model.errors import PenstockError, Unavailable

T = TypeVar("T")


class _Line(ErrorAnswer):
    """Members of every kind of line; of types that are not known nothing is read."""

    type: str = ""


class _StreamLine(_Line):
    subscription_id: str = ""
    payload: bytes = b""


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
        """The next event, if there is one; raises what ended the feed behind the last."""
        event = super().take(now_s)
        if event is None and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return event

    def end(self) -> None:
        raise self._failure or Unavailable("the broker ended the connection; it may be restarting")

    def close(self) -> None:
        """What was taken in before is not wanted any more."""
        self._ready.clear()

    def _note(self, line: _Line) -> None:
        """Takes a line that is no event. Older brokers say `publish_error` of a failed publish."""
        if line.type in ("error", "publish_error"):
            self._failure = error_from(line.code, line)


class PayloadBuffer(FeedBuffer[bytes]):
    """Of a subscription: payloads."""

    def __init__(self) -> None:
        super().__init__()
        self.subscription_id = ""

    def _read(self, lines: bytes) -> Iterator[bytes]:
        for line in _stream_lines(lines):
            if line.type == "event":
                yield line.payload
            elif line.type == "subscribed":
                self.subscription_id, self.is_open = line.subscription_id, True
            else:
                self._note(line)


class WatchBuffer(FeedBuffer[WatchEvent]):
    """Of a watch: changes. `version` is the cache's when it began."""

    def __init__(self) -> None:
        super().__init__()
        self.watch_id = ""
        self.version = 0

    def _read(self, lines: bytes) -> Iterable[WatchEvent]:
        for line in _cache_lines(lines):
            if line.type == "cache_event":
                yield WatchEvent(line.event, line.version, line.key, line.value, line.from_version)
            elif line.type == "ok":
                self.watch_id, self.version, self.is_open = line.watch_id, line.version, True
            else:
                self._note(line)
