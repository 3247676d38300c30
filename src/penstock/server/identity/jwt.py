"""Verifies JWTs of an identity provider, and makes principals of their claims.

Invariants: the algorithm is one of the allow-list and fits the kind of the key; `none` never is. A
token without an end is refused. A token that was verified is not verified again until it expires
or the keys change. Must not know where keys come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jwt
import msgspec

from penstock.model.errors import InvalidArgument, PenstockError, Unauthenticated, Unavailable
from penstock.model.limits import KIB, MAX_OFFSET, MAX_ROLES
from penstock.model.names import clean_name
from penstock.model.principals import RESERVED_PRINCIPALS, Principal
from penstock.server.identity.credentials import Credential, wall_ms
from penstock.server.identity.jwt_keys import JwtKeys, VerifyingKey

MAX_JWT_BYTES = 8 * KIB
MAX_VERIFIED = 10_000
"""Verified tokens that are remembered: about 1 KiB each."""


class ClaimNames(msgspec.Struct, frozen=True):
    """The claims that say who sends. An empty `tenant_id` means that senders reach every tenant;
    a sender with the role `admin_role` is an admin."""

    principal: str = "sub"
    tenant_id: str = "tenant_id"
    namespace: str = "namespace"
    roles: str = "roles"
    admin_role: str = ""


class JwtVerifier:
    def __init__(
        self,
        keys: JwtKeys,
        *,
        issuer: str,
        audience: str,
        algorithms: tuple[str, ...],
        leeway_ms: int,
        claims: ClaimNames,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._algorithms = frozenset(algorithms)
        self._leeway_ms = leeway_ms
        self._claims = claims
        self._now_ms = now_ms
        self._verified: dict[bytes, Credential] = {}
        keys.when_changed(self._verified.clear)

    def has_key(self, fingerprint: bytes) -> bool:
        return self._keys.has(fingerprint)

    def follow_keys(self, then: Callable[[], None]) -> None:
        """Calls `then` when the keys have changed, and no token counts as verified any more."""
        self._keys.when_changed(then)

    def verify(self, text: bytes) -> Credential | PenstockError:
        if len(text) > MAX_JWT_BYTES:
            return Unauthenticated(f"a JWT has at most {MAX_JWT_BYTES} bytes")
        identity = hashlib.sha256(text).digest()
        known = self._verified.get(identity)
        if known is not None and known.principal.expires_ms > self._now_ms():
            return known
        try:
            credential = self._verify(text)
        except PenstockError as error:
            return error
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError) as error:
            return _invalid(_reason(error))
        if len(self._verified) >= MAX_VERIFIED:
            self._verified.clear()
        self._verified[identity] = credential
        return credential

    def _verify(self, text: bytes) -> Credential:
        token = text.decode("ascii")
        key, algorithm = self._key_for(jwt.get_unverified_header(token))
        claims = jwt.decode(
            token,
            key.key,
            algorithms=[algorithm],
            issuer=self._issuer,
            audience=self._audience,
            options={
                "require": ["exp", "iss", "aud"],
                # The times are compared with the broker's clock below.
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
            },
        )
        expires_ms = self._check_times(claims)
        return Credential(self._principal(claims, expires_ms), "jwt", key.fingerprint)

    def _key_for(self, header: dict[str, Any]) -> tuple[VerifyingKey, str]:
        algorithm, kid = header.get("alg"), header.get("kid", "")
        if not isinstance(algorithm, str) or algorithm not in self._algorithms:
            raise _invalid("its algorithm is not allowed; see jwt_algorithms")
        if "crit" in header or header.get("b64", True) is not True:
            raise _invalid("it has a critical header, which the broker does not know")
        key = self._keys.find(kid, algorithm) if isinstance(kid, str) else None
        if key is None:
            if self._keys.ask_for_unknown():
                raise Unavailable("the keys of the issuer are being fetched; try again")
            raise _invalid("no key of the issuer has its key id and algorithm")
        return key, algorithm

    def _check_times(self, claims: dict[str, Any]) -> int:
        """Returns when the token ends for this broker."""
        now_ms = self._now_ms()
        expires_ms = _time_of(claims, "exp") + self._leeway_ms
        if expires_ms <= now_ms:
            raise _invalid("it has expired")
        for name in ("nbf", "iat"):
            if name in claims and _time_of(claims, name) > now_ms + self._leeway_ms:
                raise _invalid("it is not valid yet")
        return expires_ms

    def _principal(self, claims: dict[str, Any], expires_ms: int) -> Principal:
        names = self._claims
        roles = _roles(claims.get(names.roles) if names.roles else None)
        is_admin = bool(names.admin_role) and names.admin_role in roles
        tenant_id = _name(claims, names.tenant_id)
        namespace = _name(claims, names.namespace)
        if tenant_id is None and namespace is not None:
            raise _invalid(f"it has the claim {names.namespace!r} without a tenant")
        if tenant_id is None and names.tenant_id and not is_admin:
            raise _invalid(
                f"it has no claim {names.tenant_id!r}; jwt_tenant_claim names the claim with the "
                "tenant, or is empty if senders may reach every tenant"
            )
        name = _name(claims, names.principal)
        if name is None:
            raise _invalid(f"it has no claim {names.principal!r}")
        if name.casefold() in RESERVED_PRINCIPALS:
            raise _invalid(f"{name!r} is a name of the broker's own")
        return Principal(name, tenant_id, namespace, roles, is_admin, expires_ms)


def _time_of(claims: dict[str, Any], name: str) -> int:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _invalid(f"its {name} is no number of seconds")
    if not 0 <= value * 1000 <= MAX_OFFSET:
        raise _invalid(f"its {name} is out of range")
    return int(value * 1000)


def _name(claims: dict[str, Any], claim: str) -> str | None:
    value = claims.get(claim) if claim else None
    if value is None:
        return None
    try:
        if not isinstance(value, str):
            raise InvalidArgument("no text")
        return clean_name(value, claim)
    except InvalidArgument:
        raise _invalid(f"its claim {claim!r} is no name") from None


def _roles(value: Any) -> frozenset[str]:
    """Reads a list of roles, or a text with spaces between them, as a scope has."""
    roles = value.split() if isinstance(value, str) else value
    if roles is None:
        return frozenset()
    is_list = isinstance(roles, list) and len(roles) <= MAX_ROLES
    if not is_list or not all(isinstance(role, str) for role in roles):
        raise _invalid(f"its roles are no list of at most {MAX_ROLES} names")
    try:
        return frozenset(clean_name(role, "role") for role in roles)
    except InvalidArgument:
        raise _invalid("its roles are no names") from None


def _reason(error: Exception) -> str:
    """Says why, without a word of the token itself."""
    if isinstance(error, jwt.InvalidAudienceError):
        return "it is for another audience; see jwt_audience"
    if isinstance(error, jwt.InvalidIssuerError):
        return "it is from another issuer; see jwt_issuer"
    if isinstance(error, jwt.MissingRequiredClaimError):
        return "it must have the claims exp, iss and aud"
    if isinstance(error, jwt.InvalidSignatureError):
        return "its signature does not match"
    return "it cannot be read"


def _invalid(reason: str) -> Unauthenticated:
    return Unauthenticated(f"this token is not valid: {reason}")
