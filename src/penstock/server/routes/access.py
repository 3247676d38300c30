"""Access rules and roles: list, grant, revoke and explain them.

A rule belongs to the tenant that it names or, if it names none, to the tenant of the request. The
engine decides whether the sender may make the change, and notes a refusal in the audit log.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, cast

import msgspec

from penstock.model.access import (
    BROKER,
    BROKER_SCOPE,
    KINDS,
    AccessRule,
    AccessVerdict,
    ResourceKind,
    Role,
)
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_RULE_PERMISSIONS
from penstock.model.names import clean_name
from penstock.model.permissions import PERMISSIONS
from penstock.model.principals import Principal
from penstock.model.scopes import Scope
from penstock.server.access import Filtered, HandlerNeeds, Open, check, denied
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request, decode_body, whole_number
from penstock.server.members import (
    NAME_PATTERN,
    Name,
    NameOrEmpty,
    StrictBody,
    limits,
    optional,
    required,
)
from penstock.server.routes.endpoint import DONE, Answer, Endpoint, names_in_path

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_Granted = Annotated[list[Name], limits(minItems=1, maxItems=MAX_RULE_PERMISSIONS)]
_PermissionName = Annotated[str, limits(enum=list(PERMISSIONS))]
_Permissions = Annotated[list[_PermissionName], limits(minItems=1, maxItems=MAX_RULE_PERMISSIONS)]
_KIND = "(topic|stream|cache|producer|namespace|tenant)"
_ResourcePattern = Annotated[
    str, limits(pattern=rf"^\s*((\*|broker|{_KIND}:\s*{NAME_PATTERN})\s*)?$")
]
_ResourceName = Annotated[str, limits(pattern=rf"^\s*(broker|{_KIND}:\s*{NAME_PATTERN})\s*$")]
_Tenant = Annotated[NameOrEmpty | None, optional("The tenant; omitted, the tenant of the request.")]
_Resource = Annotated[
    _ResourcePattern | None,
    optional(
        "* for everything, or a kind and a name, as topic:orders or topic:orders*. Kinds are "
        "topic, stream, cache, producer, namespace and tenant. broker, without a tenant, is the "
        "broker itself."
    ),
]


class RuleBody(StrictBody):
    tenant_id: _Tenant = None
    namespace: Annotated[
        NameOrEmpty | None, optional("A namespace, or the beginning of some with *; omitted, all.")
    ] = None
    resource: _Resource = None
    principal: Annotated[NameOrEmpty | None, optional("Who gets the permissions.")] = None
    role: Annotated[
        NameOrEmpty | None, optional("Instead of a principal: all who have this role get them.")
    ] = None
    permissions: Annotated[_Granted | None, required("Names of permissions, or of roles.")] = None


class RoleBody(StrictBody):
    tenant_id: _Tenant = None
    permissions: Annotated[_Permissions | None, required("Names of permissions.")] = None


class RulesQuery(msgspec.Struct):
    tenant_id: Annotated[str | None, optional("Only the rules of this tenant.")] = None
    principal: Annotated[str | None, optional("Only the rules for this principal.")] = None
    role: Annotated[str | None, optional("Only the rules for this role.")] = None


class RolesQuery(msgspec.Struct):
    tenant_id: _Tenant = None


class CheckQuery(msgspec.Struct):
    permission: Annotated[_PermissionName | None, required("The permission, as produce.")] = None
    resource: Annotated[
        _ResourceName | None, required("The resource, as topic:orders; or broker.")
    ] = None
    principal: Annotated[
        str | None, optional("Who is asked about; omitted, the sender of the request.")
    ] = None
    roles: Annotated[
        str | None, optional("The roles of the principal's token, separated by commas.")
    ] = None
    tenant_id: _Tenant = None
    namespace: Annotated[
        NameOrEmpty | None, optional("The namespace; omitted, the namespace of the request.")
    ] = None


class RuleAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: int
    tenant_id: str = ""
    namespace: str = ""
    resource: str
    principal: str = ""
    role: str = ""
    permissions: list[str]
    created_ms: int


class RoleAnswer(msgspec.Struct, kw_only=True):
    name: str
    permissions: list[str]


class RuleList(msgspec.Struct):
    rules: list[RuleAnswer]


class RoleList(msgspec.Struct):
    roles: list[RoleAnswer]


class CheckAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`rule` is the one that allows it, if one does."""

    allowed: bool
    reason: str
    rule: RuleAnswer | None = None


_rules = msgspec.json.Decoder(RuleBody)
_roles = msgspec.json.Decoder(RoleBody)


def _rule_answer(rule: AccessRule) -> RuleAnswer:
    return RuleAnswer(
        id=rule.id,
        tenant_id=rule.tenant_id,
        namespace=rule.namespace if rule.tenant_id else "",
        resource=rule.resource,
        principal=rule.principal,
        role=rule.role,
        permissions=list(rule.permissions),
        created_ms=rule.created_ms,
    )


def _role_answer(role: Role) -> RoleAnswer:
    return RoleAnswer(name=role.name, permissions=list(role.permissions))


# -- rules -----------------------------------------------------------------------------------------


def list_rules(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params()

    def send(rules: list[AccessRule] | PenstockError) -> None:
        if isinstance(rules, PenstockError):
            reply.send_error(rules)
            return
        found = [rule for rule in rules if _is_wanted(rule, params) and _may_see(rule)]
        answer = RuleList([_rule_answer(rule) for rule in found])
        reply.when_room(400 * len(found), lambda: reply.send_json(200, answer))

    def _may_see(rule: AccessRule) -> bool:
        principal = request.notes.principal
        if principal is None:
            return True
        is_own = rule.principal == principal.name
        is_own = is_own and principal.tenant_id in (None, rule.tenant_id)
        return is_own or "access" in dispatch.engine.access.permissions_over(principal, rule)

    dispatch.engine.access.rules(send)


def _is_wanted(rule: AccessRule, params: dict[str, str]) -> bool:
    return all(
        params.get(name, "").strip() in ("", getattr(rule, name))
        for name in ("tenant_id", "principal", "role")
    )


def grant_rule(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_rules, request.body)
    resource = (body.resource or "").strip() or "*"
    rule = AccessRule(
        tenant_id="" if resource == BROKER and not body.tenant_id else _tenant(request, body),
        namespace=_given(body.namespace, "namespace") or "*",
        resource=resource,
        principal=_given(body.principal, "principal"),
        role=_given(body.role, "role"),
        permissions=tuple(body.permissions or ()),
    )

    def send(outcome: tuple[AccessRule, bool] | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            reply.send_error(outcome)
        else:
            reply.send_json(201 if outcome[1] else 200, _rule_answer(outcome[0]))

    dispatch.engine.access.grant(rule, request.notes.principal, send)


def revoke_rule(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    rule_id = whole_number({"rule": names_in_path(request)[2]}, "rule") or 0
    dispatch.engine.access.revoke(rule_id, request.notes.principal, reply.settle)


# -- roles -----------------------------------------------------------------------------------------


def list_roles(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    """Lists the roles of a tenant to everybody who may know of the tenant."""
    tenant = _tenant_of_query(request)
    principal, access = request.notes.principal, dispatch.engine.access
    if principal is not None and not access.sees_scope(principal, tenant):
        raise denied(principal, "access", "tenant", (tenant, ""), tenant)
    access.roles(
        tenant,
        lambda outcome: send_outcome(
            reply, outcome, 200, lambda roles: RoleList([_role_answer(role) for role in roles])
        ),
    )


def set_role(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_roles, request.body)
    role = Role(
        tenant_id=_tenant(request, body),
        name=clean_name(names_in_path(request)[2], "role"),
        permissions=tuple(body.permissions or ()),
    )
    dispatch.engine.access.set_role(
        role,
        request.notes.principal,
        lambda outcome: send_outcome(reply, outcome, 200, _role_answer),
    )


def remove_role(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    tenant = _tenant_of_query(request)
    name = clean_name(names_in_path(request)[2], "role")
    dispatch.engine.access.remove_role(tenant, name, request.notes.principal, reply.settle)


def _tenant(request: Request, body: RuleBody | RoleBody) -> str:
    return _given(body.tenant_id, "tenant_id") or request.notes.scope[0]


def _tenant_of_query(request: Request) -> str:
    return _given(request.params().get("tenant_id"), "tenant_id") or request.notes.scope[0]


def _given(raw: str | None, what: str) -> str:
    """Returns the name, or nothing if it is blank."""
    return clean_name(raw, what) if raw and raw.strip() else ""


# -- explaining ------------------------------------------------------------------------------------


def check_access(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params()
    permission = params.get("permission", "").strip()
    if permission not in PERMISSIONS:
        known = ", ".join(PERMISSIONS)
        raise InvalidArgument(f"permission {permission[:40]!r} is none; there are {known}")
    kind, scope, name = _asked(request, params)
    if request.notes.principal is None and not params.get("principal", "").strip():
        reply.send_json(200, CheckAnswer(allowed=True, reason="there is no access control"))
        return
    dispatch.engine.access.explain(
        _asked_about(dispatch, request, params, kind, scope, name),
        permission,
        kind,
        scope,
        name,
        partial(_send_verdict, reply),
    )


def _send_verdict(reply: Reply, outcome: AccessVerdict | PenstockError) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
        return
    rule = None if outcome.rule is None else _rule_answer(outcome.rule)
    answer = CheckAnswer(allowed=outcome.allowed, reason=outcome.reason, rule=rule)
    reply.send_json(200, answer)


def _asked(request: Request, params: dict[str, str]) -> tuple[ResourceKind, Scope, str]:
    resource = params.get("resource", "").strip()
    if resource == BROKER:
        return "broker", BROKER_SCOPE, ""
    kind, _, raw = resource.partition(":")
    if kind not in KINDS or kind == BROKER:
        raise InvalidArgument(f"resource {resource[:200]!r} is none: name one as topic:orders")
    name = clean_name(raw, "resource")
    default_tenant, default_namespace = request.notes.scope
    tenant = _given(params.get("tenant_id"), "tenant_id") or default_tenant
    namespace = _given(params.get("namespace"), "namespace") or default_namespace
    if kind == "tenant":
        return "tenant", (tenant, ""), name
    if kind == "namespace":
        namespace = name
    return cast("ResourceKind", kind), (tenant, namespace), name


def _asked_about(
    dispatch: RequestDispatch,
    request: Request,
    params: dict[str, str],
    kind: ResourceKind,
    scope: Scope,
    name: str,
) -> Principal:
    """Returns the principal that the request is about. Only somebody who has `access` to the
    resource may ask about others."""
    sender, wanted = request.notes.principal, params.get("principal", "").strip()
    if sender is not None and wanted in ("", sender.name) and not params.get("roles"):
        return sender
    wanted = wanted or (sender.name if sender is not None else "")
    check(dispatch.engine.access, sender, "access", kind, scope, name)
    roles = frozenset(filter(None, params.get("roles", "").split(",")))
    return Principal(wanted, tenant_id=scope[0] if roles else None, roles=roles)


_RULE = {
    "tenant_id": "default",
    "namespace": "*",
    "resource": "topic:orders*",
    "principal": "billing",
    "permissions": ["consume", "read"],
}
_RULE_ANSWER = {"id": 1, **_RULE, "created_ms": 1_767_225_600_000}
_ROLE = {"permissions": ["consume", "produce", "read"]}
_CHANGE = HandlerNeeds("access", "tenant")

ENDPOINTS = (
    Endpoint(
        route="GET /v1/access/rules",
        handler=list_rules,
        access=Filtered("tenant"),
        tag="Access",
        summary="List access rules",
        text="The rules that the sender may change, and those for the sender itself.",
        query=(RulesQuery,),
        answers={200: Answer("In the order of creation.", RuleList, {"rules": [_RULE_ANSWER]})},
        errors=(400, 503),
    ),
    Endpoint(
        route="POST /v1/access/rules",
        handler=grant_rule,
        access=_CHANGE,
        reads_scope=("tenant",),
        tag="Access",
        summary="Grant permissions",
        text="Adds a rule. The sender needs the permission access, and all that the rule gives, on "
        "everything that the rule reaches. In effect at once, on open streams too.",
        body=RuleBody,
        example=_RULE,
        answers={
            201: Answer("Granted.", RuleAnswer, _RULE_ANSWER),
            200: Answer("There was such a rule already.", RuleAnswer, _RULE_ANSWER),
        },
        errors=(400, 404, 429, 503),
    ),
    Endpoint(
        route="DELETE /v1/access/rules/{rule}",
        handler=revoke_rule,
        access=_CHANGE,
        tag="Access",
        summary="Revoke a rule",
        text="In effect at once: streams that it allowed are ended before the answer.",
        answers=DONE,
        errors=(400, 404, 503),
    ),
    Endpoint(
        route="GET /v1/access/roles",
        handler=list_roles,
        access=Filtered("tenant"),
        reads_scope=("tenant",),
        tag="Access",
        summary="List roles",
        text="The built-in roles, then those of the tenant.",
        query=(RolesQuery,),
        answers={200: Answer("The roles.", RoleList, {"roles": [{"name": "worker", **_ROLE}]})},
        errors=(400, 503),
    ),
    Endpoint(
        route="PUT /v1/access/roles/{role}",
        handler=set_role,
        access=_CHANGE,
        reads_scope=("tenant",),
        tag="Access",
        summary="Create or change a role",
        text="A role is a named set of permissions that rules of the tenant can give. The sender "
        "needs the permission access, and all of the role's, in the whole tenant.",
        body=RoleBody,
        example=_ROLE,
        answers={200: Answer("The role.", RoleAnswer, {"name": "worker", **_ROLE})},
        errors=(400, 404, 429, 503),
    ),
    Endpoint(
        route="DELETE /v1/access/roles/{role}",
        handler=remove_role,
        access=_CHANGE,
        reads_scope=("tenant",),
        tag="Access",
        summary="Remove a role",
        text="409 while a rule names it.",
        query=(RolesQuery,),
        answers=DONE,
        errors=(400, 404, 409, 503),
    ),
    Endpoint(
        route="GET /v1/access/check",
        handler=check_access,
        access=Open("everybody may ask about themselves; about others, the handler checks"),
        reads_scope=("tenant", "namespace"),
        tag="Access",
        summary="Explain a decision",
        text="Says whether the principal may do something, and which rule allows it. Everybody may "
        "ask about themselves; about others, who has the permission access there.",
        query=(CheckQuery,),
        example={"principal": "billing", "permission": "consume", "resource": "topic:orders"},
        answers={
            200: Answer(
                "The decision.",
                CheckAnswer,
                {"allowed": True, "reason": "rule 1 allows it", "rule": _RULE_ANSWER},
            )
        },
        errors=(400, 503),
    ),
)
