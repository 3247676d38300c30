"""How much a cache holds, what goes when it is full, and who gives when memory is short."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.cache import ENTRY_OVERHEAD_BYTES, CacheMemory, entry_bytes
from penstock.core.invariants import check
from penstock.model.caching import Put
from penstock.model.errors import NotFound, TooLarge
from penstock.model.limits import Limits
from penstock.model.tenancy import Path
from tests.engine.cache_harness import CacheBroker, Watcher, durable, in_memory
from tests.storage.faulty_vfs import FaultyVfs

kinds = pytest.mark.parametrize("is_durable", [False, True])


def made(is_durable: bool, **config: Any) -> tuple[CacheBroker, Path]:
    broker = CacheBroker(FaultyVfs())
    return broker, broker.cache("bounded", durable=is_durable, **config)


@kinds
@pytest.mark.parametrize("policy", ["best_effort", "lru"])
def test_max_entries_is_never_exceeded(is_durable: bool, policy: str):
    """felix-70, 72."""
    broker, path = made(is_durable, max_entries=3, eviction_policy=policy)
    for n in range(10):
        broker.write(path, f"k{n}", b"v")
        assert len(broker.keys(path)) == min(n + 1, 3)
        assert broker.read(path, f"k{n}") == b"v", "what was just written stays"
    assert broker.inside(path).evictions == 7
    broker.write(path, "k9", b"again")
    assert broker.inside(path).evictions == 7, "a key that is there needs no room"
    check(broker.state)


@kinds
def test_max_bytes_is_never_exceeded(is_durable: bool):
    """felix-73."""
    limit = 3 * entry_bytes("k0", b"x" * 100)
    broker, path = made(is_durable, max_bytes=limit)
    for n in range(8):
        broker.write(path, f"k{n}", b"x" * (40 + 20 * n))
        assert broker.must(broker.engine.caches.size, path)[1] <= limit
    broker.write(path, "k7", b"x" * 500)
    assert broker.must(broker.engine.caches.size, path)[1] <= limit
    assert broker.read(path, "k7") == b"x" * 500
    check(broker.state)


@kinds
def test_a_value_that_alone_is_over_max_bytes_is_refused_and_nothing_goes(is_durable: bool):
    """felix-73, 132."""
    broker, path = made(is_durable, max_bytes=1000)
    broker.write(path, "a", b"x")
    broker.write(path, "b", b"y")
    with pytest.raises(TooLarge, match="t/n/bounded") as refusal:
        broker.write(path, "b", b"x" * 1000)
    assert refusal.value.http_status == 413
    assert (broker.read(path, "a"), broker.read(path, "b")) == (b"x", b"y")


def test_an_entry_counts_its_key_in_utf_8_its_value_and_a_fixed_overhead():
    broker = in_memory()
    path = broker.cache("c")
    broker.write(path, "é", b"12345")
    assert broker.must(broker.engine.caches.size, path) == (1, 2 + 5 + ENTRY_OVERHEAD_BYTES)


@kinds
def test_the_least_recently_used_goes_first(is_durable: bool):
    """felix-74: reading, writing and counting are use."""
    broker, path = made(is_durable, max_entries=4, eviction_policy="lru")
    for key in ("read", "written", "counted", "idle"):
        broker.write(path, key, b"1")
    broker.read(path, "read")
    broker.write(path, "written", b"2")
    broker.count(path, "counted")
    broker.write(path, "new", b"1")
    assert broker.keys(path) == {"read", "written", "counted", "new"}
    broker.must(broker.engine.caches.get_many, path, ["read"])
    broker.write(path, "newer", b"1")
    assert broker.keys(path) == {"read", "counted", "new", "newer"}


def test_a_miss_and_a_refused_put_are_no_use():
    """felix-74."""
    broker = in_memory()
    path = broker.cache("c", max_entries=2, eviction_policy="lru")
    first = broker.write(path, "a", b"1")
    broker.write(path, "b", b"1")
    broker.call(broker.engine.caches.put, Put(path, "a", b"2", if_version=first + 1))
    broker.read(path, "missing")
    broker.write(path, "c", b"1")
    assert broker.keys(path) == {"b", "c"}


@kinds
def test_an_expired_entry_that_is_met_first_goes_as_expired(is_durable: bool):
    """felix-61, 70."""
    broker, path = made(is_durable, max_entries=2)
    watcher = broker.watch(path, include=frozenset({"expire", "evict"}))
    broker.write(path, "a", b"1", 10)
    broker.write(path, "b", b"1")
    broker.pass_ms(10)
    broker.write(path, "c", b"1")
    broker.write(path, "d", b"1")
    assert watcher.kinds() == ["put", "put", "put", "expire", "put", "evict"]
    assert broker.keys(path) == {"c", "d"}
    inside = broker.inside(path)
    assert (inside.expirations, inside.evictions) == (1, 1)


@kinds
def test_tighter_bounds_hold_at_once(is_durable: bool):
    """felix-72, 73, 74."""
    broker, path = made(is_durable, eviction_policy="lru")
    for n in range(6):
        broker.write(path, f"k{n}", b"v")
    broker.read(path, "k0")
    broker.configure(path, max_entries=3, eviction_policy="lru", durable=is_durable)
    assert broker.keys(path) == {"k4", "k5", "k0"}
    room = entry_bytes("k0", b"v")
    broker.configure(path, max_bytes=2 * room, eviction_policy="lru", durable=is_durable)
    assert broker.keys(path) == {"k5", "k0"}
    check(broker.state)
    if is_durable:
        broker.crash()
        assert broker.keys(path) == {"k5", "k0"}
        broker.write(path, "k6", b"v")
        assert len(broker.keys(path)) == 2, "the bounds are durable too"


def test_tightened_bounds_are_recorded_in_bursts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.engine.caches._EVICTION_BURST", 4)
    broker, path = durable()
    watcher = broker.watch(path, include=frozenset({"evict"}))
    for n in range(11):
        broker.write(path, f"k{n}", b"v")
    watcher.drain()
    broker.configure(path, max_entries=1, durable=True)
    assert watcher.kinds() == ["evict"] * 10
    broker.crash()
    assert broker.keys(path) == {"k10"}


# -- all caches together ------------------------------------------------------------------------


@pytest.mark.parametrize("largest_is_durable", [False, True])
def test_when_memory_is_short_the_cache_that_takes_most_gives(largest_is_durable: bool):
    """felix-70, 67: puts go on, and what is small stays."""
    limit = 40_000
    broker = CacheBroker(FaultyVfs(), limits=Limits(cache_memory_bytes=limit))
    large = broker.cache("large", durable=largest_is_durable)
    small = broker.cache("small", tenant="other")
    for n in range(20):
        broker.write(large, f"k{n}", b"x" * 1200)
    for n in range(30):
        broker.write(small, f"k{n}", b"y" * 200)
        assert broker.engine.caches.total_bytes <= limit
        assert broker.read(small, f"k{n}") == b"y" * 200
    assert len(broker.keys(small)) == 30, "the smaller one lost nothing"
    assert broker.inside(large).evictions > 0
    check(broker.state)
    if largest_is_durable:
        kept = broker.keys(large)
        broker.crash()
        assert broker.keys(large) == kept, "what memory took is gone after a restart too"


def test_the_writing_cache_gives_when_it_is_the_largest():
    """felix-70."""
    broker = in_memory(cache_memory_bytes=10_000)
    path, other = broker.cache("c"), broker.cache("other")
    broker.write(other, "k", b"v")
    for n in range(100):
        broker.write(path, f"k{n}", b"x" * 500)
        assert broker.engine.caches.total_bytes <= 10_000
        assert broker.read(path, f"k{n}") == b"x" * 500
    assert broker.read(other, "k") == b"v"


def test_a_large_value_takes_from_several_caches_if_it_must():
    broker = in_memory(cache_memory_bytes=10_000)
    paths = [broker.cache(f"c{n}") for n in range(5)]
    for path in paths:
        broker.write(path, "k", b"x" * 1200)
    broker.write(paths[0], "large", b"y" * 8000)
    assert broker.read(paths[0], "large") == b"y" * 8000
    assert broker.engine.caches.total_bytes <= 10_000
    with pytest.raises(TooLarge, match="cache_memory_bytes is 10000"):
        broker.write(paths[0], "larger", b"z" * 10_000)
    assert broker.read(paths[0], "large") == b"y" * 8000, "a refusal takes nothing"
    check(broker.state)


def test_less_memory_at_the_next_start_holds_at_once():
    """felix-70."""
    broker, path = durable()
    for n in range(10):
        broker.write(path, f"k{n}", b"x" * 700)
    broker.limits = Limits(cache_memory_bytes=5000)
    broker.restart()
    assert broker.engine.caches.total_bytes <= 5000
    kept = broker.keys(path)
    assert "k9" in kept
    assert "k0" not in kept
    broker.crash()
    assert broker.keys(path) == kept


def test_a_deleted_cache_frees_its_memory():
    broker = in_memory()
    path = broker.cache("c")
    broker.write(path, "k", b"x" * 1000)
    broker.drop(path)
    assert broker.engine.caches.total_bytes == 0
    with pytest.raises(NotFound):
        broker.read(path, "k")
    broker.cache("c")
    assert broker.read(path, "k") is None
    check(broker.state)


def test_the_largest_cache_is_found_whatever_grew_shrank_and_went():
    """By the sizes as they were when the order was last looked at, then as they are."""
    broker = in_memory()
    paths = [broker.cache(f"c{n}") for n in range(6)]
    memory, caches = CacheMemory(), broker.state.caches
    for n, path in enumerate(paths):
        broker.write(path, "k", b"x" * (100 * n + 100))
    names = [cache.path[2] for cache in memory.largest_first(caches)]
    assert names == ["c5", "c4", "c3", "c2", "c1", "c0"]
    broker.write(paths[5], "k", b"")
    assert next(memory.largest_first(caches)).path == paths[4], "what has shrunk gives way"
    broker.erase(paths[4], "k")
    assert next(memory.largest_first(caches)).path == paths[3]
    broker.drop(paths[3])
    assert next(memory.largest_first(caches)).path == paths[2]
    broker.write(paths[0], "k", b"x" * 10_000)
    found = [next(memory.largest_first(caches)).path for _ in range(8)]
    assert found[-1] == paths[0], "what has grown is noticed soon"
    for path in (*paths[:3], *paths[4:]):
        broker.erase(path, "k")
    assert list(memory.largest_first(caches)) == []
    broker.write(paths[1], "k", b"x")
    assert next(memory.largest_first(caches)).path == paths[1]


def test_an_eviction_by_another_cache_s_put_is_told_to_those_who_watch():
    """felix-80."""
    broker = CacheBroker(FaultyVfs(), limits=Limits(cache_memory_bytes=5000))
    kept, other = broker.cache("kept", durable=True), broker.cache("other")
    watcher = broker.watch(kept, "k", watcher=Watcher(), include=frozenset({"evict"}))
    broker.write(kept, "k", b"x" * 3000)
    broker.write(other, "k", b"y" * 2000)
    broker.settle()
    assert watcher.kinds() == ["put", "evict"]
    assert broker.read(kept, "k") is None
