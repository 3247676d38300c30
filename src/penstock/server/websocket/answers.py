"""What streams and caches answer, told apart by `type`; what is left out was not asked for."""

from __future__ import annotations

import msgspec

from penstock.model.streams import Lag
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
    """`count` once for a batch; `index` once for each of its payloads."""

    count: int | None = None
    index: int | None = None
    request_id: RequestId = None


class Subscribed(msgspec.Struct, omit_defaults=True, gc=False, tag_field="type", tag="subscribed"):
    subscription_id: str
    request_id: RequestId = None


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
    """Of a gap: changes after `from_version`, and up to `to_version`, may be missing."""

    watch_id: str
    event: str
    version: int
    key: str | None = None
    value: bytes | None = None
    from_version: int | None = None
    to_version: int | None = None


Answer = Ok | PublishOk | Subscribed | LagAnswer | Value | Values

Answers = Answer | list[PublishOk] | None
"""What answers one message: an answer, one for each payload, or none because none is due."""


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
