"""Commands on the registry: create, change, delete and list tenants, namespaces, streams, caches.

Invariant: listeners hear of a change in the turn it is applied, before anything is decided after
it; its answer waits until it is durable, as every other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from penstock.api.durability import Capabilities
from penstock.api.outcomes import Done
from penstock.core.state import BrokerState
from penstock.core.stream_logs import with_logs
from penstock.core.tenancy import (
    changes_since,
    decide_change,
    decide_create,
    decide_delete,
    decide_reconcile,
    find,
    kind_to_change,
    snapshot_of,
)
from penstock.core.topic_rules import decide_delete_within, topics_within
from penstock.engine.audit import AuditTrail
from penstock.engine.ledger import Ledger
from penstock.engine.quotas import Quotas
from penstock.engine.topic_removal import TopicRemoval
from penstock.engine.window import Window
from penstock.model.errors import FailedPrecondition
from penstock.model.quotas import Quota
from penstock.model.records import RegistryChanged, TopicCreated, TopicDeleted
from penstock.model.scopes import split_name
from penstock.model.tenancy import CacheConfig, Changes, Entry, Kind, Path, Snapshot, StreamConfig

_log = logging.getLogger("penstock.registry")

Listener = Callable[[Entry, bool], None]
"""Takes an entry that was created or changed, or (True) deleted."""


class RegistryCommands:
    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        listeners: list[Listener],
        topic_removal: TopicRemoval,
        audit: AuditTrail,
        window: Window,
        quotas: Quotas,
        capabilities: Capabilities,
    ) -> None:
        self._audit = audit
        self._state = state
        self._window = window
        self._quotas = quotas
        self._capabilities = capabilities
        self._registry = state.registry
        self._ledger = ledger
        self.listeners = listeners
        self._topic_removal = topic_removal

    # -- commands ------------------------------------------------------------------------------

    def create(self, wanted: Entry, done: Done[tuple[Entry, bool]]) -> None:
        def decide() -> tuple[Entry, bool]:
            record = decide_create(self._registry, wanted, self._ledger.now_ms())
            if record is not None:
                if self._quotas.is_active:
                    self._quotas.check_entry(record.entry)
                self._record([record])
                self._audit.registry_changed(record.entry, "create")
            return find(self._registry, wanted.kind, wanted.path), record is not None

        self._ledger.decide(decide, done)

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
        def decide() -> Entry:
            now_ms = self._ledger.now_ms()
            record = decide_change(
                self._registry,
                path,
                now_ms,
                stream=stream,
                cache=cache,
                quota=quota,
                if_revision=if_revision,
            )
            if record is not None:
                self._record([record])
                self._audit.registry_changed(record.entry, "configure")
            return find(self._registry, kind_to_change(path, stream, cache), path)

        self._ledger.decide(decide, done)

    def delete(self, kind: Kind, path: Path, cascade: bool, done: Done[None]) -> None:
        def decide() -> None:
            now_ms = self._ledger.now_ms()
            records = decide_delete(self._registry, kind, path, now_ms, cascade=cascade)
            topics = decide_delete_within(self._state, kind, path, now_ms, cascade=cascade)
            names = [self._state.topics_by_id[topic.topic_id].name for topic in topics]
            self._record(records, topics)
            for name in names:
                self._audit.changed("topic.delete", "topic", *split_name(name))
            for record in records:
                self._audit.registry_changed(record.entry, "delete")

        self._ledger.decide(decide, done)

    def reconcile(self, wanted: Sequence[Entry], done: Done[int]) -> None:
        def decide() -> int:
            steps = decide_reconcile(self._registry, wanted, self._ledger.now_ms())
            if steps:
                self._record(steps)
                self._report_kept_topics(steps)
            return len(steps)

        self._ledger.decide(decide, done)

    # -- what there is -------------------------------------------------------------------------

    def get(self, kind: Kind, path: Path, done: Done[Entry]) -> None:
        self._ledger.decide(lambda: find(self._registry, kind, path), done)

    def children(self, kind: Kind, path: Path, done: Done[list[Entry]]) -> None:
        def look() -> list[Entry]:
            parent = find(self._registry, kind, path)
            return sorted(self._registry.children(parent), key=lambda entry: entry.path)

        self._ledger.decide(look, done)

    def tenants(self, done: Done[list[Entry]]) -> None:
        self._ledger.decide(lambda: [e for _, e in sorted(self._registry.tenants.items())], done)

    def position(self, done: Done[tuple[int, int]]) -> None:
        self._ledger.decide(lambda: (self._registry.epoch, self._registry.revision), done)

    def snapshot(self, done: Done[Snapshot]) -> None:
        self._ledger.decide(self._snapshot, done)

    def changes(self, since: int, epoch: int | None, done: Done[Changes]) -> None:
        self._ledger.decide(lambda: self._changes(since, epoch), done)

    def _snapshot(self) -> Snapshot:
        return snapshot_of(self._registry)

    def _changes(self, since: int, epoch: int | None) -> Changes:
        return changes_since(self._registry, since, epoch)

    # -- within --------------------------------------------------------------------------------

    def _record(self, records: list[RegistryChanged], topics: Sequence[TopicDeleted] = ()) -> None:
        """Records changes and deletions of topics, and the logs of durable streams that come and
        go with them."""
        check_guarantees(self._capabilities, [step.entry for step in records if not step.deleted])
        steps = with_logs(self._state, records)
        deletions = [*topics, *(step for step in steps if isinstance(step, TopicDeleted))]
        others = [step for step in steps if not isinstance(step, TopicDeleted)]
        self._topic_removal.record(deletions, others)
        for step in others:
            if isinstance(step, TopicCreated):
                self._window.open_topic(step.topic_id, step.partitions)
        for record in records:
            for listener in self.listeners:
                listener(record.entry, record.deleted)

    def _report_kept_topics(self, steps: list[RegistryChanged]) -> None:
        """Warns about topics whose namespace is gone: another broker's registry must not delete
        messages that only this broker has."""
        for step in steps:
            entry = step.entry
            is_gone = step.deleted and entry.path not in self._registry.namespaces
            if entry.kind == "namespace" and is_gone:
                count = sum(1 for _ in topics_within(self._state, entry.kind, entry.path))
                if count:
                    _log.warning(
                        "namespace %s/%s is gone from the control plane; its %d topics here are "
                        "kept. Delete them, or create the namespace again",
                        entry.tenant_id,
                        entry.namespace,
                        count,
                    )


def check_guarantees(capabilities: Capabilities, entries: Iterable[Entry]) -> None:
    """Raises if there is a durable stream and the storage cannot keep what it promises."""
    if capabilities.wal_enabled and capabilities.fsync == "commit":
        return
    for entry in entries:
        if entry.stream is not None and entry.stream.durable:
            name = "/".join(entry.path)
            raise FailedPrecondition(
                f"stream {name!r} is durable, and this broker cannot promise that: "
                f"{_loss(capabilities)}"
            )


def _loss(capabilities: Capabilities) -> str:
    if not capabilities.wal_enabled:
        return (
            "it keeps everything in memory, and all events would be lost when it stops; start it "
            "without --memory"
        )
    return (
        f"with fsync {capabilities.fsync}, events that were accepted would be lost when the "
        "machine stops; start the broker with --fsync commit"
    )
