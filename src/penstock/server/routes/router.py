"""Finds the handlers of a path: by the whole path, or by its pattern if it has names in it.

The paths of streams and caches are remembered with the names that were read from them, since the
same few are asked for over and over. Must not know which endpoints there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, cast

from penstock.model.errors import PenstockError
from penstock.model.tenancy import Path
from penstock.server.access import (
    CHANGES,
    EndpointAccess,
    Filtered,
    HandlerNeeds,
    Needs,
    Open,
    actor_of,
    check_path,
    check_request,
    guard,
)
from penstock.server.commands import path_of
from penstock.server.http.dispatch import Handler, RequestDispatch, Routes
from penstock.server.http.requests import Request, path_name
from penstock.server.routes.endpoint import Endpoint, PathHandler
from penstock.server.websocket.decoding import query_request_id, request_id_of
from penstock.server.websocket.messages import RequestId

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

Methods = dict[bytes, Handler]

MAX_KNOWN = 4096
MAX_KNOWN_BYTES = 1024
"""The longest path that is cached, so that the cache stays small."""


def plain_routes(endpoints: Iterable[Endpoint]) -> Routes:
    """The routes without names in their paths."""
    routes: Routes = {}
    for endpoint in endpoints:
        if "{" not in endpoint.path:
            methods = routes.setdefault(endpoint.path.encode(), {})
            methods[endpoint.method.encode()] = guarded(endpoint)
    return routes


def guarded(endpoint: Endpoint) -> Handler:
    """Returns the endpoint's handler, with the check before it that its path allows, and with the
    sender's name for the audit log if it changes something."""
    access, handler = endpoint.access, cast("Handler", endpoint.handler)
    if isinstance(access, Open | Filtered):
        return handler
    is_change = access.permission in CHANGES
    if isinstance(access, HandlerNeeds) and not is_change:
        return handler

    def handle(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
        if request.notes.principal is None:
            handler(dispatch, request, reply)
            return
        if isinstance(access, Needs):
            guard(access, dispatch, request, reply)
        with dispatch.engine.audit.acting(actor_of(request, reply) if is_change else None):
            handler(dispatch, request, reply)

    return handle


class _Pattern:
    """A path with names in it, and the endpoints that answer it."""

    def __init__(self, path: str) -> None:
        parts = path.encode().split(b"/")
        self._literals = [(at, part) for at, part in enumerate(parts) if part[:1] != b"{"]
        self._names_at = [at for at, part in enumerate(parts) if part[:1] == b"{"]
        self.ends_in_key = parts[-1] == b"{key}"
        self.has_key = b"{key}" in parts
        self.scope = ""
        self.methods: Methods = {}
        self._access: dict[bytes, EndpointAccess] = {}

    def add(self, endpoint: Endpoint) -> None:
        self.scope = endpoint.scope
        method = endpoint.method.encode()
        self._access[method] = endpoint.access
        if endpoint.scope:
            self.methods[method] = cast("Handler", endpoint.handler)
        else:
            self.methods[method] = guarded(endpoint)

    def matches(self, parts: list[bytes]) -> bool:
        """Returns whether a path matches. `parts` are as many as the pattern has. A handler with a
        scope refuses empty names itself, and says which."""
        if any(parts[at] != literal for at, literal in self._literals):
            return False
        return bool(self.scope) or all(parts[at] for at in self._names_at)

    def methods_with(self, path: Path) -> Methods:
        return {
            method: partial(_handle, cast("PathHandler", handler), self._access[method], path)
            for method, handler in self.methods.items()
        }


class PathRouter:
    """The routes with names in their paths."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._patterns: dict[tuple[bytes, int], list[_Pattern]] = {}
        """The routes by the first word after /v1 and the number of parts."""
        self._known: dict[bytes, Methods] = {}
        """The methods of known paths. A path of an entry of a cache is kept up to the key."""
        patterns: dict[str, _Pattern] = {}
        for endpoint in endpoints:
            if "{" in endpoint.path:
                pattern = patterns.setdefault(endpoint.path, _Pattern(endpoint.path))
                pattern.add(endpoint)
        for path, pattern in patterns.items():
            parts = path.encode().split(b"/")
            self._patterns.setdefault((parts[2], len(parts)), []).append(pattern)

    def find(self, path: bytes) -> Methods | None:
        found = self._known.get(path[: path.rfind(b"/") + 1]) or self._known.get(path)
        if found is not None:
            return found
        parts = path.split(b"/")
        if len(parts) < 3:
            return None
        for pattern in self._patterns.get((parts[2], len(parts)), ()):
            if pattern.matches(parts):
                return self._scoped(pattern, path, parts) if pattern.scope else pattern.methods
        return None

    def _scoped(self, pattern: _Pattern, path: bytes, parts: list[bytes]) -> Methods:
        """Reads the stream or cache from /v1/tenants/t/namespaces/n/streams/s/…"""
        tenant_id, namespace, name = path_name(parts[3]), path_name(parts[5]), path_name(parts[7])
        methods = pattern.methods_with(path_of(tenant_id, namespace, name, pattern.scope))
        if pattern.ends_in_key or not pattern.has_key:
            known_as = path[: path.rfind(b"/") + 1] if pattern.ends_in_key else path
            if len(known_as) <= MAX_KNOWN_BYTES:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[known_as] = methods
        return methods


def _handle(
    handler: PathHandler,
    access: EndpointAccess,
    path: Path,
    dispatch: RequestDispatch,
    request: Request,
    reply: Reply,
) -> None:
    try:
        principal = request.notes.principal
        if principal is None or not isinstance(access, Needs):
            handler(path, dispatch, request, reply)
        elif access.permission in CHANGES:
            check_request(dispatch, request, reply, access, (path[0], path[1]), path[2])
            with dispatch.engine.audit.acting(actor_of(request, reply)):
                handler(path, dispatch, request, reply)
        else:
            check_path(dispatch.engine.access, principal, access.permission, access.kind, path)
            handler(path, dispatch, request, reply)
    except PenstockError as error:
        reply.send_error(error, _request_id(request))


def _request_id(request: Request) -> RequestId:
    """The `request_id` of a request that was refused, if it can be read: from the query where the
    body is bare bytes."""
    if b"raw=" not in request.query:
        return request_id_of(request.body) if request.body else None
    try:
        return query_request_id(request.params())
    except PenstockError:
        return None
