"""Stream commands and reports: publishing, subscribing, and how far a subscription is behind."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.model.tenancy import Path


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """Publishes one or more events, in order and at once. `invalidate` names (cache, key) pairs of
    the same namespace to remove with it. A producer with a `producer_id` numbers its publishes from
    0 on: `sequence`."""

    path: Path
    payloads: list[bytes]
    invalidate: list[tuple[str, str]] = []
    producer_id: str = ""
    sequence: int | None = None


class Start(msgspec.Struct, frozen=True):
    """The place in a durable stream where a subscription begins. `number` is the offset, or the
    time in ms."""

    kind: Literal["latest", "earliest", "offset", "time"]
    number: int = 0


class Subscribe(msgspec.Struct, frozen=True, kw_only=True):
    """Subscribes to a stream. An `event_queue_depth` of None means the stream's. `wants_lag` asks
    for a message when the lag alert begins and ends. With a `start` it reads the durable stream
    from there on, and loses nothing. With a `stream_id`, only that stream is read, not one that was
    created later under the same name."""

    path: Path
    event_queue_depth: int | None = None
    wants_lag: bool = False
    start: Start | None = None
    stream_id: int | None = None


class SubscribeNamed(msgspec.Struct, frozen=True, kw_only=True):
    """Joins the subscription `name` of a durable stream, which shares its events among those who
    joined it and delivers each until it is acked. A new one begins at `start`. A `prefetch` or
    `lease_ms` of 0 means the broker's limit. `stream_id` is as in Subscribe."""

    path: Path
    name: str
    owner: str
    start: Start = Start("latest")
    lease_ms: int = 0
    prefetch: int = 0
    stream_id: int | None = None


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """Says how far a subscription is behind. `dropped` events are lost for it. `alert` is on while
    more than the stream's `lag_alert_events` wait."""

    subscription_id: str
    messages_behind: int
    dropped: int
    delivered: int
    event_queue_depth: int
    alert: bool
    since_ms: int
