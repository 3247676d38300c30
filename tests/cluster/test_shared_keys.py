"""The contract of `KeyStore`, on the simulation and on a JetStream bucket of real servers."""

from __future__ import annotations

import pytest

from penstock.cluster.shared import Conflict, StoredKey, Unanswered
from tests.cluster.contract_world import ContractWorld
from tests.cluster.service_world import HeardKeys


@pytest.fixture
def world(both_worlds: ContractWorld) -> ContractWorld:
    return both_worlds


def test_a_key_changes_only_at_the_revision_that_was_read(world: ContractWorld) -> None:
    keys = world.broker().keys
    assert world.call(keys.get, "k") is None
    first = world.call(keys.put, "k", b"one", 0)
    assert world.call(keys.put, "k", b"again", 0) == Conflict()
    second = world.call(keys.put, "k", b"two", first)
    assert second > first
    assert world.call(keys.put, "k", b"late", first) == Conflict()
    assert world.call(keys.put, "k", b"early", second + 1) == Conflict()
    assert world.call(keys.get, "k") == StoredKey(b"two", second)


def test_a_key_that_was_never_set_conflicts_with_any_revision(world: ContractWorld) -> None:
    keys = world.broker().keys
    assert world.call(keys.put, "k", b"x", 7) == Conflict()
    assert world.call(keys.get, "k") is None


def test_revisions_rise_over_all_keys(world: ContractWorld) -> None:
    keys = world.broker().keys
    revisions = [world.call(keys.put, name, b"", 0) for name in ("a", "b", "c")]
    assert revisions == sorted(set(revisions))
    assert world.call(keys.get, "b") == StoredKey(b"", revisions[1])


def test_of_two_brokers_that_read_one_revision_one_puts(world: ContractWorld) -> None:
    one, other = world.broker(), world.broker()
    first = world.call(one.keys.put, "lease", b"nobody", 0)
    second = world.call(other.keys.put, "lease", b"other", first)
    assert world.call(one.keys.put, "lease", b"one", first) == Conflict()
    assert world.call(one.keys.get, "lease") == StoredKey(b"other", second)


def test_a_put_whose_answer_is_lost_makes_the_next_one_conflict(world: ContractWorld) -> None:
    broker = world.broker()
    first = world.call(broker.keys.put, "k", b"one", 0)
    outcome = world.call_losing_answer(broker, broker.keys.put, "k", b"two", first)
    assert isinstance(outcome, Unanswered)
    assert world.call(broker.keys.put, "k", b"two", first) == Conflict()
    assert world.call(broker.keys.get, "k").value == b"two"


def test_a_put_whose_request_is_lost_changes_nothing(world: ContractWorld) -> None:
    broker = world.broker()
    first = world.call(broker.keys.put, "k", b"one", 0)
    outcome = world.call_losing_request(broker, broker.keys.put, "k", b"two", first)
    assert isinstance(outcome, Unanswered)
    assert world.call(broker.keys.get, "k") == StoredKey(b"one", first)


def test_while_the_store_is_away_requests_are_unanswered(world: ContractWorld) -> None:
    broker = world.broker()
    world.away(broker)
    assert isinstance(world.call(broker.keys.get, "k"), Unanswered)
    assert isinstance(world.call(broker.keys.put, "k", b"x", 0), Unanswered)
    world.back(broker)
    assert world.call(broker.keys.get, "k") is None


def test_a_watch_tells_of_what_is_there_and_of_each_change(world: ContractWorld) -> None:
    broker, other = world.broker(), world.broker()
    first = world.call(other.keys.put, "shard.0", b"a", 0)
    world.call(other.keys.put, "other", b"x", 0)
    heard = HeardKeys()
    watch = broker.keys.watch("shard.", heard.changed)
    assert heard.changes == [], "told within the call"
    world.until(lambda: len(heard.changes) == 1)
    world.call(other.keys.put, "shard.1", b"b", 0)
    world.call(other.keys.put, "shard.0", b"c", first)
    world.until(lambda: len(heard.changes) == 3)
    assert heard.changes == [("shard.0", b"a"), ("shard.1", b"b"), ("shard.0", b"c")]
    watch.close()
    world.call(other.keys.put, "shard.2", b"d", 0)
    world.quiet()
    assert len(heard.changes) == 3


def test_a_watch_tells_after_an_outage_what_changed_and_nothing_else(
    world: ContractWorld,
) -> None:
    broker, other = world.broker(), world.broker()
    revision = world.call(other.keys.put, "k1", b"1", 0)
    world.call(other.keys.put, "k2", b"2", 0)
    heard = HeardKeys()
    broker.keys.watch("k", heard.changed)
    world.until(lambda: len(heard.changes) == 2)
    world.away(broker)
    for value in (b"3", b"4"):
        revision = world.call(other.keys.put, "k1", value, revision)
    world.call(other.keys.put, "k3", b"new", 0)
    world.back(broker)
    world.until(lambda: dict(heard.changes).get("k3") == b"new")
    world.quiet()
    assert sorted(heard.changes[:2]) == [("k1", b"1"), ("k2", b"2")]
    later = [change for change in heard.changes[2:] if change != ("k1", b"3")]
    assert sorted(later) == [("k1", b"4"), ("k3", b"new")]


def test_a_watch_that_is_opened_while_the_store_is_away_begins_later(
    world: ContractWorld,
) -> None:
    broker = world.broker()
    world.call(broker.keys.put, "k", b"1", 0)
    world.away(broker)
    heard = HeardKeys()
    broker.keys.watch("", heard.changed)
    world.back(broker)
    world.until(lambda: bool(heard.changes))
    assert heard.changes == [("k", b"1")]


KEYS = ["shard.0", ".a..b.", "ümlaut und Leerzeichen", "a=3D", "*", ">", "a\nb", "-_/", "x" * 200]


def test_a_key_may_be_any_text(world: ContractWorld) -> None:
    keys = world.broker().keys
    heard = HeardKeys()
    for number, key in enumerate(KEYS):
        world.call(keys.put, key, b"%d" % number, 0)
    for number, key in enumerate(KEYS):
        assert world.call(keys.get, key).value == b"%d" % number
    keys.watch("", heard.changed)
    world.until(lambda: len(heard.changes) == len(KEYS))
    assert dict(heard.changes) == {key: b"%d" % number for number, key in enumerate(KEYS)}
