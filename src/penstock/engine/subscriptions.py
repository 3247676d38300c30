"""One subscription: its buffer, its lag, and when it is closed for being too slow.

Invariant: the sink is woken once each time that something waits where nothing did, and is told
nothing after the subscription closed except why the broker ended it. A sink that raises loses its
own subscription and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.api.metrics import StreamCounts
from penstock.api.streams import EventRun, EventSink, StreamSettings
from penstock.core.event_buffer import EventBuffer
from penstock.core.stream_rules import NEVER, alert_bounds
from penstock.engine.scheduler import Cancellable, Scheduler
from penstock.model.errors import PenstockError, ResourceExhausted
from penstock.model.streams import Lag

_log = logging.getLogger("penstock.engine")

_ASLEEP, _TO_WAKE, _AWAKE = range(3)


class StreamContext(msgspec.Struct, frozen=True):
    """Shared by the subscriptions of a stream. `woken` collects those whose sinks are woken when
    the burst is over."""

    name: str
    counts: StreamCounts
    woken: list[OpenSubscription]
    scheduler: Scheduler
    now_ms: Callable[[], int]
    left: Callable[[OpenSubscription], None]


class OpenSubscription:
    """`since` is the last batch that was accepted before it; later ones are offered to it.
    `begins_at` is the offset of the first event in these, or -1."""

    __slots__ = (
        "_alert_above",
        "_alert_until",
        "_around",
        "_buffer",
        "_disconnect_slow_ms",
        "_is_alert",
        "_lost_publish",
        "_own_depth",
        "_sink",
        "_slow_since_ms",
        "_slow_timer",
        "_wakefulness",
        "_wants_lag",
        "begins_at",
        "delivered",
        "dropped",
        "id",
        "is_closed",
        "since",
        "since_ms",
        "stream_id",
    )

    def __init__(
        self,
        number: int,
        since: int,
        sink: EventSink,
        settings: StreamSettings,
        around: StreamContext,
        *,
        own_depth: int | None,
        wants_lag: bool,
        begins_at: int = -1,
        stream_id: int | None = None,
    ) -> None:
        self.id = f"s{number}"
        self.stream_id = stream_id
        self.begins_at = begins_at
        self.since = since
        self.since_ms = around.now_ms()
        self.delivered = 0
        self.dropped = 0
        self.is_closed = False
        self._sink = sink
        self._around = around
        self._own_depth = own_depth
        self._wants_lag = wants_lag
        self._buffer = EventBuffer(0, 0)
        self._wakefulness = _ASLEEP
        self._is_alert = False
        self._lost_publish = 0
        self._slow_since_ms: int | None = None
        self._slow_timer: Cancellable | None = None
        self.configure(settings)

    def configure(self, settings: StreamSettings) -> None:
        """Takes new settings. What is buffered stays, even if it is more than allowed now."""
        self._buffer.depth = self._own_depth or settings.event_queue_depth
        self._buffer.max_bytes = settings.event_queue_bytes
        self._alert_above, self._alert_until = alert_bounds(settings.lag_alert_events)
        self._disconnect_slow_ms = settings.disconnect_slow_ms
        self._look_at_alert()
        self._arm()

    # -- from the stream -----------------------------------------------------------------------

    def offer(self, run: EventRun) -> None:
        """Buffers what there is room for, and drops the rest for this subscription. Of a publish
        that does not fit it keeps the beginning: once one event is dropped, so are all behind it,
        even if the reader makes room meanwhile."""
        buffer = self._buffer
        publish = run.batch.publish
        kept = 0 if publish == self._lost_publish else buffer.offer(run)
        if kept != run.end - run.start:
            self._lost_publish = publish
            self._lose(run.end - run.start - kept)
        if self._wakefulness == _ASLEEP and kept:
            self._wakefulness = _TO_WAKE
            self._around.woken.append(self)
        if buffer.events > self._alert_above and not self._is_alert:
            self._look_at_alert()

    def wake(self) -> None:
        """Wakes the sink after a burst."""
        if self.is_closed or self._wakefulness != _TO_WAKE:
            return
        if not self._buffer.events:
            self._wakefulness = _ASLEEP
            return
        self._wakefulness = _AWAKE
        self._tell(self._sink.wake)

    def end(self, error: PenstockError) -> None:
        """Ends the subscription with a reason."""
        if not self.is_closed:
            self.close()
            self._tell(self._sink.ended, error)

    # -- from its reader -----------------------------------------------------------------------

    def take(self, max_events: int) -> list[EventRun]:
        """Takes the next events in order; they count as delivered. A batch may be split."""
        buffer = self._buffer
        before = buffer.events
        runs = buffer.take(max_events)
        count = before - buffer.events
        self.delivered += count
        self._around.counts.delivered += count
        if not buffer.events and self._wakefulness == _AWAKE:
            self._wakefulness = _ASLEEP
        if self._slow_since_ms is not None and buffer.is_down_to_half():
            self._slow_since_ms = None
            self._arm()
        if self._is_alert and buffer.events <= self._alert_until:
            self._look_at_alert()
        return runs

    def lag(self) -> Lag:
        return Lag(
            subscription_id=self.id,
            messages_behind=self._buffer.events,
            dropped=self.dropped,
            delivered=self.delivered,
            event_queue_depth=self._buffer.depth,
            alert=self._is_alert,
            since_ms=self.since_ms,
        )

    def close(self) -> None:
        """Closes it, and discards what was not taken."""
        if self.is_closed:
            return
        self.is_closed = True
        # The current burst skips it.
        self.since = NEVER
        self._buffer.clear()
        self._slow_since_ms = None
        self._arm()
        if self._is_alert:
            self._is_alert = False
            self._around.counts.lagging -= 1
        self._around.left(self)

    # -- falling behind ------------------------------------------------------------------------

    def _lose(self, count: int) -> None:
        self.dropped += count
        self._around.counts.dropped += count
        if self._slow_since_ms is None:
            self._slow_since_ms = self._around.now_ms()
            self._arm()

    def _look_at_alert(self) -> None:
        behind, counts = self._buffer.events, self._around.counts
        is_alert = behind > (self._alert_until if self._is_alert else self._alert_above)
        if is_alert == self._is_alert:
            return
        self._is_alert = is_alert
        counts.lagging += 1 if is_alert else -1
        counts.lag_alerts += is_alert
        _log.log(
            logging.WARNING if is_alert else logging.INFO,
            "subscription %s of stream %r %s: %d events behind, %d dropped so far",
            self.id,
            self._around.name,
            "lags" if is_alert else "no longer lags",
            behind,
            self.dropped,
        )
        if self._wants_lag:
            self._tell(self._sink.lagging, self.lag())

    def _arm(self) -> None:
        """Says whether it is slow: it lost something, and its buffer has not been half empty since
        then."""
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
        if self._slow_since_ms is not None and self._disconnect_slow_ms:
            slow_ms = self._around.now_ms() - self._slow_since_ms
            self._slow_timer = self._around.scheduler.later(
                max(0, self._disconnect_slow_ms - slow_ms), self._give_up
            )

    def _give_up(self) -> None:
        self._slow_timer = None
        self._around.counts.slow_disconnects += 1
        dropped, depth = self.dropped, self._buffer.depth
        _log.warning(
            "subscription %s of stream %r is ended: too slow for %d ms, %d events dropped",
            self.id,
            self._around.name,
            self._disconnect_slow_ms,
            dropped,
        )
        self.end(
            ResourceExhausted(
                f"the subscription was too slow: its buffer of {depth} events was full for "
                f"{self._disconnect_slow_ms} ms and {dropped} events were dropped; subscribe again",
                limit="event_queue_depth",
                reason="slow_subscriber",
            )
        )

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception:  # noqa: BLE001 - one departed reader must not stop the others
            _log.exception("subscription %s could not be told; it is closed", self.id)
            self.close()
