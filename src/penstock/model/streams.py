"""Stream commands and reports: publishing, subscribing, and how far a subscription is behind."""

from __future__ import annotations

import msgspec

from penstock.model.tenancy import Path


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """Publishes one or more events, in order and at once. `invalidate` names (cache, key) pairs of
    the same namespace to remove with it."""

    path: Path
    payloads: list[bytes]
    invalidate: list[tuple[str, str]] = []


class Subscribe(msgspec.Struct, frozen=True, kw_only=True):
    """Subscribes to a stream. An `event_queue_depth` of None means the stream's. `wants_lag` asks
    for a message when the lag alert begins and ends."""

    path: Path
    event_queue_depth: int | None = None
    wants_lag: bool = False


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
