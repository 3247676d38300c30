"""Bearer tokens: which exist, and the rules to create, rotate and revoke them.

Invariant: at most MAX_TOKENS are kept, each with the hash of its secret only. A token of a tenant
or namespace ends with it: whoever creates one of the same name later does not let old tokens in.
Must not know how a secret is made or compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from penstock.core.tenancy import Registry, find
from penstock.model.errors import AlreadyExists, NotFound, ResourceExhausted
from penstock.model.limits import MAX_TOKENS
from penstock.model.records import TokenRevoked, TokenSet
from penstock.model.tenancy import Entry
from penstock.model.tokens import Token


class Tokens:
    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[str, Token] = {}

    def __iter__(self) -> Iterator[Token]:
        """Iterates in the order of creation."""
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, token_id: str) -> Token | None:
        return self._by_id.get(token_id)

    def put(self, token: Token) -> None:
        self._by_id[token.id] = token

    def remove(self, token_id: str) -> None:
        del self._by_id[token_id]

    def restore(self, tokens: Iterable[Token]) -> None:
        self._by_id = {token.id: token for token in tokens}

    def registry_changed(self, entry: Entry, deleted: bool) -> None:
        """Forgets the tokens of a tenant or namespace that was deleted."""
        if deleted and entry.kind in ("tenant", "namespace"):
            for token in [each for each in self if _is_of(each, entry)]:
                self.remove(token.id)


def find_token(tokens: Tokens, token_id: str) -> Token:
    token = tokens.get(token_id)
    if token is None:
        raise NotFound(f"no token has the id {token_id[:40]!r}")
    return token


def decide_create_token(
    tokens: Tokens, registry: Registry, wanted: Token, now_ms: int
) -> list[TokenSet | TokenRevoked]:
    """Returns the record of the new token. If there is no room, expired tokens are removed
    first."""
    if tokens.get(wanted.id) is not None:
        raise AlreadyExists(f"the token {wanted.id!r} exists")
    if wanted.tenant_id is not None:
        if wanted.namespace is None:
            find(registry, "tenant", (wanted.tenant_id, "", ""))
        else:
            find(registry, "namespace", (wanted.tenant_id, wanted.namespace, ""))
    steps: list[TokenSet | TokenRevoked] = []
    if len(tokens) >= MAX_TOKENS:
        steps += [TokenRevoked(now_ms, each.id) for each in tokens if each.is_expired(now_ms)]
        if not steps:
            raise ResourceExhausted(
                f"there are {MAX_TOKENS} tokens; revoke those that nobody uses", limit="tokens"
            )
    return [*steps, TokenSet(now_ms, msgspec.structs.replace(wanted, created_ms=now_ms))]


def decide_rotate_token(
    tokens: Tokens, token_id: str, digest: bytes, old_until_ms: int, now_ms: int
) -> TokenSet:
    """Gives the token another secret. The one before is valid until `old_until_ms`, an earlier one
    no longer."""
    token = find_token(tokens, token_id)
    old_digest = token.digest if old_until_ms else b""
    rotated = msgspec.structs.replace(
        token, digest=digest, old_digest=old_digest, old_until_ms=old_until_ms
    )
    return TokenSet(now_ms, rotated)


def decide_revoke_token(tokens: Tokens, token_id: str, now_ms: int) -> TokenRevoked:
    return TokenRevoked(now_ms, find_token(tokens, token_id).id)


def _is_of(token: Token, entry: Entry) -> bool:
    if entry.kind == "tenant":
        return token.tenant_id == entry.tenant_id
    return (token.tenant_id, token.namespace) == (entry.tenant_id, entry.namespace)
