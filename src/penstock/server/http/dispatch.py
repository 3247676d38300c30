"""The state that all connections share: engine, route table, request ids, limits and the sweep."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.api.cluster import CopyFigures, CopySource
from penstock.api.engine import Engine
from penstock.model.errors import (
    Internal,
    InvalidArgument,
    MethodNotAllowed,
    NotFound,
    PenstockError,
    ResourceExhausted,
    TooLarge,
    Unavailable,
)
from penstock.model.limits import KIB, MAX_HEADER_BYTES, MIB, Limits
from penstock.server.http.admission import Admission, AdmissionCache
from penstock.server.http.answer_budget import AnswerBudget
from penstock.server.http.head_cache import MAX_HEADS, HeadCache
from penstock.server.http.open_streams import OpenStreams
from penstock.server.http.request_headers import RequestVerdict
from penstock.server.http.requests import Request

if TYPE_CHECKING:
    from penstock.api.cluster import ClusterControl
    from penstock.server.forwarding.forwarder import Forwarder
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply
    from penstock.server.registry.control_plane import Follower

RETRY_AFTER_MS = 1000


class AbsentEngine:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def __getattr__(self, name: str) -> Any:
        raise Unavailable(
            "this broker no longer serves these data; send the request again",
            retry_after_ms=RETRY_AFTER_MS,
        )


def absent_engine(limits: Limits) -> Engine:
    """Returns an engine that refuses everything but to tell its limits."""
    return cast(Engine, AbsentEngine(limits))


T = TypeVar("T")

Handler = Callable[["RequestDispatch", Request, "Reply"], None]
"""Sends the reply, now or later, or raises a PenstockError."""

Routes = dict[bytes, dict[bytes, Handler]]
"""Handlers by path, then method."""

PathRoute = Callable[[bytes], dict[bytes, Handler] | None]
"""Returns the handlers of a path with names in it, by method, or None."""

MAX_BODIES_BYTES = 512 * MIB
"""The bodies that are being received, over all connections."""

PREFLIGHT_HEAD = (
    b"access-control-allow-methods: GET, HEAD, POST, PUT, PATCH, DELETE\r\n"
    b"access-control-allow-headers: accept, authorization, cache-control, content-type, if-match, "
    b"if-none-match, last-event-id, x-penstock-namespace, x-penstock-tenant, x-request-id\r\n"
    b"access-control-max-age: 600\r\n"
)
"""Allows the requests that the API has. A browser asks again after ten minutes."""

SLOWEST_BYTES_S = 16 * KIB
"""A slower body is refused: it holds memory that others need."""

_log = logging.getLogger("penstock.server")


class RequestDispatch:
    open_paths = frozenset(
        {b"/v1/healthz", b"/v1/livez", b"/v1/readyz", b"/docs", b"/docs/sign-in.js"}
    )
    """Paths that need no token. /docs then shows only a page that asks for it."""
    max_bodies_bytes = MAX_BODIES_BYTES

    def __init__(
        self,
        engine: Engine | Limits,
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
        """Serves from `engine`; with limits only, from none until `serve`. `is_remembering` False:
        heads and verdicts are not cached, for tests that compare."""
        limits = engine if isinstance(engine, Limits) else engine.limits
        self.admission = admission
        self._is_remembering = is_remembering
        self.answers = answers or AnswerBudget()
        self.open_streams = OpenStreams()
        self.follower: Follower | None = None
        self.forwarder: Forwarder | None = None
        """Takes the requests that this broker does not serve; None: it serves all of them."""
        self.copies: CopySource | None = None
        """The sealed files that other brokers of the cluster copy."""
        self.copy_figures: Callable[[], CopyFigures] | None = None
        self.cluster: ClusterControl | None = None
        self.max_body_bytes = limits.max_body_bytes
        self._no_engine = absent_engine(limits)
        self.engine = self._no_engine
        if isinstance(engine, Limits):
            self.stop_serving()
        else:
            self.serve(engine)
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

    @property
    def is_serving(self) -> bool:
        """Returns whether there is an engine."""
        return self.engine is not self._no_engine

    def serve(self, engine: Engine) -> None:
        """Serves requests from this engine from now on. Streams that are open under its access
        rules are checked after each change of them."""
        self.engine = engine
        # To followers of the registry, every engine is a broker that has started anew.
        self.instance = secrets.token_hex(8)
        engine.access.when_changed(self.open_streams.recheck)
        self.forget_verdicts()

    def stop_serving(self) -> None:
        """Serves no more requests. Those under way are answered by the engine, or by whoever
        closes it."""
        self.engine = self._no_engine
        self.instance = secrets.token_hex(8)
        self.forget_verdicts()

    def forget_verdicts(self) -> None:
        """Forgets what was admitted earlier. Needed when the valid credentials have changed."""
        self.admission.forget()
        max_heads = MAX_HEADS if self._is_remembering else 0
        self.head_cache = HeadCache(max_heads, self.admission.now_ms)

    def new_admission_cache(self) -> AdmissionCache:
        """Returns a cache for one connection."""
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
        reply.credential = request.notes.credential
        if request.method == b"OPTIONS" and request.notes.is_preflight:
            reply.send_nothing(204, PREFLIGHT_HEAD)
            return
        try:
            if self.forwarder is not None and self.forwarder.takes(request):
                self.forwarder.forward(request, reply)
            else:
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
        """Returns the id that the client sent, or a new one."""
        return verdict.request_id or self.next_request_id()

    def refusal_of(
        self, verdict: RequestVerdict, path: bytes, target: bytes, method: bytes
    ) -> PenstockError | None:
        """Returns why a request is refused before its body is read, or None. A preflight needs no
        token: browsers send none with it, and it does nothing."""
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
        """Called once a second. Sets the date, and closes connections that have been silent, or
        have accepted nothing of an answer, for too long."""
        self.date_header = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"
        now = time.monotonic()
        self.answers.tick(now)
        for connection in connections:
            if connection.is_overdue():
                connection.refuse(InvalidArgument("the request was not completed in time"))
            elif now - connection.touched > self._idle_timeout_s and connection.is_idle():
                connection.shutdown()

    def is_overdue(self, began: float, nbytes: int) -> bool:
        """Returns whether a request that began at `began`, with `nbytes` received, is too slow."""
        return time.monotonic() - began > self.allowed_s(nbytes)

    def allowed_s(self, nbytes: int) -> float:
        """Returns how long a request or message may take that has `nbytes` so far."""
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
    """Sends an error, or what `body` makes of the outcome. For an answer that may be large,
    `nbytes` says about how large: it waits until there is memory for it."""
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
    elif nbytes is None:
        reply.send_json(status, body(outcome))
    else:
        reply.when_room(nbytes(outcome), lambda: reply.send_json(status, body(outcome)))
