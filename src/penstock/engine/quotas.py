"""Quotas: refuses what would take a tenant or a namespace beyond its limits.

Invariant: a check costs the same however much a tenant has. Sums over topics and caches are taken
at most once in RECOUNT_MS; in between, what was accepted since is added, which is never less than
the truth. A tenant's quota and that of a namespace in it both hold. All of this is volatile: rates
begin anew at a start, and the rest is counted from the state. The limits themselves are entries of
the registry.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from penstock.api.outcomes import Done
from penstock.api.quotas import QuotaReport
from penstock.core.cache import Cache
from penstock.core.state import BrokerState
from penstock.core.tenancy import find, kind_to_change
from penstock.core.topics import Topic
from penstock.engine.ledger import Ledger
from penstock.model.errors import ResourceExhausted
from penstock.model.quotas import NO_QUOTA, Quota
from penstock.model.scopes import Scope, is_stream_log
from penstock.model.tenancy import Entry

RECOUNT_MS = 100
"""How often use is counted anew while a limit is reached: often enough to let tenants go on soon,
and seldom enough that one at its limit costs the others nothing."""

BURST_S = 1
"""A rate may be used up for this long at once."""


class ScopeCounts:
    """Counts something by tenant and namespace. A tenant's total is under an empty namespace."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[Scope] = Counter()

    def __getitem__(self, scope: Scope) -> int:
        return self._counts[scope]

    def add(self, scope: Scope, number: int) -> None:
        for each in (scope, (scope[0], "")):
            self._counts[each] += number
            if not self._counts[each]:
                del self._counts[each]


class RateBucket:
    """A token bucket that may go into debt: a batch larger than the bucket is accepted when there
    is anything in it, and the next one waits until the debt is paid."""

    __slots__ = ("_rate", "_since_ms", "_tokens")

    def __init__(self, rate: int, now_ms: int) -> None:
        self._rate = rate
        self._tokens = float(rate * BURST_S)
        self._since_ms = now_ms

    def wait_ms(self, now_ms: int) -> int:
        """Returns 0 if something may be taken now, else how long until then."""
        passed_ms = max(0, now_ms - self._since_ms)
        self._since_ms = now_ms
        self._tokens = min(self._rate * BURST_S, self._tokens + self._rate * passed_ms / 1000)
        if self._tokens > 0:
            return 0
        return max(1, math.ceil((1 - self._tokens) * 1000 / self._rate))

    def take(self, number: int) -> None:
        self._tokens -= number


class UseMargin:
    """How much more may be used of something that is expensive to count."""

    __slots__ = ("_count", "_counted_ms", "_left", "_limit")

    def __init__(self, limit: int, count: Callable[[], int]) -> None:
        self._limit = limit
        self._count = count
        self._left = 0
        self._counted_ms = -RECOUNT_MS

    def has_room(self, number: int, now_ms: int) -> bool:
        if self._left < number and now_ms - self._counted_ms >= RECOUNT_MS:
            self._counted_ms = now_ms
            self._left = self._limit - self._count()
        return self._left >= number

    def take(self, number: int) -> None:
        self._left -= number


class LimitedScope:
    """A tenant or a namespace that has a quota, with what is kept to enforce it."""

    def __init__(self, scope: Scope, quota: Quota, quotas: Quotas, now_ms: int) -> None:
        self.scope = scope
        self.quota = quota
        self.refused: Counter[str] = Counter()
        self._rates = {
            name: RateBucket(rate, now_ms)
            for name, rate in (
                ("publish_rate_limit", quota.publish_rate_limit),
                ("publish_bytes_limit", quota.publish_bytes_limit),
            )
            if rate
        }
        self._margins = {
            name: UseMargin(limit, lambda count=count: count(scope))  # type: ignore[misc]
            for name, count in quotas.sums.items()
            if (limit := getattr(quota, name))
        }

    def check_rates(self, now_ms: int) -> None:
        for name, bucket in self._rates.items():
            wait_ms = bucket.wait_ms(now_ms)
            if wait_ms:
                self.refuse(name, f"the rate of {getattr(self.quota, name)} per second", wait_ms)

    def check_room(self, name: str, number: int, now_ms: int) -> None:
        margin = self._margins.get(name)
        if margin is not None and not margin.has_room(number, now_ms):
            self.refuse(name, f"the limit of {getattr(self.quota, name)}")

    def check_count(self, name: str, used: int) -> None:
        limit = getattr(self.quota, name)
        if limit and used >= limit:
            self.refuse(name, f"the limit of {limit}")

    def take(self, msgs: int, nbytes: int, *, is_kept: bool) -> None:
        for name, bucket in self._rates.items():
            bucket.take(nbytes if name == "publish_bytes_limit" else msgs)
        if is_kept:
            for name, margin in self._margins.items():
                if name == "backlog_msgs":
                    margin.take(msgs)
                elif name != "cache_memory":
                    margin.take(nbytes)

    def take_cache(self, nbytes: int) -> None:
        margin = self._margins.get("cache_memory")
        if margin is not None:
            margin.take(nbytes)

    def refuse(self, name: str, limit: str, retry_after_ms: int = 1000) -> None:
        self.refused[name] += 1
        tenant, namespace = self.scope
        whose = (
            f"namespace {namespace!r} of tenant {tenant!r}" if namespace else f"tenant {tenant!r}"
        )
        raise ResourceExhausted(
            f"{whose} has reached {limit} of its quota {name}",
            limit=name,
            reason="quota",
            retry_after_ms=retry_after_ms,
        )


class Quotas:
    """`is_active` is False while nobody has a quota; callers then check nothing. `open` counts
    subscriptions, consumers and watches; those who open and close them keep it."""

    def __init__(self, state: BrokerState, ledger: Ledger, opened: ScopeCounts) -> None:
        self._state = state
        self._ledger = ledger
        self._now_ms = ledger.now_ms
        self._opened = opened
        self._limited: dict[Scope, LimitedScope] = {}
        self.is_active = False
        self.sums: dict[str, Callable[[Scope], int]] = {
            "cache_memory": self._cache_bytes,
            "backlog_msgs": self._backlog_msgs,
            "backlog_bytes": self._backlog_bytes,
            "disk_bytes": self._disk_bytes,
        }

    def start(self) -> None:
        registry = self._state.registry
        for entry in (*registry.tenants.values(), *registry.namespaces.values()):
            self.registry_changed(entry, deleted=False)

    def registry_changed(self, entry: Entry, deleted: bool) -> None:
        if entry.kind not in ("tenant", "namespace"):
            return
        scope = (entry.tenant_id, entry.namespace)
        quota = NO_QUOTA if deleted else entry.quota or NO_QUOTA
        known = self._limited.get(scope)
        if quota == NO_QUOTA:
            self._limited.pop(scope, None)
        elif known is None or known.quota != quota:
            limited = LimitedScope(scope, quota, self, self._now_ms())
            if known is not None:
                limited.refused = known.refused
            self._limited[scope] = limited
        self.is_active = bool(self._limited)

    # -- checks --------------------------------------------------------------------------------

    def charge(self, scope: Scope, msgs: int, nbytes: int, *, is_kept: bool) -> None:
        """Counts a produce or publish, or raises. `is_kept`: it takes room in the backlog and on
        disk."""
        self.check(scope, msgs, nbytes, is_kept=is_kept)
        self.take(scope, msgs, nbytes, is_kept=is_kept)

    def check(self, scope: Scope, msgs: int, nbytes: int, *, is_kept: bool) -> None:
        """Raises if a produce or publish would be refused."""
        now_ms = self._now_ms()
        for each in self._of(scope):
            each.check_rates(now_ms)
            if is_kept:
                each.check_room("backlog_msgs", msgs, now_ms)
                each.check_room("backlog_bytes", nbytes, now_ms)
                each.check_room("disk_bytes", nbytes, now_ms)

    def take(self, scope: Scope, msgs: int, nbytes: int, *, is_kept: bool) -> None:
        """Counts what `check` has let through."""
        for each in self._of(scope):
            each.take(msgs, nbytes, is_kept=is_kept)

    def charge_cache(self, scope: Scope, grown: int) -> None:
        """Counts the growth of a cache, or raises."""
        self.check_cache(scope, grown)
        self.take_cache(scope, grown)

    def check_cache(self, scope: Scope, grown: int) -> None:
        """Raises if a cache may not grow."""
        now_ms = self._now_ms()
        for each in self._of(scope):
            each.check_room("cache_memory", grown, now_ms)

    def take_cache(self, scope: Scope, grown: int) -> None:
        """Counts what `check_cache` has let through."""
        for each in self._of(scope):
            each.take_cache(grown)

    def check_subscription(self, scope: Scope) -> None:
        """Raises if no other subscription, consumer or watch may be opened."""
        for each in self._of(scope):
            each.check_count("subscribe_connections", self._opened[each.scope])

    def check_topic(self, scope: Scope) -> None:
        """Raises if no other topic may be created."""
        for each in self._of(scope):
            each.check_count("topics", self._topic_count(each.scope))

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
            limited = self._limited.get(scope)
            return QuotaReport(
                scope,
                entry.quota or NO_QUOTA,
                self._used(scope),
                dict(limited.refused) if limited is not None else {},
            )

        self._ledger.answer(done, self._ledger.attempt(look))

    def metrics(self) -> list[QuotaReport]:
        """Returns a report for everyone who has a quota."""
        return [
            QuotaReport(scope, limited.quota, self._used(scope), dict(limited.refused))
            for scope, limited in self._limited.items()
        ]

    def _used(self, scope: Scope) -> dict[str, int]:
        counts = {
            "subscribe_connections": self._opened[scope],
            "topics": self._topic_count(scope),
        }
        return counts | {name: count(scope) for name, count in self.sums.items()}

    def _of(self, scope: Scope) -> list[LimitedScope]:
        found = (self._limited.get((scope[0], "")), self._limited.get(scope))
        return [limited for limited in found if limited is not None]

    def _topics(self, scope: Scope) -> Iterable[Topic]:
        return (topic for topic in self._state.topics.values() if _is_in(topic.scope, scope))

    def _topic_count(self, scope: Scope) -> int:
        return sum(1 for topic in self._topics(scope) if not is_stream_log(topic.name))

    def _caches(self, scope: Scope) -> Iterable[Cache]:
        return (cache for cache in self._state.caches.values() if _is_in(cache.path[:2], scope))

    def _cache_bytes(self, scope: Scope) -> int:
        return sum(cache.bytes for cache in self._caches(scope))

    def _backlog_msgs(self, scope: Scope) -> int:
        return sum(p.backlog.buffered_msgs() for t in self._topics(scope) for p in t.partitions)

    def _backlog_bytes(self, scope: Scope) -> int:
        return sum(p.backlog.buffered_bytes() for t in self._topics(scope) for p in t.partitions)

    def _disk_bytes(self, scope: Scope) -> int:
        return sum(p.backlog.retained_bytes() for t in self._topics(scope) for p in t.partitions)


def _is_in(scope: Scope, of: Scope) -> bool:
    return scope == of or (not of[1] and scope[0] == of[0])
