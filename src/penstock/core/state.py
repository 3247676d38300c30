"""All the broker's durable state in memory, and `apply`: the only way a record changes it.

Invariant: the state is a function of the records applied and of `limits`; `apply` reads no clock
and never fails on a record that was decided from this state. Expired idempotency keys and effects
may be dropped at any time: every reader compares the expiry, so that this changes no meaning.
Must not know leases and consumers, which only the serving process has (engine/leases.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

from penstock.core import topic_records
from penstock.core.access import AccessRules
from penstock.core.cache import VERSIONS_PER_MS, Cache, CacheMemory, CacheTable
from penstock.core.effects import Effect, EffectTotals
from penstock.core.groups import (
    DYING,
    IN_FLIGHT,
    READY,
    WAITING,
    Group,
    GroupTable,
    Progress,
    Unfinished,
)
from penstock.core.idempotency import ProducedKeys, produce_identity
from penstock.core.tenancy import Registry
from penstock.core.tokens import Tokens
from penstock.core.topics import Topic, TopicTable
from penstock.core.transactions import CommittedTransactions
from penstock.core.writers import Writers
from penstock.model.envelope import Envelope
from penstock.model.limits import Limits
from penstock.model.records import (
    ACKED,
    DEAD,
    Advanced,
    CacheRemoved,
    CacheStored,
    Delivered,
    EffectSet,
    Extended,
    Finished,
    GroupCreated,
    GroupDeleted,
    JournalArchived,
    Message,
    OwnerChanged,
    Published,
    Record,
    RegistryChanged,
    Released,
    Returned,
    RoleRemoved,
    RoleSet,
    RuleGranted,
    RuleRevoked,
    Skipped,
    Stored,
    StoredEvent,
    TokenRevoked,
    TokenSet,
    TopicConfigured,
    TopicCreated,
    TopicDeleted,
    TransactionCommitted,
    Trimmed,
    WriteCommitted,
    WriteStored,
    stored_bytes,
)
from penstock.model.scopes import DEFAULT_SCOPE, is_stream_log
from penstock.model.tenancy import Entry

Run = Sequence[tuple[Stored, int, int]]
"""Messages of one partition in their order, each with its size and its place in the log."""


class BrokerState:
    __slots__ = (
        "access",
        "cache_floor",
        "cache_memory",
        "caches",
        "effect_totals",
        "epoch",
        "groups",
        "journal_archived",
        "last_ts",
        "limits",
        "next_id",
        "produced",
        "registry",
        "tokens",
        "topics",
        "topics_by_id",
        "transactions",
        "writers",
    )

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.topics = TopicTable()
        self.topics_by_id: dict[int, Topic] = {}
        self.groups = GroupTable()
        self.produced = ProducedKeys()
        self.effect_totals = EffectTotals()
        self.registry = Registry()
        self.caches = CacheTable()
        self.cache_memory = CacheMemory()
        self.writers = Writers()
        self.transactions = CommittedTransactions()
        self.tokens = Tokens()
        self.access = AccessRules()
        # Above every version of a cache that was deleted.
        self.cache_floor = 0
        for entry in self.registry.caches.values():
            self.caches[entry.id] = Cache(entry, 0, self.cache_memory)
        self.next_id = 1
        self.last_ts = 0
        # The first position of the journal that is not archived, as far as the broker was told.
        self.journal_archived = 0
        # Rises with each owner of a replicated log. 0: this log has never had one.
        self.epoch = 0


def apply(state: BrokerState, record: Record) -> None:
    """Changes `state` by one record."""
    state.last_ts = record.ts
    _APPLY[type(record)](state, record)


def apply_message(state: BrokerState, message: Stored, size: int) -> None:
    """`apply` for a message whose size is known: the hot path of produce."""
    state.last_ts = message.ts
    topic = state.topics_by_id[message.topic_id]
    partition = topic.partitions[message.partition]
    backlog = partition.backlog
    backlog.stored_msgs += 1
    backlog.stored_bytes += size
    topic.next_offset = partition.end_offset = message.offset + 1
    if message.envelope is not None:
        _remember_key(state, message, message.envelope)


def apply_messages(state: BrokerState, messages: Sequence[Stored], runs: Iterable[Run]) -> None:
    """Does what `apply_message` does for each message, in order. `runs` has them by partition."""
    for run in runs:
        last = run[-1][0]
        topic = state.topics_by_id[last.topic_id]
        partition = topic.partitions[last.partition]
        partition.backlog.stored_msgs += len(run)
        partition.backlog.stored_bytes += sum([size for _, size, _ in run])
        partition.end_offset = last.offset + 1
        topic.next_offset = max(topic.next_offset, partition.end_offset)
        state.last_ts = last.ts
    for message in messages:
        if message.envelope is not None:
            _remember_key(state, message, message.envelope)


def _remember_key(state: BrokerState, message: Stored, envelope: Envelope) -> None:
    # A dead letter keeps its idempotency key for the reader, but is no produce of that key.
    if envelope.idempotency_key and envelope.dlq is None:
        key = envelope.idempotency_key
        identity = produce_identity(envelope.tenant_id, message.topic_id, key)
        expires = message.ts + state.limits.idempotency_ttl_ms
        state.produced.remember(identity, expires, message.ts)


def progress_of(state: BrokerState, group_id: int, partition: int) -> Progress:
    return state.groups[group_id].progress[partition]


def forget_expired_effects(topic: Topic, now_ms: int) -> None:
    """Drops entries past their TTL, except where a message with the key is still unfinished."""
    for name, key in topic.effects.expired(now_ms):
        group = topic.groups.get(name)
        if group is None or key not in group.open_effects:
            topic.effects.forget(name, key)


def _message(state: BrokerState, record: Stored) -> None:
    apply_message(state, record, stored_bytes(record))


def _delivered(state: BrokerState, record: Delivered) -> None:
    progress = progress_of(state, record.group_id, record.partition)
    unfinished, ready = progress.unfinished, progress.ready
    owner, ts, lease_ms = record.owner, record.ts, record.lease_ms
    for item in record.items:
        entry = unfinished.get(item.offset)
        if entry is None:
            entry = Unfinished(progress, item.offset, item.size, item.policy, item.effect_key)
            unfinished[item.offset] = entry
            # The consumers of one turn have a record each, and their offsets interleave.
            if item.offset >= progress.cursor:
                progress.cursor = item.offset + 1
            if item.effect_key:
                _open_effect(progress.group, item.effect_key, ts)
        else:
            ready.pop(item.offset, None)
        entry.state = IN_FLIGHT
        entry.attempts += 1
        entry.previous_owner = entry.owner
        entry.owner = owner
        entry.previous_delivered_at = entry.delivered_at
        entry.delivered_at = ts
        entry.previous_delivery = entry.delivery
        entry.deliveries = entry.delivery = entry.deliveries + 1
        entry.lease_ms = lease_ms
    progress.in_flight += len(record.items)


def _extended(state: BrokerState, record: Extended) -> None:
    progress = progress_of(state, record.group_id, record.partition)
    progress.unfinished[record.offset].lease_ms = record.lease_ms


def _open_effect(group: Group, key: str, ts: int) -> None:
    """Keeps the effect while a message with the key is unfinished. An expired one is dropped
    first."""
    already = group.open_effects.get(key, 0)
    group.open_effects[key] = already + 1
    effect = group.topic.effects.get(group.name, key)
    if not already and effect is not None and effect.expires <= ts:
        group.topic.effects.forget(group.name, key)


def _returned(state: BrokerState, record: Returned) -> None:
    """Puts deliveries back, uncounted, before the retries. Those that were never delivered come
    first, in offset order, whichever came back first."""
    progress = progress_of(state, record.group_id, record.partition)
    ready = progress.ready
    untried = list(takewhile(lambda offset: not ready[offset].attempts, ready))
    for offset in reversed(record.offsets):
        entry = progress.unfinished[offset]
        progress.in_flight -= 1
        entry.attempts -= 1
        entry.owner = entry.previous_owner
        entry.delivered_at = entry.previous_delivered_at
        entry.delivery = entry.previous_delivery
        entry.state = READY
        entry.retry_at = 0
        ready[offset] = entry
        ready.move_to_end(offset, last=False)
        if not entry.attempts:
            untried.append(offset)
    for offset in sorted(untried, reverse=True):
        ready.move_to_end(offset, last=False)


def _finished(state: BrokerState, record: Finished) -> None:
    progress = progress_of(state, record.group_id, record.partition)
    entry = _drop(state, progress, record.offset, record.ts)
    progress.count_finished(entry.size)
    if record.how == ACKED and record.offset > progress.last_acked:
        progress.last_acked = record.offset


def _advanced(state: BrokerState, record: Advanced) -> None:
    progress = progress_of(state, record.group_id, record.partition)
    for offset in [offset for offset in progress.unfinished if offset < record.next]:
        _drop(state, progress, offset, record.ts)
    progress.cursor = max(progress.cursor, record.next)
    progress.count_finished(record.bytes, record.msgs)


def _drop(state: BrokerState, progress: Progress, offset: int, ts: int) -> Unfinished:
    """Removes the entry from the unfinished ones; the caller counts it."""
    entry = progress.unfinished.pop(offset)
    _leave(progress, entry)
    if entry.effect_key:
        _close_effect(state, progress.group, entry.effect_key, ts)
    return entry


def _close_effect(state: BrokerState, group: Group, key: str, ts: int) -> None:
    left = group.open_effects[key] - 1
    if left:
        group.open_effects[key] = left
        return
    del group.open_effects[key]
    group.topic.effects.keep_until(group.name, key, ts + state.limits.idempotency_ttl_ms)


def _leave(progress: Progress, entry: Unfinished) -> None:
    """Takes the entry out of the counts and lists of its state."""
    if entry.state == IN_FLIGHT:
        progress.in_flight -= 1
    elif entry.state == READY:
        progress.ready.pop(entry.offset, None)


def _skipped(state: BrokerState, record: Skipped) -> None:
    progress = progress_of(state, record.group_id, record.partition)
    progress.cursor = record.offset + 1
    progress.count_finished(record.size)


def _released(state: BrokerState, record: Released) -> None:
    progress = progress_of(state, record.group_id, record.partition)
    entry = progress.unfinished[record.offset]
    _leave(progress, entry)
    entry.last_error = record.reason
    entry.retry_at = record.retry_at
    if record.retry_at == DEAD:
        entry.state = DYING
    elif record.retry_at <= record.ts:
        entry.state = READY
        progress.ready[entry.offset] = entry
    else:
        entry.state = WAITING


def _trimmed(state: BrokerState, record: Trimmed) -> None:
    partition = state.topics_by_id[record.topic_id].partitions[record.partition]
    partition.first_offset = record.before
    partition.backlog.trimmed_msgs += record.msgs
    partition.backlog.trimmed_bytes += record.bytes


def _effect_set(state: BrokerState, record: EffectSet) -> None:
    topic = state.topics_by_id[record.topic_id]
    forget_expired_effects(topic, record.ts)
    # An owner's lease may be longer than the TTL; until it ends the effect is theirs.
    expires = max(record.ts, record.lease_until) + state.limits.idempotency_ttl_ms
    effect = Effect(record.status, record.owner, record.lease_until, record.text, expires)
    topic.effects.put(record.group, record.effect_key, effect)


def _registry_changed(state: BrokerState, record: RegistryChanged) -> None:
    state.registry.apply(record)
    entry = record.entry
    state.tokens.registry_changed(entry, record.deleted)
    if record.deleted and entry.kind in ("tenant", "namespace"):
        state.access.forget(entry.tenant_id, entry.namespace)
        if is_emptied(state, entry):
            scope = (entry.tenant_id, entry.namespace)
            state.transactions.forget_within(scope)
            state.writers.forget_within(scope)
    if entry.kind != "cache" or entry.cache is None:
        return
    if record.deleted:
        cache = state.caches.pop(entry.id)
        cache.leave()
        last_version = max(record.ts * VERSIONS_PER_MS, cache.first_version)
        state.cache_floor = max(state.cache_floor, last_version + VERSIONS_PER_MS)
    elif entry.id in state.caches:
        state.caches[entry.id].configure(entry.cache)
    else:
        first_version = max(record.ts * VERSIONS_PER_MS, state.cache_floor)
        state.caches[entry.id] = Cache(entry, first_version, state.cache_memory)


def is_emptied(state: BrokerState, entry: Entry) -> bool:
    """Says whether all that a deleted namespace had is to be forgotten, so that a later namespace
    of the name begins empty. A control plane that deletes it leaves its topics here, and those of
    the default namespace need no entry: then nothing is forgotten."""
    scope = (entry.tenant_id, entry.namespace)
    if entry.kind != "namespace" or scope == DEFAULT_SCOPE:
        return False
    topics = state.topics.values()
    return not any(each.scope == scope and not is_stream_log(each.name) for each in topics)


def _published(state: BrokerState, record: Published) -> None:
    state.topics_by_id[record.topic_id].publishers.remember(record)


def _journal_archived(state: BrokerState, record: JournalArchived) -> None:
    state.journal_archived = record.next


def _owner_changed(state: BrokerState, record: OwnerChanged) -> None:
    state.epoch = record.epoch


def _transaction_committed(state: BrokerState, record: TransactionCommitted) -> None:
    state.transactions.commit(record, record.ts + state.limits.idempotency_ttl_ms)


_APPLY: dict[type[Any], Callable[[BrokerState, Any], None]] = {
    Message: _message,
    TopicCreated: topic_records.topic_created,
    TopicDeleted: topic_records.topic_deleted,
    TopicConfigured: topic_records.topic_configured,
    GroupCreated: topic_records.group_created,
    GroupDeleted: topic_records.group_deleted,
    Delivered: _delivered,
    Returned: _returned,
    Finished: _finished,
    Advanced: _advanced,
    JournalArchived: _journal_archived,
    Skipped: _skipped,
    Released: _released,
    Trimmed: _trimmed,
    EffectSet: _effect_set,
    RegistryChanged: _registry_changed,
    CacheStored: lambda state, record: state.caches[record.cache_id].store(record),
    CacheRemoved: lambda state, record: state.caches[record.cache_id].remove(record),
    WriteCommitted: lambda state, record: state.writers.commit(record),
    WriteStored: lambda state, record: state.writers.store(record),
    TransactionCommitted: _transaction_committed,
    TokenSet: lambda state, record: state.tokens.put(record.token),
    TokenRevoked: lambda state, record: state.tokens.remove(record.id),
    RuleGranted: lambda state, record: state.access.grant(record.rule),
    RuleRevoked: lambda state, record: state.access.revoke(record.rule_id),
    RoleSet: lambda state, record: state.access.set_role(record.role),
    RoleRemoved: lambda state, record: state.access.remove_role(record.tenant_id, record.name),
    StoredEvent: _message,
    Published: _published,
    Extended: _extended,
    OwnerChanged: _owner_changed,
}
