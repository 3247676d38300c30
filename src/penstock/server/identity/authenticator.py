"""Finds out who sends a request, from its bearer credential or else its client certificate.

Invariant: the answer depends on nothing but the arguments, the clock, the static token, the tokens
of the engine and the keys for JWTs; whoever changes one of these calls `Admission.forget`. No error
tells why a token was refused, beyond what its sender knows. Must not know what a principal may do.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Protocol

from penstock.api.tokens import TokensPart
from penstock.model.errors import PenstockError, Unauthenticated
from penstock.model.principals import STATIC_PRINCIPAL, Principal
from penstock.model.tokens import Token
from penstock.server.identity.credentials import (
    Credential,
    digest_of,
    read_token_text,
    wall_ms,
)

_NO_DIGEST = bytes(32)


class Verifier(Protocol):
    """Verifies JWTs."""

    def verify(self, text: bytes) -> Credential | PenstockError: ...

    def has_key(self, fingerprint: bytes) -> bool: ...


class Authentication(Protocol):
    """Finds out who sends a request. None: this broker does not know, and does not ask."""

    now_ms: Callable[[], int]

    def authenticate(
        self, authorizations: list[bytes], certificate: Credential | None
    ) -> Credential | PenstockError | None: ...

    def use_token(self, token: str) -> None: ...


class Authenticator:
    def __init__(
        self,
        tokens: TokensPart,
        *,
        static_token: str = "",
        jwt: Verifier | None = None,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        self._tokens = tokens
        self._jwt = jwt
        self.now_ms = now_ms
        self.use_token(static_token)

    def use_token(self, token: str) -> None:
        """Replaces the static token; empty means none."""
        self._static = digest_of(token.encode()) if token else b""

    def authenticate(
        self, authorizations: list[bytes], certificate: Credential | None
    ) -> Credential | PenstockError:
        """Takes the Authorization headers of a request, and what the certificate of its connection
        proves."""
        if not authorizations:
            if certificate is not None and self.holds(certificate):
                return certificate
            return Unauthenticated(
                "a bearer token is required: send the header 'Authorization: Bearer <token>'"
            )
        scheme, _, text = authorizations[0].strip().partition(b" ")
        if len(authorizations) > 1 or scheme.lower() != b"bearer":
            return Unauthenticated("send one header 'Authorization: Bearer <token>'")
        text = text.strip()
        if self._static and hmac.compare_digest(digest_of(text), self._static):
            return Credential(STATIC_PRINCIPAL, "static", self._static)
        known = read_token_text(text)
        if known is not None:
            return self._check_token(*known)
        if self._jwt is not None:
            return self._jwt.verify(text)
        return _refused()

    def holds(self, credential: Credential) -> bool:
        """Returns whether a credential that was verified earlier is still valid. This is asked once
        a second for every connection."""
        expires_ms = credential.principal.expires_ms
        if expires_ms and expires_ms <= self.now_ms():
            return False
        if credential.kind == "token":
            token = self._tokens.find(credential.id)
            return token is not None and self._is_current(token, credential.digest)
        if credential.kind == "static":
            return hmac.compare_digest(credential.digest, self._static)
        if credential.kind == "jwt":
            return self._jwt is not None and self._jwt.has_key(credential.digest)
        return True

    def _is_current(self, token: Token, digest: bytes) -> bool:
        """Returns whether a verified secret is still the token's, or its old one within the grace
        period."""
        if digest == token.digest:
            return not token.is_expired(self.now_ms())
        return digest == token.old_digest and token.old_until_ms > self.now_ms()

    def _check_token(self, token_id: str, digest: bytes) -> Credential | PenstockError:
        token = self._tokens.find(token_id)
        current, old = (_NO_DIGEST, _NO_DIGEST) if token is None else _digests(token)
        is_current = hmac.compare_digest(digest, current)
        is_old = hmac.compare_digest(digest, old)
        if token is None or not (is_current or is_old):
            return _refused()
        ends = [token.expires_ms, 0 if is_current else token.old_until_ms]
        expires_ms = min((end for end in ends if end), default=0)
        if expires_ms and expires_ms <= self.now_ms():
            # Its holder has proved to know the secret, and may know why it no longer helps.
            return Unauthenticated("this token has expired; ask for a new one")
        principal = Principal(
            token.principal,
            token.tenant_id,
            token.namespace,
            frozenset(token.roles),
            token.admin,
            expires_ms,
        )
        return Credential(principal, "token", digest, token.id)


def _digests(token: Token) -> tuple[bytes, bytes]:
    return token.digest, token.old_digest or _NO_DIGEST


def _refused() -> Unauthenticated:
    return Unauthenticated(
        "this token is not valid: the broker does not know it, or it was revoked or replaced"
    )
