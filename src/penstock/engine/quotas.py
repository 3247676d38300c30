"""Quotas: refuses what would take a tenant or a namespace beyond its limits.

Invariant: whoever is checked and accepted counts before the next one is checked. A command that is
refused, by a quota or for another reason, uses up nothing: it is checked first, and taken when it
has happened, in one turn of the loop. What takes longer holds a reservation meanwhile. A tenant's
quota and that of a namespace in it both hold. All of this is volatile: rates begin anew at a start,
and the rest is counted from the state. The limits themselves are entries of the registry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from penstock.api.outcomes import Done
from penstock.api.quotas import QuotaReport
from penstock.core.scope_counts import ScopeCounts
from penstock.core.state import BrokerState
from penstock.core.tenancy import find, kind_to_change
from penstock.core.topics import Topic
from penstock.engine.ledger import Ledger
from penstock.engine.limited_scope import Count, Demand, LimitedScope
from penstock.model.quotas import NO_QUOTA, Quota
from penstock.model.scopes import Scope
from penstock.model.tenancy import Entry


class Reservation:
    """The place of something that was checked and opens later. It counts until it ends."""

    __slots__ = ("_counts", "_scope")

    def __init__(self, counts: ScopeCounts, scope: Scope) -> None:
        self._counts: ScopeCounts | None = counts
        self._scope = scope
        counts.add(scope, 1)

    def end(self) -> None:
        """Gives the place back. What has opened counts itself."""
        counts, self._counts = self._counts, None
        if counts is not None:
            counts.add(self._scope, -1)


class Quotas:
    """`is_active` is False while nobody has a quota; callers then check nothing. `opened` counts
    subscriptions, consumers and watches; those who open and close them keep it."""

    def __init__(self, state: BrokerState, ledger: Ledger, opened: ScopeCounts) -> None:
        self._state = state
        self._ledger = ledger
        self._now_ms = ledger.now_ms
        self._opened = opened
        self._connections = ScopeCounts()
        self._limited: dict[Scope, LimitedScope] = {}
        # Deleted topics whose idempotency keys are still remembered, oldest first.
        self._removed: dict[int, Scope] = {}
        self.is_active = False
        self._parts: dict[str, list[Count]] = {
            "cache_memory": [self._cache_bytes],
            "backlog_msgs": [self._backlog_msgs],
            "backlog_bytes": [self._backlog_bytes],
            "disk_bytes": [self._message_bytes, self._durable_cache_bytes],
            "idempotency_keys": [self._keys],
        }
        self._sums = {name: self._sum(parts) for name, parts in self._parts.items()}

    def start(self) -> None:
        registry = self._state.registry
        for entry in (*registry.tenants.values(), *registry.namespaces.values()):
            self.registry_changed(entry, deleted=False)

    def count_also(self, name: str, count: Count) -> None:
        """Adds what somebody else counts to the use of a quota. Called before `start`."""
        self._parts[name].append(count)

    def registry_changed(self, entry: Entry, deleted: bool) -> None:
        if entry.kind not in ("tenant", "namespace"):
            return
        scope = (entry.tenant_id, entry.namespace)
        if deleted:
            self._forget_keys(scope)
        quota = NO_QUOTA if deleted else entry.quota or NO_QUOTA
        known = self._limited.get(scope)
        if quota == NO_QUOTA:
            self._limited.pop(scope, None)
        elif known is None or known.quota != quota:
            limited = LimitedScope(scope, quota, self._sums, self._now_ms())
            if known is not None:
                limited.inherit(known)
            self._limited[scope] = limited
        self.is_active = bool(self._limited)

    def topic_removed(self, topic: Topic) -> None:
        """Goes on counting the keys of a deleted topic, which are remembered to their time. If they
        did not count, whoever creates and deletes topics could use up the keys of all."""
        produced = self._state.produced
        self._removed[topic.id] = topic.scope
        while self._removed and not produced.of_topic(oldest := next(iter(self._removed))):
            del self._removed[oldest]

    def _forget_keys(self, scope: Scope) -> None:
        """Lets the keys of a deleted namespace count for its tenant only: a later one of the same
        name begins with none."""
        for topic_id, owner in list(self._removed.items()):
            if _is_in(owner, scope):
                self._removed[topic_id] = (scope[0] if scope[1] else "", "")

    # -- checks --------------------------------------------------------------------------------

    def check(self, scope: Scope, msgs: int, nbytes: int, *, is_kept: bool, keys: int = 0) -> None:
        """Raises if a produce or publish exceeds a quota. `is_kept`: it takes room in the backlog
        and on disk. `keys`: so many of its messages have an idempotency key."""
        limited = self._of(scope)
        if limited:
            demand = _demand(msgs, nbytes, keys, is_kept=is_kept)
            now_ms = self._now_ms()
            for each in limited:
                each.check(demand, now_ms)

    def take(self, scope: Scope, msgs: int, nbytes: int, *, is_kept: bool, keys: int = 0) -> None:
        """Counts a produce or publish that was accepted."""
        limited = self._of(scope)
        if limited:
            demand = _demand(msgs, nbytes, keys, is_kept=is_kept)
            now_ms = self._now_ms()
            for each in limited:
                each.take(demand, now_ms)

    def check_room(self, name: str, demanded: Mapping[Scope, int]) -> None:
        """Raises if one of these namespaces, or of their tenants, has less room than demanded."""
        now_ms = self._now_ms()
        for each, number in self._demands(demanded).items():
            each.check_room(name, number, now_ms)

    def take_room(self, name: str, demanded: Mapping[Scope, int]) -> None:
        for each, number in self._demands(demanded).items():
            each.take_room(name, number)

    def check_subscription(self, scope: Scope) -> None:
        """Raises if no other subscription, consumer or watch may be opened."""
        for each in self._of(scope):
            each.check_count("subscribe_connections", self._opened[each.scope])

    def reserve(self, scope: Scope) -> Reservation:
        """Reserves the place of a subscription, consumer or watch that opens later; or raises."""
        self.check_subscription(scope)
        return Reservation(self._opened, scope)

    def check_topic(self, scope: Scope) -> None:
        """Raises if no other topic may be created."""
        for each in self._of(scope):
            each.check_count("topics", self._state.topics.plain_count(each.scope))

    def check_group(self, scope: Scope) -> None:
        """Raises if no other group or named subscription may be created."""
        for each in self._of(scope):
            each.check_count("groups", self._state.groups.counts[each.scope])

    def check_entry(self, entry: Entry) -> None:
        """Raises if this stream or cache may not be created because there are too many."""
        if entry.kind in ("stream", "cache"):
            counts = self._state.registry.counts[entry.kind]
            for each in self._of((entry.tenant_id, entry.namespace)):
                each.check_count(f"{entry.kind}s", counts[each.scope])

    def connect(self, scope: Scope) -> None:
        for each in self._of(scope):
            each.check_count("connections", self._connections[each.scope])
        self._connections.add(scope, 1)

    def disconnect(self, scope: Scope) -> None:
        self._connections.add(scope, -1)

    def retention_ms(self, topic: Topic) -> int:
        """Returns how long finished messages of the topic are kept; 0 is for ever."""
        caps = [each.quota.stream_retention for each in self._of(topic.scope)]
        return min((ms for ms in (topic.retention_ms, *caps) if ms), default=0)

    # -- use -----------------------------------------------------------------------------------

    def report(self, scope: Scope, done: Done[QuotaReport]) -> None:
        def look() -> QuotaReport:
            tenant, namespace = scope
            path = (tenant, namespace, "")
            entry = find(self._state.registry, kind_to_change(path, None, None), path)
            return self._report(scope, entry.quota or NO_QUOTA)

        self._ledger.decide(look, done)

    def metrics(self) -> list[QuotaReport]:
        """Returns a report for everyone who has a quota."""
        return [self._report(scope, limited.quota) for scope, limited in self._limited.items()]

    def _report(self, scope: Scope, quota: Quota) -> QuotaReport:
        limited = self._limited.get(scope)
        rates = limited.accepted(self._now_ms()) if limited is not None else {}
        used = {
            "subscribe_connections": self._opened[scope],
            "connections": self._connections[scope],
            "topics": self._state.topics.plain_count(scope),
            "groups": self._state.groups.counts[scope],
            "streams": self._state.registry.counts["stream"][scope],
            "caches": self._state.registry.counts["cache"][scope],
            **{name: count(scope) for name, count in self._sums.items()},
        }
        refused = dict(limited.refused) if limited is not None else {}
        return QuotaReport(scope, quota, rates | used, refused)

    def _of(self, scope: Scope) -> list[LimitedScope]:
        """Returns the tenant's limits and the namespace's, as far as there are any."""
        tenant = self._limited.get((scope[0], ""))
        namespace = self._limited.get(scope) if scope[1] else None
        return [limited for limited in (tenant, namespace) if limited is not None]

    def _demands(self, demanded: Mapping[Scope, int]) -> dict[LimitedScope, int]:
        """Adds up by tenant and namespace. What shrinks makes no room for what grows: it may do so
        later."""
        found: defaultdict[LimitedScope, int] = defaultdict(int)
        for scope, number in demanded.items():
            if number > 0:
                for each in self._of(scope):
                    found[each] += number
        return found

    def _sum(self, parts: list[Count]) -> Count:
        return lambda scope: sum(count(scope) for count in parts)

    def _cache_bytes(self, scope: Scope) -> int:
        return sum(cache.bytes for cache in self._state.caches.within(scope))

    def _durable_cache_bytes(self, scope: Scope) -> int:
        return sum(c.bytes for c in self._state.caches.within(scope) if c.is_durable)

    def _backlog_msgs(self, scope: Scope) -> int:
        topics = self._state.topics.within(scope)
        return sum(p.backlog.buffered_msgs() for topic in topics for p in topic.partitions)

    def _backlog_bytes(self, scope: Scope) -> int:
        topics = self._state.topics.within(scope)
        return sum(p.backlog.buffered_bytes() for topic in topics for p in topic.partitions)

    def _keys(self, scope: Scope) -> int:
        count = self._state.produced.of_topic
        kept = sum(count(topic.id) for topic in self._state.topics.within(scope))
        of_removed = sum(count(each) for each, of in self._removed.items() if _is_in(of, scope))
        return kept + of_removed

    def _message_bytes(self, scope: Scope) -> int:
        topics = self._state.topics.within(scope)
        return sum(p.backlog.retained_bytes() for topic in topics for p in topic.partitions)


class PublishMeter:
    """Checks the publishes of one stream against the quotas, and counts those that were accepted.
    `is_kept`: the stream is durable."""

    __slots__ = ("_is_kept", "_quotas", "_scope")

    def __init__(self, quotas: Quotas, scope: Scope, *, is_kept: bool) -> None:
        self._quotas = quotas
        self._scope = scope
        self._is_kept = is_kept

    def check(self, msgs: int, nbytes: int) -> None:
        if self._quotas.is_active:
            self._quotas.check(self._scope, msgs, nbytes, is_kept=self._is_kept)

    def take(self, msgs: int, nbytes: int) -> None:
        if self._quotas.is_active:
            self._quotas.take(self._scope, msgs, nbytes, is_kept=self._is_kept)


def _is_in(scope: Scope, of: Scope) -> bool:
    return scope == of or (not of[1] and scope[0] == of[0])


def _demand(msgs: int, nbytes: int, keys: int, *, is_kept: bool) -> Demand:
    room: dict[str, int] = {}
    if is_kept:
        room = {"backlog_msgs": msgs, "backlog_bytes": nbytes, "disk_bytes": nbytes}
    if keys:
        room["idempotency_keys"] = keys
    return Demand(msgs, nbytes, room)
