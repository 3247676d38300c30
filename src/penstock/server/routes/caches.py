"""Caches over REST: entries by key, counters, many at once, transactions. The cache's path comes
from the route, the key from the request's own path.

With `?raw=true` a value is the body itself instead of base64 in JSON. The headers If-Match and
If-None-Match name versions; what `if_version` and `if_not_exists` say must hold beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.api.caches import check_precondition
from penstock.model.caching import CacheValue, Delete, Precondition, Written
from penstock.model.errors import NotFound, PenstockError
from penstock.model.tenancy import Path
from penstock.server.commands import put_of, version_of
from penstock.server.http.answer_budget import SMALL_ANSWER_BYTES
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, check_raw_only, path_name, truth, whole_number
from penstock.server.http.responses import JSON_TYPE, encode_json
from penstock.server.message_actions import (
    get_many,
    increment,
    transact,
    value_answer,
    written_answer,
)
from penstock.server.routes.etags import etag_head, precondition_of
from penstock.server.routes.socket import send_answer
from penstock.server.websocket.answers import Value
from penstock.server.websocket.messages import (
    GetManyBody,
    IncrBody,
    PutBody,
    RequestId,
    TxnBody,
    decode_body,
    query_request_id,
)

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_BYTES_TYPE = b"content-type: application/octet-stream\r\nx-content-type-options: nosniff\r\n"

_RAW_ONLY = ("ttl_ms", "if_not_exists", "if_version", "request_id")

_put_decoder = msgspec.json.Decoder(PutBody)
_incr_decoder = msgspec.json.Decoder(IncrBody)
_get_many_decoder = msgspec.json.Decoder(GetManyBody)
_txn_decoder = msgspec.json.Decoder(TxnBody)


def get_entry(path: Path, hub: RequestDispatch, request: Request, reply: Reply) -> None:
    is_raw = request.query and truth(request.params(), "raw")
    send = partial(_send_bytes if is_raw else _send_value, reply)
    key = _key(request.path)
    only_if = precondition_of(request.notes)
    if only_if is not None:
        send = partial(_send_if, reply, key, only_if, send)
    hub.engine.caches.get(path, key, send)


def _send_if(
    reply: Reply,
    key: str,
    only_if: Precondition,
    send: Callable[[CacheValue | PenstockError | None], None],
    found: CacheValue | PenstockError | None,
) -> None:
    """304 for a value that the client has already."""
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


def put_entry(path: Path, hub: RequestDispatch, request: Request, reply: Reply) -> None:
    body = (request.query and _raw_put(request)) or decode_body(_put_decoder, request.body)
    command = put_of(path, _key(request.path), body, precondition_of(request.notes))
    hub.engine.caches.put(command, partial(_send_written, reply, body.request_id))


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
        check_raw_only(params, _RAW_ONLY)
        return None
    return PutBody(
        value=request.body,
        ttl_ms=whole_number(params, "ttl_ms"),
        if_not_exists=truth(params, "if_not_exists"),
        if_version=whole_number(params, "if_version"),
        request_id=query_request_id(params),
    )


def delete_entry(path: Path, hub: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params() if request.query else {}
    if_version = version_of(whole_number(params, "if_version"), "if_version")
    only_if = precondition_of(request.notes)
    command = Delete(path, _key(request.path), if_version, only_if)
    hub.engine.caches.delete(command, partial(_send_written, reply, None))


def post_incr(path: Path, hub: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_incr_decoder, request.body)
    key = _key(request.path.removesuffix(b"/incr"))
    done = partial(_send_count, reply, body.request_id)
    increment(hub.engine, path, key, body, done, precondition_of(request.notes))


def _send_count(reply: Reply, request_id: RequestId, outcome: Value | PenstockError) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome, request_id)
    else:
        reply.send(200, encode_json(outcome), JSON_TYPE + etag_head(outcome.version))


def post_get_many(path: Path, hub: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_get_many_decoder, request.body)
    get_many(hub.engine, path, body, partial(send_answer, reply, body.request_id))


def post_txn(path: Path, hub: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_txn_decoder, request.body)
    transact(hub.engine, path, body, partial(send_answer, reply, body.request_id))


def _key(path: bytes) -> str:
    """The last segment; a slash of the key's own is %2F."""
    part = path[path.rfind(b"/") + 1 :]
    return part.decode() if part.isascii() and b"%" not in part else path_name(part)
