"""Caches: entries by key, counters, many at once, transactions, watches.

The route gives the cache's path; the key is read from the request's path. With `?raw=true` a value
is the body itself instead of base64 in JSON. The headers If-Match and If-None-Match name versions;
`if_version` and `if_not_exists` must hold beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.api.caches import check_precondition
from penstock.model.caching import CacheValue, Delete, Precondition, Written
from penstock.model.errors import NotFound, PenstockError
from penstock.model.tenancy import Path
from penstock.server.access import Needs, guard_of
from penstock.server.commands import put_of, version_of, watch_of
from penstock.server.http.answer_budget import SMALL_ANSWER_BYTES
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.feeds import open_feed
from penstock.server.http.requests import Request, check_raw_only, path_name, truth, whole_number
from penstock.server.http.responses import JSON_TYPE, encode_json
from penstock.server.message_access import check_transaction
from penstock.server.message_actions import (
    get_many,
    increment,
    transact,
    value_answer,
    written_answer,
)
from penstock.server.routes.endpoint import Answer, Endpoint
from penstock.server.routes.etags import etag_head, precondition_of
from penstock.server.routes.streams import FeedFormatName, FeedHeartbeat, Raw
from penstock.server.routes.websocket import send_answer
from penstock.server.websocket.answers import CacheEvent, Ok, Value, Values
from penstock.server.websocket.decoding import decode_body, query_request_id
from penstock.server.websocket.messages import (
    INCLUDE,
    GetManyBody,
    IfNotExists,
    IfVersion,
    IncrBody,
    Prefix,
    PutBody,
    RequestId,
    RequestIdText,
    SinceVersion,
    Ttl,
    TxnBody,
    WatchedKey,
)

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

CACHE = "/v1/tenants/{tenant_id}/namespaces/{namespace}/caches/{cache}"
ENTRY = CACHE + "/entries/{key}"

_READ = Needs("cache_read", "cache")
_WRITE = Needs("cache_write", "cache")

_BYTES_TYPE = b"content-type: application/octet-stream\r\nx-content-type-options: nosniff\r\n"


class GetQuery(msgspec.Struct):
    raw: Raw = None


class RawPutQuery(msgspec.Struct):
    raw: Raw = None
    ttl_ms: Ttl = None
    if_not_exists: IfNotExists = None
    if_version: IfVersion = None
    request_id: RequestIdText = None


class DeleteQuery(msgspec.Struct):
    if_version: IfVersion = None


class WatchQuery(msgspec.Struct):
    key: WatchedKey = None
    prefix: Prefix = None
    include: Annotated[str | None, INCLUDE] = None
    since_version: SinceVersion = None
    format: FeedFormatName = None
    heartbeat_ms: FeedHeartbeat = None


_put_decoder = msgspec.json.Decoder(PutBody)
_incr_decoder = msgspec.json.Decoder(IncrBody)
_get_many_decoder = msgspec.json.Decoder(GetManyBody)
_txn_decoder = msgspec.json.Decoder(TxnBody)


def get_entry(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    is_raw = request.query and truth(request.params(), "raw")
    send = partial(_send_bytes if is_raw else _send_value, reply)
    key = _key(request.path)
    only_if = precondition_of(request.notes)
    if only_if is not None:
        send = partial(_send_if, reply, key, only_if, send)
    dispatch.engine.caches.get(path, key, send)


def _send_if(
    reply: Reply,
    key: str,
    only_if: Precondition,
    send: Callable[[CacheValue | PenstockError | None], None],
    found: CacheValue | PenstockError | None,
) -> None:
    """Sends the value, or 304 if the client has it already."""
    if isinstance(found, PenstockError):
        send(found)
        return
    version = 0 if found is None else found.version
    try:
        check_precondition(key, version, Precondition(only_if.if_match))
    except PenstockError as error:
        reply.send_error(error)
        return
    if only_if.is_excluded(version):
        reply.send_nothing(304, etag_head(version))
    else:
        send(found)


def _send_value(reply: Reply, found: CacheValue | PenstockError | None) -> None:
    if isinstance(found, PenstockError):
        reply.send_error(found)
    elif found is None:
        reply.send(200, encode_json(value_answer(None)))
    else:
        head = JSON_TYPE + etag_head(found.version)
        if len(found.value) < SMALL_ANSWER_BYTES:
            reply.send(200, encode_json(value_answer(found)), head)
        else:
            nbytes = len(found.value) * 4 // 3
            reply.when_room(nbytes, lambda: reply.send(200, encode_json(value_answer(found)), head))


def _send_bytes(reply: Reply, found: CacheValue | PenstockError | None) -> None:
    if isinstance(found, CacheValue):
        head = _BYTES_TYPE + etag_head(found.version)
        reply.when_room(len(found.value), lambda: reply.send(200, found.value, head))
    else:
        reply.send_error(found or NotFound("there is nothing under this key"))


def put_entry(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = (request.query and _raw_put(request)) or decode_body(_put_decoder, request.body)
    command = put_of(path, _key(request.path), body, precondition_of(request.notes))
    dispatch.engine.caches.put(command, partial(_send_written, reply, body.request_id))


def _send_written(reply: Reply, request_id: RequestId, outcome: Written | PenstockError) -> None:
    if isinstance(outcome, Written):
        head = JSON_TYPE if outcome.deleted is not None else JSON_TYPE + etag_head(outcome.version)
        reply.send(200, encode_json(written_answer(outcome, request_id)), head)
    else:
        reply.send_error(outcome, request_id)


def _raw_put(request: Request) -> PutBody | None:
    """The request's body as the value, and the rest from the query; None if it is not raw."""
    params = request.params()
    if not truth(params, "raw"):
        check_raw_only(params, ("ttl_ms", "if_not_exists", "if_version", "request_id"))
        return None
    return PutBody(
        value=request.body,
        ttl_ms=whole_number(params, "ttl_ms"),
        if_not_exists=truth(params, "if_not_exists"),
        if_version=whole_number(params, "if_version"),
        request_id=query_request_id(params),
    )


def delete_entry(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params() if request.query else {}
    if_version = version_of(whole_number(params, "if_version"), "if_version")
    only_if = precondition_of(request.notes)
    command = Delete(path, _key(request.path), if_version, only_if)
    dispatch.engine.caches.delete(command, partial(_send_written, reply, None))


def post_incr(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_incr_decoder, request.body)
    key = _key(request.path.removesuffix(b"/incr"))
    done = partial(_send_count, reply, body.request_id)
    increment(dispatch.engine, path, key, body, done, precondition_of(request.notes))


def _send_count(reply: Reply, request_id: RequestId, outcome: Value | PenstockError) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome, request_id)
    else:
        reply.send(200, encode_json(outcome), JSON_TYPE + etag_head(outcome.version))


def post_get_many(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_get_many_decoder, request.body)
    get_many(dispatch.engine, path, body, partial(send_answer, reply, body.request_id))


def post_txn(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_txn_decoder, request.body)
    if request.notes.principal is not None:
        check_transaction(dispatch.engine.access, request.notes.principal, path, body)
    transact(dispatch.engine, path, body, partial(send_answer, reply, body.request_id))


def watch(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params()
    feed = open_feed(dispatch, request, params, reply, guard_of(_READ, dispatch, request, reply))
    include = [text for each in request.every("include") for text in each.split(",") if text]
    since = whole_number(params, "since_version")
    command = watch_of(path, params.get("key"), params.get("prefix"), include, since)
    reply.when_first(partial(dispatch.engine.caches.watch, command, feed, feed.watched))


def _key(path: bytes) -> str:
    """The last segment; a slash in the key is written %2F."""
    part = path[path.rfind(b"/") + 1 :]
    return part.decode() if part.isascii() and b"%" not in part else path_name(part)


_VERSION = 1_767_225_600_000_001

_CONDITIONS = {
    "If-Match": "The key's value must have one of these ETags, * means any value; otherwise 412.",
    "If-None-Match": "The key's value must have none of these ETags, * means it must have no "
    "value; otherwise 412.",
}
_UNLESS_KNOWN = _CONDITIONS | {
    "If-None-Match": "Answers 304 if the value has one of these ETags; * means any value.",
}
_ETAG = {"ETag": ("The version of the value, in quotes.", "string")}

ENDPOINTS = (
    Endpoint(
        route=f"GET {ENTRY}",
        handler=get_entry,
        access=_READ,
        scope="cache",
        tag="Caches",
        summary="Get a value",
        text="A key without a value is answered with null and version 0, not with an error. "
        "With raw=true the answer is the bytes, and a miss is 404. The version is the value's "
        "ETag: send it in If-None-Match, and the answer is 304 while the value is the same.",
        query=(GetQuery,),
        conditions=_UNLESS_KNOWN,
        answers={
            200: Answer(
                "The value, its version, and the rest of its TTL if it has one.",
                Value,
                {
                    "type": "cache_value",
                    "value": "aGVsbG8=",
                    "version": _VERSION,
                    "ttl_ms": 59_000,
                },
                headers={
                    "ETag": ("The version of the value, in quotes; none on a miss.", "string")
                },
            ),
            304: Answer("The client has this value; it is not sent.", headers=_ETAG),
        },
        errors=(400, 404, 412, 413, 503),
    ),
    Endpoint(
        route=f"PUT {ENTRY}",
        handler=put_entry,
        access=_WRITE,
        scope="cache",
        tag="Caches",
        summary="Put a value",
        text="Replaces the value and its TTL. With raw=true the body is the value, and the "
        "query has the other members; without raw=true such a query is refused.",
        body=PutBody,
        query=(RawPutQuery,),
        conditions=_CONDITIONS,
        example={"value": "aGVsbG8=", "ttl_ms": 60_000},
        answers={200: Answer("Put.", Ok, {"type": "ok", "version": _VERSION}, headers=_ETAG)},
        errors=(400, 404, 409, 412, 413, 429, 503),
    ),
    Endpoint(
        route=f"DELETE {ENTRY}",
        handler=delete_entry,
        access=_WRITE,
        scope="cache",
        tag="Caches",
        summary="Delete a value",
        text="deleted says whether the key had a value.",
        query=(DeleteQuery,),
        conditions=_CONDITIONS,
        answers={
            200: Answer(
                "The key has no value now.",
                Ok,
                {"type": "ok", "version": _VERSION, "deleted": True},
            )
        },
        errors=(400, 404, 412, 413, 503),
    ),
    Endpoint(
        route=f"POST {ENTRY}/incr",
        handler=post_incr,
        access=_WRITE,
        scope="cache",
        tag="Caches",
        summary="Add to a counter",
        text="A new counter begins at 0. Its value is the number as decimal text. 409 if the "
        "value is not a number, or the result is beyond 64 bits.",
        body=IncrBody,
        conditions=_CONDITIONS,
        example={"delta": 1, "ttl_ms": 60_000},
        path_examples={"key": "visits"},
        answers={
            200: Answer(
                "The new value.",
                Value,
                {"type": "cache_value", "value": "MQ==", "version": _VERSION, "number": 1},
                headers=_ETAG,
            )
        },
        errors=(400, 404, 409, 412, 413, 429, 503),
    ),
    Endpoint(
        route=f"POST {CACHE}/get_many",
        handler=post_get_many,
        access=_READ,
        scope="cache",
        tag="Caches",
        summary="Get many values",
        text="All values are from the same moment, in the order of the keys. Up to 10,000 keys.",
        body=GetManyBody,
        example={"keys": ["greeting", "nothing"]},
        answers={
            200: Answer(
                "A value per key.",
                Values,
                {
                    "type": "cache_values",
                    "values": [
                        {"key": "greeting", "value": "aGVsbG8=", "version": _VERSION},
                        {"key": "nothing", "value": None, "version": 0},
                    ],
                },
            )
        },
        errors=(400, 404, 413, 503),
    ),
    Endpoint(
        route=f"POST {CACHE}/txn",
        handler=post_txn,
        access=_WRITE,
        scope="cache",
        tag="Caches",
        summary="Run a transaction",
        text="Performs all ops, in order, or none: if a check fails the answer is 412, and "
        "nothing changes. Checks see the state before the transaction; each op sees the ops "
        "before it. cache names another cache of the namespace.",
        body=TxnBody,
        example={
            "checks": [{"key": "order-1", "exists": False}],
            "ops": [
                {"op": "incr", "key": "stock", "delta": -1},
                {"op": "put", "key": "order-1", "value": "YXBwbGU="},
            ],
        },
        answers={
            200: Answer(
                "The result of each op.",
                Ok,
                {
                    "type": "ok",
                    "results": [{"version": _VERSION, "number": 16}, {"version": _VERSION + 1}],
                },
            )
        },
        errors=(400, 404, 409, 412, 413, 429, 503),
    ),
    Endpoint(
        route=f"GET {CACHE}/watch",
        handler=watch,
        access=_READ,
        scope="cache",
        tag="Caches",
        summary="Watch keys",
        text="One JSON object per line: first ok with the cache's version, then every later "
        "change of the key, or of the keys that begin with prefix. A gap says that changes may "
        "be missing. With format=sse or Accept: text/event-stream, server-sent events.",
        query=(WatchQuery,),
        example={"prefix": "user:"},
        answers={
            200: Answer(
                "Changes, until either side ends the watch.",
                CacheEvent,
                {
                    "type": "cache_event",
                    "watch_id": "w1",
                    "event": "put",
                    "version": _VERSION,
                    "key": "user:1",
                    "value": "aGVsbG8=",
                },
                media_type="application/x-ndjson",
            )
        },
        errors=(400, 404, 413, 429, 503),
    ),
)
