"""Streams as commands and reports: what is published, who listens, how far behind they are."""

from __future__ import annotations

import msgspec

from penstock.model.tenancy import Path


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """One event or several, in order, as one step. `invalidate` names (cache, key) of the same
    namespace that are removed with it."""

    path: Path
    payloads: list[bytes]
    invalidate: list[tuple[str, str]] = []


class Subscribe(msgspec.Struct, frozen=True, kw_only=True):
    """`event_queue_depth` None: the stream's. `wants_lag`: told when the alert begins and ends."""

    path: Path
    event_queue_depth: int | None = None
    wants_lag: bool = False


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """How far a subscription is behind. `dropped` are lost for it; `alert` is on while more than
    the stream's `lag_alert_events` wait."""

    subscription_id: str
    messages_behind: int
    dropped: int
    delivered: int
    event_queue_depth: int
    alert: bool
    since_ms: int
