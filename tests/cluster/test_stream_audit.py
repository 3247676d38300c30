"""A stream that loses its end is noticed and repaired; another stream is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.api.messages import Produce
from penstock.cluster.frame_messages import decode_message, encode_message
from penstock.cluster.stream_audit import AUDIT_MS
from penstock.cluster.stream_errors import StreamCutShort, StreamHoldsOthers, StreamReplaced
from penstock.cluster.stream_repair import VOID
from penstock.model.records import TopicCreated, encode_record
from penstock.storage.frames import encode_frame
from penstock.storage.log import WalOptions
from tests.cluster.members import ClusterWorld
from tests.cluster.replicas import Node, ReplicaWorld
from tests.cluster.simulated_stream import SimulatedStream

NOTICED_MS = AUDIT_MS + 60_000
"""A minute until the next comparison, and twice the time in which a leader might be wrong."""


@pytest.fixture
def world() -> Iterator[ReplicaWorld]:
    world = ReplicaWorld()
    yield world
    world.close()


@pytest.fixture
def a(world: ReplicaWorld) -> Node:
    node = world.must_promote("a")
    world.must(node.engine.create_topic, "t", 1)
    for number in range(6):
        world.produce(node, f"v{number}")
    world.simulation.pass_ms(20)
    return node


@pytest.fixture
def b(world: ReplicaWorld) -> Node:
    return world["b"]


def lose(stream: SimulatedStream, count: int) -> dict[int, bytes]:
    """The stream forgets its last messages, which are returned."""
    first = stream.last_seq - count + 1
    lost = {seq: stream.messages[seq] for seq in range(first, stream.last_seq + 1)}
    stream.lose_tail(first - 1)
    return lost


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_stream_that_lost_its_end_is_repaired_byte_for_byte(
    world: ReplicaWorld, a: Node, b: Node, count: int
) -> None:
    before = dict(world.stream.messages)
    lost = lose(world.stream, count)
    world.simulation.wait_until(
        lambda: world.stream.last_seq >= max(lost), most_ms=NOTICED_MS + 60_000
    )
    assert world.stream.messages == before
    world.simulation.pass_ms(2000)
    repaired = sum(node.replica.findings.repaired for node in (a, b))
    assert count <= repaired <= 2 * count
    assert any(isinstance(reason, StreamCutShort) for reason in a.endings)
    world.must_promote("b")
    assert world.values(b) == [f"v{number}" for number in range(6)]
    world.produce(b, "new")
    world.simulation.pass_ms(20)
    assert a.image() == b.image()


def test_an_owner_that_appends_notices_at_once(world: ReplicaWorld, a: Node, b: Node) -> None:
    before = dict(world.stream.messages)
    lose(world.stream, 2)
    outcome = world.submit(a.engine.produce, Produce("t", "", "refused", None))
    world.simulation.wait_until(lambda: bool(outcome))
    assert isinstance(outcome[0], StreamCutShort)
    world.simulation.wait_until(lambda: world.stream.messages == before, most_ms=NOTICED_MS)


def test_a_void_message_is_void_again_after_the_repair(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    world.stream.store(b"stray")
    world.simulation.pass_ms(20)
    world.must_promote("b")
    world.produce(b, "after")
    world.simulation.pass_ms(20)
    image = b.image()
    lost = lose(world.stream, 3)
    assert b"stray" in lost.values()
    b.restart()
    a.restart()
    world.simulation.wait_until(lambda: world.stream.last_seq >= max(lost), most_ms=NOTICED_MS)
    assert [world.stream.messages[seq] for seq in sorted(lost)] == [
        VOID if data == b"stray" else data for _, data in sorted(lost.items())
    ]
    world.simulation.pass_ms(1000)
    assert a.image() == b.image() == image


def wait_for_end(world: ReplicaWorld, seq: int) -> None:
    world.simulation.wait_until(lambda: world.stream.last_seq >= seq, most_ms=NOTICED_MS)


@pytest.mark.parametrize("step", range(1, 7))
def test_a_broker_that_dies_while_it_repairs_is_followed_by_another(step: int) -> None:
    world = ReplicaWorld(names="abc")
    try:
        a = world.must_promote("a")
        world.must(a.engine.create_topic, "t", 1)
        for number in range(8):
            world.produce(a, f"v{number}")
        world.simulation.pass_ms(20)
        before = dict(world.stream.messages)
        lose(world.stream, 5)
        for node in world.nodes.values():
            node.restart()
        for name in "ab":
            end = world.stream.last_seq + (step if name == "a" else 1)
            end = min(end, max(before))
            wait_for_end(world, end)
            world[name].kill()
        world.simulation.wait_until(lambda: world.stream.messages == before, most_ms=NOTICED_MS)
        world.simulation.pass_ms(1000)
        world.must_promote("c")
        assert world.values(world["c"]) == [f"v{number}" for number in range(8)]
    finally:
        world.close()


def test_only_a_leader_that_stays_short_is_believed(world: ReplicaWorld, a: Node, b: Node) -> None:
    """A leader that was cut off answers for some seconds from what it knew."""
    b.restart()
    world.stream.isolate(b.process)
    world.stream.leader(b.process).seen_seq = world.stream.last_seq - 2
    appends = world.stream.requests["append"]
    world.simulation.pass_ms(10_000)
    world.stream.rejoin(b.process)
    world.simulation.pass_ms(2000)
    assert world.stream.requests["append"] == appends
    assert b.image() == a.image()


def test_a_stream_that_goes_on_from_a_shorter_end_is_refused(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    """Somebody wrote there although this broker has more. What it has stays on its disk."""
    b.kill()
    lost = lose(world.stream, 3)
    other = encode_record(TopicCreated(1, 99, "other", 1))
    for seq in sorted(lost):
        _, payload = encode_frame(seq, 0, 0, [other])
        world.stream.store(encode_message(1, seq, payload, 1))
    world.simulation.wait_until(lambda: bool(a.endings), most_ms=NOTICED_MS)
    assert isinstance(a.endings[0], StreamHoldsOthers)
    b.start()
    world.simulation.pass_ms(1000)
    assert isinstance(b.replica.failure, StreamHoldsOthers)
    assert "move its data directory away" in str(b.replica.failure)
    assert not b.replica.is_caught_up()


def test_a_standby_compares_its_newest_message_before_it_takes_over(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    last = world.stream.last_seq
    _, payload = encode_frame(last, 0, 0, [encode_record(TopicCreated(1, 99, "other", 1))])
    world.stream.messages[last] = encode_message(1, last, payload, 1)
    refused = world.promote("b")
    world.simulation.wait_until(lambda: bool(refused), most_ms=1000)
    assert isinstance(refused[0], StreamHoldsOthers)
    assert world.stream.last_seq == last


def test_messages_that_are_sealed_already_are_appended_again() -> None:
    world = ReplicaWorld(options=WalOptions(segment_bytes=16 * 1024, reserve_bytes=0))
    try:
        a = world.must_promote("a")
        world.must(a.engine.create_topic, "t", 1)
        for number in range(40):
            world.produce(a, f"v{number} ".ljust(600, "x"))
        for node in world.nodes.values():
            assert node.replica._log is not None
            node.replica._log.roll()
        world.simulation.pass_ms(3000)
        last = world.stream.last_seq
        assert all(node.replica.sealed_seq() == last for node in world.nodes.values())
        before = dict(world.stream.messages)
        lose(world.stream, 5)
        for node in world.nodes.values():
            node.restart()
        wait_for_end(world, last)
        assert world.stream.messages == before
    finally:
        world.close()


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "with the same messages"])
def test_a_stream_that_was_made_anew_is_refused(
    world: ReplicaWorld, a: Node, b: Node, is_empty: bool
) -> None:
    messages = dict(world.stream.messages)
    world.stream.identity = "another"
    if is_empty:
        world.stream.lose_tail(0)
        world.simulation.wait_until(
            lambda: isinstance(b.replica.failure, StreamReplaced), most_ms=3000
        )
    world.simulation.wait_until(lambda: bool(a.endings), most_ms=NOTICED_MS)
    assert isinstance(a.endings[0], StreamReplaced)
    world.simulation.pass_ms(60_000)
    if is_empty:
        assert world.stream.messages == {}, "nothing is written into another stream"
        assert isinstance(b.replica.failure, StreamReplaced)
        assert "backup of NATS" in str(b.replica.failure)
        refused = world.promote("b")
        world.simulation.wait_until(lambda: bool(refused))
        assert refused != [None]
    else:
        # Brought back from a backup: it holds what the brokers have, so it is theirs.
        assert world.stream.messages == messages
        world.must_promote("b")
        world.produce(b, "new")


def test_a_healthy_stream_is_compared_every_minute(world: ReplicaWorld, a: Node, b: Node) -> None:
    world.simulation.pass_ms(5 * AUDIT_MS)
    for node in (a, b):
        assert node.replica.findings.audits >= 4
        assert node.replica.findings.faults == 0
    assert not a.endings


def test_nobody_owns_the_shard_while_a_broker_has_more_than_the_stream() -> None:
    """The broker with the longest copy is away; the other one could take over and write there."""
    world = ClusterWorld()
    try:
        a, b = world.start("ab")
        owner = world.owner()
        other = b if owner is a else a
        world.must(owner.engine.create_topic, "t", 1)
        world.simulation.pass_ms(3000)
        world.stream.stall(other.process)
        for number in range(4):
            world.produce(owner, f"v{number}")
        world.simulation.pass_ms(3000)
        before = dict(world.stream.messages)
        owner.kill()
        lose(world.stream, 2)
        world.stream.lose_tail(min(world.stream.last_seq, other.replica.position()))
        world.stream.release(other.process)
        world.simulation.pass_ms(60_000)
        assert other.replica.engine is None, "its first frame would take the place of another"
        assert len(world.stream.messages) < len(before)
        owner.start()
        serving = world.owner(most_ms=200_000)
        assert {seq: world.stream.messages[seq] for seq in before} == before
        assert world.values(serving) == [f"v{number}" for number in range(4)]
    finally:
        world.close()


def test_messages_of_the_simulation_are_those_of_brokers(world: ReplicaWorld, a: Node) -> None:
    assert all(decode_message(data) for data in world.stream.messages.values())
