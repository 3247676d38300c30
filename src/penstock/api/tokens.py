"""Bearer tokens: the engine keeps them, the server makes and compares their secrets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.api.outcomes import Done
from penstock.model.tokens import Token

TokenListener = Callable[[], None]
"""A function that is called when a token was rotated or revoked, before any later decision."""


class TokensPart(Protocol):
    def create(self, wanted: Token, done: Done[Token]) -> None:
        """Gives the token with the time of its creation. NotFound: its tenant or namespace does not
        exist."""
        ...

    def rotate(self, token_id: str, digest: bytes, old_until_ms: int, done: Done[Token]) -> None:
        """Replaces the secret. The old one is valid until `old_until_ms`, 0 for no longer."""
        ...

    def revoke(self, token_id: str, done: Done[None]) -> None: ...

    def list(self, done: Done[list[Token]]) -> None:
        """Gives all tokens in the order of their creation, expired ones included."""
        ...

    def find(self, token_id: str) -> Token | None:
        """Returns a token at once: every request asks for it. A change counts as soon as it is
        decided, so that nobody gets in with a token that is being revoked."""
        ...

    def listen(self, listener: TokenListener) -> None: ...
