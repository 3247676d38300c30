"""The calls on bearer tokens. No IO."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.client.calls import Call, encode, list_of, nothing, reader, segment
from penstock.client.results import BearerToken, NewBearerToken


def create_token(
    principal: str,
    *,
    tenant_id: str | None = None,
    namespace: str | None = None,
    roles: Iterable[str] = (),
    admin: bool = False,
    expires_in_ms: int = 0,
) -> Call[NewBearerToken]:
    """Creates a token. Its text is in the result's `token`, and the broker never shows it again."""
    body = {
        "principal": principal,
        "tenant_id": tenant_id,
        "namespace": namespace,
        "roles": list_of(roles, "roles"),
        "admin": admin,
        "expires_in_ms": expires_in_ms,
    }
    return Call("POST", "/v1/tokens", reader(NewBearerToken), encode(body))


def list_tokens() -> Call[list[BearerToken]]:
    """Returns the tokens in reach, in the order of their creation, without secrets."""
    read = reader(_Tokens)
    return Call("GET", "/v1/tokens", lambda body: read(body).tokens)


def describe_token(token_id: str) -> Call[BearerToken]:
    """Returns the token without its secret. Raises NotFound if there is none."""
    return Call("GET", f"/v1/tokens/{segment(token_id)}", reader(BearerToken))


def rotate_token(token_id: str, *, grace_ms: int = 0) -> Call[NewBearerToken]:
    """Gives a token another secret. The old one is valid for `grace_ms` more."""
    path = f"/v1/tokens/{segment(token_id)}/rotate"
    return Call("POST", path, reader(NewBearerToken), encode({"grace_ms": grace_ms}))


def revoke_token(token_id: str) -> Call[None]:
    """Ends a token at once, and closes the connections that used it."""
    return Call("DELETE", f"/v1/tokens/{segment(token_id)}", nothing)


class _Tokens(msgspec.Struct):
    tokens: list[BearerToken]
