"""Every message of the WebSocket, described: what is asked, and what it is answered with.

Invariant: every message that can be decoded is here, and every frame that is sent; a test compares
them, and tries the examples. Must not know how a document looks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.server.answers import Event, EventBatch
from penstock.server.http.responses import TypedErrorBody
from penstock.server.websocket.answers import (
    CacheEvent,
    LagAnswer,
    Ok,
    PublishOk,
    Subscribed,
    Value,
    Values,
)
from penstock.server.websocket.messages import (
    CacheDeleteMessage,
    CacheGetManyMessage,
    CacheGetMessage,
    CacheIncrMessage,
    CachePutMessage,
    CacheTxnMessage,
    CacheUnwatchMessage,
    CacheWatchMessage,
    LagMessage,
    PingMessage,
    PublishBatchMessage,
    PublishMessage,
    SubscribeMessage,
    UnsubscribeMessage,
)


class Asked(msgspec.Struct, frozen=True):
    """`example` lacks the type, which the shape has. `answer` is what a success is; `pushes` are
    the frames that come later for it."""

    shape: Any
    text: str
    required: tuple[str, ...]
    example: dict[str, Any]
    answer: Any
    pushes: tuple[Any, ...] = ()

    @property
    def type(self) -> str:
        return str(self.shape.__struct_config__.tag)


class Sent(msgspec.Struct, frozen=True):
    """A frame of the broker's. `type` is that on the wire."""

    shape: Any
    type: str
    text: str


_SCOPE = ("tenant_id", "namespace")
_HERE = {"tenant_id": "default", "namespace": "default"}
_STREAM = _HERE | {"stream": "default"}
_CACHE = _HERE | {"cache": "default"}
_ENTRY = _CACHE | {"key": "greeting"}

ASKED: tuple[Asked, ...] = (
    Asked(
        PublishMessage,
        "Publishes an event. With an ack of none, only a failure is answered.",
        ("type", *_SCOPE, "stream", "payload"),
        _STREAM | {"payload": "aGVsbG8="},
        PublishOk,
    ),
    Asked(
        PublishBatchMessage,
        "Publishes events as one step, in order. An ack of per_message is one publish_ok for each, "
        "with its index.",
        ("type", *_SCOPE, "stream", "payloads"),
        _STREAM | {"payloads": ["b25l", "dHdv"]},
        PublishOk,
    ),
    Asked(
        SubscribeMessage,
        "From the answer on, every event that is accepted comes as an event, or several as an "
        "event_batch.",
        ("type", *_SCOPE, "stream"),
        _STREAM,
        Subscribed,
        (Event, EventBatch, LagAnswer),
    ),
    Asked(
        UnsubscribeMessage,
        "Ends a subscription of this connection; what it has not received is discarded.",
        ("type", "subscription_id"),
        {"subscription_id": "s1"},
        Ok,
    ),
    Asked(
        LagMessage,
        "How far behind a subscription of this connection is, and what was dropped for it.",
        ("type", "subscription_id"),
        {"subscription_id": "s1"},
        LagAnswer,
    ),
    Asked(
        CachePutMessage,
        "Puts a value, and answers its version.",
        ("type", *_SCOPE, "cache", "key", "value"),
        _ENTRY | {"value": "aGVsbG8=", "ttl_ms": 60_000},
        Ok,
    ),
    Asked(
        CacheGetMessage,
        "The value of a key; null with version 0 if there is none.",
        ("type", *_SCOPE, "cache", "key"),
        _ENTRY,
        Value,
    ),
    Asked(
        CacheGetManyMessage,
        "The values of keys, all as of one moment.",
        ("type", *_SCOPE, "cache", "keys"),
        _CACHE | {"keys": ["greeting", "nothing"]},
        Values,
    ),
    Asked(
        CacheDeleteMessage,
        "Removes a key, and answers whether it was there.",
        ("type", *_SCOPE, "cache", "key"),
        _ENTRY,
        Ok,
    ),
    Asked(
        CacheIncrMessage,
        "Adds to a counter, and answers what it is now.",
        ("type", *_SCOPE, "cache", "key"),
        _CACHE | {"key": "visits"},
        Value,
    ),
    Asked(
        CacheTxnMessage,
        "All of the ops, or nothing when a check does not hold.",
        ("type", *_SCOPE, "cache", "ops"),
        _CACHE | {"ops": [{"op": "incr", "key": "visits"}]},
        Ok,
    ),
    Asked(
        CacheWatchMessage,
        "From the answer on, every change of a key, or of the keys with a prefix, comes as a "
        "cache_event. Exactly one of key and prefix.",
        ("type", *_SCOPE, "cache"),
        _CACHE | {"prefix": "user:"},
        Ok,
        (CacheEvent,),
    ),
    Asked(
        CacheUnwatchMessage,
        "Ends a watch of this connection.",
        ("type", "watch_id"),
        {"watch_id": "w1"},
        Ok,
    ),
    Asked(PingMessage, "Answered with ok.", ("type",), {}, Ok),
)

SENT: tuple[Sent, ...] = (
    Sent(Ok, "ok", "Done."),
    Sent(PublishOk, "publish_ok", "Accepted: it goes to all who subscribe."),
    Sent(Subscribed, "subscribed", "The subscription has begun."),
    Sent(LagAnswer, "lag", "Asked for; or pushed, if the subscription wants it."),
    Sent(Value, "cache_value", "A value, or what a counter is now."),
    Sent(Values, "cache_values", "Values in the order of their keys."),
    Sent(Event, "event", "One event of a subscription."),
    Sent(EventBatch, "event_batch", "Several events of a subscription, in order."),
    Sent(CacheEvent, "cache_event", "A change of a watched key: put, delete, expire, evict, gap."),
    Sent(
        TypedErrorBody,
        "error",
        "A request was refused; or, with a subscription_id or watch_id, the broker has ended that.",
    ),
)
"""By the shape that is sent; `lag` is asked for and sent."""
