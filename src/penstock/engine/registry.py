"""Commands on the registry: create, change, delete and list tenants, namespaces, streams, caches.

Invariant: listeners hear of a change in the turn it is applied, before anything is decided after
it; its answer waits until it is durable, as every other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.api.outcomes import Done
from penstock.core.state import BrokerState
from penstock.core.tenancy import (
    changes_since,
    decide_change,
    decide_create,
    decide_delete,
    decide_reconcile,
    find,
    snapshot_of,
)
from penstock.engine.ledger import Ledger
from penstock.model.errors import Unavailable
from penstock.model.records import RegistryChanged
from penstock.model.tenancy import CacheConfig, Changes, Entry, Kind, Path, Snapshot, StreamConfig

T = TypeVar("T")

Listener = Callable[[Entry, bool], None]
"""Takes an entry that was created or changed, or (True) deleted."""


class RegistryCommands:
    def __init__(self, state: BrokerState, ledger: Ledger, listeners: list[Listener]) -> None:
        self._state = state
        self._registry = state.registry
        self._ledger = ledger
        self.listeners = listeners

    # -- commands ------------------------------------------------------------------------------

    def create(self, wanted: Entry, done: Done[tuple[Entry, bool]]) -> None:
        def decide() -> tuple[Entry, bool]:
            record = decide_create(self._registry, wanted, self._ledger.now_ms())
            if record is not None:
                self._record([record])
            return find(self._registry, wanted.kind, wanted.path), record is not None

        self._decide(decide, done)

    def change(
        self,
        path: Path,
        done: Done[Entry],
        *,
        stream: StreamConfig | None = None,
        cache: CacheConfig | None = None,
        if_revision: int | None = None,
    ) -> None:
        def decide() -> Entry:
            now_ms = self._ledger.now_ms()
            record = decide_change(
                self._registry, path, now_ms, stream=stream, cache=cache, if_revision=if_revision
            )
            if record is not None:
                self._record([record])
            return find(self._registry, "cache" if stream is None else "stream", path)

        self._decide(decide, done)

    def delete(self, kind: Kind, path: Path, cascade: bool, done: Done[None]) -> None:
        def decide() -> None:
            now_ms = self._ledger.now_ms()
            self._record(decide_delete(self._registry, kind, path, now_ms, cascade=cascade))

        self._decide(decide, done)

    def reconcile(self, wanted: Sequence[Entry], done: Done[int]) -> None:
        def decide() -> int:
            steps = decide_reconcile(self._registry, wanted, self._ledger.now_ms())
            if steps:
                self._record(steps)
            return len(steps)

        self._decide(decide, done)

    # -- what there is -------------------------------------------------------------------------

    def get(self, kind: Kind, path: Path, done: Done[Entry]) -> None:
        self._decide(lambda: find(self._registry, kind, path), done)

    def children(self, kind: Kind, path: Path, done: Done[list[Entry]]) -> None:
        def look() -> list[Entry]:
            parent = find(self._registry, kind, path)
            return sorted(self._registry.children(parent), key=lambda entry: entry.path)

        self._decide(look, done)

    def tenants(self, done: Done[list[Entry]]) -> None:
        self._decide(lambda: [e for _, e in sorted(self._registry.tenants.items())], done)

    def position(self, done: Done[tuple[int, int]]) -> None:
        self._decide(lambda: (self._registry.epoch, self._registry.revision), done)

    def snapshot(self, done: Done[Snapshot]) -> None:
        self._decide(self._snapshot, done)

    def changes(self, since: int, epoch: int | None, done: Done[Changes]) -> None:
        self._decide(lambda: self._changes(since, epoch), done)

    def _snapshot(self) -> Snapshot:
        return snapshot_of(self._registry)

    def _changes(self, since: int, epoch: int | None) -> Changes:
        return changes_since(self._registry, since, epoch)

    # -- within --------------------------------------------------------------------------------

    def _decide(self, decide: Callable[[], T], done: Done[T]) -> None:
        """Answers when everything decided so far is durable. Reads too: what is not durable is not
        shown."""
        self._ledger.answer(done, self._ledger.attempt(decide))

    def _record(self, records: list[RegistryChanged]) -> None:
        if not self._ledger.record_together(records):
            raise Unavailable("the disk is full; nothing can be recorded until there is room")
        for record in records:
            for listener in self.listeners:
                listener(record.entry, record.deleted)
