"""An owner that moves its shard to another broker, by simulation: who gets it, and what follows."""

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
