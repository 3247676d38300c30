"""Quotas: how much a tenant or namespace uses, and how much it may."""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.api.outcomes import Done
from penstock.model.quotas import Quota
from penstock.model.scopes import Scope


class QuotaReport(msgspec.Struct, frozen=True):
    """`scope` has an empty namespace if the quota is the tenant's. `used` has a number for each
    member of the quota that can be measured at one moment, so none for rates and retention.
    `refused` counts refusals since the broker started."""

    scope: Scope
    quota: Quota
    used: dict[str, int]
    refused: dict[str, int]


class QuotasPart(Protocol):
    def report(self, scope: Scope, done: Done[QuotaReport]) -> None:
        """Gives the quota and the use of a tenant, or of a namespace."""
        ...
