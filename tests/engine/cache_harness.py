"""A broker's caches driven by hand: commands return their outcome, a watcher keeps its events."""

from __future__ import annotations

from typing import Any

from penstock.api.caches import WatchHandle
from penstock.core.cache import Cache
from penstock.model.caching import (
    CacheValue,
    Check,
    Delete,
    Increment,
    Put,
    Txn,
    Watch,
    WatchEvent,
    Written,
)
from penstock.model.errors import PenstockError
from penstock.model.limits import Limits
from penstock.model.tenancy import CacheConfig, Entry, Path
from tests.engine.harness import Broker
from tests.storage.faulty_vfs import FaultyVfs

DEFAULT = ("default", "default", "default")


class Watcher:
    """The far end of a watch. Like a connection, it takes when it is woken, unless it is full."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.is_full = is_full
        self.events: list[WatchEvent] = []
        self.wakes = 0
        self.ends: list[PenstockError] = []
        self.handle: WatchHandle | None = None

    def wake(self) -> None:
        self.wakes += 1
        if not self.is_full and self.handle is not None:
            self.take()

    def ended(self, error: PenstockError) -> None:
        self.ends.append(error)

    def take(self, max_events: int = 10_000) -> None:
        assert self.handle is not None
        self.events += self.handle.take(max_events)

    def drain(self) -> list[WatchEvent]:
        """What came since the last time."""
        self.take()
        events, self.events = self.events, []
        return events

    def seen(self) -> list[tuple[str, str, bytes | None]]:
        return [(event.event, event.key, event.value) for event in self.drain()]

    def kinds(self) -> list[str]:
        return [event.event for event in self.drain()]


class CacheBroker(Broker):
    """A broker with words for caches. Each raises what it is refused with."""

    def cache(self, name: str, tenant: str = "t", namespace: str = "n", **config: Any) -> Path:
        wanted = [
            Entry(kind="tenant", tenant_id=tenant),
            Entry(kind="namespace", tenant_id=tenant, namespace=namespace),
            Entry(
                kind="cache",
                tenant_id=tenant,
                namespace=namespace,
                name=name,
                cache=CacheConfig(**config),
            ),
        ]
        for entry in wanted:
            self.must(self.engine.registry.create, entry)
        return (tenant, namespace, name)

    def configure(self, path: Path, **config: Any) -> None:
        outcomes: list[Any] = []
        self.engine.registry.change(path, outcomes.append, cache=CacheConfig(**config))
        self.settle()
        assert isinstance(outcomes[0], Entry), outcomes

    def drop(self, path: Path) -> None:
        self.must(self.engine.registry.delete, "cache", path, False)

    def write(self, path: Path, key: str, value: bytes, *args: Any, **options: Any) -> int:
        """The new version."""
        written = self.must(self.engine.caches.put, Put(path, key, value, *args, **options))
        assert isinstance(written, Written)
        return written.version

    def value(self, path: Path, key: str) -> CacheValue | None:
        value: CacheValue | None = self.must(self.engine.caches.get, path, key)
        return value

    def read(self, path: Path, key: str) -> bytes | None:
        value = self.value(path, key)
        return value.value if value is not None else None

    def erase(self, path: Path, key: str, if_version: int | None = None) -> Written:
        written: Written = self.must(self.engine.caches.delete, Delete(path, key, if_version))
        return written

    def count(self, path: Path, key: str, delta: int = 1, ttl_ms: int | None = None) -> int:
        written = self.must(self.engine.caches.increment, Increment(path, key, delta, ttl_ms))
        assert written.number is not None
        number: int = written.number
        return number

    def transact(
        self, ops: list[Put | Delete | Increment], checks: list[Check] | None = None
    ) -> list[Written]:
        written: list[Written] = self.must(self.engine.caches.transact, Txn(checks or [], ops))
        return written

    def watch(
        self, path: Path, key: str | None = None, *, watcher: Watcher | None = None, **options: Any
    ) -> Watcher:
        watcher = watcher or Watcher()
        if key is None:
            options.setdefault("prefix", "")
        command = Watch(path=path, key=key, **options)
        watcher.handle = self.must(self.engine.caches.watch, command, watcher)
        return watcher

    def inside(self, path: Path) -> Cache:
        return self.state.caches[self.state.registry.caches[path].id]

    def keys(self, path: Path) -> set[str]:
        return set(self.inside(path).entries)


def in_memory(**limits: Any) -> CacheBroker:
    return CacheBroker(limits=Limits(**limits))


def durable(**options: Any) -> tuple[CacheBroker, Path]:
    """A broker on a disk that can fail, and a durable cache in it."""
    broker = CacheBroker(FaultyVfs(), **options)
    return broker, broker.cache("c", durable=True)
