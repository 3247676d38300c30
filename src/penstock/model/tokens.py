"""A bearer token as the broker keeps it: its reach and the hash of its secret, never the secret.

Must not know how a token is written, sent or compared.
"""

from __future__ import annotations

import msgspec

from penstock.model.principals import Principal


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`digest` is the SHA-256 of the secret. After a rotation the secret of `old_digest` is valid
    until `old_until_ms`. `expires_ms` 0: it never expires. On disk it is an array in this order;
    fields are only ever added at the end."""

    id: str
    principal: str
    tenant_id: str | None
    namespace: str | None
    roles: tuple[str, ...]
    admin: bool
    created_ms: int
    expires_ms: int
    digest: bytes
    old_digest: bytes = b""
    old_until_ms: int = 0

    def is_expired(self, now_ms: int) -> bool:
        return 0 < self.expires_ms <= now_ms


def is_within(principal: Principal, tenant_id: str | None, namespace: str | None) -> bool:
    """Returns whether a tenant and namespace, None for all, are in the reach of a principal."""
    return principal.tenant_id in (None, tenant_id) and (principal.namespace in (None, namespace))
