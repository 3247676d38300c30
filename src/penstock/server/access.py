"""Access checks on requests and messages: what each needs, and who may see what.

Each endpoint and each message says what it needs. If the request's path names the resource, the
router checks before the handler runs. Otherwise the handler checks, once it has read the name.
Without a principal there is no access control, and nothing is checked.

Invariant: a refusal names the permission and the resource, and is the same whether the resource
exists or not. Must not know rules: the engine decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.api.access import AccessPart
from penstock.api.effects import EffectCommand
from penstock.api.messages import Produce, Settle
from penstock.model.access import BROKER_SCOPE, ResourceKind, VisibleTopics
from penstock.model.audit import AUDIT_TOPIC, Actor
from penstock.model.errors import PermissionDenied
from penstock.model.names import clean_name
from penstock.model.permissions import Permission
from penstock.model.principals import Principal, bound_elsewhere
from penstock.model.scopes import Scope, plain_name
from penstock.model.tenancy import Path
from penstock.server.http.requests import Notes, Request, path_name

if TYPE_CHECKING:
    from penstock.server.http.dispatch import RequestDispatch
    from penstock.server.http.response_order import Reply
    from penstock.server.http.streamed_response import Guard

T = TypeVar("T")
B = TypeVar("B")
C = TypeVar("C", Settle, EffectCommand)

CHANGES: frozenset[Permission] = frozenset({"manage", "registry", "access"})
"""Permissions to change things. An attempt without them goes into the audit log."""


class Needs(msgspec.Struct, frozen=True):
    """The request needs this permission on the resource that its path names."""

    permission: Permission
    kind: ResourceKind


class HandlerNeeds(msgspec.Struct, frozen=True):
    """The same, for a resource that the body names: the handler checks it. A message names it in
    its members."""

    permission: Permission
    kind: ResourceKind


class Filtered(msgspec.Struct, frozen=True):
    """The answer has only what the principal may see."""

    kind: ResourceKind


class Open(msgspec.Struct, frozen=True):
    """Needs no permission; `why` says so for the reader of the table."""

    why: str


EndpointAccess = Needs | HandlerNeeds | Filtered | Open


# -- checks ----------------------------------------------------------------------------------------


def is_allowed(
    access: AccessPart,
    principal: Principal | None,
    permission: Permission,
    kind: ResourceKind,
    scope: Scope,
    name: str,
) -> bool:
    if principal is None:
        return True
    if kind == "topic" and name == AUDIT_TOPIC:
        return permission == "read" and audit_tenant(access, principal, scope) is not None
    return permission in access.permissions_on(principal, kind, scope, name)


def check(
    access: AccessPart,
    principal: Principal | None,
    permission: Permission,
    kind: ResourceKind,
    scope: Scope,
    name: str,
) -> None:
    """Raises PermissionDenied unless the principal has the permission."""
    if not is_allowed(access, principal, permission, kind, scope, name):
        raise denied(principal, permission, kind, scope, name)


def denied(
    principal: Principal | None, permission: str, kind: str, scope: Scope, name: str
) -> PermissionDenied:
    who = "" if principal is None else principal.name
    if kind == "topic" and name == AUDIT_TOPIC:
        return _audit_denied(who, permission)
    # A tenant is in nothing, and a namespace in its tenant.
    parents = {"tenant": (), "namespace": scope[:1]}.get(kind, scope)
    place = "/".join(filter(None, parents))
    what = f"the {kind}" if kind == "broker" else f"{kind} {name!r}"
    within = f" of {place!r}" if place else ""
    elsewhere = "" if principal is None or kind == "broker" else bound_elsewhere(principal, scope)
    return PermissionDenied(
        f"{who!r} needs the permission {permission} on {what}{within}{elsewhere}"
    )


def _audit_denied(who: str, permission: str) -> PermissionDenied:
    if permission == "read":
        return PermissionDenied(
            f"{who!r} needs the permission audit on the tenant, or on the broker, to read the "
            "audit log"
        )
    return PermissionDenied(
        f"the audit log is the broker's own, and nobody has {permission} on topic {AUDIT_TOPIC!r}: "
        "read it with penstock audit, or as a range of the topic"
    )


def check_path(
    access: AccessPart,
    principal: Principal | None,
    permission: Permission,
    kind: ResourceKind,
    path: Path,
) -> None:
    """`check` for a stream or a cache."""
    check(access, principal, permission, kind, (path[0], path[1]), path[2])


def check_caches(
    access: AccessPart,
    principal: Principal | None,
    permission: Permission,
    scope: Scope,
    names: Iterable[str],
) -> None:
    for name in set(names):
        check(access, principal, permission, "cache", scope, name)


def check_produce(access: AccessPart, notes: Notes, command: Produce) -> Produce:
    """Checks the topic of the message, and the one that its envelope sends it to instead."""
    principal = notes.principal
    check(access, principal, "produce", "topic", notes.scope, plain_name(command.topic))
    envelope = command.envelope
    if envelope is not None and envelope.target_topic:
        check(access, principal, "produce", "topic", notes.scope, envelope.target_topic)
    return command


def check_consume(dispatch: RequestDispatch, request: Request, topic: str) -> None:
    """`topic` may be a full name."""
    notes = request.notes
    if notes.principal is not None:
        check(dispatch.engine.access, notes.principal, "consume", "topic", notes.scope,
              plain_name(topic))  # fmt: skip


def consuming(
    dispatch: RequestDispatch, request: Request, command_of: Callable[[B], C]
) -> Callable[[B], C]:
    """Returns `command_of`, with a check of the topic of its command if there is anything to
    check."""
    if request.notes.principal is None:
        return command_of

    def checked(body: B) -> C:
        command = command_of(body)
        check_consume(dispatch, request, command.topic)
        return command

    return checked


# -- what the path of a request names --------------------------------------------------------------


def resource_in_path(kind: ResourceKind, request: Request) -> tuple[Scope, str]:
    """Returns the scope and the name of the resource. Paths of tenants are
    /v1/tenants/t/namespaces/n/streams/s; a topic belongs to the scope of the request."""
    if kind == "broker":
        return BROKER_SCOPE, ""
    names = [path_name(part) for part in request.path.split(b"/")[3:8:2]]
    if kind == "topic":
        return request.notes.scope, clean_name(names[0], "topic")
    if kind == "producer":
        return request.notes.scope, clean_name(names[0], "producer")
    tenant = clean_name(names[0], "tenant_id")
    if kind == "tenant":
        return (tenant, ""), tenant
    namespace = clean_name(names[1], "namespace")
    if kind == "namespace":
        return (tenant, namespace), namespace
    return (tenant, namespace), clean_name(names[2], "name")


def guard(needs: Needs, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    """Raises unless the principal of the request may do what its path says."""
    scope, name = resource_in_path(needs.kind, request)
    check_request(dispatch, request, reply, needs, scope, name)


def guard_of(needs: Needs, dispatch: RequestDispatch, request: Request, reply: Reply) -> Guard:
    """Returns the guard of a stream that the request opens: None if there is nobody to check."""
    if request.notes.principal is None:
        return None
    return partial(guard, needs, dispatch, request, reply)


def check_request(
    dispatch: RequestDispatch,
    request: Request,
    reply: Reply,
    needs: Needs | HandlerNeeds,
    scope: Scope,
    name: str,
) -> None:
    """`check`, with a row in the audit log if a change is refused."""
    principal, permission, kind = request.notes.principal, needs.permission, needs.kind
    if is_allowed(dispatch.engine.access, principal, permission, kind, scope, name):
        return
    if permission in CHANGES:
        note_refusal(dispatch, request, reply, permission, f"{kind}:{name}", scope)
    raise denied(principal, permission, kind, scope, name)


# -- the audit log ---------------------------------------------------------------------------------


def actor_of(request: Request, reply: Reply) -> Actor | None:
    principal = request.notes.principal
    return None if principal is None else Actor(principal.name, reply.peer())


def note_refusal(
    dispatch: RequestDispatch,
    request: Request,
    reply: Reply,
    permission: str,
    resource: str,
    scope: Scope,
) -> None:
    action = f"{request.method.decode()} {request.path.decode('latin-1')[:200]}"
    with dispatch.engine.audit.acting(actor_of(request, reply)):
        dispatch.engine.audit.note(action, resource, scope, "denied", f"needs {permission}")


def audit_tenant(access: AccessPart, principal: Principal, scope: Scope) -> str | None:
    """Returns the tenant whose rows of the audit log the principal may read: "" for all rows, None
    if there are none."""
    if "audit" in access.permissions_on(principal, "broker", BROKER_SCOPE, ""):
        return ""
    tenant = scope[0]
    held = access.permissions_on(principal, "tenant", (tenant, ""), tenant)
    return tenant if "audit" in held else None


# -- lists -----------------------------------------------------------------------------------------


def sees(access: AccessPart, notes: Notes, kind: ResourceKind, scope: Scope, name: str) -> bool:
    """Returns whether the principal may know that the resource exists: it has some permission on
    it."""
    principal = notes.principal
    if principal is None:
        return True
    if kind == "tenant":
        return access.sees_scope(principal, name)
    if kind == "namespace":
        return access.sees_scope(principal, *scope)
    if kind == "topic" and name == AUDIT_TOPIC:
        return audit_tenant(access, principal, scope) is not None
    return bool(access.permissions_on(principal, kind, scope, name))


def seen(
    access: AccessPart,
    notes: Notes,
    kind: ResourceKind,
    found: list[T],
    place: Callable[[T], tuple[Scope, str]],
) -> list[T]:
    """Returns the part of the list that the principal may see."""
    if notes.principal is None:
        return found
    return [each for each in found if sees(access, notes, kind, *place(each))]


def visible_topics(access: AccessPart, notes: Notes) -> VisibleTopics | None:
    """Returns the topics and streams whose rows of the journal the principal may read; None means
    all. Raises if there are none."""
    principal = notes.principal
    if principal is None:
        return None
    visible = access.topics_within(principal, "journal")
    if visible is not None and not visible.patterns:
        raise denied(principal, "journal", "topic", notes.scope, "*")
    return visible
