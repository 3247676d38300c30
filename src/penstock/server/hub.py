"""What all connections share: the engine, the route table, request ids, limits and the sweep."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from penstock.engine.protocol import Engine
from penstock.model.errors import (
    Internal,
    InvalidArgument,
    MethodNotAllowed,
    NotFound,
    PenstockError,
    ResourceExhausted,
    TooLarge,
)
from penstock.model.limits import KIB, MAX_HEADER_BYTES, MIB
from penstock.server.gate import Gate, Verdict
from penstock.server.heads import KnownHeads
from penstock.server.requests import Request

if TYPE_CHECKING:
    from penstock.server.felix.control_plane import Follower
    from penstock.server.lane import Lane
    from penstock.server.turns import Reply

Handler = Callable[["Hub", Request, "Reply"], None]
"""Answers through the reply, now or later; or raises a PenstockError."""

Routes = dict[bytes, dict[bytes, Handler]]
"""Path, then method."""

PathRoute = Callable[[bytes], dict[bytes, Handler] | None]
"""For paths with names in them: the methods of the path, or None."""

MAX_BODIES_BYTES = 512 * MIB
"""All bodies that are being received, over all connections."""

SLOWEST_BYTES_S = 16 * KIB
"""A body that comes slower, over its whole length, holds memory that others need."""

_log = logging.getLogger("penstock.server")


class Hub:
    open_paths = frozenset({b"/v1/healthz", b"/v1/livez", b"/v1/readyz"})
    max_bodies_bytes = MAX_BODIES_BYTES

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        routes: Routes,
        path_route: PathRoute,
        *,
        request_timeout_ms: int,
        idle_timeout_ms: int,
        ws_ping_ms: int = 20_000,
    ) -> None:
        self.engine = engine
        self.gate = gate
        self.heads = KnownHeads()
        self.instance = secrets.token_hex(8)
        self.follower: Follower | None = None
        self.max_body_bytes = engine.limits.max_body_bytes
        self.body_bytes = 0
        self.requests = 0
        self.sockets = 0
        self.socket_messages = 0
        self.ws_ping_s = ws_ping_ms / 1000
        self.is_draining = False
        self.date_header = b""
        self.routes = routes
        self._path_route = path_route
        self._request_timeout_s = request_timeout_ms / 1000
        self._idle_timeout_s = idle_timeout_ms / 1000
        self._id_prefix = secrets.token_hex(6).encode()
        self._last_id = 0
        self.tick(())

    def handle(self, request: Request, reply: Reply) -> None:
        """Every outcome is an answer; a defect of ours is a 500 in the common shape."""
        self.requests += 1
        reply.path = request.path
        reply.is_head = request.method == b"HEAD"
        try:
            self._find(request)(self, request, reply)
        except PenstockError as error:
            reply.send_error(error)
        except Exception:  # noqa: BLE001 - the last resort, logged
            _log.exception("a request failed", extra={"path": request.path.decode("latin-1")})
            reply.send_error(Internal("internal error; the broker's log says more"))

    def is_app_path(self, path: bytes) -> bool:
        return path in (b"/metrics", b"/docs") or path.startswith(b"/docs/")

    def next_request_id(self) -> bytes:
        self._last_id += 1
        return b"%b-%x" % (self._id_prefix, self._last_id)

    def refusal_of(self, verdict: Verdict, path: bytes, target: bytes) -> PenstockError | None:
        """Why a request with such headers is refused before its body is read, if it is."""
        if verdict.refusal is not None:
            return verdict.refusal
        if verdict.cross_site_refusal is not None and not self.is_app_path(path):
            return verdict.cross_site_refusal
        if verdict.token_refusal is not None and path not in self.open_paths:
            return verdict.token_refusal
        if len(target) > MAX_HEADER_BYTES:
            return InvalidArgument(f"the request target is over {MAX_HEADER_BYTES} bytes")
        if verdict.content_length > self.max_body_bytes:
            return self.too_large(verdict.content_length)
        return None

    def too_large(self, nbytes: int) -> TooLarge:
        limit = self.max_body_bytes
        return TooLarge(f"the body has {nbytes} bytes or more; max_body_bytes is {limit}")

    def too_many_bodies(self) -> ResourceExhausted:
        return ResourceExhausted("too many large requests at once", limit="bodies_bytes")

    def tick(self, lanes: Iterable[Lane]) -> None:
        """Once a second: the date, and connections that have been silent for too long."""
        self.date_header = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"
        now = time.monotonic()
        for lane in lanes:
            if lane.is_overdue():
                lane.refuse(InvalidArgument("the request was not completed in time"))
            elif now - lane.touched > self._idle_timeout_s and lane.is_idle():
                lane.transport.close()

    def is_overdue(self, began: float, nbytes: int) -> bool:
        """Of what is being received since then, with so much of it here."""
        return time.monotonic() - began > self._request_timeout_s + nbytes / SLOWEST_BYTES_S

    def _find(self, request: Request) -> Handler:
        methods = self.routes.get(request.path) or self._path_route(request.path)
        if methods is None:
            raise NotFound(_unknown(request.path))
        handler = methods.get(request.method)
        if handler is None and request.method == b"HEAD":
            handler = methods.get(b"GET")
        if handler is None:
            raise MethodNotAllowed(", ".join(sorted(method.decode() for method in methods)))
        return handler


def _unknown(path: bytes) -> str:
    text = path[:200].decode("latin-1")
    if path.startswith(b"/v1/"):
        return f"no such path: {text}"
    return f"no such path: {text}; the API is under /v1"


def send_outcome(reply: Any, outcome: Any, status: int, body: Callable[[Any], Any]) -> None:
    """Sends an error as it is, anything else as `body` makes it."""
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
    else:
        reply.send_json(status, body(outcome))
