<<<<<<< HEAD
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
=======
"""An owner that hands its shard over, by simulation: who gets it, what becomes of the broker."""

from __future__ import annotations

from functools import partial

import pytest

from penstock.cluster.ownership import DRAIN_MS, RELEASE_MS, ShardRole
from penstock.model.errors import FailedPrecondition, NotFound, PenstockError
from tests.cluster.members import TTL_MS, ClusterWorld, Member

PROMPT_MS = 500
"""A hand-over takes far less than the lease, which nobody may wait for."""


def whole(world: ClusterWorld, owner: Member) -> None:
    """Waits until every other broker could take over, and has said so."""
    others = len(world.nodes) - 1
    world.simulation.wait_until(lambda: len(owner.node.successors()) == others, 60_000)


def owns(member: Member) -> bool:
    return member.node.ownership.role is ShardRole.OWNER


def cluster(names: str = "abc", seed: int = 0) -> tuple[ClusterWorld, Member]:
    world = ClusterWorld(seed)
    world.start(names)
    owner = world.owner()
    whole(world, owner)
    return world, owner


@pytest.mark.parametrize("seed", range(6))
def test_the_shard_goes_to_the_broker_that_was_named(seed: int) -> None:
    world, owner = cluster(seed=seed)
    for name in [each for each in "abc" if each != owner.name]:
        successor = world[name]
        owner.node.check_successor(name)
        owner.node.move(name, yields=False)
        took = world.simulation.now_ms
        world.simulation.wait_until(partial(owns, successor), PROMPT_MS)
        assert world.simulation.now_ms - took < PROMPT_MS
        world.simulation.wait_until(owner.replica.is_caught_up, 60_000)
        assert owner.node.ownership.role is ShardRole.STANDBY
        owner = successor
        whole(world, owner)


def test_a_drained_broker_takes_the_shard_again_only_if_no_other_does() -> None:
    world, owner = cluster()
    owner.node.move("", yields=True)
    world.simulation.wait_until(lambda: owner.node.ownership.role is ShardRole.STANDBY, PROMPT_MS)
    second = world.owner()
    whole(world, second)
    second.kill()
    third = world.owner()
    assert third not in (owner, second)
    third.kill()
    assert world.owner() is owner, "it is the last one"


def test_a_broker_that_the_shard_is_moved_to_is_drained_no_longer() -> None:
    world, owner = cluster()
    owner.node.move("", yields=True)
    world.simulation.wait_until(lambda: owner.node.ownership.role is ShardRole.STANDBY, PROMPT_MS)
    second = world.owner()
    whole(world, second)
    second.node.move(owner.name, yields=False)
    world.simulation.wait_until(lambda: owner.node.ownership.role is ShardRole.OWNER, PROMPT_MS)


def test_a_broker_that_is_stopped_while_it_hands_over_still_releases_the_lease() -> None:
    world, owner = cluster()
    world.probes_are_blind = True
    owner.node.move("", yields=False)
    steps = owner.stop()
    world.simulation.wait_until(lambda: "left" in steps, DRAIN_MS + RELEASE_MS + 2000)
    began = world.simulation.now_ms
    assert world.owner(PROMPT_MS) is not owner
    assert world.simulation.now_ms - began < TTL_MS


def test_only_a_standby_that_has_caught_up_is_a_successor() -> None:
    world, owner = cluster("ab")
    with pytest.raises(FailedPrecondition, match="owns the shard already"):
        owner.node.check_successor(owner.name)
    with pytest.raises(FailedPrecondition, match="no standby that has caught up"):
        owner.node.check_successor("c")
    other = world["b" if owner.name == "a" else "a"]
    with pytest.raises(FailedPrecondition, match="does not own the shard"):
        other.node.check_successor(owner.name)


def test_only_a_broker_that_is_gone_can_be_removed() -> None:
    world, owner = cluster()
    lost = next(each for each in world.nodes.values() if each is not owner)

    def removed(name: str) -> PenstockError | None:
        outcomes: list[PenstockError | None] = []
        owner.node.remove(name, outcomes.append)
        world.simulation.wait_until(lambda: bool(outcomes), 60_000)
        return outcomes[0]

    assert isinstance(removed(lost.name), FailedPrecondition)
    assert isinstance(removed("nobody"), NotFound)
    lost.kill()
    world.simulation.wait_until(lambda: not owner.node.is_live(lost.name), 60_000)
    assert [each.state for each in owner.node.brokers() if each.name == lost.name] == ["gone"]
    assert removed(lost.name) is None
    world.simulation.wait_until(
        lambda: lost.name not in [each.name for each in owner.node.brokers()], 60_000
    )
    assert isinstance(removed(lost.name), NotFound)
>>>>>>> af946e6 (Test hand-overs by simulation)
