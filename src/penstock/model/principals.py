"""Principals: who sends a request, as far as the broker could verify it."""

from __future__ import annotations

import msgspec


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
"""The sender with the broker's static token."""
RESERVED_PRINCIPALS = frozenset({STATIC_PRINCIPAL.name, "broker"})
"""The audit log shows these for the static token and for the broker itself."""
