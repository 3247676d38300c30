"""A probe tells that the owner is gone: in time, too late, of another one, or wrongly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.api.messages import Produce
from penstock.cluster.ownership import ShardRole
from penstock.cluster.replicated_log import Deposed
from tests.cluster.members import (
    AT_ONCE_MS,
    CURRENT_MS,
    PROBE_MS,
    RENEW_MS,
    TTL_MS,
    ClusterWorld,
    Member,
)


@pytest.fixture
def world() -> Iterator[ClusterWorld]:
    world = ClusterWorld()
    yield world
    world.close()


@pytest.fixture
def a(world: ClusterWorld) -> Member:
    """The owner of a cluster of three."""
    return world.ready("abc")


def test_a_probe_that_is_wrong_loses_nothing(world: ClusterWorld, a: Member) -> None:
    world.produce(a, "kept")
    world.may_two_be_sure = True
    world.mislead_probes(a.url)
    world.simulation.wait_until(lambda: bool(a.endings))
    owner = world.owner()
    assert owner is not a
    assert not a.is_sure()
    world.produce(owner, "new")
    world.simulation.pass_ms(2 * TTL_MS)
    assert world.values(owner) == ["kept", "new"]
    assert a.image() == owner.image()
    assert len(world.epochs) == 2


def test_an_owner_that_does_not_hear_of_a_wrong_probe_ends_with_its_lease(
    world: ClusterWorld, a: Member
) -> None:
    world.may_two_be_sure = True
    world.cut(a)
    world.mislead_probes(a.url)
    world.simulation.wait_until(lambda: bool(world.epochs[1:]))
    pending = world.submit(a.engine.produce, Produce("t", "", "refused", None))
    world.simulation.pass_ms(CURRENT_MS)
    assert not a.is_sure()
    assert pending == []
    world.may_two_be_sure = False
    world.connect(a)
    world.simulation.wait_until(lambda: bool(pending))
    assert isinstance(pending[0], Deposed)


def test_a_renewal_that_comes_after_the_probe_told_proves_it_wrong(world: ClusterWorld) -> None:
    """The broker could not take over when its probe told, and must not do so long after."""
    a = world.ready("ab")
    b = world["b"]
    world.stream.stall(b.process)
    for number in range(3):
        world.produce(a, f"v{number}")
        world.simulation.pass_ms(RENEW_MS)
    assert not b.replica.is_caught_up()
    world.mislead_probes(a.url)
    world.simulation.pass_ms(2 * RENEW_MS)
    world.stream.release(b.process)
    world.simulation.pass_ms(4 * TTL_MS)
    assert b.replica.is_caught_up()
    assert (a.role, b.role) == (ShardRole.OWNER, ShardRole.STANDBY)
    a.kill()
    assert world.simulation.wait_until(lambda: b.role is ShardRole.OWNER) < AT_ONCE_MS


def test_what_a_probe_tells_of_an_earlier_life_does_not_end_the_next_one(
    world: ClusterWorld,
) -> None:
    """The standby learns of the new lease before its probe tells that the old process is gone."""
    a = world.ready("ab")
    b = world["b"]
    a.kill()
    world.simulation.pass_ms(PROBE_MS - 2)
    b.process.pause()
    world.simulation.pass_ms(PROBE_MS)
    a.start()
    world.simulation.wait_until(lambda: a.role is ShardRole.OWNER)
    world.simulation.pass_ms(RENEW_MS // 2)
    b.process._arrived.reverse()
    b.process.resume()
    world.simulation.pass_ms(3 * TTL_MS)
    assert (a.role, b.role) == (ShardRole.OWNER, ShardRole.STANDBY)
    a.kill()
    assert world.simulation.wait_until(lambda: b.role is ShardRole.OWNER) < AT_ONCE_MS


def test_a_suspicion_of_one_owner_does_not_fall_on_the_next(world: ClusterWorld) -> None:
    a = world.ready("ab")
    b = world["b"]
    a.kill()
    assert world.owner() is b
    a.start()
    world.simulation.pass_ms(2 * TTL_MS)
    b.process.pause()
    world.simulation.wait_until(lambda: a.role is ShardRole.OWNER)
    b.process.resume(timers_first=True)
    world.simulation.pass_ms(4 * TTL_MS)
    assert (a.role, b.role) == (ShardRole.OWNER, ShardRole.STANDBY)
    assert [name for _, name in world.epochs] == ["a", "b", "a"]
