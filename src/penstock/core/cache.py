"""One cache in memory: its entries in order of eviction, its version and its size.

Invariant: `bytes` is the sum over the entries, and `memory.bytes` the sum over all caches.
`version` is at least that of every entry and only grows. The least recently written entry comes
first. In an `lru` cache a read moves an entry to the end too; no record tells that, so after a
restart the order is that of the writes. Durable and ephemeral caches differ only in whether their
records are in the log. Must not know the rules: cache_rules.py decides what is stored and removed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

import msgspec

from penstock.model.records import CacheRemoved, CacheStored
from penstock.model.scopes import Scope
from penstock.model.tenancy import CacheConfig, Entry, Path

ENTRY_OVERHEAD_BYTES = 320
"""Memory of an entry besides its key and value, measured with a million entries."""

VERSIONS_PER_MS = 1000
"""A new cache's first version is its time of creation in ms times this. So a cache that is created
again, or an ephemeral one after a restart, never repeats a version. No cache changes a thousand
times a millisecond for long, and the versions of the next two centuries fit in 53 bits."""

NO_LIMIT = 2**62


class CacheEntry(msgspec.Struct, gc=False):
    """A value in a cache. `expires` is a wall-clock time in ms, 0 for never. `late_ms` is volatile,
    in no record and no image: this process lets the entry live so much longer, since its TTL counts
    from the answer."""

    value: bytes
    version: int
    expires: int = 0
    late_ms: int = 0

    def ends(self) -> int:
        """Returns when this process lets the entry expire; 0 for never."""
        return self.expires + self.late_ms


class CacheMemory:
    """The memory of all caches together, and which cache is the largest."""

    __slots__ = ("_by_size", "_fresh_for", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        # A heap of (-bytes, id). The sizes may be outdated and are corrected when they come up.
        self._by_size: list[tuple[int, int]] = []
        self._fresh_for = 0

    def largest_first(self, caches: dict[int, Cache]) -> Iterator[Cache]:
        """Yields caches by size. The first is cheap to find among any number, and nearly always
        enough."""
        first = self._largest(caches)
        if first is not None:
            yield first
            others = [cache for cache in caches.values() if cache is not first and cache.bytes]
            yield from sorted(others, key=lambda cache: -cache.bytes)

    def _largest(self, caches: dict[int, Cache]) -> Cache | None:
        """Returns the largest cache of the heap. Growth since the heap was built is noticed when it
        is built again, after as many uses as it has caches."""
        self._fresh_for -= 1
        found = self._top(caches) if self._fresh_for >= 0 else None
        if found is None:
            self._by_size = [(-cache.bytes, cache.id) for cache in caches.values() if cache.bytes]
            heapq.heapify(self._by_size)
            self._fresh_for = len(self._by_size)
            found = self._top(caches)
        return found

    def _top(self, caches: dict[int, Cache]) -> Cache | None:
        heap = self._by_size
        while heap:
            cache = caches.get(heap[0][1])
            if cache is None or not cache.bytes:
                heapq.heappop(heap)
            elif cache.bytes >= -heap[0][0]:
                return cache
            else:
                heapq.heapreplace(heap, (-cache.bytes, cache.id))
        return None


class Cache:
    """`first_version` is the version it was created with.

    Volatile, in no record and no image: the counters `hits`, `misses`, `evictions`, `expirations`;
    the order that reads give the entries of an LRU cache; all content of an ephemeral cache; and
    `unanswered`, the keys with their versions whose TTL does not run yet since their put is not
    answered.
    """

    __slots__ = ("bytes", "entries", "evictions", "expirations", "first_version", "hits", "id",
                 "is_durable", "is_lru", "max_bytes", "max_entries", "memory", "misses", "path",
                 "unanswered", "version")  # fmt: skip

    def __init__(self, entry: Entry, first_version: int, memory: CacheMemory) -> None:
        self.id = entry.id
        self.path = entry.path
        self.first_version = self.version = first_version
        self.memory = memory
        self.entries: OrderedDict[str, CacheEntry] = OrderedDict()
        self.bytes = 0
        self.unanswered: dict[str, int] = {}
        self.hits = self.misses = self.evictions = self.expirations = 0
        self.configure(entry.cache or CacheConfig())

    def configure(self, config: CacheConfig) -> None:
        self.is_durable = config.durable
        self.is_lru = config.eviction_policy == "lru"
        self.max_entries = config.max_entries or NO_LIMIT
        self.max_bytes = config.max_bytes or NO_LIMIT

    def is_over(self, key: str, entry: CacheEntry, now_ms: int) -> bool:
        """Returns True if the entry has expired."""
        return 0 < entry.ends() <= now_ms and key not in self.unanswered

    def store(self, record: CacheStored) -> None:
        key, value = record.key, record.value
        entries = self.entries
        old = entries.get(key)
        if old is None:
            grown = entry_bytes(key, value)
        else:
            grown = len(value) - len(old.value)
            entries.move_to_end(key)
        # An increment keeps the expiry, and with it what this process adds to it.
        late_ms = old.late_ms if old is not None and old.expires == record.expires else 0
        entries[key] = CacheEntry(value, record.version, record.expires, late_ms)
        self.bytes += grown
        self.memory.bytes += grown
        self.version = record.version

    def remove(self, record: CacheRemoved) -> None:
        """Removes the entry, if it is there: a snapshot leaves out expired entries."""
        entry = self.entries.pop(record.key, None)
        if entry is not None:
            size = entry_bytes(record.key, entry.value)
            self.bytes -= size
            self.memory.bytes -= size
        self.version = record.version

    def restore(self, version: int, entries: list[tuple[str, CacheEntry]]) -> None:
        """Fills an empty cache with entries, in the order in which they were written."""
        self.version = version
        self.entries.update(entries)
        self.bytes = sum(entry_bytes(key, entry.value) for key, entry in entries)
        self.memory.bytes += self.bytes

    def leave(self) -> None:
        """Gives the memory of a deleted cache back."""
        self.memory.bytes -= self.bytes


def entry_bytes(key: str, value: bytes) -> int:
    """Returns the size that an entry counts for in `max_bytes` and `cache_memory_bytes`."""
    key_bytes = len(key) if key.isascii() else len(key.encode())
    return key_bytes + len(value) + ENTRY_OVERHEAD_BYTES


class CacheTable(dict[int, Cache]):
    """Caches by id, and by the tenant or namespace that they belong to."""

    __slots__ = ("_by_scope",)

    def __init__(self) -> None:
        super().__init__()
        self._by_scope: dict[Scope, dict[int, Cache]] = {}

    def __setitem__(self, cache_id: int, cache: Cache) -> None:
        super().__setitem__(cache_id, cache)
        for scope in _around(cache.path):
            self._by_scope.setdefault(scope, {})[cache_id] = cache

    def pop(self, cache_id: int) -> Cache:  # type: ignore[override]
        cache = super().pop(cache_id)
        for scope in _around(cache.path):
            caches = self._by_scope[scope]
            del caches[cache_id]
            if not caches:
                del self._by_scope[scope]
        return cache

    def clear(self) -> None:
        super().clear()
        self._by_scope.clear()

    def within(self, scope: Scope) -> Iterable[Cache]:
        """Returns the caches of a namespace, or of a tenant if the namespace is empty."""
        return self._by_scope.get(scope, _NO_CACHES).values()


_NO_CACHES: dict[int, Cache] = {}


def _around(path: Path) -> tuple[Scope, Scope]:
    return path[:2], (path[0], "")
