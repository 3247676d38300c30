"""The registry: tenants, namespaces, streams and caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.api.outcomes import Done
from penstock.model.quotas import Quota
from penstock.model.tenancy import CacheConfig, Changes, Entry, Kind, Path, Snapshot, StreamConfig


class RegistryPart(Protocol):
    def create(self, wanted: Entry, done: Done[tuple[Entry, bool]]) -> None:
        """Gives the entry, and whether this call created it."""
        ...

    def change(
        self,
        path: Path,
        done: Done[Entry],
        *,
        stream: StreamConfig | None = None,
        cache: CacheConfig | None = None,
        quota: Quota | None = None,
        if_revision: int | None = None,
    ) -> None:
        """Gives the changed entry, or VersionMismatch if it has changed since `if_revision`. With
        neither `stream` nor `cache`, changes the quota of a tenant or namespace; None removes
        it."""
        ...

    def delete(self, kind: Kind, path: Path, cascade: bool, done: Done[None]) -> None: ...

    def reconcile(self, wanted: Sequence[Entry], done: Done[int]) -> None:
        """Makes the registry equal to another one; gives the number of changes this took."""
        ...

    def get(self, kind: Kind, path: Path, done: Done[Entry]) -> None: ...

    def children(self, kind: Kind, path: Path, done: Done[list[Entry]]) -> None:
        """Gives the entries directly in a tenant or namespace, sorted."""
        ...

    def tenants(self, done: Done[list[Entry]]) -> None:
        """Gives all tenants, sorted."""
        ...

    def position(self, done: Done[tuple[int, int]]) -> None:
        """Gives the epoch and the revision of the registry."""
        ...

    def snapshot(self, done: Done[Snapshot]) -> None: ...

    def changes(self, since: int, epoch: int | None, done: Done[Changes]) -> None:
        """Gives the changes after revision `since`."""
        ...
