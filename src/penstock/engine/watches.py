"""Watches of caches: which of them hear of a change, and the events that wait to be taken.

Invariant: a watch has every change of its keys in order, one event each; where its buffer was full,
one gap stands in their place. Its sink is woken once each time that something waits where nothing
did; all events of a change are in the buffers before anybody is woken. A sink that raises loses its
own watch and no other. Events of durable caches leave only when their records are on disk.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from penstock.api.caches import WatchSink
from penstock.core.cache import Cache
from penstock.core.scope_counts import ScopeCounts
from penstock.engine.ledger import Ledger
from penstock.model.caching import Watch, WatchEvent, WatchKind
from penstock.model.errors import PenstockError
from penstock.model.limits import MAX_WATCH_EVENTS
from penstock.model.records import DELETED, EVICTED, EXPIRED, CacheRemoved, CacheStored

_log = logging.getLogger("penstock.engine")

_REMOVALS: dict[int, WatchKind] = {DELETED: "delete", EXPIRED: "expire", EVICTED: "evict"}
_ALWAYS = frozenset({"put", "delete"})

Notice = tuple["CacheWatch", WatchEvent]


class CacheWatch:
    """See WatchHandle. `version` is the cache's when the watch began."""

    def __init__(
        self,
        number: int,
        cache: Cache,
        command: Watch,
        sink: WatchSink,
        max_bytes: int,
        leave: Callable[[CacheWatch], None],
    ) -> None:
        self.id = f"w{number}"
        self.version = cache.version
        self.cache_id = cache.id
        self.scope = cache.path[:2]
        self.is_durable = cache.is_durable
        self.key = command.key
        self.prefix = command.prefix or ""
        self.kinds = _ALWAYS | command.include
        self.sink = sink
        self.is_open = True
        self._leave = leave
        self._max_bytes = max_bytes
        self._waiting: deque[WatchEvent] = deque()
        self._bytes = 0
        self._is_woken = False
        if command.since_version is not None and command.since_version != cache.version:
            # A version of the future says nothing: everything may be missing.
            since = command.since_version if command.since_version < cache.version else 0
            self._waiting.append(WatchEvent("gap", cache.version, from_version=since))

    def take(self, max_events: int) -> list[WatchEvent]:
        waiting = self._waiting
        taken = [waiting.popleft() for _ in range(min(max_events, len(waiting)))]
        self._bytes -= sum(len(event.value) for event in taken if event.value)
        if not waiting:
            self._is_woken = False
        return taken

    def close(self) -> None:
        self._waiting.clear()
        if self.is_open:
            self.is_open = False
            self._leave(self)

    def end(self, error: PenstockError) -> None:
        """Ends the watch. Events that wait can still be taken."""
        if self.is_open:
            self.is_open = False
            self._leave(self)
            try:
                self.sink.ended(error)
            except Exception:  # noqa: BLE001 - one departed client must not stop the others
                _log.exception("the end of watch %s could not be told", self.id)

    def add(self, event: WatchEvent) -> None:
        waiting = self._waiting
        size = len(event.value) if event.value else 0
        if waiting and (len(waiting) >= MAX_WATCH_EVENTS or self._bytes + size > self._max_bytes):
            if waiting[-1].event == "gap":
                since = waiting.pop().from_version
            else:
                since = event.version - 1
            waiting.append(WatchEvent("gap", event.version, from_version=since))
        else:
            waiting.append(event)
            self._bytes += size

    def wake(self) -> None:
        if self._is_woken or not self._waiting:
            return
        self._is_woken = True
        try:
            self.sink.wake()
        except Exception:  # noqa: BLE001 - one departed client must not stop the others
            _log.exception("watch %s could not be woken and is closed", self.id)
            self.close()


class _OfCache:
    """The watches of one cache, in the order of opening, by key and by prefix."""

    __slots__ = ("by_key", "by_prefix")

    def __init__(self) -> None:
        self.by_key: dict[str, dict[CacheWatch, None]] = {}
        self.by_prefix: dict[CacheWatch, None] = {}

    def all(self) -> list[CacheWatch]:
        of_keys = [watch for watches in self.by_key.values() for watch in watches]
        return [*of_keys, *self.by_prefix]


class Watches:
    """`count` is the number of open watches."""

    def __init__(self, ledger: Ledger, max_bytes: int, opened: ScopeCounts) -> None:
        self.count = 0
        self._ledger = ledger
        self._opened = opened
        self._max_bytes = max_bytes
        self._of: dict[int, _OfCache] = {}
        self._next_number = 1

    def open(self, cache: Cache, command: Watch, sink: WatchSink) -> CacheWatch:
        number, self._next_number = self._next_number, self._next_number + 1
        watch = CacheWatch(number, cache, command, sink, self._max_bytes, self._left)
        of_cache = self._of.setdefault(cache.id, _OfCache())
        if watch.key is not None:
            of_cache.by_key.setdefault(watch.key, {})[watch] = None
        else:
            of_cache.by_prefix[watch] = None
        self.count += 1
        self._opened.add(cache.path[:2], 1)
        return watch

    def changed(self, records: Iterable[CacheStored | CacheRemoved]) -> None:
        """Gives the watches their events: those of durable caches once the records are on disk."""
        notices = self._notices(records)
        held = [notice for notice in notices if notice[0].is_durable]
        if held:
            self._ledger.answer(self._notify_held, held)
            notices = [notice for notice in notices if not notice[0].is_durable]
        self._notify(notices)

    def _notices(self, records: Iterable[CacheStored | CacheRemoved]) -> list[Notice]:
        """Returns the watches that the records affect, each with its event."""
        found: list[Notice] = []
        for record in records:
            of_cache = self._of.get(record.cache_id)
            if of_cache is not None:
                event = _event(record)
                affected = [*of_cache.by_key.get(record.key, ())]
                affected += [w for w in of_cache.by_prefix if record.key.startswith(w.prefix)]
                found += [(watch, event) for watch in affected if event.event in watch.kinds]
        return found

    def _notify_held(self, outcome: list[Notice] | PenstockError) -> None:
        if not isinstance(outcome, PenstockError):
            self._notify(outcome)

    def _notify(self, notices: Sequence[Notice]) -> None:
        for watch, event in notices:
            if watch.is_open:
                watch.add(event)
        for watch, _ in notices:
            if watch.is_open:
                watch.wake()

    def end_of(self, cache_id: int, error: PenstockError) -> None:
        of_cache = self._of.get(cache_id)
        for watch in of_cache.all() if of_cache is not None else []:
            watch.end(error)

    def end_all(self, error: PenstockError, *, durable_only: bool = False) -> None:
        for of_cache in list(self._of.values()):
            for watch in of_cache.all():
                if watch.is_durable or not durable_only:
                    watch.end(error)

    def _left(self, watch: CacheWatch) -> None:
        self.count -= 1
        self._opened.add(watch.scope, -1)
        of_cache = self._of[watch.cache_id]
        if watch.key is None:
            del of_cache.by_prefix[watch]
        else:
            same = of_cache.by_key[watch.key]
            del same[watch]
            if not same:
                del of_cache.by_key[watch.key]
        if not of_cache.by_key and not of_cache.by_prefix:
            del self._of[watch.cache_id]


def _event(record: CacheStored | CacheRemoved) -> WatchEvent:
    if isinstance(record, CacheStored):
        return WatchEvent("put", record.version, record.key, record.value)
    return WatchEvent(_REMOVALS[record.how], record.version, record.key)
