"""Commands on caches: decide, record, apply, answer, and tell watches.

Invariant: every answer about a durable cache, also a refusal or a miss, waits until all that was
decided before it is durable; an ephemeral cache answers at once, unless another broker may serve.
The records of one command on durable caches are one frame. A TTL counts from the moment its put is
answered. Must not know the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from penstock.api.caches import WatchSink, check_key
from penstock.api.outcomes import Done
from penstock.core.cache import VERSIONS_PER_MS, Cache, CacheEntry
from penstock.core.cache_rules import (
    Decision,
    decide_bounds,
    decide_delete,
    decide_increment,
    decide_invalidate,
    decide_look,
    decide_put,
    decide_replace,
    decide_transact,
    find_cache,
)
from penstock.core.scope_counts import ScopeCounts
from penstock.core.state import BrokerState
from penstock.engine.cache_snapshots import CacheSnapshots
from penstock.engine.ledger import Ledger
from penstock.engine.quotas import Quotas
from penstock.engine.watches import CacheWatch, Notice, Watches
from penstock.model.caching import CacheValue, Delete, Increment, Put, Txn, Watch, Written
from penstock.model.errors import InvalidArgument, NotFound, PenstockError, Unavailable
from penstock.model.records import EVICTED, EXPIRED, CacheRemoved, CacheStored, Record
from penstock.model.tenancy import Entry, Path
from penstock.storage.staged_rows import CacheRow

C = TypeVar("C")
T = TypeVar("T")

_EVICTION_BURST = 10_000
"""The number of eviction records, after bounds became tighter, that share a frame. A crash may keep
some frames and not others."""

Countdown = tuple[Cache, CacheStored, CacheEntry]
"""An entry of a durable cache whose TTL starts when the command of the record is answered."""


class Caches:
    """Metrics read `watches.count`, and the counters of each cache in `all()`."""

    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        quotas: Quotas,
        opened: ScopeCounts,
        snapshots: CacheSnapshots,
    ) -> None:
        self.entries = snapshots.open
        self._quotas = quotas
        self._state = state
        self._ledger = ledger
        self._now_ms = ledger.now_ms
        self._is_current = ledger.log.is_current
        self.watches = Watches(state.limits.event_queue_bytes, opened)

    def start(self) -> None:
        """Moves the versions of ephemeral caches on to the clock, and evicts where limits are
        tighter than they were at the last run."""
        version = self._now_ms() * VERSIONS_PER_MS
        for cache in self._state.caches.values():
            if not cache.is_durable:
                cache.version = max(cache.version, version)
        self._keep_bounds(self._state.caches.values())

    def all(self) -> list[Cache]:
        return list(self._state.caches.values())

    @property
    def total_bytes(self) -> int:
        return self._state.cache_memory.bytes

    # -- reading -------------------------------------------------------------------------------

    def get(self, path: Path, key: str, done: Done[CacheValue | None]) -> None:
        registered = self._state.registry.caches.get(path)
        cache = self._state.caches[registered.id] if registered is not None else None
        if cache is not None and not cache.is_durable and self._is_current():
            entry = cache.entries.get(key)
            if entry is not None:
                expires = entry.expires
                left_ms = expires - self._now_ms() if expires else None
                if left_ms is None or left_ms > 0:
                    cache.hits += 1
                    if cache.is_lru:
                        cache.entries.move_to_end(key)
                    done(CacheValue(entry.value, entry.version, left_ms))
                    return
        self.get_many(path, [key], lambda outcome: done(_only(outcome)))

    def get_many(self, path: Path, keys: list[str], done: Done[list[CacheValue | None]]) -> None:
        cache = None
        try:
            cache = find_cache(self._state, path)
            found = self._look(cache, keys)
        except PenstockError as error:
            self._answer(done, error, is_durable=cache is None or cache.is_durable)
            return
        if not cache.is_durable:
            self._ledger.answer_unlogged(done, self._values(found))
            return

        def released(outcome: list[CacheEntry | None] | PenstockError) -> None:
            # Entries that expired while the answer was held are not returned either.
            done(outcome if isinstance(outcome, PenstockError) else self._values(outcome))

        self._ledger.answer(released, found)

    def size(self, path: Path, done: Done[tuple[int, int]]) -> None:
        cache = None
        outcome: tuple[int, int] | PenstockError
        try:
            cache = find_cache(self._state, path)
            outcome = (len(cache.entries), cache.bytes)
        except PenstockError as error:
            outcome = error
        self._answer(done, outcome, is_durable=cache is None or cache.is_durable)

    def _look(self, cache: Cache, keys: list[str]) -> list[CacheEntry | None]:
        now_ms = self._now_ms()
        found: list[CacheEntry | None] = []
        over: list[str] = []
        for key in keys:
            entry = cache.entries.get(key)
            if entry is None:
                check_key(key)
            elif cache.is_over(key, entry, now_ms):
                over.append(key)
                entry = None
            elif cache.is_lru:
                cache.entries.move_to_end(key)
            found.append(entry)
        if over:
            self._expire(cache, over, now_ms)
        misses = found.count(None)
        cache.misses += misses
        cache.hits += len(found) - misses
        return found

    def _expire(self, cache: Cache, keys: list[str], now_ms: int) -> None:
        try:
            self._record(decide_look(self._state, cache, keys, now_ms))
        except Unavailable:
            # Nobody sees it, recorded or not; the next read tries again.
            return

    def _values(self, found: list[CacheEntry | None]) -> list[CacheValue | None]:
        now_ms = self._now_ms()
        return [
            None
            if entry is None or 0 < entry.ends() <= now_ms
            else CacheValue(
                entry.value, entry.version, entry.ends() - now_ms if entry.expires else None
            )
            for entry in found
        ]

    # -- changing ------------------------------------------------------------------------------

    def put(self, command: Put, done: Done[Written]) -> None:
        registered = self._state.registry.caches.get(command.path)
        cache = self._state.caches[registered.id] if registered is not None else None
        is_plain = not self.watches.count and not self._quotas.is_active and self._is_current()
        if cache is not None and not cache.is_durable and is_plain:
            record = decide_replace(self._state, cache, command, self._now_ms())
            if record is not None:
                cache.store(record)
                done(Written(record.version))
                return
        self._change(decide_put, command, [command.path], done)

    def delete(self, command: Delete, done: Done[Written]) -> None:
        self._change(decide_delete, command, [command.path], done)

    def increment(self, command: Increment, done: Done[Written]) -> None:
        self._change(decide_increment, command, [command.path], done)

    def transact(self, command: Txn, done: Done[list[Written]]) -> None:
        paths = {each.path for each in (*command.checks, *command.ops)}
        self._change(decide_transact, command, paths, done)

    def check_targets(self, targets: list[tuple[Path, str]]) -> None:
        """Raises for targets of `invalidate` that cannot exist."""
        for path, key in targets:
            find_cache(self._state, path)
            check_key(key)

    def invalidate(self, targets: list[tuple[Path, str]]) -> bool:
        """Removes these keys. Returns True if the caller must wait for the ledger."""
        is_durable = self._is_durable({path for path, _ in targets})
        if is_durable and self._ledger.failure is not None:
            raise self._ledger.failure
        self._record(decide_invalidate(self._state, targets, self._now_ms()))
        return is_durable

    def write(self, path: Path, rows: Sequence[CacheRow], also: Record) -> bool:
        """Puts and deletes these rows in order. Their records of durable caches share a frame with
        `also`, which is always recorded. Returns False without room; raises if a transaction of the
        rows would be refused."""
        ops: list[Put | Delete | Increment] = [_op(path, row) for row in rows]
        decision = decide_transact(self._state, Txn([], ops), self._now_ms())
        try:
            countdowns = self._record(decision, [also])
        except Unavailable:
            return False
        if countdowns:
            self._ledger.answer(partial(self.begin, countdowns, _nobody), None)
        return True

    def _change(
        self,
        decide: Callable[[BrokerState, C, int], Decision[T]],
        command: C,
        paths: Iterable[Path],
        done: Done[T],
    ) -> None:
        is_durable = self._is_durable(paths)
        outcome: T | PenstockError
        countdowns: list[Countdown] = []
        try:
            if is_durable and self._ledger.failure is not None:
                raise self._ledger.failure
            decision = decide(self._state, command, self._now_ms())
            if self._quotas.is_active:
                grown, kept = decision.growth(), decision.growth(durable_only=True)
                self._quotas.check_room("cache_memory", grown)
                self._quotas.check_room("disk_bytes", kept)
                countdowns = self._record(decision)
                self._quotas.take_room("cache_memory", grown)
                self._quotas.take_room("disk_bytes", kept)
            else:
                countdowns = self._record(decision)
            outcome = decision.outcome
        except PenstockError as error:
            outcome = error
        if not is_durable:
            self._ledger.answer_unlogged(done, outcome)
        elif countdowns:
            self._ledger.answer(partial(self.begin, countdowns, done), outcome)
        else:
            self._ledger.answer(done, outcome)

    def _is_durable(self, paths: Iterable[Path]) -> bool:
        """Counts an unknown cache as durable: that it is unknown may not be durable yet."""
        registered = self._state.registry.caches
        for path in paths:
            entry = registered.get(path)
            if entry is None or self._state.caches[entry.id].is_durable:
                return True
        return False

    def _answer(self, done: Done[T], outcome: T | PenstockError, *, is_durable: bool) -> None:
        if is_durable:
            self._ledger.answer(done, outcome)
        else:
            self._ledger.answer_unlogged(done, outcome)

    def _record(self, decision: Decision[Any], also: Sequence[Record] = ()) -> list[Countdown]:
        if decision.is_durable or also:
            self._write(decision.records, also)
        return self.finish(decision, is_logged=decision.is_durable or bool(also))

    def finish(self, decision: Decision[Any], *, is_logged: bool) -> list[Countdown]:
        """Does the rest, once the records of durable caches are appended and applied. Returns the
        countdowns to `begin` with the answer."""
        records = decision.records
        countdowns: list[Countdown] = []
        # It has happened by now, wholly or (a broken invariant) in part.
        try:
            if is_logged:
                countdowns = self._hold(decision.anew)
            self._apply(records)
            if self.watches.count:
                self._tell(records)
        except BaseException as error:
            raise self._ledger.stop_serving(error, is_appended=True) from error
        return countdowns

    def durable_among(self, records: Sequence[CacheStored | CacheRemoved]) -> list[Record]:
        """Returns the records that belong in the log."""
        caches = self._state.caches
        return [record for record in records if caches[record.cache_id].is_durable]

    def _write(
        self, records: Sequence[CacheStored | CacheRemoved], also: Sequence[Record] = ()
    ) -> None:
        """Records and applies changes of durable caches, or raises Unavailable."""
        durable = self.durable_among(records)
        # A value may be refused without room; removals free memory and may use the reserve.
        reserve = not also and not any(isinstance(record, CacheStored) for record in durable)
        durable += also
        if durable:
            if not self._ledger.record_together(durable, reserve=reserve):
                raise self._ledger.no_room("caches are written when there is room")
            self._ledger.wake()

    def _apply(self, records: Sequence[CacheStored | CacheRemoved]) -> None:
        """Applies changes of ephemeral caches, and counts."""
        caches = self._state.caches
        for record in records:
            cache = caches[record.cache_id]
            if isinstance(record, CacheStored):
                if not cache.is_durable:
                    cache.store(record)
                continue
            if record.how == EVICTED:
                cache.evictions += 1
            elif record.how == EXPIRED:
                cache.expirations += 1
            if not cache.is_durable:
                cache.remove(record)

    # -- time to live --------------------------------------------------------------------------

    def _hold(self, anew: list[CacheStored]) -> list[Countdown]:
        """Keeps entries that were given a TTL from expiring before that was answered."""
        countdowns: list[Countdown] = []
        for record in anew:
            cache = self._state.caches[record.cache_id]
            if cache.is_durable:
                cache.unanswered.pop(record.key, None)
                entry = cache.entries.get(record.key)
                # The same transaction may have removed it, or written over it.
                if entry is not None and entry.expires == record.expires > record.ts:
                    cache.unanswered[record.key] = record.version
                    countdowns.append((cache, record, entry))
        return countdowns

    def begin(self, countdowns: list[Countdown], done: Done[T], answer: T | PenstockError) -> None:
        """Starts the TTLs of a command whose answer leaves now, and gives the answer."""
        if not isinstance(answer, PenstockError):
            now_ms = self._now_ms()
            for cache, record, entry in countdowns:
                entry.late_ms = now_ms - record.ts
                if cache.unanswered.get(record.key) == record.version:
                    del cache.unanswered[record.key]
                    current = cache.entries.get(record.key)
                    if current is not None and current.expires == record.expires:
                        # An increment has replaced the entry and kept its expiry.
                        current.late_ms = now_ms - record.ts
        done(answer)

    # -- watching ------------------------------------------------------------------------------

    def watch(self, command: Watch, sink: WatchSink, done: Done[CacheWatch]) -> None:
        try:
            if (command.key is None) == (command.prefix is None):
                raise InvalidArgument("a watch needs either a key or a prefix")
            if command.key is not None or command.prefix:
                check_key(command.key or command.prefix or "")
            cache = find_cache(self._state, command.path)
            if cache.is_durable and self._ledger.failure is not None:
                raise self._ledger.failure
            if self._quotas.is_active:
                self._quotas.check_subscription(command.path[:2])
        except PenstockError as error:
            self._ledger.answer(done, error)
            return
        watch = self.watches.open(cache, command, sink)

        def opened(outcome: CacheWatch | PenstockError) -> None:
            try:
                done(outcome)
            except Exception:
                watch.close()
                raise
            if isinstance(outcome, PenstockError):
                watch.close()
            watch.wake()

        self._answer(opened, watch, is_durable=cache.is_durable)

    def end_watches(self, error: PenstockError) -> None:
        self.watches.end_all(error)

    def log_failed(self, failure: Unavailable) -> None:
        """Ends the watches of durable caches: nothing more can be told."""
        self.watches.end_all(failure, durable_only=True)

    def _tell(self, records: Sequence[CacheStored | CacheRemoved]) -> None:
        notices = self.watches.notices(records)
        held = [notice for notice in notices if notice[0].is_durable]
        if held:
            self._ledger.answer(self._tell_held, held)
            notices = [notice for notice in notices if not notice[0].is_durable]
        self.watches.tell(notices)

    def _tell_held(self, outcome: list[Notice] | PenstockError) -> None:
        if not isinstance(outcome, PenstockError):
            self.watches.tell(outcome)

    # -- the registry --------------------------------------------------------------------------

    def registry_changed(self, entry: Entry, deleted: bool) -> None:
        if entry.kind != "cache":
            return
        if deleted:
            name = "/".join(entry.path)
            gone = NotFound(f"cache {name!r} was deleted")
            self._ledger.answer(lambda outcome: self._end_of(entry.id, outcome), gone)
        elif entry.id in self._state.caches:
            self._keep_bounds([self._state.caches[entry.id]])

    def _end_of(self, cache_id: int, error: PenstockError) -> None:
        self.watches.end_of(cache_id, error)

    def _keep_bounds(self, caches: Iterable[Cache]) -> None:
        records = decide_bounds(self._state, caches, self._now_ms()).records
        for first in range(0, len(records), _EVICTION_BURST):
            burst = records[first : first + _EVICTION_BURST]
            try:
                self._write(burst)
            except Unavailable:
                # There is no room to record it; the next put tries again.
                return
            try:
                self._apply(burst)
                if self.watches.count:
                    self._tell(burst)
            except BaseException as error:
                raise self._ledger.stop_serving(error, is_appended=True) from error


def _op(path: Path, row: CacheRow) -> Put | Delete:
    if row.value is None:
        return Delete(path, row.key)
    return Put(path, row.key, row.value, row.ttl_ms)


def _nobody(answer: PenstockError | None) -> None:
    """Ignores the answer."""


def _only(outcome: list[CacheValue | None] | PenstockError) -> CacheValue | PenstockError | None:
    return outcome if isinstance(outcome, PenstockError) else outcome[0]
