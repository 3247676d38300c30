"""A request of the registry and its answer, which has the body's `request_id` if it had one.

Looking is answered here; what changes something is decided here too or, where the registry follows
a control plane, there. Must not know what is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.api.outcomes import Done
from penstock.model.errors import PenstockError, TooLarge
from penstock.model.limits import KIB
from penstock.model.tenancy import Entry, Path
from penstock.server.http.dispatch import Handler, RequestDispatch
from penstock.server.http.requests import Request, path_name
from penstock.server.http.responses import JSON_TYPE
from penstock.server.registry.control_plane import RemoteAnswer
from penstock.server.registry.entries import entry_path, show
from penstock.server.websocket.messages import (
    Body,
    RequestId,
    check_request_id,
    decode_body,
    request_id_of,
)

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

PREFIX = b"/v1/tenants/"

MAX_REGISTRY_BODY_BYTES = 64 * KIB
"""Names and a handful of settings."""

SHOWN_BYTES = 700
"""About what an entry has in an answer: a stream with its settings and where each came from."""

B = TypeVar("B", bound=Body)
T = TypeVar("T")


class Exchange:
    """One request of these routes and its answer. `names` are those in its path."""

    def __init__(self, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
        self.hub = dispatch
        self.request = request
        self.reply = reply
        self.registry = dispatch.engine.registry
        self.request_id: RequestId = None

    def names(self) -> list[str]:
        parts = self.request.path[len(PREFIX) :].split(b"/")
        return [path_name(part) for part in parts[::2] if part]

    def path(self, *more: str | None) -> Path:
        return entry_path(*self.names(), *more)

    def body(self, decoder: msgspec.json.Decoder[B]) -> B:
        body = decode_body(decoder, self.request.body)
        if body.request_id is not None:
            check_request_id(body.request_id)
        return body

    def send(self, status: int, body: dict[str, Any]) -> None:
        if self.request_id is not None:
            body["request_id"] = self.request_id
        self.reply.send_json(status, body)

    def show(self, status: int, entry: Entry) -> None:
        self.send(status, show(entry, self.hub.engine.limits))

    def refuse(self, error: PenstockError) -> None:
        self.reply.send_error(error, self.request_id)

    def settle(self, outcome: PenstockError | None) -> None:
        if outcome is None:
            self.reply.send_nothing()
        else:
            self.refuse(outcome)

    def then(self, use: Callable[[T], None]) -> Done[T]:
        """For the engine: gives an outcome to `use`, and refuses an error."""

        def done(outcome: T | PenstockError) -> None:
            try:
                if isinstance(outcome, PenstockError):
                    raise outcome
                use(outcome)
            except PenstockError as error:
                self.refuse(error)

        return done


Act = Callable[[Exchange], None]


def looking(act: Act) -> Handler:
    """The handler of a route that changes nothing."""

    @wraps(act)
    def handle(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
        exchange = Exchange(dispatch, request, reply)
        try:
            act(exchange)
        except PenstockError as error:
            exchange.refuse(error)

    return handle


def changing(act: Act) -> Handler:
    """The handler of a route that changes the registry: there, if it follows a control plane."""

    @looking
    @wraps(act)
    def handle(exchange: Exchange) -> None:
        body = exchange.request.body
        if len(body) > MAX_REGISTRY_BODY_BYTES:
            raise TooLarge(f"the body has {len(body)} bytes; {MAX_REGISTRY_BODY_BYTES} are allowed")
        exchange.request_id = request_id_of(body)
        follower = exchange.hub.follower
        if follower is None:
            act(exchange)
        else:
            follower.forward(exchange.request, exchange.then(_pass_on(exchange.reply)))

    return handle


def _pass_on(reply: Reply) -> Callable[[RemoteAnswer], None]:
    def send(answer: RemoteAnswer) -> None:
        if answer.status == 204:
            reply.send_nothing()
            return
        head = JSON_TYPE
        if answer.retry_after.isdecimal():
            head += f"retry-after: {answer.retry_after}\r\n".encode()
        reply.send(answer.status, answer.body, head)

    return send
