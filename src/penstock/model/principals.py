"""Principals: who sends a request, as far as the broker could verify it."""

from __future__ import annotations

import msgspec

from penstock.model.errors import InvalidArgument
from penstock.model.names import clean_name
from penstock.model.scopes import Scope


class Principal(msgspec.Struct, frozen=True):
    """A verified sender. `tenant_id` is the only tenant that it can reach; None means every
    tenant. `roles` are names, whose meaning the access rules define; an admin may do everything in
    its reach without any rule. `expires_ms` is the wall-clock time at which its credentials end, 0
    for never."""

    name: str
    tenant_id: str | None = None
    namespace: str | None = None
    roles: frozenset[str] = frozenset()
    is_admin: bool = False
    expires_ms: int = 0


STATIC_PRINCIPAL = Principal("static-token", is_admin=True)
"""The sender with the token of `token_file` or PENSTOCK_TOKEN."""
UNVERIFIED = Principal("")
"""A sender whose credential another broker of the cluster has to check. No rule can name it."""
RESERVED_PRINCIPALS = frozenset({STATIC_PRINCIPAL.name, "broker"})
"""The audit log shows these for the static token and for the broker itself."""


def bound_elsewhere(principal: Principal, scope: Scope) -> str:
    """Returns the end of a refusal: which tenant or namespace the principal's credential is for, if
    the scope is another one; else nothing."""
    tenant, namespace = scope
    own = principal.tenant_id
    if own is not None and own != tenant:
        return f"; your credential is for tenant {own!r}: name it (X-Penstock-Tenant, -t {own})"
    bound = principal.namespace
    if bound is not None and namespace != bound:
        return (
            f"; your credential is for namespace {bound!r}: name it (X-Penstock-Namespace, "
            f"-n {bound})"
        )
    return ""


def clean_principal(name: str | None) -> str:
    """Returns the name without blanks around it. Raises InvalidArgument if it is no name, or one of
    the broker's own: whoever had that could act under it in the audit log."""
    cleaned = clean_name(name, "principal")
    if cleaned.casefold() in RESERVED_PRINCIPALS:
        raise InvalidArgument(f"{cleaned!r} is a name of the broker's own; choose another")
    return cleaned
