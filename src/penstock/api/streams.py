"""Streams: publishing events, subscribing to them, and the settings of one."""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.api.consumers import Consumer, Sink
from penstock.api.outcomes import Done
from penstock.model.errors import PenstockError
from penstock.model.limits import Limits
from penstock.model.streams import Lag, Publish, Subscribe, SubscribeNamed
from penstock.model.tenancy import Path, StreamConfig


class EventBatch(msgspec.Struct, gc=False):
    """Events that fan out together. `seq` is their place in the stream's order. A large publish is
    cut into several batches: `publish` is the `seq` of the first of them. The server keeps the
    encoded events in `encoded`, by its own key; all subscribers share them. `offset` is that of the
    first event, or -1 if the stream keeps none."""

    payloads: list[bytes]
    seq: int = 0
    publish: int = 0
    encoded: dict[str, bytes] = {}
    offset: int = -1


class EventRun(msgspec.Struct, frozen=True, gc=False):
    """The events of a batch from `start` to before `end`."""

    batch: EventBatch
    start: int
    end: int
    nbytes: int

    @property
    def offset(self) -> int:
        """The offset of the first event, or -1."""
        return self.batch.offset if self.batch.offset < 0 else self.batch.offset + self.start

    @property
    def payloads(self) -> list[bytes]:
        return self.batch.payloads[self.start : self.end]


class EventSink(Protocol):
    """The receiving end of a subscription."""

    def wake(self) -> None:
        """Called when events can be taken and there were none before, then not again until all are
        taken."""
        ...

    def lagging(self, lag: Lag) -> None:
        """Called when the lag alert has begun or ended, if the subscriber asked for it."""
        ...

    def ended(self, error: PenstockError) -> None:
        """Called when the broker ends the subscription: its stream is gone, or it is too slow."""
        ...


class Subscription(Protocol):
    """An open subscription. `begins_at` is the offset of the first event that can come, or -1 if
    the stream keeps none. All events before it are durable. `stream_id` is that of the stream, None
    if it keeps no events."""

    id: str
    begins_at: int
    stream_id: int | None

    def take(self, max_events: int) -> list[EventRun]:
        """Takes the next events in order, which then count as delivered; may split a batch."""
        ...

    def lag(self) -> Lag: ...

    def close(self) -> None:
        """Discards the events that were not taken."""
        ...


class StreamsPart(Protocol):
    def publish(self, command: Publish, done: Done[int | None]) -> None:
        """Calls `done` once the events are in the stream's queue; on a durable stream, once they
        are on disk, with the offset of the first."""
        ...

    def subscribe(self, command: Subscribe, sink: EventSink, done: Done[Subscription]) -> None:
        """Gives a subscription that receives everything accepted from then on, or from its start
        on."""
        ...

    def consume(self, command: SubscribeNamed, sink: Sink, done: Done[Consumer]) -> None:
        """Joins a named subscription. Nothing is delivered to `sink` before `done` was called."""
        ...

    def advance(
        self, path: Path, name: str, at: int, done: Done[int], stream_id: int | None = None
    ) -> None:
        """Finishes everything below an offset for a named subscription, which is created if it is
        new. Gives its position, which never goes back."""
        ...

    def log_name(self, path: Path) -> str:
        """Returns the topic that keeps the events of a durable stream, to read ranges of it and to
        settle deliveries of named subscriptions. Raises if the stream has none."""
        ...

    def next_sequence(self, path: Path, producer_id: str, done: Done[int]) -> None:
        """Gives the number that the producer's next publish must have: 0 if the stream does not
        know the producer. All publishes below it are on disk."""
        ...

    def subscriptions(self, path: Path, done: Done[list[Lag]]) -> None:
        """Gives the lag of every subscription of the stream."""
        ...


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in force: the stream's own, and the broker's limits for the others."""

    event_queue_depth: int
    event_queue_bytes: int
    pub_queue_depth: int
    publish_queue_wait_timeout_ms: int
    lag_alert_events: int
    disconnect_slow_ms: int


def stream_settings(config: StreamConfig, limits: Limits) -> StreamSettings:
    def chosen(own: int | None, brokers: int) -> int:
        return brokers if own is None else own

    return StreamSettings(
        event_queue_depth=chosen(config.event_queue_depth, limits.event_queue_depth),
        event_queue_bytes=chosen(config.event_queue_bytes, limits.event_queue_bytes),
        pub_queue_depth=chosen(config.pub_queue_depth, limits.pub_queue_depth),
        publish_queue_wait_timeout_ms=chosen(
            config.publish_queue_wait_timeout_ms, limits.publish_queue_wait_timeout_ms
        ),
        lag_alert_events=chosen(config.lag_alert_events, limits.lag_alert_events),
        disconnect_slow_ms=chosen(config.disconnect_slow_ms, limits.disconnect_slow_ms),
    )
