"""A subscription that reads a durable stream from a start on, through history to live events.

Invariant: it gives every event from its start on, once and in order, whatever is sealed or evicted
meanwhile; or it ends with an error that says why. It reads ahead a bounded amount, and only while
its reader takes. Must not know the wire, nor where events are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from penstock.api.metrics import StreamCounts
from penstock.api.streams import EventRun, EventSink
from penstock.core.event_buffer import EventBuffer, whole
from penstock.engine.event_reading import READ_BYTES, READ_EVENTS, EventReading, Payloads, Read
from penstock.engine.reading import MOVED, log_unreadable
from penstock.engine.scheduler import Scheduler
from penstock.engine.stream_log import StreamLog
from penstock.model.errors import PenstockError
from penstock.model.scopes import plain_name
from penstock.model.streams import Lag

_log = logging.getLogger("penstock.engine")

_UNLIMITED = 2**62
RETRY_MS = 10


class ReplaySubscription:
    """`_at` is the offset of the next event to read, `next_offset` of the next to take."""

    def __init__(
        self,
        number: int,
        at: int,
        log: StreamLog,
        reading: EventReading,
        sink: EventSink,
        counts: StreamCounts,
        scheduler: Scheduler,
        now_ms: int,
        left: Callable[[ReplaySubscription], None],
    ) -> None:
        self.id = f"s{number}"
        self.stream_id: int | None = log.topic.id
        self.is_closed = False
        self.begins_at = self.next_offset = at
        self.delivered = 0
        self._since_ms = now_ms
        self._at = at
        self._log = log
        self._reading = reading
        self._sink = sink
        self._counts = counts
        self._scheduler = scheduler
        self._left = left
        self._buffer = EventBuffer(_UNLIMITED, _UNLIMITED)
        self._is_asked = False
        self._is_reading = False
        self._is_awake = False
        log.follow(self)

    # -- from its reader -----------------------------------------------------------------------

    def take(self, max_events: int) -> list[EventRun]:
        buffer = self._buffer
        before = buffer.events
        runs = buffer.take(max_events)
        count = before - buffer.events
        self.next_offset += count
        self.delivered += count
        self._counts.delivered += count
        if not buffer.events:
            self._is_awake = False
        self.advance()
        return runs

    def lag(self) -> Lag:
        return Lag(
            subscription_id=self.id,
            messages_behind=max(0, self._log.durable_end - self.next_offset),
            dropped=0,
            delivered=self.delivered,
            event_queue_depth=READ_EVENTS,
            alert=False,
            since_ms=self._since_ms,
        )

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._buffer.clear()
            self._log.cursors.discard(self)
            self._left(self)

    # -- from the stream -----------------------------------------------------------------------

    def advance(self) -> None:
        """Reads on in a turn of its own, if there is something to read and room for it."""
        buffer = self._buffer
        if (
            self._at < self._log.durable_end
            and not (self._is_asked or self._is_reading or self.is_closed)
            and buffer.events < READ_EVENTS
            and buffer.nbytes < READ_BYTES
        ):
            self._is_asked = True
            self._scheduler.soon(self._read)

    def end(self, error: PenstockError) -> None:
        """Ends the subscription with a reason."""
        if not self.is_closed:
            self.close()
            self._tell(partial(self._sink.ended, error))

    # -- reading -------------------------------------------------------------------------------

    def _read(self) -> None:
        self._is_asked = False
        if self.is_closed or self._is_reading:
            return
        try:
            found = self._reading.read(self._log.topic.id, self._at, self._log.durable_end)
        except PenstockError as error:
            self.end(error)
            return
        if isinstance(found, list):
            self._got(found)
        else:
            self._is_reading = True
            self._scheduler.in_background(partial(self._read_blocking, found))

    def _read_blocking(self, read: Read) -> None:
        """Runs on a thread."""
        try:
            found = read()
        except MOVED:
            # Sealed or rewritten since it was looked up, or not in the log yet.
            self._scheduler.post(self._again)
        except Exception as error:  # noqa: BLE001 - whatever it was, the subscriber waits
            failure = log_unreadable(error, f"the stream {plain_name(self._log.topic.name)!r}")
            self._scheduler.post(partial(self.end, failure))
        else:
            self._scheduler.post(partial(self._read_done, found))

    def _again(self) -> None:
        self._is_reading = False
        self._scheduler.later(RETRY_MS, self.advance)

    def _read_done(self, found: Payloads) -> None:
        self._is_reading = False
        if not self.is_closed:
            self._got(found)

    def _got(self, found: Payloads) -> None:
        if found:
            self._buffer.offer(whole(found, self._at))
            self._at += len(found)
        if self._buffer.events and not self._is_awake:
            self._is_awake = True
            self._tell(self._sink.wake)
        self.advance()

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # noqa: BLE001 - one departed reader must not stop the others
            _log.exception("subscription %s could not be told; it is closed", self.id)
            self.close()
