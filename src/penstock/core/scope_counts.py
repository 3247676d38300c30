"""Counts by tenant and namespace."""

from __future__ import annotations

from collections import Counter

from penstock.model.scopes import Scope


class ScopeCounts:
    """Counts something by tenant and namespace. A tenant's total is under an empty namespace."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[Scope] = Counter()

    def __getitem__(self, scope: Scope) -> int:
        return self._counts[scope]

    def add(self, scope: Scope, number: int) -> None:
        """Adds to the count of a namespace and its tenant, or only of a tenant if the namespace is
        empty."""
        tenant = (scope[0], "")
        for each in (scope, tenant) if scope != tenant else (tenant,):
            self._counts[each] += number
            if not self._counts[each]:
                del self._counts[each]
