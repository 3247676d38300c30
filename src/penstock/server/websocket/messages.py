"""The messages of streams and caches that a client may send.

A message is a JSON object with a `type`. Unknown members are refused; `null` means absent. A body
is a message without the names that a route has in its path. Lists stay undecoded until they are
used, so that no more of them is decoded than is allowed. Must not know connections, nor what a
message does; message_actions.py describes and performs them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.model.errors import PenstockError
from penstock.model.limits import (
    MAX_BATCH_ITEMS,
    MAX_CACHE_KEY_BYTES,
    MAX_QUEUE_DEPTH,
    MAX_REQUEST_ID_CHARS,
    MAX_TXN_OPS,
)
from penstock.server.members import (
    CONTROL,
    NAME_PATTERN,
    Base64,
    CacheKey,
    Count,
    LeaseTime,
    Name,
    Position,
    Wait,
    decoded_later,
    limits,
    optional,
    required,
)

RequestId = str | int | None

ABSENT = msgspec.Raw()
"""A list that was not sent."""

# -- members that several messages have --------------------------------------------------------

_Text = Annotated[str, limits(maxLength=MAX_REQUEST_ID_CHARS)]
_Int64 = Annotated[int, limits(minimum=-(2**63), maximum=2**63 - 1)]

TenantId = Annotated[Name | None, required("The tenant's name: 1 to 200 bytes of UTF-8.")]
NamespaceName = Annotated[Name | None, required("The namespace's name.")]
_StreamName = Annotated[Name | None, required("The stream's name.")]
_CacheName = Annotated[Name | None, required("The cache's name.")]
_OtherCache = Annotated[Name | None, optional("The cache's name.")]

QueueDepth = Annotated[int, limits(minimum=1, maximum=MAX_QUEUE_DEPTH)]
EVENT_QUEUE_DEPTH = optional(
    "How many events a subscription may be behind, 1 to 65,536, before it loses the newest; "
    "omitted, the setting of the stream or else of the broker."
)

_KEY_TEXT = "1 to 1,024 bytes of UTF-8 without control characters."
_Key = Annotated[CacheKey | None, required(_KEY_TEXT)]
_Value = Annotated[Base64 | None, required("The value, in base64; it may be empty.")]
Delta = Annotated[
    _Int64 | None,
    optional("The number to add; 1 when omitted, negative to subtract."),
]
Ttl = Annotated[
    Count | None,
    optional(
        "How long the value lasts; 0 expires at once, omitted is for ever. For a counter it "
        "counts only when the counter is created."
    ),
]
IfVersion = Annotated[
    Count | None, optional("Only if the key has this version, 0 for no value; otherwise 412.")
]
IfNotExists = Annotated[bool | None, optional("true: only if the key has no value; otherwise 409.")]
Prefix = Annotated[
    Annotated[str, limits(maxLength=MAX_CACHE_KEY_BYTES, pattern=f"^[^{CONTROL}]*$")] | None,
    optional("All keys that begin with it; the empty one is every key."),
]
WatchedKey = Annotated[CacheKey | None, optional(_KEY_TEXT)]
SinceVersion = Annotated[
    Count | None,
    optional("The version that the client has: if the cache is past it, a gap comes first."),
]

_REQUEST_ID = optional("A text of up to 128 characters, or an integer, that every answer repeats.")
RequestIdText = Annotated[_Text | None, _REQUEST_ID]
ACK = optional(
    "none: only errors are answered. per_message: one answer per event. per_batch: one answer "
    "for all."
)
INVALIDATE = optional(
    "Keys of caches in the same namespace to remove with the event, each as cache:<cache>:<key>."
)
INCLUDE = optional("Changes that are sent only if they are asked for: expire, evict.")
LAG = optional("true: sends a lag when the subscription's alert begins and ends.")

_Target = Annotated[str, limits(pattern=rf"^cache:\s*{NAME_PATTERN}\s*:[^{CONTROL}]{{1,1024}}$")]
_Targets = Annotated[msgspec.Raw, INVALIDATE, decoded_later(list[_Target])]

ProducerId = Annotated[
    Name | None,
    optional("Names a producer that numbers its publishes. exactly_once streams need it."),
]
Sequence = Annotated[
    Count | None,
    optional("The number of this publish: 0 for the producer's first, one more for each next."),
]
SubscriptionName = Annotated[
    Name | None,
    optional(
        "Joins the subscription of this name. It shares the events of a durable stream among "
        "those who join it, and delivers each until it is acked."
    ),
]
START = optional(
    "Where to begin in a durable stream: latest, earliest, an offset, or a time as RFC 3339. With "
    "a name it counts only if the name is new; then the default is latest."
)
StreamId = Annotated[
    Position | None,
    optional(
        "The stream_id that the stream must have, as subscribed or offsets told it, so that a "
        "stream created later under the same name is not meant."
    ),
]
OwnerOfName = Annotated[
    Name | None,
    optional("The name under which events are acked; omitted, the broker makes one up."),
]
Prefetch = Annotated[
    Count | None,
    optional("How many events of a named subscription may be unacked here; 0 is the limit."),
]

# -- bodies ------------------------------------------------------------------------------------


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """`request_id` is echoed in every answer."""

    request_id: Annotated[_Text | _Int64 | None, _REQUEST_ID] = None


class PublishBody(Body):
    """`payload` is base64; `invalidate` are texts `cache:<cache>:<key>`."""

    payload: Annotated[Base64 | None, required("The event, in base64; it may be empty.")] = None
    ack: Annotated[Literal["none", "per_message"] | None, ACK] = None
    invalidate: _Targets = ABSENT
    producer_id: ProducerId = None
    sequence: Sequence = None


_Payloads = Annotated[list[Base64], limits(minItems=1, maxItems=MAX_BATCH_ITEMS)]


class PublishBatchBody(Body):
    payloads: Annotated[
        msgspec.Raw,
        required("The events, in order, each in base64."),
        decoded_later(_Payloads),
    ] = ABSENT
    ack: Annotated[Literal["none", "per_message", "per_batch"] | None, ACK] = None
    invalidate: _Targets = ABSENT
    producer_id: ProducerId = None
    sequence: Sequence = None


class PutBody(Body):
    value: _Value = None
    ttl_ms: Ttl = None
    if_not_exists: IfNotExists = None
    if_version: IfVersion = None


_Keys = Annotated[list[CacheKey], limits(maxItems=MAX_BATCH_ITEMS)]


class GetManyBody(Body):
    keys: Annotated[msgspec.Raw, required("Up to 10,000 keys."), decoded_later(_Keys)] = ABSENT


class IncrBody(Body):
    delta: Delta = None
    ttl_ms: Ttl = None


class TxnCheck(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A condition of a transaction. Without `cache` it is about the transaction's cache."""

    cache: _OtherCache = None
    key: _Key = None
    version: Annotated[Count | None, optional("The key's version; 0 is no value.")] = None
    exists: Annotated[bool | None, optional("Whether the key must have a value.")] = None


class TxnPut(msgspec.Struct, forbid_unknown_fields=True, gc=False, tag_field="op", tag="put"):
    cache: _OtherCache = None
    key: _Key = None
    value: _Value = None
    ttl_ms: Ttl = None


class TxnDelete(msgspec.Struct, forbid_unknown_fields=True, gc=False, tag_field="op", tag="delete"):
    cache: _OtherCache = None
    key: _Key = None


class TxnIncr(msgspec.Struct, forbid_unknown_fields=True, gc=False, tag_field="op", tag="incr"):
    cache: _OtherCache = None
    key: _Key = None
    delta: Delta = None
    ttl_ms: Ttl = None


TxnOp = TxnPut | TxnDelete | TxnIncr

_Checks = Annotated[list[TxnCheck], limits(maxItems=MAX_TXN_OPS)]
_Ops = Annotated[list[TxnOp], limits(minItems=1, maxItems=MAX_TXN_OPS)]


class TxnBody(Body):
    checks: Annotated[
        msgspec.Raw,
        optional("Conditions on keys: a version, or whether the key has a value. Up to 1,000."),
        decoded_later(_Checks),
    ] = ABSENT
    ops: Annotated[
        msgspec.Raw, required("1 to 1,000 ops: put, delete or incr."), decoded_later(_Ops)
    ] = ABSENT


# -- messages ----------------------------------------------------------------------------------


class PublishMessage(PublishBody, tag_field="type", tag="publish"):
    tenant_id: TenantId = None
    namespace: NamespaceName = None
    stream: _StreamName = None


class PublishBatchMessage(PublishBatchBody, tag_field="type", tag="publish_batch"):
    tenant_id: TenantId = None
    namespace: NamespaceName = None
    stream: _StreamName = None


class SubscribeMessage(Body, tag_field="type", tag="subscribe"):
    tenant_id: TenantId = None
    namespace: NamespaceName = None
    stream: _StreamName = None
    lag: Annotated[bool | None, LAG] = None
    event_queue_depth: Annotated[QueueDepth | None, EVENT_QUEUE_DEPTH] = None
    batch: Annotated[bool | None, optional("false: sends each event as its own frame.")] = None
    name: SubscriptionName = None
    start: Annotated[Count | str | None, START] = None
    owner: OwnerOfName = None
    lease_ms: LeaseTime = None
    prefetch: Prefetch = None
    stream_id: StreamId = None


_SubscriptionId = Annotated[str | None, required("The id from the answer to subscribe.")]


class UnsubscribeMessage(Body, tag_field="type", tag="unsubscribe"):
    subscription_id: _SubscriptionId = None


class LagMessage(Body, tag_field="type", tag="lag"):
    subscription_id: _SubscriptionId = None


_Offset = Annotated[Count | None, required("The event's offset.")]
_DeliveryId = Annotated[
    str | None, optional("Names this delivery only; a later one of the event is refused.")
]


class EventAckMessage(Body, tag_field="type", tag="event_ack"):
    subscription_id: _SubscriptionId = None
    offset: _Offset = None
    delivery_id: _DeliveryId = None


class EventReleaseMessage(Body, tag_field="type", tag="event_release"):
    subscription_id: _SubscriptionId = None
    offset: _Offset = None
    delivery_id: _DeliveryId = None


class EventNackMessage(Body, tag_field="type", tag="event_nack"):
    subscription_id: _SubscriptionId = None
    offset: _Offset = None
    delivery_id: _DeliveryId = None
    reason: Annotated[
        str | None, optional("Why it failed; the next delivery has it as last_error.")
    ] = None
    delay_ms: Annotated[
        Wait | None, optional("How long the next delivery waits, up to a day; 0 is at once.")
    ] = None


class EventExtendMessage(Body, tag_field="type", tag="event_extend"):
    subscription_id: _SubscriptionId = None
    offset: _Offset = None
    delivery_id: _DeliveryId = None
    lease_ms: LeaseTime = None


class PauseMessage(Body, tag_field="type", tag="pause"):
    subscription_id: _SubscriptionId = None


class ResumeMessage(Body, tag_field="type", tag="resume"):
    subscription_id: _SubscriptionId = None


class CachePutMessage(PutBody, tag_field="type", tag="cache_put"):
    tenant_id: TenantId = None
    namespace: NamespaceName = None
    cache: _CacheName = None
    key: _Key = None


class CacheGetMessage(Body, tag_field="type", tag="cache_get"):
    tenant_id: TenantId = None
    namespace: NamespaceName = None
    cache: _CacheName = None
    key: _Key = None


class CacheGetManyMessage(GetManyBody, tag_field="type", tag="cache_get_many"):
    tenant_id: TenantId = None
    namespace: NamespaceName = None
    cache: _CacheName = None


class CacheDeleteMessage(Body, tag_field="type", tag="cache_delete"):
    tenant_id: TenantId = None
    namespace: NamespaceName = None
    cache: _CacheName = None
    key: _Key = None
    if_version: IfVersion = None


class CacheIncrMessage(IncrBody, tag_field="type", tag="cache_incr"):
    tenant_id: TenantId = None
    namespace: NamespaceName = None
    cache: _CacheName = None
    key: _Key = None


class CacheTxnMessage(TxnBody, tag_field="type", tag="cache_txn"):
    tenant_id: TenantId = None
    namespace: NamespaceName = None
    cache: _CacheName = None


class CacheWatchMessage(Body, tag_field="type", tag="cache_watch"):
    """Watches one `key`, or all keys that begin with `prefix`."""

    tenant_id: TenantId = None
    namespace: NamespaceName = None
    cache: _CacheName = None
    key: WatchedKey = None
    prefix: Prefix = None
    include: Annotated[msgspec.Raw, INCLUDE, decoded_later(list[Literal["expire", "evict"]])] = (
        ABSENT
    )
    since_version: SinceVersion = None


class CacheUnwatchMessage(Body, tag_field="type", tag="cache_unwatch"):
    watch_id: Annotated[str | None, required("The id from the answer to cache_watch.")] = None


class PingMessage(Body, tag_field="type", tag="ping"):
    pass


class RefusedMessage(msgspec.Struct):
    """Takes the place of a message that is wrong: the error, and the `request_id` if it has one."""

    error: PenstockError
    request_id: RequestId = None


EventMessage = EventAckMessage | EventReleaseMessage | EventNackMessage | EventExtendMessage
"""A message that settles an event of a named subscription, or extends its lease."""

Message = (
    PublishMessage
    | PublishBatchMessage
    | SubscribeMessage
    | UnsubscribeMessage
    | LagMessage
    | EventAckMessage
    | EventNackMessage
    | EventReleaseMessage
    | EventExtendMessage
    | PauseMessage
    | ResumeMessage
    | CachePutMessage
    | CacheGetMessage
    | CacheGetManyMessage
    | CacheDeleteMessage
    | CacheIncrMessage
    | CacheTxnMessage
    | CacheWatchMessage
    | CacheUnwatchMessage
    | PingMessage
)
