"""Every operation on a stream's events as a call. No IO.

The stream's path comes first; the handles of both clients give it. What is asked of the stream
itself, as its settings, is in `registry`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from penstock.client.calls import (
    Call,
    Payload,
    bytes_of,
    encode,
    list_of,
    nothing,
    query_of,
    reader,
)
from penstock.client.registry import stream_path
from penstock.model.errors import NotFound
from penstock.model.streams import Lag
from penstock.model.tenancy import Path

Ack = Literal["none", "per_message"]
BatchAck = Literal["none", "per_message", "per_batch"]


def publish(
    path: Path, payload: Payload, *, ack: Ack = "per_message", invalidate: Iterable[str] = ()
) -> Call[None]:
    """Publishes one event: when this returns, it goes to all who subscribe. With it, the keys
    that `invalidate` names (`cache:<cache>:<key>`) are removed from their caches.

    ResourceExhausted: the stream is overloaded, and the event was not published. HTTP answers in
    any case; an `ack` of `none` only makes the answer say nothing.
    """
    body: dict[str, Any] = {"payload": bytes_of(payload), "ack": ack}
    return Call("POST", f"{stream_path(*path)}/publish", nothing, _with(invalidate, body))


def publish_batch(
    path: Path,
    payloads: Iterable[Payload],
    *,
    ack: BatchAck = "per_batch",
    invalidate: Iterable[str] = (),
) -> Call[None]:
    """Publishes events in their order as one step: all of them, or none when this raises."""
    events = [bytes_of(payload) for payload in list_of(payloads, "payloads")]
    body: dict[str, Any] = {"payloads": events, "ack": ack}
    return Call("POST", f"{stream_path(*path)}/publish_batch", nothing, _with(invalidate, body))


def subscriptions(path: Path) -> Call[list[Lag]]:
    """Who subscribes to the stream, and how far behind each is."""
    read = reader(_Subscriptions)
    return Call("GET", f"{stream_path(*path)}/subscriptions", lambda body: read(body).subscriptions)


def subscribe_path(path: Path, event_queue_depth: int | None, heartbeat_ms: int) -> str:
    """Where a subscription's feed is found."""
    query = query_of(event_queue_depth=event_queue_depth, heartbeat_ms=heartbeat_ms)
    return f"{stream_path(*path)}/subscribe?{query}"


def lag_of(subscription_id: str, found: list[Lag]) -> Lag:
    """The one that is meant, of all of a stream."""
    for lag in found:
        if lag.subscription_id == subscription_id:
            return lag
    raise NotFound("the subscription is not open, or has ended")


class _Subscriptions(msgspec.Struct):
    subscriptions: list[Lag]


def _with(invalidate: Iterable[str], body: dict[str, Any]) -> bytes:
    keys = list_of(invalidate, "invalidate")
    return encode(body | {"invalidate": keys} if keys else body)
