"""A request of the registry, and the steps that its endpoints share.

An answer has the `request_id` of the body, if it had one. A registry that follows a control plane
answers reads itself, and forwards changes. Must not know the shapes of bodies and answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.api.outcomes import Done
from penstock.model.access import BROKER_SCOPE, ResourceKind
from penstock.model.errors import (
    InvalidArgument,
    PenstockError,
    PermissionDenied,
    TooLarge,
    VersionMismatch,
)
from penstock.model.limits import KIB, Limits
from penstock.model.permissions import Permission
from penstock.model.scopes import Scope
from penstock.model.tenancy import CacheConfig, Entry, Kind, Path, StreamConfig
from penstock.server.access import HandlerNeeds, actor_of, check_request, denied, seen, sees
from penstock.server.http.dispatch import Handler, RequestDispatch
from penstock.server.http.requests import Request
from penstock.server.http.responses import JSON_TYPE
from penstock.server.registry.control_plane import RemoteAnswer
from penstock.server.registry.entries import check_lasting, entry_path
from penstock.server.routes.endpoint import names_in_path
from penstock.server.websocket.decoding import decode_body, request_id_of
from penstock.server.websocket.messages import Body, RequestId

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

MAX_REGISTRY_BODY_BYTES = 64 * KIB
"""Enough for names and a handful of settings."""

SHOWN_BYTES = 700
"""About the size of an entry in an answer: a stream with its settings and their origins."""

B = TypeVar("B", bound=Body)
T = TypeVar("T")

AnswerOf = Callable[[Entry, Limits], msgspec.Struct]
"""Shows an entry, with the settings in force for it."""


class RegistryRequest:
    """One request of the registry and its answer."""

    def __init__(self, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
        self.dispatch = dispatch
        self.request = request
        self.reply = reply
        self.registry = dispatch.engine.registry
        self.request_id: RequestId = None

    def path(self, *more: str | None) -> Path:
        """Returns the entry's path: the names of the request's path, and `more`."""
        names = names_in_path(self.request)[1::2]
        return entry_path(*filter(None, names), *more)

    def body(self, decoder: msgspec.json.Decoder[B]) -> B:
        return decode_body(decoder, self.request.body)

    def send(self, status: int, answer: msgspec.Struct) -> None:
        if self.request_id is None:
            self.reply.send_json(status, answer)
        else:
            named = {"request_id": self.request_id}
            self.reply.send_json(status, msgspec.to_builtins(answer) | named)

    def refuse(self, error: PenstockError) -> None:
        self.reply.send_error(error, self.request_id)

    def settle(self, outcome: PenstockError | None) -> None:
        if outcome is None:
            self.reply.send_nothing()
        else:
            self.refuse(outcome)

    def is_followed(self) -> bool:
        """Returns whether changes are the control plane's to make."""
        return self.dispatch.follower is not None

    def forward(self) -> None:
        """Asks the control plane for the change, which may be in the audit log there too."""
        follower = self.dispatch.follower
        if follower is not None:
            follower.forward(self.request, self.then(_pass_on(self.reply)))
            text = self.request.path.decode("latin-1")[:200]
            action = f"{self.request.method.decode()} {text}"
            self.dispatch.engine.audit.note(action, "", BROKER_SCOPE, "forwarded")

    def check(self, permission: Permission, kind: ResourceKind, scope: Scope, name: str) -> None:
        needs = HandlerNeeds(permission, kind)
        check_request(self.dispatch, self.request, self.reply, needs, scope, name)

    def then(self, use: Callable[[T], None]) -> Done[T]:
        """Returns a callback for the engine, which gives its outcome to `use` or answers its
        error."""

        def done(outcome: T | PenstockError) -> None:
            try:
                if isinstance(outcome, PenstockError):
                    raise outcome
                use(outcome)
            except PenstockError as error:
                self.refuse(error)

        return done


Act = Callable[[RegistryRequest], None]


def reading(act: Act) -> Handler:
    """Makes the handler of an endpoint that changes nothing."""
    return _handler(act)


def changing(act: Act) -> Handler:
    """Makes the handler of an endpoint that changes the registry, or forwards the change to the
    control plane that it follows."""

    @_handler
    @wraps(act)
    def handle(exchange: RegistryRequest) -> None:
        body = exchange.request.body
        if len(body) > MAX_REGISTRY_BODY_BYTES:
            raise TooLarge(f"the body has {len(body)} bytes; {MAX_REGISTRY_BODY_BYTES} are allowed")
        exchange.request_id = request_id_of(body)
        # With access control the body may name what is checked, so it is read before.
        if exchange.dispatch.follower is None or exchange.request.notes.principal is not None:
            act(exchange)
        else:
            exchange.forward()

    return handle


def _handler(act: Act) -> Handler:
    @wraps(act)
    def handle(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
        exchange = RegistryRequest(dispatch, request, reply)
        try:
            act(exchange)
        except PenstockError as error:
            exchange.refuse(error)

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


# -- what tenants, namespaces, streams and caches have in common -----------------------------------


def create(exchange: RegistryRequest, wanted: Entry, answer_of: AnswerOf) -> None:
    if wanted.kind != "tenant":
        permission: Permission = "registry" if wanted.kind == "namespace" else "manage"
        exchange.check(permission, wanted.kind, *place_of(wanted))
    if exchange.is_followed():
        exchange.forward()
        return

    def created(outcome: tuple[Entry, bool]) -> None:
        entry, is_new = outcome
        exchange.send(201 if is_new else 200, answer_of(entry, exchange.dispatch.engine.limits))

    exchange.registry.create(wanted, exchange.then(created))


def place_of(entry: Entry) -> tuple[Scope, str]:
    """Returns the scope and the name of an entry, as access rules know it."""
    name = entry.name or entry.namespace or entry.tenant_id
    return (entry.tenant_id, entry.namespace), name


def send_list(
    exchange: RegistryRequest,
    kind: Kind,
    answer_of: AnswerOf,
    list_of: Callable[[list[T]], msgspec.Struct],
) -> Done[list[Entry]]:
    """Returns a callback that sends the entries of this kind as one list."""

    def found(entries: list[Entry]) -> None:
        exchange.reply.when_room(SHOWN_BYTES * len(entries), lambda: send(entries))

    def send(entries: list[Entry]) -> None:
        limits = exchange.dispatch.engine.limits
        wanted = [entry for entry in entries if entry.kind == kind]
        engine, notes = exchange.dispatch.engine, exchange.request.notes
        visible = seen(engine.access, notes, kind, wanted, place_of)
        shown: list[Any] = [answer_of(entry, limits) for entry in visible]
        exchange.send(200, list_of(shown))

    def listed(outcome: list[Entry] | PenstockError) -> None:
        # Refused before it is told whether the tenant or the namespace exists.
        hidden = None if kind == "tenant" else _hidden(exchange)
        exchange.then(found)(hidden or outcome)

    return listed


def _hidden(exchange: RegistryRequest) -> PermissionDenied | None:
    """Returns the refusal of a list in a tenant or a namespace of which the principal may not
    know."""
    access, notes = exchange.dispatch.engine.access, exchange.request.notes
    tenant, namespace, _ = exchange.path()
    if not sees(access, notes, "tenant", (tenant, ""), tenant):
        return denied(notes.principal, "read", "tenant", (tenant, ""), tenant)
    if namespace and not sees(access, notes, "namespace", (tenant, namespace), namespace):
        return denied(notes.principal, "read", "namespace", (tenant, namespace), namespace)
    return None


def change(
    exchange: RegistryRequest,
    kind: Kind,
    configured: Callable[[Entry], StreamConfig | CacheConfig],
    answer_of: AnswerOf,
) -> None:
    """Changes the settings of an entry. If somebody else has changed it meanwhile, begins again, so
    that no change is lost."""
    if exchange.is_followed():
        exchange.forward()
        return
    path = exchange.path()
    actor = actor_of(exchange.request, exchange.reply)

    def read() -> None:
        exchange.registry.get(kind, path, exchange.then(found))

    def found(entry: Entry) -> None:
        config = configured(entry)
        check_lasting(entry, config)
        with exchange.dispatch.engine.audit.acting(actor):
            exchange.registry.change(
                path,
                changed,
                stream=config if isinstance(config, StreamConfig) else None,
                cache=config if isinstance(config, CacheConfig) else None,
                if_revision=entry.revision,
            )

    def changed(outcome: Entry | PenstockError) -> None:
        if isinstance(outcome, VersionMismatch):
            read()
        else:
            exchange.then(send)(outcome)

    def send(entry: Entry) -> None:
        exchange.send(200, answer_of(entry, exchange.dispatch.engine.limits))

    read()


def describing(kind: Kind, answer_of: AnswerOf) -> Handler:
    @reading
    def describe(exchange: RegistryRequest) -> None:
        def found(entry: Entry) -> None:
            exchange.send(200, answer_of(entry, exchange.dispatch.engine.limits))

        exchange.registry.get(kind, exchange.path(), exchange.then(found))

    return describe


def deleting(kind: Kind) -> Handler:
    @changing
    def delete(exchange: RegistryRequest) -> None:
        cascade = exchange.request.params().get("cascade", "false")
        if cascade not in ("true", "false"):
            raise InvalidArgument("cascade must be true or false")
        if exchange.is_followed():
            exchange.forward()
            return
        exchange.registry.delete(kind, exchange.path(), cascade == "true", exchange.settle)

    return delete
