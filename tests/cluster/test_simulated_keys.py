"""The simulated keys' faults do what they name. Their contract is in test_shared_keys.py."""

from __future__ import annotations

import pytest

from penstock.cluster.shared import Conflict, StoredKey, Unanswered
from tests.cluster.service_world import HeardKeys, World


@pytest.fixture
def world() -> World:
    return World()


def test_a_watch_tells_of_what_is_there_and_of_each_change(world: World) -> None:
    _, _, keys = world.broker()
    world.keys.set("shard.0", b"a")
    world.keys.set("other", b"x")
    heard = HeardKeys()
    watch = keys.watch("shard.", heard.changed)
    assert heard.values() == []
    world.simulation.pass_ms(5)
    world.keys.set("shard.1", b"b")
    world.simulation.pass_ms(5)
    world.keys.delete("shard.0")
    world.simulation.pass_ms(5)
    assert heard.changes == [("shard.0", b"a"), ("shard.1", b"b"), ("shard.0", None)]
    watch.close()
    world.keys.set("shard.1", b"c")
    world.simulation.pass_ms(5)
    assert len(heard.changes) == 3


def test_a_watch_that_was_held_up_tells_the_last_values_only(world: World) -> None:
    process, _, keys = world.broker()
    heard = HeardKeys()
    keys.watch("k", heard.changed)
    world.keys.stall(process)
    world.keys.set("k", b"one")
    world.keys.set("k", b"two")
    world.simulation.pass_ms(100)
    assert heard.values() == []
    world.keys.release(process)
    world.simulation.pass_ms(5)
    assert heard.values() == [b"two"]


@pytest.mark.parametrize("committed", [0, 1])
def test_keys_without_quorum_are_read_and_not_changed(world: World, committed: int) -> None:
    _, _, keys = world.broker()
    first = world.call(keys.put, "k", b"one", 0)
    world.keys.lose_quorum()
    assert isinstance(world.call(keys.put, "k", b"two", first), Unanswered)
    assert world.call(keys.put, "k", b"two", first) == Conflict()
    assert world.call(keys.get, "k") == StoredKey(b"one", first)
    world.keys.regain_quorum(committed)
    assert world.call(keys.get, "k").value == (b"two" if committed else b"one")


def test_an_old_leader_of_the_keys_shows_old_values(world: World) -> None:
    process, _, keys = world.broker("b1")
    _, _, others = world.broker("b2")
    first = world.call(keys.put, "k", b"one", 0)
    heard = HeardKeys()
    keys.watch("k", heard.changed)
    world.simulation.pass_ms(5)
    world.keys.isolate(process)
    world.call(others.put, "k", b"two", first)
    assert world.call(keys.get, "k") == StoredKey(b"one", first)
    assert isinstance(world.call(keys.put, "k", b"vain", first), Unanswered)
    world.keys.rejoin(process)
    assert world.call(keys.get, "k").value == b"two"
    assert heard.values() == [b"one", b"two"]
