"""Which brokers are live, as they announce themselves, and the order in which they take over."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from penstock.cluster.lease import Lease
from penstock.cluster.roster import (
    MOST_BROKERS,
    Announcement,
    Roster,
    Standing,
    decode_announcement,
)
from penstock.cluster.succession import takers
from tests.cluster.members import TTL_MS, ClusterWorld


def announcement(
    name: str, *, beats: int, now_ms: int = 0, is_caught_up: bool | None = None
) -> bytes:
    shards = {} if is_caught_up is None else {0: Standing(1, is_caught_up)}
    return msgspec.json.encode(
        Announcement(name, "http://z:1", "n", "l", "1", now_ms, beats, shards)
    )


class RosterWorld:
    def __init__(self) -> None:
        self.world = ClusterWorld()
        self.process = self.world.simulation.process("r")
        self.roster = Roster(
            self.world.keys.handle(self.process),
            self.process.monotonic_ms,
            self.process.clock.wall_ms,
            TTL_MS,
        )
        self.roster.open()

    def announce(self, name: str, **fields: Any) -> None:
        self.world.keys.set(f"broker.{name}", announcement(name, **fields))
        self.world.simulation.pass_ms(5)

    def names(self) -> list[str]:
        return [each.name for each in self.roster.live()]


def test_an_announcement_that_does_not_change_is_not_of_a_live_broker() -> None:
    its = RosterWorld()
    its.announce("z", beats=1)
    assert its.names() == ["z"]
    assert not its.roster.has_changed("z")
    its.world.simulation.pass_ms(TTL_MS)
    assert its.names() == []
    its.announce("z", beats=2)
    assert its.names() == ["z"]
    assert its.roster.has_changed("z")


def test_an_announcement_under_another_name_counts_for_nobody() -> None:
    its = RosterWorld()
    its.world.keys.set("broker.y", announcement("z", beats=1))
    its.world.keys.set("broker.x", b"garbage")
    its.world.simulation.pass_ms(5)
    assert its.names() == []
    assert decode_announcement(b"\xff") is None


def test_a_roster_is_bounded() -> None:
    its = RosterWorld()
    for number in range(MOST_BROKERS + 5):
        name = f"z{number}"
        its.world.keys.set(f"broker.{name}", announcement(name, beats=1))
    its.world.simulation.pass_ms(5)
    assert len(its.names()) == MOST_BROKERS
    its.world.keys.delete("broker.z0")
    its.announce("new", beats=1)
    assert "new" in its.names()


def test_a_clock_that_is_far_ahead_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    its = RosterWorld()
    wall_ms = its.process.clock.wall_ms()
    with caplog.at_level(logging.WARNING, "penstock.cluster"):
        for beats in range(5):
            its.announce("late", beats=beats, now_ms=wall_ms - 60_000)
            its.announce("fast", beats=beats, now_ms=wall_ms + 60_000)
    assert len(caplog.messages) == 1
    assert "clock of broker fast is 59" in caplog.text


def test_all_brokers_have_the_same_order_of_takers() -> None:
    its = RosterWorld()
    for name in "abcdef":
        its.announce(name, beats=1, is_caught_up=True)
    orders = [takers(0, None, name, its.roster) for name in "abcdef"]
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == list("abcdef")
    its.announce("g", beats=1, is_caught_up=False)
    assert takers(0, None, "a", its.roster) == orders[0]
    assert set(takers(0, None, "g", its.roster)) == set("abcdefg")


def test_the_successor_that_the_last_owner_chose_is_the_first_to_take_over() -> None:
    its = RosterWorld()
    for name in "abc":
        its.announce(name, beats=1, is_caught_up=True)
    for successor in "bc":
        lease = Lease("a", "", "n", "l", 1, 0, is_released=True, successor=successor)
        order = takers(0, lease, "b", its.roster)
        assert order[0] == successor
        assert sorted(order) == ["b", "c"]


def test_each_shard_has_another_order() -> None:
    its = RosterWorld()
    shards = {shard: Standing(1, True) for shard in range(16)}
    for name in "abc":
        value = Announcement(name, "", "n", "l", "1", 0, 1, shards)
        its.world.keys.set(f"broker.{name}", msgspec.json.encode(value))
    its.world.simulation.pass_ms(5)
    assert {takers(shard, None, "a", its.roster)[0] for shard in shards} == {"a", "b", "c"}
