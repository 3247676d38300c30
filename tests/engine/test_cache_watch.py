"""Watches: every change of the keys, once, in order; where something is missing, a gap says so."""

from __future__ import annotations

import logging

import pytest

from penstock.model.caching import Delete, Put, Watch, WatchEvent
from penstock.model.errors import InvalidArgument, NotFound, PenstockError, Unavailable
from penstock.model.limits import MAX_CACHE_KEY_BYTES, MAX_WATCH_EVENTS, Limits
from penstock.model.tenancy import Path
from tests.engine.cache_harness import CacheBroker, Watcher, durable, in_memory

Held = tuple[CacheBroker, Path]
ALL = frozenset({"expire", "evict"})


@pytest.fixture(params=["ephemeral", "durable"])
def held(request: pytest.FixtureRequest) -> Held:
    if request.param == "durable":
        return durable()
    broker = in_memory()
    return broker, broker.cache("c")


def test_a_watch_sees_every_change_of_its_key_and_none_of_others(held: Held):
    """felix-80."""
    broker, path = held
    other = broker.cache("other")
    watcher = broker.watch(path, "k")
    versions = [broker.write(path, "k", b"1"), broker.write(path, "k", b"2")]
    broker.write(path, "k2", b"x")
    broker.write(other, "k", b"x")
    broker.count(path, "k")
    versions.append(broker.erase(path, "k").version)
    broker.erase(path, "k")
    assert watcher.handle is not None
    assert watcher.handle.version < versions[0]
    events = watcher.drain()
    assert [(e.event, e.value) for e in events] == [
        ("put", b"1"),
        ("put", b"2"),
        ("put", b"3"),
        ("delete", None),
    ]
    assert {e.key for e in events} == {"k"}
    assert [events[0].version, events[1].version, events[3].version] == versions


@pytest.mark.parametrize("include", [frozenset[str](), frozenset({"expire"}), ALL])
def test_expiry_and_eviction_are_sent_to_watchers_that_asked_for_them(
    held: Held, include: frozenset[str]
):
    """felix-80."""
    broker, path = held
    broker.configure(path, max_entries=2, durable=broker.inside(path).is_durable)
    watcher = broker.watch(path, prefix="", include=include)
    broker.write(path, "a", b"1", 10)
    broker.pass_ms(10)
    assert broker.read(path, "a") is None
    for key in ("b", "c", "d"):
        broker.write(path, key, b"1")
    expected = ["put", "expire", "put", "put", "put", "evict"]
    assert watcher.kinds() == [kind for kind in expected if kind in {"put", *include}]


def test_a_watch_sees_expiry_and_put_when_an_expired_entry_is_replaced(held: Held):
    """felix-61, 80."""
    broker, path = held
    watcher = broker.watch(path, "k", include=ALL)
    broker.write(path, "k", b"1", 10)
    broker.pass_ms(10)
    broker.write(path, "k", b"2")
    broker.write(path, "k", b"3", 10)
    broker.pass_ms(10)
    assert not broker.erase(path, "k").deleted
    assert watcher.kinds() == ["put", "expire", "put", "put", "expire"]


def test_a_watch_sees_changes_by_transactions_and_invalidations(held: Held):
    """felix-80, 81, 82."""
    broker, path = held
    watcher = broker.watch(path, prefix="")
    broker.transact([Put(path, "a", b"1"), Put(path, "b", b"1"), Delete(path, "a")])
    broker.engine.caches.invalidate([(path, "b")])
    broker.settle()
    told = [(kind, key) for kind, key, _ in watcher.seen()]
    assert told == [("put", "a"), ("put", "b"), ("delete", "a"), ("delete", "b")]


def test_a_sink_is_woken_once_until_all_is_taken(held: Held):
    broker, path = held
    watcher = broker.watch(path, "k", watcher=Watcher(is_full=True))
    for n in range(5):
        broker.write(path, "k", b"%d" % n)
    assert watcher.wakes == 1
    watcher.take(2)
    broker.write(path, "k", b"5")
    assert watcher.wakes == 1, "there was something left"
    watcher.take()
    assert [e.value for e in watcher.events] == [b"%d" % n for n in range(6)]
    broker.write(path, "k", b"6")
    assert watcher.wakes == 2


def test_what_did_not_fit_is_one_gap_in_its_place(held: Held):
    """felix-80."""
    broker, path = held
    watcher = broker.watch(path, "k", watcher=Watcher(is_full=True))
    versions = [broker.write(path, "k", b"%d" % n) for n in range(MAX_WATCH_EVENTS + 5)]
    watcher.take(1)
    broker.write(path, "k", b"x")
    watcher.take(1)
    after = broker.write(path, "k", b"later")
    events = watcher.drain()
    assert [e.version for e in events[:MAX_WATCH_EVENTS]] == versions[:MAX_WATCH_EVENTS]
    gap, last = events[MAX_WATCH_EVENTS:]
    assert gap.event == "gap"
    assert gap.from_version == versions[MAX_WATCH_EVENTS] - 1
    assert gap.version == after - 1
    assert last == WatchEvent("put", after, "k", b"later")


def test_a_full_watch_costs_its_owner_only(held: Held):
    """felix-80."""
    broker, path = held
    slow = broker.watch(path, "k", watcher=Watcher(is_full=True))
    quick = broker.watch(path, "k")
    for n in range(MAX_WATCH_EVENTS + 100):
        broker.write(path, "k", b"%d" % n)
    assert len(quick.drain()) == MAX_WATCH_EVENTS + 100
    assert len(slow.drain()) == MAX_WATCH_EVENTS + 1


def test_what_waits_is_bounded_in_bytes_too():
    broker = CacheBroker(limits=Limits(event_queue_bytes=10_000))
    path = broker.cache("c")
    watcher = broker.watch(path, "k", watcher=Watcher(is_full=True))
    broker.write(path, "k", b"x" * 50_000)
    for _ in range(3):
        broker.write(path, "k", b"x" * 4000)
    assert watcher.kinds() == ["put", "gap"], "one event always fits"
    for _ in range(4):
        broker.write(path, "k", b"x" * 4000)
    assert watcher.kinds() == ["put", "put", "gap"]


@pytest.mark.parametrize("behind", [0, 1, 5])
def test_a_watch_from_an_older_version_begins_with_a_gap(held: Held, behind: int):
    """felix-80."""
    broker, path = held
    for n in range(6):
        version = broker.write(path, "k", b"%d" % n)
    watcher = broker.watch(path, "k", since_version=version - behind)
    assert watcher.wakes == (1 if behind else 0)
    events = watcher.drain()
    gap = WatchEvent("gap", version, from_version=version - behind)
    assert events == ([gap] if behind else [])
    later = broker.write(path, "k", b"later")
    assert [e.version for e in watcher.drain()] == [later]


def test_from_a_version_that_is_to_come_everything_may_be_missing(held: Held):
    broker, path = held
    version = broker.write(path, "k", b"v")
    watcher = broker.watch(path, "k", since_version=version + 1000)
    assert watcher.drain() == [WatchEvent("gap", version, from_version=0)]


def test_a_closed_watch_is_told_nothing_more(held: Held):
    broker, path = held
    watcher = broker.watch(path, "k", watcher=Watcher(is_full=True))
    broker.write(path, "k", b"1")
    assert watcher.handle is not None
    watcher.handle.close()
    watcher.handle.close()
    broker.write(path, "k", b"2")
    assert (watcher.wakes, watcher.drain(), watcher.ends) == (1, [], [])
    assert broker.engine.caches.watches.count == 0
    assert not broker.engine.caches.watches._of


def test_the_end_of_a_cache_ends_its_watches_with_not_found(held: Held):
    """felix-80, 92."""
    broker, path = held
    other = broker.cache("other")
    ended = [broker.watch(path, "k"), broker.watch(path, prefix="a")]
    stays = broker.watch(other, "k")
    broker.must(broker.engine.registry.delete, "cache", path, False)
    for watcher in ended:
        assert [type(error) for error in watcher.ends] == [NotFound]
    broker.write(other, "k", b"v")
    assert (stays.ends, stays.kinds()) == ([], ["put"])
    assert broker.engine.caches.watches.count == 1
    broker.must(broker.engine.registry.delete, "tenant", ("t", "", ""), True)
    assert [type(error) for error in stays.ends] == [NotFound]


def test_a_stopping_broker_ends_every_watch(held: Held):
    broker, path = held
    watcher = broker.watch(path, "k")
    broker.close()
    assert [type(error) for error in watcher.ends] == [Unavailable]


def test_a_watch_is_of_one_key_or_one_prefix(held: Held):
    broker, path = held
    watch = broker.engine.caches.watch
    for command in (Watch(path=path), Watch(path=path, key="k", prefix="k")):
        assert isinstance(broker.call(watch, command, Watcher()), InvalidArgument)
    for command in (
        Watch(path=path, key=""),
        Watch(path=path, prefix="\n"),
        Watch(path=path, prefix="k" * (MAX_CACHE_KEY_BYTES + 1)),
    ):
        assert isinstance(broker.call(watch, command, Watcher()), InvalidArgument)
    assert broker.engine.caches.watches.count == 0


def test_watches_have_names_of_their_own(held: Held):
    broker, path = held
    handles = [broker.watch(path, "k").handle for _ in range(3)]
    names = [handle.id for handle in handles if handle is not None]
    assert len(set(names)) == 3
    assert all(name[0] == "w" and name[1:].isdigit() for name in names)


class Broken(Watcher):
    """Its connection is gone, and says so loudly."""

    def wake(self) -> None:
        raise OSError("gone")

    def ended(self, error: PenstockError) -> None:
        raise OSError("gone")


def test_a_sink_that_raises_loses_its_own_watch_only(held: Held, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)
    broker, path = held
    broken = [broker.watch(path, "k", watcher=Broken()) for _ in range(2)]
    watcher = broker.watch(path, "k")
    assert broker.write(path, "k", b"1")
    assert broker.write(path, "k", b"2")
    assert watcher.kinds() == ["put", "put"]
    assert broker.engine.caches.watches.count == 1
    again = broker.watch(path, "k", watcher=Broken())
    broker.drop(path)
    assert len(watcher.ends) == 1
    assert all(each.handle is not None for each in (*broken, again))
    assert broker.engine.caches.watches.count == 0


def test_a_watch_whose_owner_left_before_the_answer_is_closed(
    held: Held, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL)
    broker, path = held

    def gone(_: object) -> None:
        raise OSError("gone")

    command = Watch(path=path, key="k")
    if broker.inside(path).is_durable:
        broker.submit(broker.engine.caches.put, Put(path, "k", b"v"))
        broker.engine.caches.watch(command, Watcher(), gone)
        broker.settle()
    else:
        with pytest.raises(OSError, match="gone"):
            broker.engine.caches.watch(command, Watcher(), gone)
    assert broker.engine.caches.watches.count == 0


class Eager(Watcher):
    """Writes as soon as it is woken."""

    def __init__(self, broker: CacheBroker, path: Path) -> None:
        super().__init__()
        self.broker = broker
        self.path = path

    def wake(self) -> None:
        super().wake()
        if len(self.events) < 4:
            command = Put(self.path, "k", b"by a watcher")
            self.broker.engine.caches.put(command, lambda _: None)


def test_a_watcher_that_writes_when_woken_leaves_the_others_in_order(held: Held):
    """felix-80."""
    broker, path = held
    eager = broker.watch(path, "k", watcher=Eager(broker, path))
    watcher = broker.watch(path, "k")
    broker.write(path, "k", b"1")
    broker.settle()
    for each in (eager, watcher):
        versions = [event.version for event in each.drain()]
        assert len(versions) == 4
        assert versions == sorted(versions)


def test_a_put_looks_at_the_watches_of_its_key_only():
    """With many watches of other keys a put costs the same."""
    broker = in_memory()
    path = broker.cache("c")
    for n in range(50):
        broker.watch(path, f"other-{n}")
    looked: list[str] = []
    watches = broker.engine.caches.watches

    class Counted(dict):  # type: ignore[type-arg]
        def get(self, key: str, default: object = None) -> object:
            looked.append(key)
            return super().get(key, default)

        def values(self):
            raise AssertionError("all watches were looked at")

        __iter__ = items = values

    (of_cache,) = watches._of.values()
    of_cache.by_key = Counted(of_cache.by_key)
    broker.write(path, "k", b"v")
    assert looked == ["k"]


# -- durable ----------------------------------------------------------------------------------


def test_events_of_a_durable_cache_leave_when_they_are_durable():
    """felix-54, 80: nothing that could be lost is told."""
    broker, path = durable()
    memory = broker.cache("m")
    watcher, other = broker.watch(path, "k"), broker.watch(memory, "k")
    broker.hold_writes()
    broker.submit(broker.engine.caches.put, Put(path, "k", b"1"))
    broker.submit(broker.engine.caches.put, Put(memory, "k", b"1"))
    broker.scheduler.run()
    assert other.kinds() == ["put"]
    assert (watcher.wakes, watcher.drain()) == (0, [])
    broker.disk.release()
    broker.settle()
    assert watcher.kinds() == ["put"]


def test_a_watch_opened_between_two_changes_sees_the_later_one_only():
    """felix-80."""
    broker, path = durable()
    broker.hold_writes()
    put = broker.engine.caches.put
    first = broker.submit(put, Put(path, "k", b"1"))
    watcher = Watcher()
    opened = broker.submit(broker.engine.caches.watch, Watch(path=path, key="k"), watcher)
    second = broker.submit(put, Put(path, "k", b"2"))
    broker.scheduler.run()
    assert not first
    assert not opened
    broker.disk.release()
    broker.settle()
    watcher.handle = opened[0]
    assert opened[0].version == first[0].version
    assert [e.version for e in watcher.drain()] == [second[0].version]
