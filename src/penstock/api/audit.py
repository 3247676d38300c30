"""The audit log: notes who changes what."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from penstock.model.audit import Actor, AuditOutcome
from penstock.model.scopes import Scope


class AuditPart(Protocol):
    def acting(self, actor: Actor | None) -> AbstractContextManager[None]:
        """Notes changes that are decided meanwhile under this actor's name. Nothing is noted
        without one."""
        ...

    def note(
        self, action: str, resource: str, scope: Scope, outcome: AuditOutcome, detail: str = ""
    ) -> None:
        """Writes a row about the actor."""
        ...
