"""Caches over REST: entries by key, counters, many at once, transactions. The cache's path comes
from the route, the key from the request's own path.

With `?raw=true` a value is the body itself instead of base64 in JSON.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.model.caching import CacheValue, Delete, Written
from penstock.model.errors import NotFound, PenstockError
from penstock.model.limits import KIB
from penstock.model.tenancy import Path
from penstock.server.felix.forms import put_of, version_of
from penstock.server.felix.message_routes import send_answer
from penstock.server.felix.messages import (
    GetManyBody,
    IncrBody,
    PutBody,
    RequestId,
    TxnBody,
    decode_body,
)
from penstock.server.felix.operations import (
    get_many,
    increment,
    transact,
    value_answer,
    written_answer,
)
from penstock.server.hub import Hub
from penstock.server.replies import encode_json
from penstock.server.requests import Request, path_name, truth, whole_number

if TYPE_CHECKING:
    from penstock.server.turns import Reply

_BYTES_TYPE = b"content-type: application/octet-stream\r\nx-content-type-options: nosniff\r\n"

LARGE_BYTES = 64 * KIB
"""Of a value that becomes an answer only when there is room for it."""

_put_decoder = msgspec.json.Decoder(PutBody)
_incr_decoder = msgspec.json.Decoder(IncrBody)
_get_many_decoder = msgspec.json.Decoder(GetManyBody)
_txn_decoder = msgspec.json.Decoder(TxnBody)


def get_entry(path: Path, hub: Hub, request: Request, reply: Reply) -> None:
    is_raw = request.query and truth(request.params(), "raw")
    send = partial(_send_bytes if is_raw else _send_value, reply)
    hub.engine.caches.get(path, _key(request.path), send)


def _send_value(reply: Reply, found: CacheValue | PenstockError | None) -> None:
    if isinstance(found, PenstockError):
        reply.send_error(found)
    elif found is None or len(found.value) < LARGE_BYTES:
        reply.send(200, encode_json(value_answer(found)))
    else:
        reply.when_room(lambda: reply.send(200, encode_json(value_answer(found))))


def _send_bytes(reply: Reply, found: CacheValue | PenstockError | None) -> None:
    if isinstance(found, CacheValue):
        head = _BYTES_TYPE + b'etag: "%d"\r\n' % found.version
        reply.when_room(lambda: reply.send(200, found.value, head))
    else:
        reply.send_error(found or NotFound("there is nothing under this key"))


def put_entry(path: Path, hub: Hub, request: Request, reply: Reply) -> None:
    body = (request.query and _raw_put(request)) or decode_body(_put_decoder, request.body)
    command = put_of(path, _key(request.path), body)
    hub.engine.caches.put(command, partial(_send_written, reply, body.request_id))


def _send_written(reply: Reply, request_id: RequestId, outcome: Written | PenstockError) -> None:
    if isinstance(outcome, Written):
        reply.send(200, encode_json(written_answer(outcome, request_id)))
    else:
        reply.send_error(outcome, request_id)


def _raw_put(request: Request) -> PutBody | None:
    """The request's body as the value, and the rest from the query; None if it is not raw."""
    params = request.params()
    if not truth(params, "raw"):
        return None
    return PutBody(
        value=request.body,
        ttl_ms=whole_number(params, "ttl_ms"),
        if_not_exists=truth(params, "if_not_exists"),
        if_version=whole_number(params, "if_version"),
    )


def delete_entry(path: Path, hub: Hub, request: Request, reply: Reply) -> None:
    params = request.params() if request.query else {}
    if_version = version_of(whole_number(params, "if_version"), "if_version")
    command = Delete(path, _key(request.path), if_version)
    hub.engine.caches.delete(command, partial(_send_written, reply, None))


def post_incr(path: Path, hub: Hub, request: Request, reply: Reply) -> None:
    body = decode_body(_incr_decoder, request.body)
    key = _key(request.path.removesuffix(b"/incr"))
    increment(hub.engine, path, key, body, partial(send_answer, reply, body.request_id))


def post_get_many(path: Path, hub: Hub, request: Request, reply: Reply) -> None:
    body = decode_body(_get_many_decoder, request.body)
    get_many(hub.engine, path, body, partial(send_answer, reply, body.request_id))


def post_txn(path: Path, hub: Hub, request: Request, reply: Reply) -> None:
    body = decode_body(_txn_decoder, request.body)
    transact(hub.engine, path, body, partial(send_answer, reply, body.request_id))


def _key(path: bytes) -> str:
    """The last segment; a slash of the key's own is %2F."""
    part = path[path.rfind(b"/") + 1 :]
    return part.decode() if part.isascii() and b"%" not in part else path_name(part)
