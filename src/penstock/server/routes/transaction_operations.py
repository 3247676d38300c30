"""Operations of a transaction: their bodies, commands, permissions and results on the wire.

Each kind has a body in `OperationBody`, and in `_KINDS` what makes its command and its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec

from penstock.api.access import AccessPart
from penstock.api.messages import Produce
from penstock.api.transactions import (
    AckOperation,
    EffectOperation,
    EventAckOperation,
    EventNackOperation,
    NackOperation,
    Operation,
)
from penstock.model.caching import Delete, Increment, Put
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.names import clean_name
from penstock.model.scopes import Scope, plain_name
from penstock.model.streams import Publish
from penstock.model.tenancy import Path
from penstock.model.transactions import (
    CacheResult,
    DuplicateResult,
    OperationResult,
    StoredResult,
)
from penstock.server.access import check, check_path, check_produce
from penstock.server.commands import (
    check_offset,
    clean_reason,
    increment_of,
    ttl_of,
    version_of,
)
from penstock.server.http.requests import Notes
from penstock.server.members import Base64, CacheKey, Name, StrictBody, required
from penstock.server.routes.deliveries import AckBody, NackBody, settle_of
from penstock.server.routes.effects import CommitEffectBody, effect_of
from penstock.server.routes.messages import ProduceBody, produce_of
from penstock.server.routes.stream_deliveries import EventAckBody, EventNackBody
from penstock.server.websocket.messages import (
    Delta,
    IfNotExists,
    IfVersion,
    ProducerId,
    Sequence,
    Ttl,
)

_Cache = Annotated[Name | None, required("The cache's name; the cache must be durable.")]
_Stream = Annotated[Name | None, required("The stream's name; it must be durable.")]
_Key = Annotated[CacheKey | None, required("1 to 1,024 bytes of UTF-8 without control characters.")]


class ProduceOperation(ProduceBody, tag_field="op", tag="produce"):
    """The members of a produce."""


class AckOperationBody(AckBody, tag_field="op", tag="ack"):
    """The members of an ack. An offset that is done already is refused."""


class NackOperationBody(NackBody, tag_field="op", tag="nack"):
    """The members of a nack."""


class EventAckOperationBody(EventAckBody, tag_field="op", tag="event_ack"):
    """The members of an event's ack, and the stream. An event that is done already is refused."""

    stream: _Stream = None


class EventNackOperationBody(EventNackBody, tag_field="op", tag="event_nack"):
    """The members of an event's nack, and the stream."""

    stream: _Stream = None


class EffectOperationBody(CommitEffectBody, tag_field="op", tag="effect_commit"):
    """The members of the commit of an effect. One that is committed already is refused."""


class PublishOperation(StrictBody, tag_field="op", tag="publish"):
    stream: _Stream = None
    payloads: Annotated[
        list[Base64] | None, required("1 to 10,000 events, each in base64; published in order.")
    ] = None
    producer_id: ProducerId = None
    sequence: Sequence = None


class CachePutOperation(StrictBody, tag_field="op", tag="cache_put"):
    cache: _Cache = None
    key: _Key = None
    value: Annotated[Base64 | None, required("The value, in base64; it may be empty.")] = None
    ttl_ms: Ttl = None
    if_not_exists: IfNotExists = None
    if_version: IfVersion = None


class CacheDeleteOperation(StrictBody, tag_field="op", tag="cache_delete"):
    cache: _Cache = None
    key: _Key = None
    if_version: IfVersion = None


class CacheIncrOperation(StrictBody, tag_field="op", tag="cache_incr"):
    cache: _Cache = None
    key: _Key = None
    delta: Delta = None
    ttl_ms: Ttl = None


OperationBody = (
    ProduceOperation
    | AckOperationBody
    | NackOperationBody
    | EventAckOperationBody
    | EventNackOperationBody
    | EffectOperationBody
    | PublishOperation
    | CachePutOperation
    | CacheDeleteOperation
    | CacheIncrOperation
)


class TransactionItem(msgspec.Struct, omit_defaults=True, gc=False):
    """The result of one operation. A produce has its topic, partition and offset, or `duplicate`;
    a publish has the offset of its first event, also with `duplicate` if it is still known;
    an operation on a cache has a version, a delete also `deleted`, an increment also `number`."""

    status: str
    topic: str = ""
    partition: int = -1
    offset: int = -1
    duplicate: bool = False
    version: int = -1
    deleted: bool | None = None
    number: int | None = None


def operation_of(scope: Scope, index: int, body: OperationBody) -> Operation:
    try:
        return _KINDS[type(body)].command(scope, body)
    except PenstockError as error:
        raise error.at_operation(index) from None


def item_of(body: OperationBody, result: OperationResult) -> TransactionItem:
    return _KINDS[type(body)].item(body, result)


# -- permissions -----------------------------------------------------------------------------------


def check_operation(access: AccessPart, notes: Notes, index: int, operation: Operation) -> None:
    """Raises unless the sender may do the operation by itself."""
    principal = notes.principal
    try:
        if isinstance(operation, Produce):
            check_produce(access, notes, operation)
        elif isinstance(operation, Publish):
            check_path(access, principal, "publish", "stream", operation.path)
        elif isinstance(operation, EventAckOperation):
            check_path(access, principal, "subscribe", "stream", operation.path)
        elif isinstance(operation, Put | Delete | Increment):
            check_path(access, principal, "cache_write", "cache", operation.path)
        else:
            topic = plain_name(_delivery_topic(operation))
            check(access, principal, "consume", "topic", notes.scope, topic)
    except PenstockError as error:
        raise error.at_operation(index) from None


def _delivery_topic(operation: AckOperation | NackOperation | EffectOperation) -> str:
    if isinstance(operation, EffectOperation):
        return operation.effect.topic
    return operation.delivery.topic


# -- commands --------------------------------------------------------------------------------------


def _ack_of(scope: Scope, body: AckOperationBody) -> AckOperation:
    return AckOperation(settle_of(scope, body))


def _nack_of(scope: Scope, body: NackOperationBody) -> NackOperation:
    reason = clean_reason(body.reason)
    return NackOperation(settle_of(scope, body), reason, body.delay_ms, bool(body.dead))


def _event_ack_of(scope: Scope, body: EventAckOperationBody) -> EventAckOperation:
    return EventAckOperation(*_event_of(scope, body))


def _event_nack_of(scope: Scope, body: EventNackOperationBody) -> EventNackOperation:
    return EventNackOperation(*_event_of(scope, body), clean_reason(body.reason), body.delay_ms)


def _event_of(
    scope: Scope, body: EventAckOperationBody | EventNackOperationBody
) -> tuple[Path, str, int, str, str]:
    path = (*scope, clean_name(body.stream, "stream"))
    name, owner = clean_name(body.name, "name"), clean_name(body.owner, "owner")
    check_offset(body.offset)
    return path, name, body.offset or 0, owner, body.delivery_id or ""


def _effect_of(scope: Scope, body: EffectOperationBody) -> EffectOperation:
    return EffectOperation(effect_of(scope, body), body.result or "")


def _publish_of(scope: Scope, body: PublishOperation) -> Publish:
    return Publish(
        path=(*scope, clean_name(body.stream, "stream")),
        payloads=body.payloads or [],
        producer_id=body.producer_id or "",
        sequence=body.sequence,
    )


def _put_of(scope: Scope, body: CachePutOperation) -> Put:
    if body.value is None:
        raise InvalidArgument("value is required")
    return Put(
        _path(scope, body.cache),
        body.key or "",
        body.value,
        ttl_of(body.ttl_ms),
        body.if_not_exists or False,
        version_of(body.if_version, "if_version"),
    )


def _delete_of(scope: Scope, body: CacheDeleteOperation) -> Delete:
    if_version = version_of(body.if_version, "if_version")
    return Delete(_path(scope, body.cache), body.key or "", if_version)


def _increment_of(scope: Scope, body: CacheIncrOperation) -> Increment:
    return increment_of(_path(scope, body.cache), body.key, body.delta, body.ttl_ms)


def _path(scope: Scope, cache: str | None) -> Path:
    return (*scope, clean_name(cache, "cache"))


# -- results -------------------------------------------------------------------------------------


def _produced(body: ProduceOperation, result: OperationResult) -> TransactionItem:
    topic = clean_name(body.topic, "topic")
    if isinstance(result, StoredResult):
        return TransactionItem("produced", topic, result.partition, result.offset)
    return TransactionItem("produced", topic, duplicate=True)


def _published(_: PublishOperation, result: StoredResult | DuplicateResult) -> TransactionItem:
    is_repeat = isinstance(result, DuplicateResult)
    return TransactionItem("published", offset=result.offset, duplicate=is_repeat)


def _done(status: str) -> Callable[[Any, OperationResult], TransactionItem]:
    item = TransactionItem(status)
    return lambda _, result: item


def _changed(status: str) -> Callable[[Any, CacheResult], TransactionItem]:
    return lambda _, result: TransactionItem(
        status, version=result.version, deleted=result.deleted, number=result.number
    )


class _Kind(NamedTuple):
    """Makes the command of an operation, and the item of its result."""

    command: Callable[[Scope, Any], Operation]
    item: Callable[[Any, Any], TransactionItem]


_KINDS: dict[type[Any], _Kind] = {
    ProduceOperation: _Kind(produce_of, _produced),
    AckOperationBody: _Kind(_ack_of, _done("acked")),
    NackOperationBody: _Kind(_nack_of, _done("nacked")),
    EventAckOperationBody: _Kind(_event_ack_of, _done("acked")),
    EventNackOperationBody: _Kind(_event_nack_of, _done("nacked")),
    EffectOperationBody: _Kind(_effect_of, _done("committed")),
    PublishOperation: _Kind(_publish_of, _published),
    CachePutOperation: _Kind(_put_of, _changed("put")),
    CacheDeleteOperation: _Kind(_delete_of, _changed("deleted")),
    CacheIncrOperation: _Kind(_increment_of, _changed("incremented")),
}
