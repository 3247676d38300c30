"""The calls that publish events, ack them and list subscriptions. No IO.

The first argument is the stream's path; the handles of both clients add it. Calls on the stream
itself, such as its settings, are in `registry`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from penstock.client.calls import (
    Call,
    Payload,
    SocketForm,
    bytes_of,
    encode,
    list_of,
    nothing,
    query_of,
    reader,
    require_text,
    segment,
)
from penstock.client.deliveries import DEFAULT_LEASE_MS
from penstock.client.feeds import EventRef
from penstock.client.registry import stream_path
from penstock.client.results import StreamSubscriptions
from penstock.model.errors import InvalidArgument, NotFound
from penstock.model.streams import Lag
from penstock.model.tenancy import Path

Start = int | str | datetime
"""The place where a subscription begins: `latest`, `earliest`, an offset, or a time."""

Ack = Literal["none", "per_message"]
BatchAck = Literal["none", "per_message", "per_batch"]


def publish(
    path: Path,
    payload: Payload,
    *,
    ack: Ack = "per_message",
    invalidate: Iterable[str] = (),
    producer_id: str | None = None,
    sequence: int | None = None,
) -> Call[int | None]:
    """Publishes one event. When this returns, the broker sends it to all subscribers. In the same
    step it removes the keys of `invalidate` (`cache:<cache>:<key>`) from their caches. If the
    stream is durable, the event is on disk then, and the result is its offset.

    An `exactly_once` stream needs a `producer_id`, and as `sequence` the number of this publish,
    which counts from 0; `producer()` does that for you.

    Raises ResourceExhausted if the stream is overloaded; the event is then not published. HTTP
    always answers; with an `ack` of `none` the answer is empty.
    """
    body: dict[str, Any] = {"payload": bytes_of(payload), "ack": ack}
    body |= _numbers(producer_id, sequence)
    url_path = f"{stream_path(*path)}/publish"
    is_numbered = producer_id is not None
    form = SocketForm("publish", stream_members(path), is_idempotent=is_numbered)
    return Call("POST", url_path, _offset, _with(invalidate, body), form=form)


def publish_batch(
    path: Path,
    payloads: Iterable[Payload],
    *,
    ack: BatchAck = "per_batch",
    invalidate: Iterable[str] = (),
    producer_id: str | None = None,
    sequence: int | None = None,
) -> Call[int | None]:
    """Publishes events in their order as one step: all of them, or none if this raises. Returns the
    offset of the first if the stream is durable."""
    events = [bytes_of(payload) for payload in list_of(payloads, "payloads")]
    body: dict[str, Any] = {"payloads": events, "ack": ack}
    body |= _numbers(producer_id, sequence)
    url_path = f"{stream_path(*path)}/publish_batch"
    is_numbered = producer_id is not None
    form = SocketForm("publish_batch", stream_members(path), is_idempotent=is_numbered)
    return Call("POST", url_path, _offset, _with(invalidate, body), form=form)


def subscriptions(path: Path) -> Call[StreamSubscriptions]:
    """Returns the subscriptions of the stream, and how far behind each one is; those of a durable
    stream with a name as `named`."""
    return Call("GET", f"{stream_path(*path)}/subscriptions", reader(StreamSubscriptions))


def next_sequence(path: Path, producer_id: str) -> Call[int]:
    """Returns the number that the next publish of a producer must have, 0 if the stream does not
    know it: `producer(id, next_sequence=...)` goes on there after a restart.

    It does not say what was published under the last number. If the program stopped before that was
    answered, compare this number with the one that it had used."""
    read = reader(_Producer)
    url_path = f"{stream_path(*path)}/producers/{segment(producer_id)}"
    return Call("GET", url_path, lambda body: read(body).next_sequence)


def ack_event(ref: EventRef) -> Call[None]:
    """Finishes an event for its named subscription."""
    form = SocketForm("event_ack", _delivery(ref), is_idempotent=True)
    return Call(
        "POST", f"{stream_path(*ref.stream)}/ack", nothing, encode(event_members(ref)), form=form
    )


def nack_event(ref: EventRef, reason: str = "", *, delay_ms: int | None = None) -> Call[None]:
    """Reports that an event could not be handled. It is delivered again after `delay_ms`, or after
    the broker's backoff."""
    require_text("reason", reason)
    failure = {"reason": reason, "delay_ms": delay_ms}
    body = encode(event_members(ref) | failure)
    form = SocketForm("event_nack", _delivery(ref) | failure)
    return Call("POST", f"{stream_path(*ref.stream)}/nack", nothing, body, form=form)


def release_event(ref: EventRef) -> Call[None]:
    """Gives back an event that nobody began to handle. Its attempt does not count."""
    body = encode(event_members(ref))
    return Call("POST", f"{stream_path(*ref.stream)}/release", nothing, body)


def release_events(refs: list[EventRef]) -> Call[None]:
    """Gives back events of one stream that nobody began to handle. Their attempts do not count. An
    event that is settled already, or that another has now, is left as it is."""
    body = encode([event_members(ref) for ref in refs])
    return Call("POST", f"{stream_path(*refs[0].stream)}/release_batch", _done, body)


def extend_event(ref: EventRef, lease_ms: int = DEFAULT_LEASE_MS) -> Call[None]:
    """Extends the lease of an event: it ends `lease_ms` from now."""
    body = encode(event_members(ref) | {"lease_ms": lease_ms})
    members = _delivery(ref) | {"lease_ms": lease_ms}
    form = SocketForm("event_extend", members, is_idempotent=True)
    return Call("POST", f"{stream_path(*ref.stream)}/extend", nothing, body, form=form)


def delete_subscription(path: Path, name: str) -> Call[None]:
    """Deletes a named subscription and its position. Retention no longer waits for it."""
    return Call("DELETE", f"{stream_path(*path)}/subscriptions/{segment(name)}", nothing)


def subscribe_path(path: Path, **parameters: str | int | None) -> str:
    """Returns the address of a subscription."""
    return f"{stream_path(*path)}/subscribe?{query_of(**parameters)}"


def check_named(
    name: str | None, owner: str | None, lease_ms: int, prefetch: int, once: object
) -> None:
    """Refuses an empty name, and options that only a subscription with a name has: without one
    they would be ignored, and nothing be acked."""
    if name is not None:
        if not name.strip():
            raise InvalidArgument("name must not be empty; leave it out for a live subscription")
        return
    given = {
        "owner": owner is not None,
        "lease_ms": lease_ms != DEFAULT_LEASE_MS,
        "prefetch": prefetch != 0,
        "once": once is not None,
    }
    for option, is_given in given.items():
        if is_given:
            raise InvalidArgument(
                f"{option} needs a name: subscribe(name=...) joins a named subscription, whose "
                "events are acked"
            )


def start_text(start: Start | None) -> str | None:
    """Returns a start as the API spells it. A time without a zone is local."""
    if isinstance(start, datetime):
        return start.astimezone(UTC).isoformat()
    return None if start is None else str(start)


def lag_of(subscription_id: str, found: Iterable[Lag]) -> Lag:
    """Returns the lag of one subscription from those of its stream."""
    for lag in found:
        if lag.subscription_id == subscription_id:
            return lag
    raise NotFound("the subscription is not open, or has ended")


def stream_members(path: Path) -> dict[str, Any]:
    """Returns the members of a message that name a stream."""
    tenant_id, namespace, stream = path
    return {"tenant_id": tenant_id, "namespace": namespace, "stream": stream}


def identity_members(stream_id: int | None) -> dict[str, Any]:
    """Returns the member that says which stream is meant, if it is known. Older brokers, which tell
    no id, do not know the member."""
    return {} if stream_id is None else {"stream_id": stream_id}


class SocketLag(msgspec.Struct):
    """The broker's report on a subscription of a WebSocket."""

    subscription_id: str
    messages_behind: int
    dropped: int
    delivered: int
    event_queue_depth: int
    alert: bool

    def lag(self, unread: int, dropped: int, since_ms: int) -> Lag:
        """Adds the events that are unread, or were dropped, on this side."""
        return Lag(
            subscription_id=self.subscription_id,
            messages_behind=self.messages_behind + unread,
            dropped=self.dropped + dropped,
            delivered=self.delivered,
            event_queue_depth=self.event_queue_depth,
            alert=self.alert,
            since_ms=since_ms,
        )


class _Producer(msgspec.Struct):
    next_sequence: int


class _Published(msgspec.Struct):
    offset: int | None = None


_published = msgspec.json.Decoder(_Published).decode
_published_each = msgspec.json.Decoder(list[_Published]).decode


def _offset(body: bytes) -> int | None:
    """Reads the offset of the first event from one answer, or from one for each event."""
    if body[:1] == b"[":
        return _published_each(body)[0].offset
    return _published(body).offset


def _done(body: bytes) -> None:
    """Reads an answer whose content does not matter."""


def _numbers(producer_id: str | None, sequence: int | None) -> dict[str, Any]:
    numbers = {"producer_id": producer_id, "sequence": sequence}
    return {name: value for name, value in numbers.items() if value is not None}


def event_members(ref: EventRef) -> dict[str, Any]:
    """Returns the members that name an event in its stream."""
    return {"name": ref.name, "owner": ref.owner, **_delivery(ref)}


def _delivery(ref: EventRef) -> dict[str, Any]:
    return {"offset": ref.offset, "delivery_id": ref.delivery_id}


def _with(invalidate: Iterable[str], body: dict[str, Any]) -> bytes:
    keys = list_of(invalidate, "invalidate")
    return encode(body | {"invalidate": keys} if keys else body)
