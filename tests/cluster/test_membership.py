"""Brokers join a cluster, agree on settings, have a name of their own, and leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.cluster.agreement import (
    AGREEMENT_KEY,
    CLUSTER_FORMAT,
    Agreement,
    decode_agreement,
    encode_agreement,
)
from penstock.cluster.ownership import ShardRole
from penstock.cluster.roster import Announcement
from penstock.model.errors import FailedPrecondition, InvalidArgument
from tests.cluster.members import TTL_MS, ClusterWorld, Member
from tests.cluster.test_roster import announcement

OURS: dict[str, Any] = {"lease_ms": 30_000, "max_in_flight": 100}
OTHERS: dict[str, Any] = {"lease_ms": 60_000, "max_in_flight": 100}


@pytest.fixture
def world() -> Iterator[ClusterWorld]:
    world = ClusterWorld()
    yield world
    world.close()


def joined(world: ClusterWorld, names: str, **options: Any) -> list[Member]:
    """Starts brokers, and waits until all are members."""
    members = world.start(names, **options)
    world.simulation.wait_until(lambda: all(each.joined for each in members))
    assert all(each.joined == [None] for each in members)
    return members


def refusal(world: ClusterWorld, member: Member, most_ms: int = 3 * TTL_MS) -> str:
    """Waits until a broker was refused, and returns why."""
    world.simulation.wait_until(lambda: bool(member.joined or member.refusals), most_ms)
    error = member.joined[0] if member.joined else member.refusals[0]
    assert isinstance(error, FailedPrecondition | InvalidArgument), error
    return error.message


def live(member: Member) -> list[str]:
    return [each.name for each in member.node.brokers() if each.state != "gone"]


def agreement(world: ClusterWorld) -> Agreement | None:
    return decode_agreement(world.keys.entries[AGREEMENT_KEY].value)


# -- joining and leaving --------------------------------------------------------------------------


def test_members_know_each_other(world: ClusterWorld) -> None:
    members = joined(world, "abc")
    world.simulation.pass_ms(TTL_MS)
    assert all(live(each) == ["a", "b", "c"] for each in members)


def test_a_broker_that_is_gone_is_not_live_for_long(world: ClusterWorld) -> None:
    a, b = joined(world, "ab")
    b.kill()
    world.simulation.pass_ms(TTL_MS // 2)
    assert live(a) == ["a", "b"]
    world.simulation.pass_ms(TTL_MS)
    assert live(a) == ["a"]


def test_a_broker_that_leaves_is_not_live_any_more_at_once(world: ClusterWorld) -> None:
    a, b = joined(world, "ab")
    world.simulation.pass_ms(100)
    steps = b.stop()
    world.simulation.wait_until(lambda: "left" in steps)
    world.simulation.pass_ms(10)
    assert live(a) == ["a"]


def test_a_broker_waits_for_a_store_that_is_away(world: ClusterWorld) -> None:
    world.keys.leave()
    (a,) = world.start("a")
    world.simulation.pass_ms(5 * TTL_MS)
    assert a.joined == []
    world.keys.come_back()
    world.simulation.wait_until(lambda: a.joined == [None], most_ms=2000)
    assert world.owner() is a


def test_a_broker_that_was_cut_off_for_long_is_a_member_again(world: ClusterWorld) -> None:
    a, b = joined(world, "ab")
    world.keys.cut(b.process)
    world.simulation.pass_ms(5 * TTL_MS)
    assert live(a) == ["a"]
    world.keys.connect(b.process)
    world.simulation.pass_ms(TTL_MS)
    assert live(a) == live(b) == ["a", "b"]
    assert b.refusals == []


@pytest.mark.parametrize("value", [None, b"garbage", b'{"name": "z"}'])
def test_an_announcement_that_somebody_spoiled_is_written_again(
    world: ClusterWorld, value: bytes | None
) -> None:
    a, b = joined(world, "ab")
    if value is None:
        world.keys.delete("broker.b")
    else:
        world.keys.set("broker.b", value)
    world.simulation.pass_ms(TTL_MS)
    assert live(a) == ["a", "b"]
    assert b.refusals == []


# -- names ----------------------------------------------------------------------------------------


def test_a_second_broker_of_one_name_is_refused(world: ClusterWorld) -> None:
    a, _ = joined(world, "ab")
    (twin,) = world.start("x", called="a")
    why = refusal(world, twin)
    assert "another broker of this cluster has the name a" in why
    assert "http://a:80" in why
    world.simulation.pass_ms(2 * TTL_MS)
    assert a.refusals == []
    assert twin.role is not ShardRole.OWNER
    assert twin.stop() is not None


def test_of_two_brokers_of_one_name_that_start_together_one_joins(world: ClusterWorld) -> None:
    twins = [*world.start("x", called="a"), *world.start("y", called="a")]
    world.simulation.wait_until(lambda: all(each.joined for each in twins))
    world.simulation.pass_ms(2 * TTL_MS)
    assert sorted(each.joined == [None] for each in twins) == [False, True]
    assert [each.refusals for each in twins] == [[], []]


def test_a_name_is_free_when_its_broker_has_left(world: ClusterWorld) -> None:
    (a,) = joined(world, "a")
    steps = a.stop()
    world.simulation.wait_until(lambda: "left" in steps)
    (heir,) = world.start("x", called="a")
    world.simulation.wait_until(lambda: heir.joined == [None], most_ms=TTL_MS // 2)


def test_a_name_is_free_when_its_broker_was_silent_for_long_enough(world: ClusterWorld) -> None:
    (a,) = joined(world, "a")
    a.kill()
    (heir,) = world.start("x", called="a")
    took_ms = world.simulation.wait_until(lambda: bool(heir.joined))
    assert heir.joined == [None]
    assert TTL_MS <= took_ms < 2 * TTL_MS


def test_a_broker_that_restarts_on_its_directory_has_its_name_at_once(world: ClusterWorld) -> None:
    (a,) = joined(world, "a")
    a.restart()
    world.simulation.wait_until(lambda: a.joined == [None], most_ms=TTL_MS // 2)


def test_a_broker_leaves_when_another_took_its_name_meanwhile(world: ClusterWorld) -> None:
    a, _ = joined(world, "ab")
    world.keys.cut(a.process)
    world.simulation.pass_ms(2 * TTL_MS)
    (heir,) = world.start("x", called="a")
    world.simulation.wait_until(lambda: heir.joined == [None], most_ms=2 * TTL_MS)
    world.keys.connect(a.process)
    assert "has the name a" in refusal_of_member(world, a)
    world.simulation.pass_ms(2 * TTL_MS)
    assert heir.refusals == []


def test_of_two_brokers_on_copies_of_one_directory_the_earlier_leaves(world: ClusterWorld) -> None:
    (a,) = joined(world, "a")
    (twin,) = world.start("x", called="a")
    twin.kill()
    twin.vfs.plant("/node-x/NODE", a.vfs.content("/node-a/NODE"))
    twin.start()
    assert "has the name a" in refusal_of_member(world, a)
    assert twin.joined == [None]
    a.kill()
    world.simulation.pass_ms(2 * TTL_MS)
    assert twin.refusals == []


def refusal_of_member(world: ClusterWorld, member: Member) -> str:
    """Waits until a broker that had joined was refused."""
    world.simulation.wait_until(lambda: bool(member.refusals), 10 * TTL_MS)
    (error,) = member.refusals
    return error.message


# -- settings -------------------------------------------------------------------------------------


def test_other_settings_than_those_of_live_brokers_are_refused(world: ClusterWorld) -> None:
    joined(world, "ab", settings=OURS)
    (c,) = world.start("c", settings=OTHERS)
    why = refusal(world, c)
    assert "lease_ms 60000 instead of 30000" in why
    assert "max_in_flight" not in why
    assert agreement(world) == Agreement(CLUSTER_FORMAT, OURS)


def test_a_setting_that_the_others_lack_is_named() -> None:
    mine, theirs = Agreement(1, {"a": 1, "b": True}), Agreement(1, {"a": 1})
    assert mine.differences(theirs) == ["b not set instead of True"]
    assert mine.differences(mine) == []


def test_another_format_is_refused(world: ClusterWorld) -> None:
    joined(world, "a", settings=OURS)
    other = encode_agreement(Agreement(CLUSTER_FORMAT + 1, OURS))
    world.keys.set(AGREEMENT_KEY, other)
    (b,) = world.start("b", settings=OURS)
    world.simulation.wait_until(lambda: bool(b.joined))
    assert Agreement(2, {}).differences(Agreement(3, {"a": 1})) == ["format 3 instead of 2"]
    world["a"].kill()
    b.kill()
    world.keys.set(AGREEMENT_KEY, other)
    world.keys.set("broker.z", announcement("z", beats=1))
    (c,) = world.start("c", settings=OURS)
    world.simulation.pass_ms(1000)
    world.keys.set("broker.z", announcement("z", beats=2))
    assert f"format {CLUSTER_FORMAT} instead of {CLUSTER_FORMAT + 1}" in refusal(world, c)


def test_other_settings_are_agreed_on_when_nobody_else_is_live(world: ClusterWorld) -> None:
    (a,) = joined(world, "a", settings=OURS)
    a.kill()
    (b,) = world.start("b", settings=OTHERS)
    took_ms = world.simulation.wait_until(lambda: b.joined == [None])
    assert TTL_MS <= took_ms < 4 * TTL_MS
    assert agreement(world) == Agreement(CLUSTER_FORMAT, OTHERS)
    a.start()
    assert "lease_ms 30000 instead of 60000" in refusal(world, a)


@pytest.mark.parametrize("delay_ms", [0, 1, 3, 150, 500])
def test_brokers_of_different_settings_that_start_together_do_not_both_join(
    world: ClusterWorld, delay_ms: int
) -> None:
    (a,) = joined(world, "a", settings={"lease_ms": 1})
    a.kill()
    (b,) = world.start("b", settings=OURS)
    world.simulation.pass_ms(delay_ms)
    (c,) = world.start("c", settings=OTHERS)
    world.simulation.wait_until(lambda: bool(b.joined and c.joined))
    world.simulation.pass_ms(3 * TTL_MS)
    members = [each for each in (b, c) if each.joined == [None] and not each.refusals]
    assert len(members) == 1
    assert agreement(world) == Agreement(CLUSTER_FORMAT, members[0].settings)


@pytest.mark.parametrize("value", [None, b"garbage"])
def test_an_agreement_that_somebody_spoiled_is_written_again(
    world: ClusterWorld, value: bytes | None
) -> None:
    a, b = joined(world, "ab", settings=OURS)
    beats = world.keys.requests["put broker.a"]
    world.simulation.wait_until(lambda: world.keys.requests["put broker.a"] > beats)
    world.simulation.pass_ms(20)
    if value is None:
        world.keys.delete(AGREEMENT_KEY)
    else:
        world.keys.set(AGREEMENT_KEY, value)
    (c,) = world.start("c", settings=OTHERS)
    world.keys.stall(c.process)
    world.simulation.pass_ms(50)
    world.keys.release(c.process)
    assert "lease_ms" in refusal(world, c)
    assert agreement(world) == Agreement(CLUSTER_FORMAT, OURS)
    assert a.refusals == b.refusals == []


def test_a_newcomer_that_does_not_see_the_others_cannot_replace_their_settings(
    world: ClusterWorld,
) -> None:
    """Its watch tells nothing, as on a server that lags behind."""
    a, b = joined(world, "ab", settings=OURS)
    (c,) = world.start("c", settings=OTHERS)
    world.keys.stall(c.process)
    world.simulation.pass_ms(10 * TTL_MS)
    assert c.joined == []
    assert a.refusals == b.refusals == []
    world.keys.release(c.process)
    assert "lease_ms" in refusal(world, c)


def test_a_broker_that_was_away_while_the_others_agreed_anew_leaves(world: ClusterWorld) -> None:
    (a,) = joined(world, "a", settings=OURS)
    world.keys.cut(a.process)
    world.simulation.pass_ms(2 * TTL_MS)
    (b,) = world.start("b", settings=OTHERS)
    world.simulation.wait_until(lambda: b.joined == [None])
    writes = world.keys.requests["put agreement"]
    world.keys.connect(a.process)
    assert "lease_ms 30000 instead of 60000" in refusal_of_member(world, a)
    world.simulation.pass_ms(2 * TTL_MS)
    assert b.refusals == []
    assert world.keys.requests["put agreement"] == writes


def test_the_standing_of_a_broker_is_announced(world: ClusterWorld) -> None:
    a = world.ready("ab")
    world.produce(a, "v")
    world.simulation.pass_ms(TTL_MS)
    found: Announcement | None = a.node._roster.find_live("b")
    assert found is not None
    assert found.shards[0].is_caught_up
    assert found.shards[0].position == world.stream.last_seq
