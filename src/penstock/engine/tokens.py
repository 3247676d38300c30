"""Commands on bearer tokens.

Invariant: listeners hear of a token that was rotated or revoked in the turn it is applied, before
anything is decided after it; its answer waits until it is durable, as every other.
"""

from __future__ import annotations

import builtins

from penstock.api.outcomes import Done
from penstock.api.tokens import TokenListener
from penstock.core.state import BrokerState
from penstock.core.tokens import (
    decide_create_token,
    decide_revoke_token,
    decide_rotate_token,
    find_token,
)
from penstock.engine.audit import AuditTrail
from penstock.engine.ledger import Ledger
from penstock.model.tenancy import Entry
from penstock.model.tokens import Token


class TokenCommands:
    def __init__(self, state: BrokerState, ledger: Ledger, audit: AuditTrail) -> None:
        self._audit = audit
        self._state = state
        self._tokens = state.tokens
        self._ledger = ledger
        self._listeners: builtins.list[TokenListener] = []

    def create(self, wanted: Token, done: Done[Token]) -> None:
        def decide() -> Token:
            now_ms = self._ledger.now_ms()
            self._ledger.must_record(
                *decide_create_token(self._tokens, self._state.registry, wanted, now_ms)
            )
            self._note("token.create", wanted)
            return find_token(self._tokens, wanted.id)

        self._ledger.decide(decide, done)

    def rotate(self, token_id: str, digest: bytes, old_until_ms: int, done: Done[Token]) -> None:
        def decide() -> Token:
            now_ms = self._ledger.now_ms()
            record = decide_rotate_token(self._tokens, token_id, digest, old_until_ms, now_ms)
            self._ledger.must_record(record)
            self._note("token.rotate", record.token)
            self._tell()
            return record.token

        self._ledger.decide(decide, done)

    def revoke(self, token_id: str, done: Done[None]) -> None:
        def decide() -> None:
            token = self._tokens.get(token_id)
            self._ledger.must_record(
                decide_revoke_token(self._tokens, token_id, self._ledger.now_ms())
            )
            if token is not None:
                self._note("token.revoke", token)
            self._tell()

        self._ledger.decide(decide, done)

    def list(self, done: Done[builtins.list[Token]]) -> None:
        self._ledger.decide(lambda: builtins.list(self._tokens), done)

    def find(self, token_id: str) -> Token | None:
        return self._tokens.get(token_id)

    def listen(self, listener: TokenListener) -> None:
        self._listeners.append(listener)

    def registry_changed(self, entry: Entry, deleted: bool) -> None:
        """Tokens of a deleted tenant or namespace are gone with it."""
        if deleted and entry.kind in ("tenant", "namespace"):
            self._tell()

    def _note(self, action: str, token: Token) -> None:
        scope = (token.tenant_id or "", token.namespace or "")
        self._audit.changed(action, "token", scope, token.id, f"for {token.principal}")

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
