"""Transactions: operations on topics, groups, effects and durable caches, all or none of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from penstock.api.messages import Produce
from penstock.api.transactions import (
    AckOperation,
    EffectOperation,
    NackOperation,
    Operation,
    TransactionCommand,
)
from penstock.model.caching import Delete, Increment, Put
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_BATCH_ITEMS, MAX_TXN_OPS
from penstock.model.names import clean_name
from penstock.model.scopes import Scope, full_name, plain_name
from penstock.model.streams import Publish
from penstock.model.tenancy import Path
from penstock.model.transactions import CacheResult, OperationResult, StoredResult
from penstock.server.access import Open, check, check_path, check_produce
from penstock.server.batches import SMALL_BODY_BYTES
from penstock.server.commands import clean_reason, increment_of, is_absent, ttl_of, version_of
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Notes, Request, decode_body
from penstock.server.members import (
    Base64,
    CacheKey,
    Name,
    StrictBody,
    decoded_later,
    limits,
    optional,
    required,
)
from penstock.server.routes.deliveries import AckBody, NackBody, settle_of
from penstock.server.routes.effects import CommitEffectBody, effect_of
from penstock.server.routes.endpoint import Answer, Endpoint
from penstock.server.routes.messages import ProduceBody, produce_of
from penstock.server.websocket.decoding import ListDecoder, explain
from penstock.server.websocket.messages import (
    ABSENT,
    Delta,
    IfNotExists,
    IfVersion,
    ProducerId,
    Sequence,
    Ttl,
)

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_Cache = Annotated[Name | None, required("The cache's name; the cache must be durable.")]
_Key = Annotated[CacheKey | None, required("1 to 1,024 bytes of UTF-8 without control characters.")]


class ProduceOperation(ProduceBody, tag_field="op", tag="produce"):
    """The members of a produce."""


class AckOperationBody(AckBody, tag_field="op", tag="ack"):
    """The members of an ack. An offset that is done already is refused."""


class NackOperationBody(NackBody, tag_field="op", tag="nack"):
    """The members of a nack."""


class EffectOperationBody(CommitEffectBody, tag_field="op", tag="effect_commit"):
    """The members of the commit of an effect. One that is committed already is refused."""


class PublishOperation(StrictBody, tag_field="op", tag="publish"):
    stream: Annotated[Name | None, required("The stream's name; it must be durable.")] = None
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
    | EffectOperationBody
    | PublishOperation
    | CachePutOperation
    | CacheDeleteOperation
    | CacheIncrOperation
)

_Operations = Annotated[list[OperationBody], limits(minItems=1, maxItems=MAX_TXN_OPS)]


class TransactionBody(StrictBody):
    operations: Annotated[
        msgspec.Raw,
        required("1 to 1,000 operations, done in this order."),
        decoded_later(_Operations),
    ] = ABSENT
    transaction_id: Annotated[
        Name | None,
        optional(
            "A new name for each transaction, of 1 to 200 bytes. If the same request comes again, "
            "it is answered like the first, and nothing is done twice."
        ),
    ] = None


class TransactionItem(msgspec.Struct, omit_defaults=True, gc=False):
    """The result of one operation. A produce has its topic, partition and offset, or `duplicate`;
    a publish has the offset of its first event, or `duplicate`;
    an operation on a cache has a version, a delete also `deleted`, an increment also `number`."""

    status: str
    topic: str = ""
    partition: int = -1
    offset: int = -1
    duplicate: bool = False
    version: int = -1
    deleted: bool | None = None
    number: int | None = None


class CommittedTransaction(msgspec.Struct):
    status: str
    results: list[TransactionItem]


class _WholeBody(StrictBody):
    """A body of ordinary size, decoded in one go."""

    operations: list[OperationBody]
    transaction_id: str | None = None


_whole = msgspec.json.Decoder(_WholeBody)
_bodies = msgspec.json.Decoder(TransactionBody)
_lists = ListDecoder(OperationBody)
_raws = ListDecoder(msgspec.Raw)
_one: msgspec.json.Decoder[OperationBody] = msgspec.json.Decoder(OperationBody)


def commit(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    bodies, transaction_id = decode_transaction(request.body)
    scope = request.notes.scope
    if not bodies:
        # Before its id is looked up: whoever may do nothing must not learn which ids were used.
        raise InvalidArgument("a transaction needs at least one operation")
    command = TransactionCommand([_operation_of(scope, *each) for each in enumerate(bodies)])
    if request.notes.principal is not None:
        for index, operation in enumerate(command.operations):
            _check_access(dispatch, request.notes, index, operation)
    if transaction_id is not None:
        name = clean_name(transaction_id, "transaction_id")
        command.transaction_id = full_name(scope, name)
        # Members in another order, or spaces, make another transaction: clients repeat the bytes.
        command.fingerprint = hashlib.blake2b(request.body, digest_size=8).digest()
    answer = partial(_committed, bodies)
    dispatch.engine.transactions.commit(
        command, lambda outcome: send_outcome(reply, outcome, 200, answer)
    )


# -- operations ----------------------------------------------------------------------------------


def decode_transaction(data: bytes) -> tuple[list[OperationBody], str | None]:
    """Returns the operations and the id. Tries to decode all in one go, which is fast; a body that
    is large or wrong is decoded in steps, which tell what is wrong with it."""
    if len(data) <= SMALL_BODY_BYTES:
        try:
            whole = _whole.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError):
            pass
        else:
            if len(whole.operations) <= MAX_BATCH_ITEMS:
                return whole.operations, whole.transaction_id
    return decode_in_steps(data)


def decode_in_steps(data: bytes) -> tuple[list[OperationBody], str | None]:
    body = decode_body(_bodies, data)
    return _operations(body.operations), body.transaction_id


def _operations(raw: msgspec.Raw) -> list[OperationBody]:
    if is_absent(raw):
        raise InvalidArgument("operations is required")
    try:
        return _lists.decode(raw, "operations")
    except InvalidArgument:
        # Some operation is wrong: find out which.
        for index, each in enumerate(_raws.decode(raw, "operations")):
            try:
                _one.decode(each)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise InvalidArgument(explain(error)).at_operation(index) from error
        raise


def _operation_of(scope: Scope, index: int, body: OperationBody) -> Operation:
    try:
        return _KINDS[type(body)].command(scope, body)
    except PenstockError as error:
        raise error.at_operation(index) from None


def _check_access(
    dispatch: RequestDispatch, notes: Notes, index: int, operation: Operation
) -> None:
    """Raises unless the sender may do the operation by itself."""
    access, principal = dispatch.engine.access, notes.principal
    try:
        if isinstance(operation, Produce):
            check_produce(access, notes, operation)
        elif isinstance(operation, Publish):
            check_path(access, principal, "publish", "stream", operation.path)
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


def _ack_of(scope: Scope, body: AckOperationBody) -> AckOperation:
    return AckOperation(settle_of(scope, body))


def _nack_of(scope: Scope, body: NackOperationBody) -> NackOperation:
    reason = clean_reason(body.reason)
    return NackOperation(settle_of(scope, body), reason, body.delay_ms, bool(body.dead))


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


def _published(_: PublishOperation, result: OperationResult) -> TransactionItem:
    if isinstance(result, StoredResult):
        return TransactionItem("published", offset=result.offset)
    return TransactionItem("published", duplicate=True)


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
    EffectOperationBody: _Kind(_effect_of, _done("committed")),
    PublishOperation: _Kind(_publish_of, _published),
    CachePutOperation: _Kind(_put_of, _changed("put")),
    CacheDeleteOperation: _Kind(_delete_of, _changed("deleted")),
    CacheIncrOperation: _Kind(_increment_of, _changed("incremented")),
}


def _committed(bodies: list[OperationBody], results: list[OperationResult]) -> CommittedTransaction:
    items = [
        _KINDS[type(body)].item(body, result) for body, result in zip(bodies, results, strict=True)
    ]
    return CommittedTransaction("committed", items)


_DELIVERY = {
    "topic": "orders",
    "group": "billing",
    "partition": 0,
    "offset": 12,
    "owner": "w1",
    "delivery_id": "2-1",
}

ENDPOINTS = (
    Endpoint(
        route="POST /v1/transactions",
        handler=commit,
        access=Open("each operation is checked by itself"),
        tag="Transactions",
        summary="Run operations together",
        text="Does all operations, in order, or none of them, also across a crash. If one is "
        "refused, the answer is its error, and operation is its index. An ack of an offset that "
        "is done already is refused here, so that a message's results are produced once.",
        body=TransactionBody,
        example={
            "transaction_id": "w1-000017",
            "operations": [
                {"op": "produce", "topic": "invoices", "key": "user-1", "value": "17 EUR"},
                {"op": "ack", **_DELIVERY},
                {"op": "cache_incr", "cache": "totals", "key": "invoices"},
            ],
        },
        answers={
            200: Answer(
                "All of it is done. A result per operation, in order.",
                CommittedTransaction,
                {
                    "status": "committed",
                    "results": [
                        {"status": "produced", "topic": "invoices", "partition": 0, "offset": 4},
                        {"status": "acked"},
                        {"status": "incremented", "version": 1_767_225_600_000_001, "number": 5},
                    ],
                },
            )
        },
        errors=(400, 404, 409, 412, 413, 429, 503),
    ),
)
