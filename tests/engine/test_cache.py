"""What a cache holds, for how long, and under which conditions it changes."""

from __future__ import annotations

import pytest

from penstock.core.invariants import check
from penstock.model.caching import CacheValue, Delete, Increment
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    TooLarge,
    VersionMismatch,
)
from penstock.model.limits import MAX_CACHE_KEY_BYTES, MAX_OFFSET
from penstock.model.tenancy import Path
from tests.engine.cache_harness import CacheBroker, durable, in_memory

Held = tuple[CacheBroker, Path]


@pytest.fixture(params=["ephemeral", "durable"])
def held(request: pytest.FixtureRequest) -> Held:
    """A broker and one of its caches: what is promised is promised of both kinds."""
    if request.param == "durable":
        return durable()
    broker = in_memory()
    return broker, broker.cache("c")


# -- what is there ----------------------------------------------------------------------------


def test_a_value_is_read_as_it_was_written(held: Held):
    """felix-51, 54."""
    broker, path = held
    for value in (b"", b"plain", bytes(range(256)), b"\xff" * 100_000):
        version = broker.write(path, "k", value)
        assert broker.value(path, "k") == CacheValue(value, version)
    check(broker.state)


def test_a_missing_key_is_none_and_no_error(held: Held):
    """felix-56."""
    broker, path = held
    assert broker.value(path, "nothing") is None


def test_a_put_on_an_existing_key_replaces_it(held: Held):
    """felix-56, 75."""
    broker, path = held
    first = broker.write(path, "k", b"old")
    second = broker.write(path, "k", b"new")
    assert second > first
    assert broker.read(path, "k") == b"new"
    assert broker.must(broker.engine.caches.size, path)[0] == 1


def test_many_keys_are_read_at_one_moment_and_in_order(held: Held):
    broker, path = held
    broker.write(path, "a", b"1")
    broker.write(path, "b", b"2")
    values = broker.must(broker.engine.caches.get_many, path, ["b", "x", "a", "b"])
    assert [v and v.value for v in values] == [b"2", None, b"1", b"2"]


def test_a_deleted_key_is_gone_and_deleting_it_again_says_so(held: Held):
    broker, path = held
    put = broker.write(path, "k", b"v")
    written = broker.erase(path, "k")
    assert written.deleted
    assert written.version == put + 1
    assert broker.read(path, "k") is None
    again = broker.erase(path, "k")
    assert (again.deleted, again.version) == (False, 0)


@pytest.mark.parametrize("key", ["", "a\x00b", "line\nbreak", "\x85"])
def test_a_key_that_is_empty_or_has_control_characters_is_refused(held: Held, key: str):
    broker, path = held
    for attempt in (broker.read, broker.erase, broker.count):
        with pytest.raises(InvalidArgument):
            attempt(path, key)
    with pytest.raises(InvalidArgument):
        broker.write(path, key, b"v")
    with pytest.raises(InvalidArgument):
        broker.engine.caches.check_targets([(path, key)])
    assert not broker.keys(path)


def test_a_key_may_be_any_other_text_up_to_its_limit_in_utf_8(held: Held):
    broker, path = held
    for key in (" ", " k ", "a/b?c#d", "k" * MAX_CACHE_KEY_BYTES, "é" * (MAX_CACHE_KEY_BYTES // 2)):
        broker.write(path, key, b"v")
        assert broker.read(path, key) == b"v"
    for key in ("k" * (MAX_CACHE_KEY_BYTES + 1), "é" * (MAX_CACHE_KEY_BYTES // 2 + 1)):
        with pytest.raises(TooLarge):
            broker.write(path, key, b"v")
    check(broker.state)


def test_every_change_counts_the_version_up_by_one(held: Held):
    broker, path = held
    start = broker.inside(path).version
    versions = [broker.write(path, "a", b"1"), broker.write(path, "b", b"1", 10)]
    versions.append(broker.must(broker.engine.caches.increment, Increment(path, "a")).version)
    versions.append(broker.erase(path, "a").version)
    broker.pass_ms(10)
    assert broker.read(path, "b") is None, "that it was removed is a change too"
    versions.append(broker.write(path, "c", b"1") - 1)
    assert versions == list(range(start + 1, start + 6))


# -- time to live -----------------------------------------------------------------------------


def test_a_value_is_there_until_its_ttl_has_passed_and_not_after(held: Held):
    """felix-58, 62, 63, 64."""
    broker, path = held
    broker.write(path, "k", b"v", 60_000)
    broker.pass_ms(59_999)
    value = broker.value(path, "k")
    assert value is not None
    assert value.ttl_ms == 1
    broker.pass_ms(1)
    assert broker.value(path, "k") is None


def test_without_a_ttl_nothing_expires(held: Held):
    """felix-59."""
    broker, path = held
    broker.write(path, "k", b"v")
    broker.clock.advance(100 * 365 * 24 * 3600 * 1000)
    value = broker.value(path, "k")
    assert value is not None
    assert value.ttl_ms is None


def test_a_ttl_of_0_expires_at_once(held: Held):
    """felix-65."""
    broker, path = held
    broker.write(path, "k", b"old")
    broker.write(path, "k", b"v", 0)
    assert broker.read(path, "k") is None


def test_a_put_replaces_the_ttl_and_one_without_clears_it(held: Held):
    """felix-65."""
    broker, path = held
    broker.write(path, "longer", b"v", 100)
    broker.write(path, "longer", b"v", 300)
    broker.write(path, "shorter", b"v", 300)
    broker.write(path, "shorter", b"v", 100)
    broker.write(path, "cleared", b"v", 100)
    broker.write(path, "cleared", b"v")
    broker.pass_ms(150)
    assert broker.read(path, "longer") == b"v"
    assert broker.read(path, "shorter") is None
    broker.pass_ms(1000)
    assert broker.read(path, "longer") is None
    assert broker.read(path, "cleared") == b"v"


def test_an_expired_entry_counts_until_it_is_met(held: Held):
    """felix-61."""
    broker, path = held
    broker.write(path, "k", b"v", 10)
    broker.pass_ms(5000)
    entries, nbytes = broker.must(broker.engine.caches.size, path)
    assert entries == 1
    assert nbytes > 0
    assert broker.read(path, "k") is None
    assert broker.must(broker.engine.caches.size, path) == (0, 0)
    assert broker.inside(path).expirations == 1
    check(broker.state)


def test_an_absurd_ttl_is_as_good_as_none_and_a_negative_one_is_refused(held: Held):
    broker, path = held
    broker.write(path, "k", b"v", MAX_OFFSET * 100)
    broker.clock.advance(10**12)
    assert broker.read(path, "k") == b"v"
    with pytest.raises(InvalidArgument, match="ttl_ms"):
        broker.write(path, "k", b"w", -1)
    assert broker.read(path, "k") == b"v"


# -- conditions -------------------------------------------------------------------------------


def test_if_not_exists_finds_an_expired_entry_absent(held: Held):
    """felix-77, 62."""
    broker, path = held
    broker.write(path, "k", b"old", 10)
    broker.pass_ms(10)
    broker.write(path, "k", b"new", if_not_exists=True)
    assert broker.read(path, "k") == b"new"


def test_if_version_0_means_absent(held: Held):
    """felix-78."""
    broker, path = held
    broker.write(path, "k", b"a", if_version=0)
    with pytest.raises(VersionMismatch):
        broker.write(path, "k", b"b", if_version=0)
    with pytest.raises(VersionMismatch):
        broker.write(path, "other", b"b", if_version=1)
    assert broker.read(path, "k") == b"a"
    assert broker.read(path, "other") is None


def test_a_delete_if_version_removes_only_that_version(held: Held):
    """felix-78."""
    broker, path = held
    version = broker.write(path, "k", b"a")
    with pytest.raises(VersionMismatch):
        broker.erase(path, "k", version + 1)
    assert broker.read(path, "k") == b"a"
    assert broker.erase(path, "k", version).deleted
    assert not broker.erase(path, "k", 0).deleted


# -- counters ---------------------------------------------------------------------------------


def test_a_counter_that_is_made_takes_the_ttl_and_an_existing_one_keeps_its_own(held: Held):
    """felix-79, 65."""
    broker, path = held
    broker.count(path, "n", ttl_ms=100)
    broker.pass_ms(60)
    assert broker.count(path, "n", ttl_ms=1000) == 2
    value = broker.value(path, "n")
    assert value is not None
    assert value.ttl_ms == 40
    broker.pass_ms(40)
    assert broker.count(path, "n") == 1, "it has expired and begins anew"
    value = broker.value(path, "n")
    assert value is not None
    assert value.ttl_ms is None


@pytest.mark.parametrize("value", [b"", b"x", b"1.5", b" 1", b"+1", b"0x1", b"1" * 20, b"9" * 19])
def test_what_is_no_decimal_of_64_bits_cannot_be_counted(held: Held, value: bytes):
    """felix-79."""
    broker, path = held
    broker.write(path, "n", value)
    if value == b"9" * 19:
        assert int(value) >= 2**63
    with pytest.raises(FailedPrecondition, match="not a number") as refusal:
        broker.count(path, "n")
    assert refusal.value.http_status == 409
    assert broker.read(path, "n") == value


def test_a_counter_does_not_leave_64_bits(held: Held):
    """felix-79."""
    broker, path = held
    broker.write(path, "n", b"%d" % (2**63 - 2))
    assert broker.count(path, "n") == 2**63 - 1
    with pytest.raises(FailedPrecondition, match="64 bits"):
        broker.count(path, "n")
    broker.write(path, "n", b"%d" % -(2**63))
    with pytest.raises(FailedPrecondition, match="64 bits"):
        broker.count(path, "n", -1)
    with pytest.raises(FailedPrecondition, match="64 bits"):
        broker.count(path, "new", 2**63)
    assert broker.read(path, "new") is None


# -- invalidation -----------------------------------------------------------------------------


def test_an_invalidated_key_is_gone_when_it_is_said_to_be(held: Held):
    """felix-82, 83."""
    broker, path = held
    caches = broker.engine.caches
    broker.write(path, "k", b"v")
    broker.write(path, "other", b"v")
    caches.check_targets([(path, "k"), (path, "missing")])
    assert caches.invalidate([(path, "k"), (path, "missing")]) == broker.inside(path).is_durable
    broker.settle()
    assert broker.read(path, "k") is None
    assert broker.read(path, "other") == b"v"


def test_whoever_invalidates_a_durable_cache_waits_even_if_the_key_is_just_gone():
    """felix-83: that it is gone may not be durable yet."""
    broker, path = durable()
    broker.write(path, "k", b"v")
    broker.hold_writes()
    erased = broker.submit(broker.engine.caches.delete, Delete(path, "k"))
    assert broker.engine.caches.invalidate([(path, "k")])
    assert not erased
    broker.disk.release()
    broker.settle()


# -- counting ---------------------------------------------------------------------------------


def test_hits_and_misses_are_counted(held: Held):
    broker, path = held
    broker.write(path, "k", b"v")
    broker.write(path, "over", b"v", 0)
    for key in ("k", "k", "missing", "over"):
        broker.read(path, key)
    broker.must(broker.engine.caches.get_many, path, ["k", "missing"])
    inside = broker.inside(path)
    assert (inside.hits, inside.misses, inside.expirations) == (3, 3, 1)
    assert broker.engine.caches.total_bytes == inside.bytes
