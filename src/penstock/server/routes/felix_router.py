"""The paths of streams and caches, and who answers them; those of the registry are elsewhere.

    /v1/tenants/{tenant_id}/namespaces/{namespace}/streams/{stream}/…
    /v1/tenants/{tenant_id}/namespaces/{namespace}/caches/{cache}/…

What a path means is remembered, since the same few are asked for over and over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.model.errors import PenstockError
from penstock.model.tenancy import Path
from penstock.server.commands import path_of
from penstock.server.http import feeds
from penstock.server.http.dispatch import Handler, RequestDispatch
from penstock.server.http.requests import Request, path_name
from penstock.server.routes import caches, socket, streams
from penstock.server.routes.tenants import registry_route
from penstock.server.websocket import upgrade
from penstock.server.websocket.messages import RequestId, query_request_id, request_id_of

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

PathHandler = Callable[[Path, RequestDispatch, Request, "Reply"], None]
"""A handler that is told the stream or cache."""

Methods = dict[bytes, Handler]

PREFIX = b"/v1/tenants/"
MAX_KNOWN = 4096
MAX_KNOWN_BYTES = 1024
"""Of one path that is remembered; together they stay small."""

_STREAM: dict[tuple[bytes, ...], dict[bytes, PathHandler]] = {
    (b"publish",): {b"POST": streams.post_publish},
    (b"publish_batch",): {b"POST": streams.post_publish_batch},
    (b"subscriptions",): {b"GET": streams.list_subscriptions},
    (b"subscribe",): {b"GET": feeds.get_subscribe},
}
_CACHE: dict[tuple[bytes, ...], dict[bytes, PathHandler]] = {
    (b"get_many",): {b"POST": caches.post_get_many},
    (b"txn",): {b"POST": caches.post_txn},
    (b"watch",): {b"GET": feeds.get_watch},
}
_ENTRY: dict[bytes, PathHandler] = {
    b"GET": caches.get_entry,
    b"PUT": caches.put_entry,
    b"DELETE": caches.delete_entry,
}
_COUNTER: dict[bytes, PathHandler] = {b"POST": caches.post_incr}
_MESSAGES: Methods = {b"POST": socket.post_message}
_SOCKET: Methods = {b"GET": upgrade.get_socket}

_known: dict[bytes, Methods] = {}
"""By the whole path; of an entry, by the path up to its key, which ends in a slash."""


def felix_route(path: bytes) -> Methods | None:
    found = _known.get(path[: path.rfind(b"/") + 1]) or _known.get(path)
    if found is not None:
        return found
    if path == b"/v1/felix":
        return _MESSAGES
    if path == upgrade.PATH:
        return _SOCKET
    return _data_route(path) or registry_route(path)


def _data_route(path: bytes) -> Methods | None:
    """The methods of a stream's or a cache's path that is not known yet."""
    if not path.startswith(PREFIX):
        return None
    tenant_id, *parts = path[len(PREFIX) :].split(b"/")
    if len(parts) < 5 or parts[0] != b"namespaces":
        return None
    _, namespace, kind, name, *rest = parts
    what = "stream" if kind == b"streams" else "cache"
    handlers, known_as = _handlers(kind, rest, path)
    if handlers is None:
        return None
    methods = _methods(
        path_of(path_name(tenant_id), path_name(namespace), path_name(name), what), handlers
    )
    if known_as and len(known_as) <= MAX_KNOWN_BYTES:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[known_as] = methods
    return methods


def _handlers(
    kind: bytes, rest: list[bytes], path: bytes
) -> tuple[dict[bytes, PathHandler] | None, bytes]:
    """Who answers, and by what the answer is to be remembered, if at all."""
    if kind == b"streams":
        return _STREAM.get(tuple(rest)), path
    if kind != b"caches":
        return None, b""
    if rest[0] != b"entries":
        return _CACHE.get(tuple(rest)), path
    if len(rest) == 2:
        return _ENTRY, path[: path.rfind(b"/") + 1]
    if len(rest) == 3 and rest[2] == b"incr":
        return _COUNTER, b""
    return None, b""


def _methods(path: Path, handlers: dict[bytes, PathHandler]) -> Methods:
    return {method: partial(_handle, handler, path) for method, handler in handlers.items()}


def _handle(
    handler: PathHandler, path: Path, hub: RequestDispatch, request: Request, reply: Reply
) -> None:
    try:
        handler(path, hub, request, reply)
    except PenstockError as error:
        reply.send_error(error, _request_id(request))


def _request_id(request: Request) -> RequestId:
    """The `request_id` of a request that was not understood, if that can be: in the query where the
    body is bare bytes."""
    if b"raw=" not in request.query:
        return request_id_of(request.body) if request.body else None
    try:
        return query_request_id(request.params())
    except PenstockError:
        return None
