"""Quotas: how much a tenant or namespace uses, and how much it may."""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.api.outcomes import Done
from penstock.model.quotas import Quota
from penstock.model.scopes import Scope


class QuotaReport(msgspec.Struct, frozen=True):
    """`scope` has an empty namespace if the quota is the tenant's. `used` has a number for each
    member of the quota except retention; for a rate it is what was accepted in the last second, and
    is there only if somebody set a quota, since nobody counts otherwise.
    `refused` counts refusals since the broker started."""

    scope: Scope
    quota: Quota
    used: dict[str, int]
    refused: dict[str, int]


class QuotasPart(Protocol):
    def report(self, scope: Scope, done: Done[QuotaReport]) -> None:
        """Gives the quota and the use of a tenant, or of a namespace."""
        ...

    def connect(self, scope: Scope) -> None:
        """Counts an open connection of a namespace, or only of a tenant if the namespace is empty.
        Raises ResourceExhausted if there may be no other."""
        ...

    def disconnect(self, scope: Scope) -> None:
        """Counts a connection no longer, which was counted for this scope."""
        ...
