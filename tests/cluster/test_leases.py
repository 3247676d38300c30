"""The lease of a shard while the store of keys fails, forgets, lies, or is changed by a person."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from penstock.api.messages import Produce
from penstock.cluster.availability import Standstill, StoreAvailability
from penstock.cluster.lease import MIN_TTL_MS, encode_lease, lease_key, shard_of_key
from penstock.cluster.ownership import ShardRole
from penstock.cluster.replicated_log import Deposed
from penstock.model.errors import InvalidArgument
from penstock.server.clustering import check_cluster_settings
from penstock.server.settings import Settings
from tests.cluster.members import AT_ONCE_MS, CURRENT_MS, RENEW_MS, TTL_MS, ClusterWorld, Member
from tests.cluster.simulated_service import Fate

KEY = lease_key(0)


@pytest.fixture
def world() -> Iterator[ClusterWorld]:
    world = ClusterWorld()
    yield world
    world.close()


@pytest.fixture
def a(world: ClusterWorld) -> Member:
    """The owner of a cluster of two."""
    return world.ready("ab")


@pytest.fixture
def b(world: ClusterWorld, a: Member) -> Member:
    return world["b"]


def stays_owner(world: ClusterWorld, a: Member) -> bool:
    """Says whether this broker has been the only owner, and will be for a while."""
    world.simulation.pass_ms(3 * TTL_MS)
    return a.role is ShardRole.OWNER and len(world.epochs) == 1 and a.is_sure()


# -- lost answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", list(Fate))
def test_an_owner_survives_what_becomes_of_a_renewal(
    world: ClusterWorld, a: Member, fate: Fate
) -> None:
    for _ in range(3):
        world.keys.plan(fate, "put shard", a.process)
        world.simulation.pass_ms(2 * RENEW_MS)
    assert stays_owner(world, a)


@pytest.mark.parametrize("fate", list(Fate))
def test_a_take_is_tried_again_until_its_outcome_is_known(
    world: ClusterWorld, a: Member, b: Member, fate: Fate
) -> None:
    world.keys.plan(fate, "put shard", b.process)
    a.kill()
    took_ms = world.simulation.wait_until(lambda: b.role is ShardRole.OWNER)
    assert took_ms < 2 * TTL_MS
    assert b.is_sure()
    assert stays_owner_of(world, b)


def stays_owner_of(world: ClusterWorld, owner: Member) -> bool:
    served = len(world.epochs)
    world.simulation.pass_ms(3 * TTL_MS)
    return owner.role is ShardRole.OWNER and len(world.epochs) == served


# -- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", range(20))
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (0.96, 1.04)], ids=["even", "uneven"])
def test_nobody_takes_a_lease_while_its_owner_may_be_sure_of_it(
    world: ClusterWorld, phase: int, speeds: tuple[float, float]
) -> None:
    """The other one reads the lease at any time between two renewals. `ClusterWorld` checks that
    never two are sure."""
    world.start("a", speed=speeds[0], started_ms=10_000)
    world.owner()
    world.simulation.pass_ms(phase * RENEW_MS // 20)
    world.start("b", speed=speeds[1], started_ms=77_777)
    a, b = world["a"], world["b"]
    world.must(a.engine.create_topic, "t", 1)
    world.simulation.pass_ms(2 * TTL_MS)
    world.keys.cut(a.process)
    took_ms = world.simulation.wait_until(lambda: bool(b.role is ShardRole.OWNER))
    assert took_ms < TTL_MS + 2 * RENEW_MS
    world.produce(b, "new")
    reads = world.submit(a.engine.describe_topic, "t")
    world.simulation.wait_until(lambda: bool(reads))
    assert isinstance(reads[0], Deposed)


def test_time_between_an_answer_and_the_news_of_a_revision_does_not_count() -> None:
    availability = StoreAvailability(gap_ms=1500)
    standstill = Standstill(availability)
    availability.answered(1000)
    standstill.seen(7, 1900)
    availability.answered(2000)
    assert standstill.lasted_ms(7) == 100
    availability.answered(3000)
    assert standstill.lasted_ms(7) == 1100
    availability.answered(5000)
    assert standstill.lasted_ms(7) == 1100
    standstill.seen(8, 7000)
    availability.answered(7100)
    availability.answered(7200)
    assert standstill.lasted_ms(8) == 100
    assert standstill.lasted_ms(7) == 0


def test_clocks_that_differ_by_minutes_do_not_matter_to_leases(world: ClusterWorld) -> None:
    world.start("a", ahead_ms=300_000)
    a = world.owner()
    world.start("b", ahead_ms=-300_000)
    (b,) = [world["b"]]
    world.must(a.engine.create_topic, "t", 1)
    world.produce(a, "kept")
    world.simulation.pass_ms(10 * TTL_MS)
    assert (a.role, len(world.epochs)) == (ShardRole.OWNER, 1)
    before = a.process.clock.now_ms()
    a.kill()
    assert world.simulation.wait_until(lambda: b.role is ShardRole.OWNER) < AT_ONCE_MS
    assert before - RENEW_MS <= b.process.clock.now_ms() < before + TTL_MS
    assert world.values(b) == ["kept"]


# -- the store is away ----------------------------------------------------------------------------


def test_nobody_takes_over_from_a_live_owner_when_the_store_was_away_for_long(
    world: ClusterWorld, a: Member, b: Member
) -> None:
    world.keys.leave()
    world.simulation.pass_ms(10 * TTL_MS)
    assert a.role is ShardRole.OWNER
    assert not a.is_sure()
    world.produce(a, "stored without the store of keys")
    assert world.must(a.engine.describe_topic, "t").next_offset == 1
    world.keys.come_back()
    assert stays_owner(world, a)


def test_nobody_takes_over_from_a_live_owner_while_the_store_cannot_be_written(
    world: ClusterWorld, a: Member, b: Member
) -> None:
    world.keys.lose_quorum()
    requests = sum(world.keys.requests.values())
    world.simulation.pass_ms(10 * TTL_MS)
    assert sum(world.keys.requests.values()) - requests < 40 * TTL_MS // 100
    world.keys.regain_quorum(committed=0)
    assert stays_owner(world, a)


def test_a_store_that_cannot_be_written_is_not_asked_without_pause(
    world: ClusterWorld, a: Member, b: Member
) -> None:
    """Its leader refuses a take because of the one before, which it cannot store."""
    world.keys.lose_quorum()
    a.kill()
    requests = sum(world.keys.requests.values())
    world.simulation.pass_ms(10 * TTL_MS)
    assert b.role is not ShardRole.OWNER
    assert sum(world.keys.requests.values()) - requests < 30 * TTL_MS // 100
    world.keys.regain_quorum(committed=0)
    assert world.simulation.wait_until(lambda: b.role is ShardRole.OWNER) < 1000 + AT_ONCE_MS


def test_a_standby_takes_over_when_the_store_comes_back_without_the_owner(
    world: ClusterWorld, a: Member, b: Member
) -> None:
    world.probes_are_blind = True
    world.keys.leave()
    world.simulation.pass_ms(TTL_MS)
    a.kill()
    world.simulation.pass_ms(5 * TTL_MS)
    world.keys.come_back()
    assert world.simulation.wait_until(lambda: b.role is ShardRole.OWNER) < 2 * TTL_MS


def test_a_suspicion_is_kept_while_the_store_is_away(
    world: ClusterWorld, a: Member, b: Member
) -> None:
    """The owner and a leader of the store may be on one machine."""
    world.keys.leave()
    a.kill()
    world.simulation.pass_ms(2 * TTL_MS)
    world.keys.come_back()
    assert world.simulation.wait_until(lambda: b.role is ShardRole.OWNER) < 1000 + AT_ONCE_MS


def test_a_lease_that_was_lost_is_taken_back_later(
    world: ClusterWorld, a: Member, b: Member
) -> None:
    world.produce(a, "one")
    world.keys.cut(a.process)
    world.simulation.wait_until(lambda: b.role is ShardRole.OWNER)
    refused = world.submit(a.engine.produce, Produce("t", "", "refused", None))
    world.simulation.wait_until(lambda: bool(refused))
    assert isinstance(refused[0], Deposed)
    world.produce(b, "two")
    world.keys.connect(a.process)
    world.simulation.pass_ms(2 * TTL_MS)
    assert a.role is ShardRole.STANDBY
    b.kill()
    world.simulation.wait_until(lambda: a.role is ShardRole.OWNER)
    assert world.values(a) == ["one", "two"]
    assert [name for _, name in world.epochs] == ["a", "b", "a"]


# -- old values -----------------------------------------------------------------------------------


def test_an_owner_that_reads_an_older_lease_of_another_goes_on(
    world: ClusterWorld, a: Member, b: Member
) -> None:
    """A leader of the store that was cut off refuses a renewal and shows what it knew."""
    old = dict(world.keys.entries)
    a.kill()
    world.simulation.wait_until(lambda: b.role is ShardRole.OWNER)
    world.simulation.pass_ms(TTL_MS)
    world.keys.isolate(b.process, old)
    world.simulation.pass_ms(RENEW_MS + 200)
    world.keys.rejoin(b.process)
    world.simulation.pass_ms(3 * TTL_MS)
    assert b.role is ShardRole.OWNER
    assert b.is_sure()
    assert len(world.epochs) == 2


def test_a_standby_that_reads_old_values_takes_nothing(
    world: ClusterWorld, a: Member, b: Member
) -> None:
    world.keys.isolate(b.process)
    world.simulation.pass_ms(5 * TTL_MS)
    assert b.role is not ShardRole.OWNER
    world.keys.rejoin(b.process)
    assert stays_owner(world, a)


# -- people ---------------------------------------------------------------------------------------

SPOILED = {
    "removed": None,
    "no JSON": b"\xff\x00garbage",
    "no lease": b'{"owner": 7}',
    "too long a number": b'{"owner":"x","url":"","node_id":"","life_id":"","epoch":1'
    + b"0" * 400
    + b',"now_ms":0}',
    "below 0": b'{"owner":"x","url":"","node_id":"","life_id":"","epoch":-5,"now_ms":0}',
    "an old one": b'{"owner":"x","url":"http://x:99999999","node_id":"","life_id":"","epoch":0,'
    b'"now_ms":0}',
}


@pytest.mark.parametrize("value", SPOILED.values(), ids=SPOILED)
def test_a_lease_that_somebody_spoiled_is_written_again(
    world: ClusterWorld, a: Member, b: Member, value: bytes | None
) -> None:
    if value is None:
        world.keys.delete(KEY)
    else:
        world.keys.set(KEY, value)
    assert stays_owner(world, a)
    assert world.lease().owner == "a"
    a.kill()
    assert world.simulation.wait_until(lambda: b.role is ShardRole.OWNER) < AT_ONCE_MS


@pytest.mark.parametrize("value", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_lease_without_an_owner_is_taken_when_it_has_stood_still(
    world: ClusterWorld, a: Member, b: Member, value: bytes | None
) -> None:
    world.produce(a, "kept")
    world.probes_are_blind = True
    a.kill()
    if value is None:
        world.keys.delete(KEY)
    else:
        world.keys.set(KEY, value)
    took_ms = world.simulation.wait_until(lambda: b.role is ShardRole.OWNER)
    assert CURRENT_MS <= took_ms < TTL_MS + 2 * RENEW_MS
    assert world.values(b) == ["kept"]
    assert world.epochs[-1] == (2, "b")


def test_an_owner_keeps_to_a_lease_that_a_person_gave_to_another(
    world: ClusterWorld, a: Member, b: Member
) -> None:
    world.produce(a, "kept")
    lease = msgspec.structs.replace(
        world.lease(), owner="b", node_id="n", life_id="l", epoch=9, is_released=True, successor="b"
    )
    world.may_two_be_sure = True
    world.keys.set(KEY, encode_lease(lease))
    assert world.simulation.wait_until(lambda: bool(world.epochs[1:])) < AT_ONCE_MS
    world.may_two_be_sure = False
    assert world.epochs[1] == (10, "b")
    assert world.values(b) == ["kept"]


def test_a_store_that_was_made_anew_changes_no_owner(
    world: ClusterWorld, a: Member, b: Member
) -> None:
    world.keys.make_anew()
    assert stays_owner(world, a)
    assert world.lease().owner == "a"
    assert [each.name for each in b.node.brokers()] == ["a", "b"]
    world.simulation.pass_ms(TTL_MS)
    a.kill()
    assert world.simulation.wait_until(lambda: b.role is ShardRole.OWNER) < 2 * TTL_MS
    assert world.epochs[-1] == (2, "b")


def test_a_standby_knows_the_lease_of_a_store_that_was_made_anew(
    world: ClusterWorld, a: Member, b: Member
) -> None:
    """Its revisions are lower than those that the standby has seen."""
    world.simulation.pass_ms(20 * TTL_MS)
    world.keys.make_anew()
    world.simulation.pass_ms(2 * RENEW_MS)
    a.kill()
    assert world.simulation.wait_until(lambda: b.role is ShardRole.OWNER) < AT_ONCE_MS
    assert world.epochs[-1] == (2, "b")


def test_keys_that_are_no_lease_are_nobodys() -> None:
    assert shard_of_key("shard.0") == 0
    assert shard_of_key("shard.15") == 15
    for key in ("shard.", "shard.00", "shard.-1", "shard.1x", "shards.1", "shard." + "9" * 5000):
        assert shard_of_key(key) is None


def test_a_lease_so_short_that_one_slow_answer_would_end_it_is_refused() -> None:
    settings = Settings(name="b1", cluster_lease_ms=MIN_TTL_MS - 1)
    with pytest.raises(InvalidArgument, match="cluster_lease_ms"):
        check_cluster_settings(settings, "")
