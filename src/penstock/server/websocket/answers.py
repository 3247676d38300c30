"""The answers and pushed frames of streams and caches, told apart by `type`.

A member that does not apply is left out.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.api.consumers import Consumer
from penstock.api.streams import Subscription
from penstock.model.streams import Lag, SubscribeNamed
from penstock.server.http.responses import CursorErrorBody, TypedErrorBody
from penstock.server.websocket.messages import RequestId


class TxnResult(msgspec.Struct, omit_defaults=True, gc=False):
    version: int
    deleted: bool | None = None
    number: int | None = None


class Ok(msgspec.Struct, omit_defaults=True, gc=False, tag_field="type", tag="ok"):
    version: int | None = None
    deleted: bool | None = None
    results: list[TxnResult] | None = None
    watch_id: str | None = None
    request_id: RequestId = None


class PublishOk(msgspec.Struct, omit_defaults=True, gc=False, tag_field="type", tag="publish_ok"):
    """`count` once for a batch; `index` once for each of its payloads. `offset` is that of the
    event, or of the first one, in a durable stream."""

    count: int | None = None
    index: int | None = None
    request_id: RequestId = None
    offset: int | None = None


class Subscribed(msgspec.Struct, omit_defaults=True, gc=False, tag_field="type", tag="subscribed"):
    """`name` and `owner` are those of a named subscription. `offset` is that of the first event
    that can come, if the stream is durable and the subscription has no name. A durable stream has
    a `stream_id`; one that is created later under the same name has another."""

    subscription_id: str
    request_id: RequestId = None
    name: str | None = None
    owner: str | None = None
    offset: int | None = None
    stream_id: int | None = None


class LagAnswer(msgspec.Struct, omit_defaults=True, gc=False, tag_field="type", tag="lag"):
    subscription_id: str
    messages_behind: int
    dropped: int
    delivered: int
    event_queue_depth: int
    alert: bool
    request_id: RequestId = None


class Value(msgspec.Struct, omit_defaults=True, gc=False, tag_field="type", tag="cache_value"):
    """`ttl_ms` is what is left; `number` is that of a counter."""

    value: bytes | None
    version: int
    ttl_ms: int | None = None
    number: int | None = None
    request_id: RequestId = None


class KeyValue(msgspec.Struct, gc=False):
    key: str
    value: bytes | None
    version: int


class Values(msgspec.Struct, omit_defaults=True, gc=False, tag_field="type", tag="cache_values"):
    values: list[KeyValue]
    request_id: RequestId = None


class CacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag_field="type", tag="cache_event"):
    """A gap means that changes after `from_version`, up to `to_version`, may be missing."""

    watch_id: str
    event: str
    version: int
    key: str | None = None
    value: bytes | None = None
    from_version: int | None = None
    to_version: int | None = None


class Event(msgspec.Struct, omit_defaults=True):
    """A line, or a frame, of a subscription. Events of a durable stream have an `offset`, those of
    a named subscription also what is needed to ack them."""

    type: Literal["event"]
    subscription_id: str
    payload: bytes
    offset: int | None = None
    attempt: int | None = None
    delivery_id: str | None = None
    last_error: str | None = None


class EventBatch(msgspec.Struct, omit_defaults=True):
    """`offset` is that of the first event; the others follow it without a gap."""

    type: Literal["event_batch"]
    subscription_id: str
    payloads: list[bytes]
    offset: int | None = None


Answer = Ok | PublishOk | Subscribed | LagAnswer | Value | Values

Answers = Answer | list[PublishOk] | None
"""The answer to one message: one, one for each payload, or none because none is due."""


def lag_answer(lag: Lag, request_id: RequestId = None) -> LagAnswer:
    return LagAnswer(
        lag.subscription_id,
        lag.messages_behind,
        lag.dropped,
        lag.delivered,
        lag.event_queue_depth,
        lag.alert,
        request_id,
    )


def subscribed_answer(subscription: Subscription, request_id: RequestId = None) -> Subscribed:
    begins_at = subscription.begins_at
    offset = None if begins_at < 0 else begins_at
    stream_id = subscription.stream_id
    return Subscribed(subscription.id, request_id, offset=offset, stream_id=stream_id)


def named_answer(
    subscription_id: str,
    command: SubscribeNamed,
    consumer: Consumer,
    request_id: RequestId = None,
) -> Subscribed:
    return Subscribed(
        subscription_id,
        request_id,
        command.name,
        command.owner,
        stream_id=consumer.topic_id,
    )


class FrameDescription(msgspec.Struct, frozen=True):
    """The description of a frame that the broker sends. `type` is that on the wire."""

    shape: Any
    type: str
    text: str


FRAMES: tuple[FrameDescription, ...] = (
    FrameDescription(Ok, "ok", "Done."),
    FrameDescription(PublishOk, "publish_ok", "Accepted: the event goes to all subscribers."),
    FrameDescription(Subscribed, "subscribed", "The subscription has begun."),
    FrameDescription(
        LagAnswer, "lag", "The answer to lag; also pushed, if the subscription asked for it."
    ),
    FrameDescription(Value, "cache_value", "A value, or the new value of a counter."),
    FrameDescription(Values, "cache_values", "Values in the order of their keys."),
    FrameDescription(Event, "event", "One event of a subscription."),
    FrameDescription(EventBatch, "event_batch", "Several events of a subscription, in order."),
    FrameDescription(
        CursorErrorBody,
        "subscribe_cursor_error",
        "The position asked for is older than what the stream keeps, or newer than its end; or the "
        "stream does not have the stream_id asked for; or retention has passed the subscription "
        "that is named.",
    ),
    FrameDescription(
        CacheEvent, "cache_event", "A change of a watched key: put, delete, expire, evict, gap."
    ),
    FrameDescription(
        TypedErrorBody,
        "error",
        "A request was refused; or the broker has ended the subscription or watch that is named.",
    ),
)
