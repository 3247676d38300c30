"""The calls that publish events and list subscriptions. No IO.

The first argument is the stream's path; the handles of both clients add it. Calls on the stream
itself, such as its settings, are in `registry`.
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
    """Publishes one event. When this returns, the broker sends it to all subscribers. In the same
    step it removes the keys of `invalidate` (`cache:<cache>:<key>`) from their caches.

    Raises ResourceExhausted if the stream is overloaded; the event is then not published. HTTP
    always answers; with an `ack` of `none` the answer is empty.
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
    """Publishes events in their order as one step: all of them, or none if this raises."""
    events = [bytes_of(payload) for payload in list_of(payloads, "payloads")]
    body: dict[str, Any] = {"payloads": events, "ack": ack}
    return Call("POST", f"{stream_path(*path)}/publish_batch", nothing, _with(invalidate, body))


def subscriptions(path: Path) -> Call[list[Lag]]:
    """Returns the subscriptions of the stream, and how far behind each one is."""
    read = reader(_Subscriptions)
    return Call("GET", f"{stream_path(*path)}/subscriptions", lambda body: read(body).subscriptions)


def subscribe_path(path: Path, event_queue_depth: int | None, heartbeat_ms: int) -> str:
    """Returns the address of a subscription."""
    query = query_of(event_queue_depth=event_queue_depth, heartbeat_ms=heartbeat_ms)
    return f"{stream_path(*path)}/subscribe?{query}"


def lag_of(subscription_id: str, found: list[Lag]) -> Lag:
    """Returns the lag of one subscription from those of its stream."""
    for lag in found:
        if lag.subscription_id == subscription_id:
            return lag
    raise NotFound("the subscription is not open, or has ended")


class _Subscriptions(msgspec.Struct):
    subscriptions: list[Lag]


def _with(invalidate: Iterable[str], body: dict[str, Any]) -> bytes:
    keys = list_of(invalidate, "invalidate")
    return encode(body | {"invalidate": keys} if keys else body)
