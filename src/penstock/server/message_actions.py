"""Performs the messages that need no open connection, and describes all messages.

An action takes a path, a body and `done`. It calls `done` once: with the answer, a list of answers,
None when none is due, or the PenstockError that refused it; or it raises that at once. `perform`
takes a whole message and never raises it. Must not know which way a message came.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any

from penstock.api import outcomes
from penstock.api.engine import Engine
from penstock.model.caching import CacheValue, Delete, Precondition, Written
from penstock.model.errors import InvalidArgument, PenstockError, TooLarge
from penstock.model.tenancy import Path
from penstock.server.access import HandlerNeeds, Open
from penstock.server.commands import (
    increment_of,
    keys_of,
    path_of,
    publish_batch_of,
    publish_of,
    put_of,
    txn_of,
    version_of,
)
from penstock.server.message_description import MessageDescription
from penstock.server.websocket.answers import (
    Answers,
    CacheEvent,
    Event,
    EventBatch,
    KeyValue,
    LagAnswer,
    Ok,
    PublishOk,
    Subscribed,
    TxnResult,
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
    EventAckMessage,
    EventExtendMessage,
    EventNackMessage,
    EventReleaseMessage,
    GetManyBody,
    IncrBody,
    LagMessage,
    Message,
    PauseMessage,
    PingMessage,
    PublishBatchBody,
    PublishBatchMessage,
    PublishBody,
    PublishMessage,
    RefusedMessage,
    RequestId,
    ResumeMessage,
    SubscribeMessage,
    TxnBody,
    UnsubscribeMessage,
)

Done = outcomes.Done[Answers]
Outcome = Answers | PenstockError


def perform(engine: Engine, message: Message | RefusedMessage, done: Done) -> None:
    action = _ACTIONS.get(type(message), _refuse)
    try:
        action(engine, message, done)
    except PenstockError as error:
        done(error)


# -- streams ---------------------------------------------------------------------------------------


def publish(engine: Engine, path: Path, body: PublishBody, done: Done) -> None:
    command = publish_of(path, body)
    answer = _nothing if body.ack == "none" else partial(_one_published, body.request_id)
    engine.streams.publish(command, partial(answer_publish, done, answer))


def publish_batch(engine: Engine, path: Path, body: PublishBatchBody, done: Done) -> None:
    command = publish_batch_of(path, body)
    answer = partial(published, body.ack or "per_batch", len(command.payloads), body.request_id)
    engine.streams.publish(command, partial(answer_publish, done, answer))


def published(
    ack: str, count: int, request_id: RequestId, offset: int | None
) -> PublishOk | list[PublishOk] | None:
    """Returns the answer to a batch that was published. `offset` is that of its first event, if the
    stream is durable."""
    if ack == "none":
        return None
    if ack == "per_message":
        return [
            PublishOk(None, index, request_id, None if offset is None else offset + index)
            for index in range(count)
        ]
    return PublishOk(count, None, request_id, offset)


def _one_published(request_id: RequestId, offset: int | None) -> PublishOk:
    return PublishOk(None, None, request_id, offset)


def _nothing(offset: int | None) -> None:
    return None


def answer_publish(
    done: Done, answer: Callable[[int | None], Answers], outcome: int | PenstockError | None
) -> None:
    done(outcome if isinstance(outcome, PenstockError) else answer(outcome))


# -- the cache -------------------------------------------------------------------------------------


def _got(done: Done, request_id: RequestId, found: CacheValue | PenstockError | None) -> None:
    done(found if isinstance(found, PenstockError) else value_answer(found, request_id))


def value_answer(found: CacheValue | None, request_id: RequestId = None) -> Value:
    if found is None:
        return Value(None, 0, request_id=request_id)
    return Value(found.value, found.version, found.ttl_ms, None, request_id)


def get_many(engine: Engine, path: Path, body: GetManyBody, done: Done) -> None:
    keys = keys_of(body)
    limit = engine.limits.max_body_bytes
    engine.caches.get_many(path, keys, partial(_got_many, done, keys, body.request_id, limit))


def _got_many(
    done: Done,
    keys: list[str],
    request_id: RequestId,
    limit: int,
    found: list[CacheValue | None] | PenstockError,
) -> None:
    if isinstance(found, PenstockError):
        done(found)
        return
    if sum(len(each.value) for each in found if each is not None) > limit:
        done(too_much(limit))
        return
    values = [
        KeyValue(key, None, 0) if each is None else KeyValue(key, each.value, each.version)
        for key, each in zip(keys, found, strict=True)
    ]
    done(Values(values, request_id))


def _written(done: Done, request_id: RequestId, outcome: Written | PenstockError) -> None:
    done(written_answer(outcome, request_id) if isinstance(outcome, Written) else outcome)


def written_answer(written: Written, request_id: RequestId) -> Ok:
    return Ok(written.version, written.deleted, None, None, request_id)


def increment(
    engine: Engine,
    path: Path,
    key: str | None,
    body: IncrBody,
    done: outcomes.Done[Value],
    only_if: Precondition | None = None,
) -> None:
    command = increment_of(path, key, body.delta, body.ttl_ms, only_if)
    engine.caches.increment(command, partial(_incremented, done, body.request_id))


def _incremented(
    done: outcomes.Done[Value], request_id: RequestId, outcome: Written | PenstockError
) -> None:
    if isinstance(outcome, PenstockError):
        done(outcome)
    else:
        number = outcome.number or 0
        done(Value(b"%d" % number, outcome.version, number=number, request_id=request_id))


def transact(engine: Engine, path: Path, body: TxnBody, done: Done) -> None:
    command = txn_of(path, body)
    engine.caches.transact(command, partial(_transacted, done, body.request_id))


def _transacted(done: Done, request_id: RequestId, outcome: list[Written] | PenstockError) -> None:
    if isinstance(outcome, PenstockError):
        done(outcome)
    else:
        results = [TxnResult(each.version, each.deleted, each.number) for each in outcome]
        done(Ok(results=results, request_id=request_id))


def too_much(limit: int) -> TooLarge:
    """Returns the error for a small request whose answer would be large, as when it asks for one
    value many times."""
    return TooLarge(f"the values are over {limit} bytes (max_body_bytes); ask for fewer at once")


# -- whole messages --------------------------------------------------------------------------------


def _publish(engine: Engine, message: PublishMessage, done: Done) -> None:
    path = path_of(message.tenant_id, message.namespace, message.stream, "stream")
    publish(engine, path, message, done)


def _publish_batch(engine: Engine, message: PublishBatchMessage, done: Done) -> None:
    path = path_of(message.tenant_id, message.namespace, message.stream, "stream")
    publish_batch(engine, path, message, done)


def _cache_get(engine: Engine, message: CacheGetMessage, done: Done) -> None:
    path = path_of(message.tenant_id, message.namespace, message.cache, "cache")
    engine.caches.get(path, message.key or "", partial(_got, done, message.request_id))


def _cache_get_many(engine: Engine, message: CacheGetManyMessage, done: Done) -> None:
    path = path_of(message.tenant_id, message.namespace, message.cache, "cache")
    get_many(engine, path, message, done)


def _cache_put(engine: Engine, message: CachePutMessage, done: Done) -> None:
    path = path_of(message.tenant_id, message.namespace, message.cache, "cache")
    command = put_of(path, message.key, message)
    engine.caches.put(command, partial(_written, done, message.request_id))


def _cache_delete(engine: Engine, message: CacheDeleteMessage, done: Done) -> None:
    path = path_of(message.tenant_id, message.namespace, message.cache, "cache")
    if_version = version_of(message.if_version, "if_version")
    command = Delete(path, message.key or "", if_version)
    engine.caches.delete(command, partial(_written, done, message.request_id))


def _cache_incr(engine: Engine, message: CacheIncrMessage, done: Done) -> None:
    path = path_of(message.tenant_id, message.namespace, message.cache, "cache")
    increment(engine, path, message.key, message, done)


def _cache_txn(engine: Engine, message: CacheTxnMessage, done: Done) -> None:
    path = path_of(message.tenant_id, message.namespace, message.cache, "cache")
    transact(engine, path, message, done)


def _ping(engine: Engine, message: PingMessage, done: Done) -> None:
    done(Ok(request_id=message.request_id))


def _refuse(engine: Engine, message: Any, done: Done) -> None:
    if isinstance(message, RefusedMessage):
        done(message.error)
        return
    raise InvalidArgument(
        f"{message.__struct_config__.tag} needs a connection that stays open: use the WebSocket "
        "/v1/felix/ws, or GET …/streams/{stream}/subscribe and …/caches/{cache}/watch"
    )


# -- descriptions ----------------------------------------------------------------------------------


_OWN = Open("is about the connection itself")
_READS = HandlerNeeds("cache_read", "cache")
_WRITES = HandlerNeeds("cache_write", "cache")

_HERE = {"tenant_id": "default", "namespace": "default"}
_STREAM = _HERE | {"stream": "default"}
_CACHE = _HERE | {"cache": "default"}
_ENTRY = _CACHE | {"key": "greeting"}
_SUBSCRIPTION = {"subscription_id": "s1"}


def _own(shape: Any, text: str, example: dict[str, Any], answer: Any = Ok) -> MessageDescription:
    """Describes a message about the connection itself."""
    return MessageDescription(shape, text, example, answer, access=_OWN)


MESSAGES: tuple[MessageDescription, ...] = (
    MessageDescription(
        PublishMessage,
        "Publishes an event. With ack none, only a failure is answered.",
        _STREAM | {"payload": "aGVsbG8="},
        PublishOk,
        access=HandlerNeeds("publish", "stream"),
        action=_publish,
    ),
    MessageDescription(
        PublishBatchMessage,
        "Publishes events together, in order. With ack per_message, each event is answered by "
        "a publish_ok with its index.",
        _STREAM | {"payloads": ["b25l", "dHdv"]},
        PublishOk,
        access=HandlerNeeds("publish", "stream"),
        action=_publish_batch,
    ),
    MessageDescription(
        SubscribeMessage,
        "Sends every event that is accepted after the answer as an event, or several as an "
        "event_batch. On a durable stream a start or a name may be given.",
        _STREAM,
        Subscribed,
        access=HandlerNeeds("subscribe", "stream"),
        pushes=(Event, EventBatch, LagAnswer),
    ),
    _own(
        UnsubscribeMessage,
        "Ends a subscription of this connection, and discards the events that it has not received.",
        _SUBSCRIPTION,
    ),
    _own(
        LagMessage,
        "Answers how far behind a subscription of this connection is, and how many events it lost.",
        _SUBSCRIPTION,
        LagAnswer,
    ),
    _own(
        PauseMessage,
        "Sends no events of a subscription until resume. Those on their way still arrive.",
        _SUBSCRIPTION,
    ),
    _own(ResumeMessage, "Sends the events of a paused subscription again.", _SUBSCRIPTION),
    _own(
        EventAckMessage,
        "Finishes an event for the named subscription that delivered it here.",
        {"subscription_id": "n1", "offset": 12, "delivery_id": "1-1"},
    ),
    _own(
        EventReleaseMessage,
        "Gives back an event that nobody began to handle: it is delivered again, at its old place "
        "and without counting an attempt.",
        {"subscription_id": "n1", "offset": 12, "delivery_id": "1-1"},
    ),
    _own(
        EventNackMessage,
        "Reports that an event could not be handled: it is delivered again.",
        {"subscription_id": "n1", "offset": 12, "reason": "timeout"},
    ),
    _own(
        EventExtendMessage,
        "Extends the lease of an event: it ends lease_ms from now.",
        {"subscription_id": "n1", "offset": 12, "lease_ms": 30_000},
    ),
    MessageDescription(
        CachePutMessage,
        "Puts a value, and answers its version.",
        _ENTRY | {"value": "aGVsbG8=", "ttl_ms": 60_000},
        Ok,
        access=_WRITES,
        action=_cache_put,
    ),
    MessageDescription(
        CacheGetMessage,
        "Answers the value of a key; null with version 0 if there is none.",
        _ENTRY,
        Value,
        access=_READS,
        action=_cache_get,
    ),
    MessageDescription(
        CacheGetManyMessage,
        "Answers the values of keys, all from the same moment.",
        _CACHE | {"keys": ["greeting", "nothing"]},
        Values,
        access=_READS,
        action=_cache_get_many,
    ),
    MessageDescription(
        CacheDeleteMessage,
        "Removes a key, and answers whether it was there.",
        _ENTRY,
        Ok,
        access=_WRITES,
        action=_cache_delete,
    ),
    MessageDescription(
        CacheIncrMessage,
        "Adds to a counter, and answers its new value.",
        _CACHE | {"key": "visits"},
        Value,
        access=_WRITES,
        action=_cache_incr,
    ),
    MessageDescription(
        CacheTxnMessage,
        "Performs all ops, or none if a check fails.",
        _CACHE | {"ops": [{"op": "incr", "key": "visits"}]},
        Ok,
        access=_WRITES,
        action=_cache_txn,
    ),
    MessageDescription(
        CacheWatchMessage,
        "Sends every later change of a key, or of the keys with a prefix, as a cache_event. "
        "Takes either key or prefix.",
        _CACHE | {"prefix": "user:"},
        Ok,
        access=_READS,
        pushes=(CacheEvent,),
    ),
    MessageDescription(
        CacheUnwatchMessage,
        "Ends a watch of this connection.",
        {"watch_id": "w1"},
        Ok,
        access=_OWN,
    ),
    MessageDescription(PingMessage, "Answered with ok.", {}, Ok, access=_OWN, action=_ping),
)

_ACTIONS = {each.shape: each.action for each in MESSAGES if each.action is not None}

MESSAGES_WITHOUT_CONNECTION: Any = reduce(or_, _ACTIONS)
"""The union of the messages that POST /v1/felix takes."""
