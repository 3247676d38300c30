"""The calls on access rules and roles. No IO."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.client.calls import Call, encode, nothing, query_of, reader, segment
from penstock.client.results import AccessDecision, GrantedRule, RoleDefinition, SenderInfo


def grant_access(
    permissions: Sequence[str],
    *,
    principal: str = "",
    role: str = "",
    tenant_id: str = "",
    namespace: str = "",
    resource: str = "",
) -> Call[GrantedRule]:
    """Gives a principal, or all who have a role, permissions (or roles) on resources of a tenant.
    `namespace` and `resource` are everything if omitted; both may end with `*`. In effect at
    once."""
    body = {
        "tenant_id": tenant_id,
        "namespace": namespace,
        "resource": resource,
        "principal": principal,
        "role": role,
        "permissions": list(permissions),
    }
    given = {name: value for name, value in body.items() if value}
    return Call("POST", "/v1/access/rules", reader(GrantedRule), encode(given))


def revoke_access(rule_id: int) -> Call[None]:
    """Removes a rule. When this returns, streams that it allowed have ended."""
    return Call("DELETE", f"/v1/access/rules/{rule_id}", nothing)


def list_access_rules(
    *, tenant_id: str = "", principal: str = "", role: str = ""
) -> Call[list[GrantedRule]]:
    """Returns the rules that you may change, and those for yourself."""
    read = reader(_Rules)
    query = _query(tenant_id=tenant_id, principal=principal, role=role)
    return Call("GET", f"/v1/access/rules{query}", lambda body: read(body).rules)


def check_access(
    permission: str,
    resource: str,
    *,
    principal: str = "",
    roles: Sequence[str] = (),
    tenant_id: str = "",
    namespace: str = "",
) -> Call[AccessDecision]:
    """Says whether a principal may do something, and which rule allows it. Without `principal` it
    is about you."""
    query = _query(
        permission=permission,
        resource=resource,
        principal=principal,
        roles=",".join(roles),
        tenant_id=tenant_id,
        namespace=namespace,
    )
    return Call("GET", f"/v1/access/check{query}", reader(AccessDecision))


def who_am_i() -> Call[SenderInfo]:
    """Returns who you are to the broker, and the tenant and namespace of names without one."""
    return Call("GET", "/v1/access/self", reader(SenderInfo))


def set_role(name: str, permissions: Sequence[str], *, tenant_id: str = "") -> Call[RoleDefinition]:
    """Creates or changes a role of a tenant: a named set of permissions that rules can give."""
    body = {"permissions": list(permissions)} | ({"tenant_id": tenant_id} if tenant_id else {})
    return Call("PUT", _role(name), reader(RoleDefinition), encode(body))


def remove_role(name: str, *, tenant_id: str = "") -> Call[None]:
    """Removes a role that no rule names."""
    return Call("DELETE", _role(name) + _query(tenant_id=tenant_id), nothing)


def list_roles(*, tenant_id: str = "") -> Call[list[RoleDefinition]]:
    """Returns the built-in roles, then those of the tenant."""
    read = reader(_Roles)
    query = _query(tenant_id=tenant_id)
    return Call("GET", f"/v1/access/roles{query}", lambda body: read(body).roles)


class _Rules(msgspec.Struct):
    rules: list[GrantedRule]


class _Roles(msgspec.Struct):
    roles: list[RoleDefinition]


def _role(name: str) -> str:
    return f"/v1/access/roles/{segment(name)}"


def _query(**parameters: str) -> str:
    given = query_of(**{name: value or None for name, value in parameters.items()})
    return f"?{given}" if given else ""
