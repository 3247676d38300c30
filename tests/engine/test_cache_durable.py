"""Durable caches: what was answered is there after any crash, and nothing else is ever seen."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from penstock.core.comparison import comparable
from penstock.core.image import take_image
from penstock.core.invariants import check
from penstock.model.caching import CacheValue, Delete, Increment, Put, Txn, Watch
from penstock.model.errors import AlreadyExists, NotFound, Unavailable
from penstock.model.limits import Limits
from penstock.model.tenancy import Path
from tests.engine.cache_harness import CacheBroker, Watcher, durable
from tests.storage.faulty_vfs import FaultyVfs

starts = pytest.mark.parametrize("start", ["restart", "crash", "kill", "seal_and_crash"])


def start_again(broker: CacheBroker, start: str) -> None:
    broker.clock.advance(1)
    getattr(broker, start)()


# -- restarts ---------------------------------------------------------------------------------


@starts
def test_a_durable_cache_is_rebuilt_and_an_ephemeral_one_is_empty(start: str):
    """felix-48, 111."""
    broker, path = durable()
    memory = broker.cache("m")
    for n in range(20):
        broker.write(path, f"k{n}", bytes([n]) * n, None if n % 2 else 60_000)
        broker.write(memory, f"k{n}", b"v")
    broker.erase(path, "k1")
    broker.count(path, "n", 41)
    broker.count(path, "n")
    before = {key: broker.value(path, key) for key in [*broker.keys(path)]}
    image = comparable(take_image(broker.state), broker.clock.now_ms())
    start_again(broker, start)
    assert comparable(take_image(broker.state), broker.clock.now_ms()) == image
    assert broker.keys(memory) == set()
    assert broker.keys(path) == set(before)
    for key, value in before.items():
        again = broker.value(path, key)
        assert value is not None
        assert again is not None
        assert (again.value, again.version) == (value.value, value.version)
        assert again.ttl_ms == (value.ttl_ms and value.ttl_ms - 1)
    check(broker.state)


@starts
def test_versions_never_go_back(start: str):
    """felix-52: of both kinds, whatever was deleted in between."""
    broker, path = durable()
    memory = broker.cache("m")
    last = {path: 0, memory: 0}
    for _ in range(3):
        for each in last:
            for write in (broker.write(each, "k", b"v"), broker.erase(each, "k").version):
                assert write > last[each]
                last[each] = write
        start_again(broker, start)


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_cache_made_anew_in_the_same_moment_repeats_no_version(is_durable: bool):
    """felix-52."""
    broker, _ = durable()
    seen: list[int] = []
    for _ in range(4):
        path = broker.cache("again", durable=is_durable)
        seen += [broker.write(path, "k", b"v"), broker.write(path, "k", b"w")]
        broker.drop(path)
    assert seen == sorted(set(seen))
    check(broker.state)


@starts
def test_an_expiry_holds_over_a_restart(start: str):
    """felix-58, 111."""
    broker, path = durable()
    broker.write(path, "k", b"v", 1000)
    broker.pass_ms(900)
    start_again(broker, start)
    value = broker.value(path, "k")
    assert value is not None
    assert value.ttl_ms == 99
    broker.pass_ms(99)
    assert broker.read(path, "k") is None
    start_again(broker, start)
    assert broker.read(path, "k") is None


def test_after_a_restart_what_was_written_first_goes_first():
    """felix-72: which key was read is in no log."""
    broker, path = durable()
    broker.configure(path, max_entries=3, eviction_policy="lru", durable=True)
    for key in ("a", "b", "c"):
        broker.write(path, key, b"v")
    broker.write(path, "a", b"again")
    broker.read(path, "b")
    broker.seal_and_crash()
    broker.write(path, "d", b"v")
    assert broker.keys(path) == {"c", "a", "d"}


def test_an_ephemeral_cache_writes_nothing_to_disk():
    """felix-127 for caches."""
    broker, _ = durable()
    memory = broker.cache("m", max_entries=2)
    seq, calls = broker.log.seq, len(broker.disk.calls)
    for n in range(20):
        broker.write(memory, f"k{n}", b"v", 5)
    broker.clock.advance(5)
    broker.read(memory, "k19")
    assert broker.log.seq == seq
    assert len(broker.disk.calls) == calls


# -- nothing undurable is seen ------------------------------------------------------------------


def test_answers_of_a_durable_cache_wait_for_earlier_writes():
    """felix-54, 51: values, misses, refusals and sizes."""
    broker, path = durable()
    caches = broker.engine.caches
    broker.write(path, "gone", b"v")
    broker.hold_writes()
    waiting: list[list[Any]] = [
        broker.submit(caches.put, Put(path, "k", b"new")),
        broker.submit(caches.get, path, "k"),
        broker.submit(caches.put, Put(path, "k", b"x", if_not_exists=True)),
        broker.submit(caches.delete, Delete(path, "gone")),
        broker.submit(caches.get, path, "gone"),
        broker.submit(caches.get_many, path, ["k", "gone"]),
        broker.submit(caches.increment, Increment(path, "n")),
        broker.submit(caches.size, path),
        broker.submit(broker.engine.registry.delete, "cache", path, False),
        broker.submit(caches.get, path, "k"),
        broker.submit(caches.put, Put(path, "k", b"v")),
    ]
    broker.scheduler.run()
    assert not any(waiting), "answered before it was durable"
    broker.disk.release()
    broker.settle()
    answers = [outcomes[0] for outcomes in waiting]
    version = answers[0].version
    assert answers[1] == CacheValue(b"new", version)
    assert isinstance(answers[2], AlreadyExists)
    assert answers[3].deleted
    assert answers[4] is None
    assert answers[5] == [CacheValue(b"new", version), None]
    assert answers[6].number == 1
    assert answers[7][0] == 2
    assert isinstance(answers[9], NotFound)
    assert isinstance(answers[10], NotFound)


def test_an_ephemeral_cache_answers_while_the_disk_is_slow():
    broker, path = durable()
    memory = broker.cache("m")
    broker.hold_writes()
    held = broker.submit(broker.engine.caches.put, Put(path, "k", b"v"))
    assert broker.submit(broker.engine.caches.put, Put(memory, "k", b"v"))
    assert broker.submit(broker.engine.caches.get, memory, "k")[0].value == b"v"
    assert not held
    broker.disk.release()
    broker.settle()


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_after_a_failed_log_nothing_of_a_durable_cache_is_seen(kind: str):
    """felix-54: and an ephemeral one goes on."""
    broker, path = durable()
    if kind == "sync":
        broker.disk._dsync_flag = 0
    memory = broker.cache("m")
    broker.write(path, "k", b"old")
    watcher, other = broker.watch(path, "k"), broker.watch(memory, "k")
    broker.disk.fail_call(1, errno.EIO, only=[kind], path=broker.log.files.active.path)
    caches = broker.engine.caches
    waiting = [
        broker.submit(caches.put, Put(path, "k", b"lost", 1000)),
        broker.submit(caches.get, path, "k"),
        broker.submit(caches.transact, Txn([], [Put(path, "a", b"1"), Put(memory, "a", b"1")])),
    ]
    broker.settle()
    assert broker.disk.faults_hit == 1
    later = [
        broker.submit(caches.get, path, "k"),
        broker.submit(caches.put, Put(path, "k", b"v")),
        broker.submit(caches.delete, Delete(path, "k")),
        broker.submit(caches.watch, Watch(path=path, key="k"), Watcher()),
    ]
    for outcomes in (*waiting, *later):
        assert [type(outcome) for outcome in outcomes] == [Unavailable]
    with pytest.raises(Unavailable):
        caches.invalidate([(path, "k")])
    assert (watcher.drain(), [type(error) for error in watcher.ends]) == ([], [Unavailable])
    assert broker.write(memory, "k", b"v")
    assert broker.read(memory, "k") == b"v"
    assert (other.kinds(), other.ends) == (["put"], [])
    broker.clock.advance(1)
    broker.crash()
    assert broker.read(path, "k") == b"old"
    assert broker.read(path, "a") is None


def test_a_broker_that_stopped_serving_changes_no_durable_cache():
    """felix-54."""
    broker, path = durable()
    broker.write(path, "k", b"old")
    broker.engine.caches._ledger._fail(Unavailable("a defect"))
    for command, argument in (
        (broker.engine.caches.put, Put(path, "k", b"new")),
        (broker.engine.caches.delete, Delete(path, "k")),
    ):
        assert [type(outcome) for outcome in broker.submit(command, argument)] == [Unavailable]
    with pytest.raises(Unavailable):
        broker.engine.caches.invalidate([(path, "k")])
    assert broker.inside(path).entries["k"].value == b"old"
    broker.clock.advance(1)
    broker.restart()
    assert broker.read(path, "k") == b"old"


# -- the time of a durable entry ------------------------------------------------------------------


def held_put(broker: CacheBroker, path: Path, *commands: Any) -> list[list[Any]]:
    """The commands are decided now and are durable 500 ms later."""
    caches = broker.engine.caches
    by_kind: dict[type, Any] = {Put: caches.put, Increment: caches.increment, Delete: caches.delete}
    broker.hold_writes()
    outcomes = [broker.submit(by_kind[type(command)], command) for command in commands]
    broker.scheduler.run()
    broker.clock.advance(500)
    outcomes.append(broker.submit(caches.get, path, "k"))
    broker.scheduler.run()
    broker.disk.release()
    broker.settle()
    return outcomes


def test_the_countdown_of_a_ttl_begins_when_the_put_is_answered():
    """felix-60: a slow disk takes nothing from it."""
    broker, path = durable()
    *_, read = held_put(broker, path, Put(path, "k", b"v", 100))
    assert read[0].value == b"v"
    assert read[0].ttl_ms == 100
    broker.pass_ms(99)
    assert broker.read(path, "k") == b"v"
    broker.pass_ms(1)
    assert broker.read(path, "k") is None
    check(broker.state)


def test_an_increment_before_the_answer_keeps_the_whole_ttl():
    """felix-60, 79."""
    broker, path = durable()
    *_, read = held_put(broker, path, Put(path, "k", b"1", 100), Increment(path, "k", ttl_ms=9))
    assert (read[0].value, read[0].ttl_ms) == (b"2", 100)
    broker.pass_ms(99)
    assert broker.read(path, "k") == b"2"
    broker.pass_ms(1)
    assert broker.read(path, "k") is None


@pytest.mark.parametrize(
    ("second", "left_ms"),
    [
        (lambda path: Put(path, "k", b"2"), None),
        (lambda path: Put(path, "k", b"2", 700), 700),
        (lambda path: Put(path, "k", b"2", 50), 50),
    ],
)
def test_the_last_put_s_ttl_counts_however_many_wait(second: Any, left_ms: int | None):
    """felix-60, 65."""
    broker, path = durable()
    *_, read = held_put(broker, path, Put(path, "k", b"1", 100), second(path))
    assert (read[0].value, read[0].ttl_ms) == (b"2", left_ms)
    assert not broker.inside(path).unanswered


def test_a_read_between_two_puts_has_the_first_for_its_whole_ttl():
    """felix-60, 51."""
    broker, path = durable()
    caches = broker.engine.caches
    broker.hold_writes()
    broker.submit(caches.put, Put(path, "k", b"1", 100))
    read = broker.submit(caches.get, path, "k")
    broker.submit(caches.put, Put(path, "k", b"2"))
    broker.scheduler.run()
    broker.clock.advance(500)
    broker.disk.release()
    broker.settle()
    assert (read[0].value, read[0].ttl_ms) == (b"1", 100)
    assert broker.read(path, "k") == b"2"


@pytest.mark.parametrize("ttl_ms", [0, 100])
def test_a_put_that_expires_at_once_does_so_while_another_waits(ttl_ms: int):
    """felix-65."""
    broker, path = durable()
    over = [Put(path, "k", b"5", 100), Put(path, "k", b"5", 0)]
    *_, counted, read = held_put(broker, path, *over, Increment(path, "k", ttl_ms=0))
    assert counted[0].number == 1
    assert read[0] is None
    *_, read = held_put(broker, path, Put(path, "k", b"1", ttl_ms), Delete(path, "k"))
    assert read[0] is None
    assert not broker.inside(path).unanswered


def test_a_value_that_expires_while_its_read_is_held_back_is_not_returned():
    """felix-64."""
    broker, path = durable()
    broker.write(path, "k", b"v", 100)
    broker.hold_writes()
    broker.submit(broker.engine.caches.put, Put(path, "other", b"v"))
    read = broker.submit(broker.engine.caches.get, path, "k")
    broker.scheduler.run()
    broker.clock.advance(100)
    broker.disk.release()
    broker.settle()
    assert read == [None]


# -- a full disk ------------------------------------------------------------------------------


def no_room(broker: CacheBroker, *, for_anything: bool = False) -> None:
    broker.log.has_room = lambda nbytes, *, reserve=False: reserve and not for_anything


def test_on_a_full_disk_puts_are_refused_and_deletes_go_on():
    broker, path = durable()
    memory = broker.cache("m")
    broker.write(path, "a", b"1")
    broker.write(path, "b", b"1", 10)
    no_room(broker)
    caches = broker.engine.caches
    for refused in (
        broker.call(caches.put, Put(path, "c", b"1")),
        broker.call(caches.increment, Increment(path, "a")),
        broker.call(caches.transact, Txn([], [Put(memory, "c", b"1"), Put(path, "c", b"1")])),
    ):
        assert isinstance(refused, Unavailable)
        assert "disk" in refused.message
    assert broker.read(memory, "c") is None, "nothing of it was done"
    assert broker.erase(path, "a").deleted
    broker.pass_ms(10)
    assert broker.read(path, "b") is None
    assert broker.keys(path) == set()
    del broker.log.has_room
    broker.write(path, "c", b"1")
    check(broker.state)


def test_without_any_room_an_expired_value_is_a_miss_all_the_same():
    """felix-62, 64."""
    broker, path = durable()
    broker.write(path, "k", b"v", 10)
    broker.pass_ms(10)
    no_room(broker, for_anything=True)
    assert broker.read(path, "k") is None
    assert broker.keys(path) == {"k"}, "it is removed when that can be recorded"
    assert isinstance(broker.call(broker.engine.caches.delete, Delete(path, "k")), Unavailable)
    with pytest.raises(Unavailable):
        broker.engine.caches.invalidate([(path, "k")])
    del broker.log.has_room
    assert broker.read(path, "k") is None
    assert broker.keys(path) == set()


def test_bounds_that_cannot_be_recorded_hold_with_the_next_put():
    broker, path = durable()
    for n in range(5):
        broker.write(path, f"k{n}", b"v")
    inside = broker.inside(path)
    # There is room for the registry's change, and none for what follows from it.
    broker.log.has_room = lambda nbytes, *, reserve=False: inside.max_entries > 2
    broker.configure(path, max_entries=2, durable=True)
    assert len(broker.keys(path)) == 5
    del broker.log.has_room
    broker.write(path, "new", b"v")
    assert broker.keys(path) == {"k4", "new"}


def test_memory_that_only_a_durable_cache_could_give_is_refused_without_room():
    """Memory stays bounded, whatever the disk does."""
    broker = CacheBroker(FaultyVfs(), limits=Limits(cache_memory_bytes=5000))
    path, memory = broker.cache("c", durable=True), broker.cache("m")
    broker.write(path, "k", b"x" * 4000)
    no_room(broker, for_anything=True)
    refused = broker.call(broker.engine.caches.put, Put(memory, "k", b"x" * 1000))
    assert isinstance(refused, Unavailable)
    assert broker.engine.caches.total_bytes <= 5000
    check(broker.state)
