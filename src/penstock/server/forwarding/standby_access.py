"""Access control on a broker that has no engine: it knows no tokens, so the owner checks them.

Invariant: a request whose sender was not verified has the principal UNVERIFIED, which may do
nothing, so that it can only be forwarded. A client certificate cannot go along, and no other broker
may vouch for it: such a request is refused, and the refusal says where the owner is.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from penstock.model.errors import PenstockError, Unauthenticated
from penstock.model.principals import STATIC_PRINCIPAL
from penstock.server.identity.credentials import Credential, digest_of, wall_ms


class StandbyAuthenticator:
    """`owner_text` names the owner and its address."""

    now_ms = staticmethod(wall_ms)

    def __init__(self, token: str, owner_text: Callable[[], str]) -> None:
        self._owner_text = owner_text
        self.use_token(token)

    def use_token(self, token: str) -> None:
        """Replaces the static token, the only one that this broker can check."""
        self._static = digest_of(token.encode()) if token else b""

    def authenticate(
        self, authorizations: list[bytes], certificate: Credential | None
    ) -> Credential | PenstockError | None:
        if not authorizations:
            if certificate is None:
                return None
            return Unauthenticated(
                "this broker forwards requests and cannot pass a client certificate on: "
                f"connect to {self._owner_text()}, or send a bearer token"
            )
        scheme, _, text = authorizations[0].strip().partition(b" ")
        if len(authorizations) > 1 or scheme.lower() != b"bearer" or not self._static:
            return None
        digest = digest_of(text.strip())
        if hmac.compare_digest(digest, self._static):
            return Credential(STATIC_PRINCIPAL, "static", self._static)
        return None

    def holds(self, credential: Credential) -> bool:
        """Returns whether a credential still holds, as far as this broker can know."""
        is_static = credential.principal is STATIC_PRINCIPAL
        return not is_static or hmac.compare_digest(credential.digest, self._static)
