"""Brokers choose who owns the shard: at the start, after a kill, a stop, a pause, an error."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from penstock.api.messages import Produce
from penstock.api.topics import TopicReport
from penstock.cluster.ownership import ShardRole
from penstock.cluster.replicated_log import Deposed
from tests.cluster.members import AT_ONCE_MS, CURRENT_MS, RENEW_MS, TTL_MS, ClusterWorld, Member
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


# -- the first owner ------------------------------------------------------------------------------


def test_the_first_broker_of_a_new_cluster_owns_its_shard_at_once(world: ClusterWorld) -> None:
    (a,) = world.start("a")
    assert world.owner(most_ms=TTL_MS // 2) is a
    assert a.joined == [None]
    assert (world.lease().owner, world.lease().epoch) == ("a", 1)


def test_brokers_that_start_together_choose_one_owner(world: ClusterWorld) -> None:
    world.start("abcde")
    owner = world.owner(most_ms=TTL_MS)
    world.simulation.pass_ms(3 * TTL_MS)
    assert world.epochs == [(1, owner.name)]
    assert len(world.standbys()) == 4


def test_every_broker_knows_the_owner(world: ClusterWorld, a: Member) -> None:
    for member in world.nodes.values():
        report = member.node.owner_of(0)
        assert report is not None
        assert (report.owner, report.url, report.epoch) == ("a", a.url, 1)
        states = {each.name: each.state for each in member.node.brokers()}
        assert states == {"a": "owner", "b": "standby", "c": "standby"}


# -- after a kill ---------------------------------------------------------------------------------


def test_the_next_broker_takes_over_at_once_when_its_probe_sees_that_the_owner_is_gone(
    world: ClusterWorld, a: Member
) -> None:
    world.produce(a, "kept")
    first = world.next_owner()
    a.kill()
    assert world.simulation.wait_until(lambda: first.role is ShardRole.OWNER) < AT_ONCE_MS
    assert world.values(first) == ["kept"]


def test_without_a_probe_the_lease_runs_out_first(world: ClusterWorld, a: Member) -> None:
    world.probes_are_blind = True
    a.kill()
    took_ms = world.simulation.wait_until(lambda: bool(world.epochs[1:]))
    assert CURRENT_MS - RENEW_MS < took_ms < TTL_MS + 2 * RENEW_MS


def test_all_brokers_agree_on_the_order_in_which_they_take_over(
    world: ClusterWorld, a: Member
) -> None:
    b, c = world.standbys()
    assert b.node.ownership._takers() == c.node.ownership._takers()
    first = world.next_owner()
    tries = world.keys.requests["put shard.0"]
    a.kill()
    assert world.owner() is first
    assert world.keys.requests["put shard.0"] == tries + 1
    world.simulation.pass_ms(TTL_MS)
    a.restart()
    world.simulation.pass_ms(2 * TTL_MS)
    orders = {tuple(each.node.ownership._takers()) for each in world.standbys()}
    assert len(orders) == 1
    assert len(orders.pop()) == 2


def test_a_broker_that_does_not_take_its_turn_is_passed_over(
    world: ClusterWorld, a: Member
) -> None:
    first = world.next_owner()
    first.process.pause()
    a.kill()
    assert world.simulation.wait_until(lambda: bool(world.epochs[1:])) < AT_ONCE_MS
    assert world.epochs[1][1] not in (a.name, first.name)


def test_a_broker_whose_copy_is_behind_does_not_take_over(world: ClusterWorld) -> None:
    a = world.ready("ab")
    b = world["b"]
    world.stream.stall(b.process)
    for number in range(3):
        world.produce(a, f"v{number}")
        world.simulation.pass_ms(RENEW_MS)
    a.kill()
    world.simulation.pass_ms(4 * TTL_MS)
    assert b.role is ShardRole.STANDBY
    world.stream.release(b.process)
    assert world.owner(most_ms=3000) is b
    assert world.values(b) == ["v0", "v1", "v2"]


def test_a_broker_that_was_restarted_takes_its_own_lease_back_at_once(world: ClusterWorld) -> None:
    a = world.ready("a")
    world.produce(a, "kept")
    a.restart()
    assert world.owner(most_ms=TTL_MS // 2) is a
    assert world.values(a) == ["kept"]
    assert world.lease().epoch == 2


def test_a_copied_data_directory_gives_no_right_to_the_lease(world: ClusterWorld) -> None:
    a = world.ready("a")
    world.probes_are_blind = True
    (b,) = world.start("b")
    b.kill()
    b.vfs.plant("/node-b/NODE", a.vfs.content("/node-a/NODE"))
    b.start()
    world.simulation.pass_ms(4 * TTL_MS)
    assert (a.role, b.role) == (ShardRole.OWNER, ShardRole.STANDBY)
    assert len(world.epochs) == 1


def test_a_renewal_under_way_when_the_owner_is_killed_delays_nobody(
    world: ClusterWorld, a: Member
) -> None:
    """It may be stored after the others have heard that the process is gone."""
    world.keys.faults.least_delay_ms = world.keys.faults.most_delay_ms = 50
    renewals = world.keys.requests["put shard.0"]
    world.simulation.wait_until(lambda: world.keys.requests["put shard.0"] > renewals)
    a.kill()
    before = world.lease().renewals
    assert world.simulation.wait_until(lambda: bool(world.epochs[1:])) < 10 * AT_ONCE_MS
    assert world.lease().renewals <= before + 1


# -- a pause --------------------------------------------------------------------------------------


@pytest.mark.parametrize("timers_first", [False, True])
def test_an_owner_that_was_paused_acknowledges_nothing_and_reads_nothing_from_memory(
    world: ClusterWorld, a: Member, *, timers_first: bool
) -> None:
    world.produce(a, "kept")
    a.process.pause()
    pending = [world.submit(a.engine.produce, Produce("t", "", "doubtful", None))]
    reads = [world.submit(a.engine.describe_topic, "t")]
    owner = a
    world.simulation.wait_until(lambda: len(world.epochs) == 2)
    owner = world.owner()
    world.produce(owner, "new")
    engine = a.engine
    a.process.resume(timers_first=timers_first)
    assert not a.is_sure()
    pending.append(world.submit(engine.produce, Produce("t", "", "late", None)))
    reads.append(world.submit(engine.describe_topic, "t"))
    world.simulation.wait_until(lambda: all([*pending, *reads]))
    for outcome in [*pending, *reads[1:]]:
        assert isinstance(outcome[0], Deposed)
    assert not isinstance(reads[0][0], TopicReport) or reads[0][0].next_offset == 1
    world.simulation.pass_ms(2 * TTL_MS)
    assert a.role is ShardRole.STANDBY
    assert world.values(owner) == ["kept", "new"]
    assert a.image() == owner.image()


def test_an_owner_that_was_paused_for_less_than_its_lease_goes_on(
    world: ClusterWorld, a: Member
) -> None:
    a.process.pause()
    world.simulation.pass_ms(TTL_MS - RENEW_MS - 100)
    a.process.resume()
    world.simulation.pass_ms(3 * TTL_MS)
    assert a.role is ShardRole.OWNER
    assert len(world.epochs) == 1
    assert a.is_sure()


# -- errors ---------------------------------------------------------------------------------------


def test_an_owner_whose_disk_fails_gives_the_shard_up(world: ClusterWorld, a: Member) -> None:
    world.produce(a, "kept")
    world.probes_are_blind = True
    a.vfs.fail_call(1, errno.EIO, only=("write",), thread="penstock-wal-writer")
    pending = world.submit(a.engine.produce, Produce("t", "", "stored", None))
    took_ms = world.simulation.wait_until(lambda: bool(world.epochs[1:]))
    assert took_ms < AT_ONCE_MS
    owner = world.owner()
    assert owner is not a
    assert pending
    world.simulation.pass_ms(2 * TTL_MS)
    assert world.values(owner) == ["kept", "stored"]
    assert a.image() == owner.image()


def test_a_shard_is_given_up_at_once_while_a_renewal_is_under_way(
    world: ClusterWorld, a: Member
) -> None:
    world.probes_are_blind = True
    before = world.lease().renewals
    world.simulation.wait_until(lambda: world.lease().renewals > before)
    a.replica._ended(a.replica._life, OSError(errno.EIO, "the disk failed"))
    assert world.simulation.wait_until(lambda: bool(world.epochs[1:])) < AT_ONCE_MS
    assert world.owner() is not a


def test_a_broker_that_gave_the_shard_up_takes_it_again_if_nobody_else_does(
    world: ClusterWorld,
) -> None:
    a = world.ready("a")
    world.produce(a, "kept")
    a.replica._ended(a.replica._life, OSError(errno.EIO, "the disk failed"))
    assert world.simulation.wait_until(lambda: a.role is ShardRole.OWNER) < 2 * AT_ONCE_MS
    assert world.values(a) == ["kept"]


def test_a_broker_whose_disk_goes_on_failing_never_owns_the_shard_again(
    world: ClusterWorld, a: Member
) -> None:
    a.vfs.fail_call(1, errno.EIO, only=("write", "open", "open_read"), then_all_after=0)
    world.submit(a.engine.produce, Produce("t", "", "stored", None))
    world.simulation.wait_until(lambda: bool(a.endings))
    owner = world.owner()
    world.simulation.pass_ms(10 * TTL_MS)
    assert (owner.role, a.role) == (ShardRole.OWNER, ShardRole.STANDBY)
    assert a.replica.standby is None
    assert len(world.epochs) == 2


def test_a_takeover_that_fails_leaves_the_lease_to_the_next(world: ClusterWorld, a: Member) -> None:
    first = world.next_owner()
    other = next(each for each in world.standbys() if each is not first)
    a.kill()
    wait_for_role(world, first, ShardRole.PROMOTING)
    first.replica._ended(first.replica._life, OSError(errno.EIO, "the disk failed"))
    assert world.simulation.wait_until(lambda: bool(world.epochs[1:])) < AT_ONCE_MS
    assert other.role is ShardRole.OWNER
    world.simulation.pass_ms(2 * TTL_MS)
    assert first.image() == other.image()


def test_a_promotion_that_is_too_late_serves_nothing(world: ClusterWorld, a: Member) -> None:
    """The stream is away while a broker takes over, and its own lease runs out."""
    first = world.next_owner()
    a.kill()
    wait_for_role(world, first, ShardRole.PROMOTING)
    world.cut(first)
    world.simulation.wait_until(lambda: bool(world.epochs[1:]))
    owner = world.owner()
    assert owner is not first
    world.produce(owner, "new")
    world.connect(first)
    world.simulation.pass_ms(3 * TTL_MS)
    assert (owner.role, first.role) == (ShardRole.OWNER, ShardRole.STANDBY)
    assert len(world.epochs) == 2
    assert first.image() == owner.image()


# -- many takeovers -------------------------------------------------------------------------------


def test_many_takeovers_leave_nothing_behind(world: ClusterWorld, a: Member) -> None:
    """One renewal and one read at a time, whatever happened before."""

    def requests() -> dict[str, int]:
        world.simulation.pass_ms(2 * TTL_MS)
        before = dict(world.keys.requests)
        world.simulation.pass_ms(10 * TTL_MS)
        return {kind: count - before[kind] for kind, count in world.keys.requests.items()}

    def timers() -> int:
        """Those that are due soon: the audits of a copy that was closed come within a minute."""
        scheduler = world.simulation.scheduler
        return sum(due - scheduler._now_ms < 2 * TTL_MS for due, _, _ in scheduler._timers)

    at_first = requests()
    timers_at_first, watches = timers(), len(world.watches)
    for number in range(30):
        owner = world.owner()
        if number % 3 == 0:
            world.stream.store(b"stray")
            world.submit(owner.engine.produce, Produce("t", "", f"v{number}", None))
        elif number % 3 == 1:
            owner.process.pause()
        else:
            owner.vfs.fail_call(1, errno.EIO, only=("write",), thread="penstock-wal-writer")
            world.submit(owner.engine.produce, Produce("t", "", f"v{number}", None))
        served = len(world.epochs)
        world.simulation.wait_until(lambda: len(world.epochs) > served)  # noqa: B023
        owner.process.resume()
        world.simulation.pass_ms(TTL_MS)
    for kind, count in requests().items():
        assert count <= at_first[kind] + 6
    assert timers() <= timers_at_first + 10
    assert len(world.watches) <= watches


def test_an_answer_to_a_renewal_of_an_earlier_lease_begins_no_second_chain(
    world: ClusterWorld,
) -> None:
    a = world.ready("a")
    for _ in range(5):
        world.keys.plan(Fate.LOST_REQUEST, "put shard")
        sent = world.keys.requests["put shard.0"]
        world.simulation.wait_until(lambda: world.keys.requests["put shard.0"] > sent)  # noqa: B023
        a.replica._ended(a.replica._life, OSError(errno.EIO, "the disk failed"))
        world.owner()
        world.simulation.pass_ms(2 * TTL_MS)
    sent = world.keys.requests["put shard.0"]
    world.simulation.pass_ms(10 * RENEW_MS)
    assert world.keys.requests["put shard.0"] - sent <= 11
