"""A broker that stops hands the shard over, whatever it is doing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.api.messages import Produce
from penstock.cluster.ownership import DRAIN_MS, RELEASE_MS, ShardRole
from penstock.cluster.replicated_log import Deposed
from tests.cluster.members import (
    AT_ONCE_MS,
    TTL_MS,
    ClusterWorld,
    Member,
)
from tests.cluster.simulated_service import Fate


@pytest.fixture
def world() -> Iterator[ClusterWorld]:
    world = ClusterWorld()
    yield world
    world.close()


@pytest.fixture
def a(world: ClusterWorld) -> Member:
    """The owner of a cluster of three."""
    return world.ready("abc")


def wait_for_role(world: ClusterWorld, member: Member, role: ShardRole) -> int:
    return world.simulation.wait_until(lambda: member.role is role)


def test_an_owner_that_stops_answers_what_it_accepted_and_hands_over_at_once(
    world: ClusterWorld, a: Member
) -> None:
    pending = [
        world.submit(a.engine.produce, Produce("t", "", f"v{number}", None)) for number in range(5)
    ]
    first = world.next_owner()
    steps = a.stop()
    took_ms = world.simulation.wait_until(lambda: first.role is ShardRole.OWNER)
    assert took_ms < AT_ONCE_MS
    assert all(outcome and not isinstance(outcome[0], Exception) for outcome in pending)
    assert world.values(first) == [f"v{number}" for number in range(5)]
    world.simulation.wait_until(lambda: steps == ["handed over", "left"])
    assert [name for _, name in world.epochs] == ["a", first.name]


def test_a_successor_that_is_gone_is_passed_over(world: ClusterWorld, a: Member) -> None:
    first = world.next_owner()
    world.probes_are_blind = True
    first.kill()
    a.stop()
    world.simulation.wait_until(lambda: bool(world.epochs[1:]), most_ms=AT_ONCE_MS)
    assert world.epochs[1][1] not in (a.name, first.name)


def test_a_hand_over_is_as_fast_while_a_renewal_is_under_way(
    world: ClusterWorld, a: Member
) -> None:
    world.probes_are_blind = True
    before = world.lease().renewals
    world.simulation.wait_until(lambda: world.lease().renewals > before)
    a.stop()
    assert world.simulation.wait_until(lambda: bool(world.epochs[1:])) < AT_ONCE_MS


@pytest.mark.parametrize("fate", [Fate.LOST_REQUEST, Fate.LOST_ANSWER])
def test_a_release_that_gets_no_answer_is_sent_again(
    world: ClusterWorld, a: Member, fate: Fate
) -> None:
    world.probes_are_blind = True
    steps = a.stop()
    world.simulation.wait_until(lambda: a.role is ShardRole.RELEASING)
    world.keys.plan(fate, "put shard", a.process)
    took_ms = world.simulation.wait_until(lambda: bool(world.epochs[1:]))
    assert took_ms < RELEASE_MS
    world.simulation.wait_until(lambda: "left" in steps)


def test_a_drain_that_never_ends_is_cut_short(world: ClusterWorld, a: Member) -> None:
    world.stream.cut(a.process)
    pending = world.submit(a.engine.produce, Produce("t", "", "never stored", None))
    steps = a.stop()
    world.simulation.pass_ms(DRAIN_MS - 1000)
    assert (steps, a.role) == ([], ShardRole.DRAINING)
    took_ms = world.simulation.wait_until(lambda: bool(world.epochs[1:]))
    assert took_ms < 1000 + AT_ONCE_MS
    world.simulation.wait_until(lambda: "left" in steps)
    assert not pending or isinstance(pending[0], Exception)
    assert world.values(world.owner()) == []


def test_an_owner_that_loses_its_lease_while_it_drains_ends_at_once(
    world: ClusterWorld, a: Member
) -> None:
    world.stream.cut(a.process)
    pending = world.submit(a.engine.produce, Produce("t", "", "never stored", None))
    steps = a.stop()
    world.may_two_be_sure = True
    world.mislead_probes(a.url)
    took_ms = world.simulation.wait_until(lambda: "handed over" in steps)
    assert took_ms < DRAIN_MS
    assert isinstance(pending[0], Deposed)
    assert a.role is ShardRole.STOPPED


@pytest.mark.parametrize(
    "role", [ShardRole.STANDBY, ShardRole.TAKING, ShardRole.PROMOTING, ShardRole.OWNER]
)
def test_a_broker_can_stop_in_each_role(world: ClusterWorld, a: Member, role: ShardRole) -> None:
    first = world.next_owner()
    other = next(each for each in world.standbys() if each is not first)
    if role is not ShardRole.STANDBY:
        a.kill()
        wait_for_role(world, first, role)
    world.probes_are_blind = True
    steps = first.stop()
    world.simulation.wait_until(lambda: "left" in steps, most_ms=RELEASE_MS + 2000)
    if role is ShardRole.STANDBY:
        a.stop()
    if role is not ShardRole.OWNER:
        assert first.name not in [name for _, name in world.epochs]
    assert world.simulation.wait_until(lambda: other.role is ShardRole.OWNER) < AT_ONCE_MS
    first.start()
    world.simulation.pass_ms(2 * TTL_MS)
    assert first.role is ShardRole.STANDBY
    assert first.image() == other.image()


def test_a_broker_that_stops_without_the_store_is_done_in_bounded_time(
    world: ClusterWorld, a: Member
) -> None:
    world.keys.leave()
    steps = a.stop()
    took_ms = world.simulation.wait_until(lambda: "left" in steps)
    assert took_ms <= RELEASE_MS + 1500
    world.keys.come_back()
    assert world.owner() is not a
