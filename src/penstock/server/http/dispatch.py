"""What all connections share: the engine, the route table, request ids, limits and the sweep."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.api.engine import Engine
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
from penstock.server.http.admission import Admission, AdmissionCache, RequestVerdict
from penstock.server.http.answer_budget import AnswerBudget
from penstock.server.http.head_cache import MAX_HEADS, HeadCache
from penstock.server.http.requests import Request

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply
    from penstock.server.registry.control_plane import Follower

T = TypeVar("T")

Handler = Callable[["RequestDispatch", Request, "Reply"], None]
"""Answers through the reply, now or later; or raises a PenstockError."""

Routes = dict[bytes, dict[bytes, Handler]]
"""Path, then method."""

PathRoute = Callable[[bytes], dict[bytes, Handler] | None]
"""For paths with names in them: the methods of the path, or None."""

MAX_BODIES_BYTES = 512 * MIB
"""All bodies that are being received, over all connections."""

PREFLIGHT_HEAD = (
    b"access-control-allow-methods: GET, HEAD, POST, PUT, PATCH, DELETE\r\n"
    b"access-control-allow-headers: accept, authorization, cache-control, content-type, if-match, "
    b"if-none-match, last-event-id, x-request-id\r\n"
    b"access-control-max-age: 600\r\n"
)
"""What a page of an allowed origin may send; a browser asks again after ten minutes."""

SLOWEST_BYTES_S = 16 * KIB
"""A body that comes slower, over its whole length, holds memory that others need."""

_log = logging.getLogger("penstock.server")


class RequestDispatch:
    open_paths = frozenset(
        {b"/v1/healthz", b"/v1/livez", b"/v1/readyz", b"/docs", b"/docs/sign-in.js"}
    )
    """Paths that are served without the token. At /docs that is only a page that asks for it."""
    max_bodies_bytes = MAX_BODIES_BYTES

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        routes: Routes,
        path_route: PathRoute,
        *,
        request_timeout_ms: int,
        idle_timeout_ms: int,
        ws_ping_ms: int = 20_000,
        is_remembering: bool = True,
        answers: AnswerBudget | None = None,
    ) -> None:
        """`is_remembering` False: no head and no verdict is cached, for tests that compare."""
        self.engine = engine
        self.admission = admission
        self._is_remembering = is_remembering
        self.forget_heads()
        self.answers = answers or AnswerBudget()
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

    def forget_heads(self) -> None:
        """Every head is parsed and judged anew, as after the token has changed."""
        self.head_cache = HeadCache(MAX_HEADS if self._is_remembering else 0)

    def new_admission_cache(self) -> AdmissionCache:
        """For one connection."""
        return AdmissionCache(
            self.admission, self.max_body_bytes, is_remembering=self._is_remembering
        )

    def handle(self, request: Request, reply: Reply) -> None:
        """Runs the handler of the request. Every outcome is an answer; a defect is a 500."""
        if request.path[:4] == b"/v1/":
            self.requests += 1
        reply.path = request.path
        reply.is_head = request.method == b"HEAD"
        reply.cors_head = request.notes.cors_head
        if request.method == b"OPTIONS" and request.notes.is_preflight:
            reply.send_nothing(204, PREFLIGHT_HEAD)
            return
        try:
            self._find(request)(self, request, reply)
        except PenstockError as error:
            reply.send_error(error)
        except Exception as error:  # noqa: BLE001 - the last resort, logged
            reply.send_error(self.defect(error, request.path))

    def defect(self, error: BaseException, path: bytes = b"") -> Internal:
        """Logs an exception that nobody expected, once; returns the answer to it."""
        _log.error("a request failed", exc_info=error, extra={"path": path.decode("latin-1")})
        return Internal("internal error; the broker's log says more")

    def next_request_id(self) -> bytes:
        self._last_id += 1
        return b"%b-%x" % (self._id_prefix, self._last_id)

    def request_id_of(self, verdict: RequestVerdict) -> bytes:
        """The client's own, or a new one."""
        return verdict.request_id or self.next_request_id()

    def refusal_of(
        self, verdict: RequestVerdict, path: bytes, target: bytes, method: bytes
    ) -> PenstockError | None:
        """Why a request with such headers is refused before its body is read, if it is. A browser
        sends no token with a preflight, which is answered and does nothing."""
        is_open = path in self.open_paths or verdict.is_preflight(method)
        if verdict.refusal is not None:
            return verdict.refusal
        if verdict.cross_site_refusal is not None and not _is_page(path):
            return verdict.cross_site_refusal
        if verdict.notes.token_refusal is not None and not is_open:
            return verdict.notes.token_refusal
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

    def tick(self, connections: Iterable[HttpConnection]) -> None:
        """Once a second: the date, and connections that have been silent, or have accepted nothing
        of an answer, for too long."""
        self.date_header = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"
        now = time.monotonic()
        self.answers.tick(now)
        for connection in connections:
            if connection.is_overdue():
                connection.refuse(InvalidArgument("the request was not completed in time"))
            elif now - connection.touched > self._idle_timeout_s and connection.is_idle():
                connection.transport.close()

    def is_overdue(self, began: float, nbytes: int) -> bool:
        """Of what is being received since then, with so much of it here."""
        return time.monotonic() - began > self.allowed_s(nbytes)

    def allowed_s(self, nbytes: int) -> float:
        """How long a request or message may take to come, with so much of it here."""
        return self._request_timeout_s + nbytes / SLOWEST_BYTES_S

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


def _is_page(path: bytes) -> bool:
    """Returns whether a link on another site may lead to this path."""
    return path in (b"/metrics", b"/docs") or path.startswith(b"/docs/")


def _unknown(path: bytes) -> str:
    text = path[:200].decode("latin-1")
    if path.startswith(b"/v1/"):
        return f"no such path: {text}"
    return f"no such path: {text}; the API is under /v1"


def send_outcome(
    reply: Reply,
    outcome: T | PenstockError,
    status: int,
    body: Callable[[T], Any],
    nbytes: Callable[[T], int] | None = None,
) -> None:
    """Sends an error as it is, anything else as `body` makes it. `nbytes` says about how long an
    answer is that may be large: it waits until there is memory for it."""
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
    elif nbytes is None:
        reply.send_json(status, body(outcome))
    else:
        reply.when_room(nbytes(outcome), lambda: reply.send_json(status, body(outcome)))
