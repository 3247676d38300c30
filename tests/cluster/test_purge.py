"""The stream is purged only up to what enough live brokers have in synced files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.cluster.purging import PURGE_MS, ReplicaStanding, purge_position
from penstock.storage.log import WalOptions
from tests.cluster.members import ClusterWorld, Member

TINY = WalOptions(segment_bytes=16 * 1024, reserve_bytes=0)
SOON_MS = 3 * PURGE_MS


def standing(name: str, sealed: int, **options: bool) -> ReplicaStanding:
    return ReplicaStanding(name, sealed, options.pop("is_live", True), **options)


A, B = standing("a", 70), standing("b", 50)
DEAD = standing("c", 20, is_live=False)
COPYING = standing("c", 30, is_copying=True)


@pytest.mark.parametrize(
    ("standings", "copies", "half_full", "expected"),
    [
        ([A, B], 2, False, 50),
        ([A, B], 1, False, 50),
        ([A], 2, False, 0),
        ([A], 1, False, 70),
        ([A, B], 3, True, 0),
        ([A, B, DEAD], 2, False, 20),
        ([A, B, DEAD], 2, True, 50),
        ([A, DEAD], 2, True, 0),
        ([A, B, COPYING], 2, False, 30),
        ([A, B, COPYING], 3, False, 0),
        ([A, COPYING], 2, True, 0),
        ([A, B, standing("c", 0)], 2, False, 0),
        ([A, B, standing("c", 0)], 2, True, 50),
    ],
)
def test_the_position_up_to_which_is_purged(
    standings: list[ReplicaStanding], copies: int, half_full: bool, expected: int
) -> None:
    assert purge_position(standings, copies, is_half_full=half_full) == expected


@pytest.fixture
def world() -> Iterator[ClusterWorld]:
    world = ClusterWorld(options=TINY)
    yield world
    world.close()


def start(world: ClusterWorld, names: str) -> Member:
    world.start(names)
    owner = world.owner()
    world.must(owner.engine.create_topic, "t", 1)
    return owner


def fill(world: ClusterWorld, owner: Member, count: int = 80) -> None:
    for number in range(count):
        world.produce(owner, f"v{number} ".ljust(600, "x"))
    world.simulation.pass_ms(3000)


def others(world: ClusterWorld, owner: Member) -> list[Member]:
    return [member for member in world.nodes.values() if member is not owner]


def test_the_owner_purges_what_both_brokers_have_sealed(world: ClusterWorld) -> None:
    owner = start(world, "ab")
    fill(world, owner)
    world.simulation.pass_ms(SOON_MS)
    sealed = [member.replica.sealed_seq() for member in world.nodes.values()]
    assert world.stream.first_seq == min(sealed) + 1 > 20


def test_nothing_is_purged_while_one_broker_is_alone(world: ClusterWorld) -> None:
    owner = start(world, "a")
    fill(world, owner)
    world.simulation.pass_ms(SOON_MS)
    assert owner.replica.sealed_seq() > 20
    assert world.stream.first_seq == 1


def test_a_broker_that_is_away_keeps_the_stream_until_it_is_half_full(
    world: ClusterWorld,
) -> None:
    owner = start(world, "abc")
    fill(world, owner)
    world.simulation.pass_ms(SOON_MS)
    away = others(world, owner)[0]
    needs = away.replica.sealed_seq() + 1
    away.kill()
    fill(world, owner)
    world.simulation.pass_ms(SOON_MS)
    assert world.stream.first_seq == needs, "it can go on from here"
    used = sum(map(len, world.stream.messages.values()))
    world.stream.max_bytes = int(1.5 * used)
    world.simulation.pass_ms(SOON_MS)
    assert world.stream.first_seq > needs
    away.start()
    world.simulation.wait_until(lambda: away.replica.position() == owner.replica.position())
    assert away.image() == owner.image(), "it has copied the files of another one"


def test_a_stream_that_fills_up_is_sealed_early_and_purged(world: ClusterWorld) -> None:
    """Its brokers would seal much later, when their segments are full."""
    world._options = WalOptions(segment_bytes=1024 * 1024, reserve_bytes=0)
    owner = start(world, "ab")
    fill(world, owner)
    assert owner.replica.sealed_seq() == 0
    world.stream.max_bytes = 2 * sum(map(len, world.stream.messages.values()))
    world.simulation.pass_ms(SOON_MS)
    assert owner.replica.sealed_seq() > 0
    assert world.stream.first_seq > 20


def test_the_newest_message_stays(world: ClusterWorld) -> None:
    owner = start(world, "ab")
    fill(world, owner)
    for member in world.nodes.values():
        log = member.replica._log
        assert log is not None
        log.roll()
    world.simulation.pass_ms(SOON_MS)
    assert world.stream.first_seq == world.stream.last_seq


def test_a_new_broker_joins_after_a_purge(world: ClusterWorld) -> None:
    owner = start(world, "ab")
    fill(world, owner)
    world.simulation.pass_ms(SOON_MS)
    (new,) = world.start("c")
    world.simulation.wait_until(lambda: new.replica.position() == owner.replica.position())
    assert new.image() == owner.image()
    states = {report.name: report.state for report in new.node.brokers()}
    world.simulation.pass_ms(3000)
    states = {report.name: report.state for report in owner.node.brokers()}
    assert states["c"] == "standby"


def test_a_broker_that_copies_says_so(world: ClusterWorld) -> None:
    owner = start(world, "ab")
    fill(world, owner)
    world.simulation.pass_ms(SOON_MS)
    (new,) = world.start("c")
    seen: list[str] = []

    def before_read(node: object, name: str) -> None:
        progress = new.replica.copy_progress()
        if progress is not None:
            assert new.replica.sealed_seq() == progress.next_seq - 1
            seen.append((new.node._standings()[0].is_copying and "copying") or "")

    world.before_read = before_read
    world.simulation.wait_until(lambda: new.replica.position() == owner.replica.position())
    assert seen
    assert set(seen) == {"copying"}
