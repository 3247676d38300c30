"""A replica follows a shared stream, owns it behind a fence, and is fenced off by others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from penstock.api.messages import Produce, Settle
from penstock.api.topics import TopicReport
from penstock.cluster.frame_messages import encode_message
from penstock.cluster.replicated_log import Deposed
from penstock.model.errors import PenstockError, Unavailable
from penstock.model.limits import MIB
from penstock.model.records import TopicCreated, encode_record
from penstock.storage.frames import encode_frame
from penstock.storage.log import WalOptions
from tests.cluster.replicas import LEASE_MS, Node, ReplicaWorld
from tests.cluster.simulated_service import Fate


@pytest.fixture
def world() -> Iterator[ReplicaWorld]:
    world = ReplicaWorld()
    yield world
    world.close()


@pytest.fixture
def a(world: ReplicaWorld) -> Node:
    """The owner, with a topic."""
    node = world.must_promote("a")
    world.must(node.engine.create_topic, "t", 1)
    return node


@pytest.fixture
def b(world: ReplicaWorld) -> Node:
    return world["b"]


def test_a_standby_has_the_owners_state_after_every_frame(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    reader = world.consume(a)
    for number in range(20):
        world.produce(a, f"v{number}")
        world.simulation.pass_ms(5)
        if number % 3:
            assert world.ack(a, reader, number) is None
        world.simulation.pass_ms(5)
        assert b.image() == a.image()
    assert b.replica.position() == a.replica.position() == world.stream.last_seq


def test_a_standby_that_is_promoted_has_everything_that_was_acknowledged(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    for number in range(10):
        world.produce(a, f"v{number}")
    world.must_promote("b")
    assert world.values(b) == [f"v{number}" for number in range(10)]
    assert world.produce(b, "new") == 10


def test_a_command_of_several_frames_is_answered_without_another_one() -> None:
    """Two frames are full before the first is sent, and the third is not."""
    with closing(ReplicaWorld(options=WalOptions(segment_bytes=8 * MIB, reserve_bytes=0))) as world:
        node = world.must_promote("a")
        world.must(node.engine.create_topic, "t", 1)
        batch = [Produce("t", "", "x" * 9000, None) for _ in range(260)]
        outcomes = world.must(node.engine.produce_many, batch)
    assert [outcome.offset for outcome in outcomes] == list(range(260))


def test_a_deposed_owner_acknowledges_nothing_and_becomes_a_standby(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    world.produce(a, "kept")
    world.must_promote("b")
    old = world.submit(a.engine.produce, Produce("t", "", "refused", None))
    world.simulation.wait_until(lambda: bool(a.endings))
    assert isinstance(old[0], Deposed)
    world.produce(b, "new")
    world.simulation.pass_ms(20)
    assert a.replica.engine is None
    assert a.image() == b.image()
    assert world.values(b) == ["kept", "new"]


def test_a_paused_owner_that_resumes_acknowledges_nothing(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    world.produce(a, "kept")
    a.process.pause()
    pending = world.submit(a.engine.produce, Produce("t", "", "doubtful", None))
    world.must_promote("b")
    world.produce(b, "new")
    a.process.resume()
    world.simulation.wait_until(lambda: bool(pending))
    assert isinstance(pending[0], Deposed)
    assert world.values(b) == ["kept", "new"]


def test_a_frame_whose_ack_was_lost_is_found_and_counts_once(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    for fate in (Fate.LOST_ANSWER, Fate.LOST_REQUEST, Fate.DUPLICATED, Fate.LATE):
        world.stream.plan(fate, "append")
        world.produce(a, fate.name)
    world.simulation.pass_ms(5000)
    assert b.image() == a.image()
    assert world.values(a) == ["LOST_ANSWER", "LOST_REQUEST", "DUPLICATED", "LATE"]


def test_a_stray_message_ends_the_owner_and_changes_nothing(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    world.produce(a, "before")
    world.stream.store(b"stray")
    outcome = world.call(a.engine.produce, Produce("t", "", "refused", None))
    assert isinstance(outcome, Deposed)
    world.simulation.pass_ms(20)
    assert a.image() == b.image()
    world.must_promote("a")
    world.produce(a, "after")
    assert world.values(a) == ["before", "after"]
    world.simulation.pass_ms(20)
    assert a.image() == b.image()


def test_a_frame_behind_a_void_one_of_its_epoch_does_not_count(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    """An owner that had several frames on their way when a stray message took a number."""
    world.stream.store(b"stray")
    seq = world.stream.last_seq + 1
    record = encode_record(TopicCreated(a.state.last_ts, 99, "void", 1))
    _, payload = encode_frame(seq, 0, 0, [record])
    world.stream.store(encode_message(a.replica.serving_epoch, seq, payload, 1))
    world.simulation.pass_ms(20)
    assert "void" not in b.state.topics
    world.must_promote("b")
    assert "void" not in b.state.topics
    assert sorted(world.must(b.engine.list_topics, ("default", "default"))) == ["t"]


def test_whether_a_message_counts_is_known_again_after_a_restart(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    world.produce(a, "one")
    world.stream.store(b"stray")
    world.simulation.pass_ms(20)
    b.restart()
    seq = world.stream.last_seq + 1
    record = encode_record(TopicCreated(a.state.last_ts, 99, "void", 1))
    _, payload = encode_frame(seq, 0, 0, [record])
    world.stream.store(encode_message(1, seq, payload, 1))
    world.simulation.pass_ms(20)
    assert "void" not in b.state.topics


def test_a_fence_is_appended_again_behind_a_stray_message(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    world.produce(a, "kept")
    world.stream.plan(Fate.LOST_ANSWER, "append")
    promoted = world.promote("b")
    world.simulation.wait_until(lambda: world.stream.last_seq > a.replica.position())
    world.stream.store(b"stray")
    world.simulation.wait_until(lambda: bool(promoted))
    assert not isinstance(promoted[0], PenstockError)
    world.produce(b, "new")
    world.simulation.pass_ms(20)
    a.restart()
    world.simulation.pass_ms(50)
    assert a.image() == b.image()


def test_a_lower_epoch_cannot_take_over(world: ReplicaWorld, a: Node, b: Node) -> None:
    world.must_promote("b")
    world.simulation.pass_ms(20)
    a.replica.drop("a test")
    world.simulation.wait_until(lambda: a.replica.standby is not None)
    world.simulation.pass_ms(20)
    refused = world.promote("a", epoch=1)
    world.simulation.wait_until(lambda: bool(refused))
    assert isinstance(refused[0], Deposed)
    world.produce(b, "still the owner")


def test_leases_begin_again_in_full_at_a_takeover(world: ReplicaWorld, a: Node, b: Node) -> None:
    reader = world.consume(a, lease_ms=LEASE_MS)
    world.produce(a, "v")
    world.simulation.wait_until(lambda: bool(reader.items))
    world.simulation.pass_ms(LEASE_MS - 100)
    a.kill()
    world.must_promote("b")
    other = world.consume(b, owner="p")
    world.simulation.pass_ms(LEASE_MS - 100)
    assert other.items == []
    assert world.ack(b, reader, 0) is None
    world.simulation.pass_ms(2 * LEASE_MS)
    assert other.items == []


def test_a_lease_that_was_extended_begins_again_with_its_new_length(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    reader = world.consume(a, lease_ms=100)
    world.produce(a, "v")
    world.simulation.wait_until(lambda: bool(reader.items))
    settle = Settle("t", "g", 0, 0, "o", "")
    assert world.call(a.engine.extend, settle, 5000) is None
    a.kill()
    world.must_promote("b")
    other = world.consume(b, owner="p")
    world.simulation.pass_ms(4500)
    assert other.items == []
    world.simulation.pass_ms(1000)
    assert [item.value for item in other.items] == ["v"]
    assert other.items[0].last_error == "ack_timeout"


def test_a_read_waits_for_a_frame_when_the_owner_may_have_been_deposed(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    world.produce(a, "v")
    a.is_current = False
    before = world.stream.last_seq
    report = world.must(a.engine.describe_topic, "t")
    assert isinstance(report, TopicReport)
    assert world.stream.last_seq == before + 1
    world.simulation.pass_ms(20)
    assert b.image() == a.image()
    world.must_promote("b")
    stale = world.call(a.engine.describe_topic, "t")
    assert isinstance(stale, Deposed)


def test_a_read_is_not_released_by_a_frame_that_was_sent_before_it(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    """The frame may have been stored before another broker took over, and its ack be late."""
    sent = world.submit(a.engine.produce, Produce("t", "", "mine", None))
    world.simulation.wait_until(lambda: world.stream.last_seq > a.replica.position())
    a.process.pause()
    world.must_promote("b")
    world.produce(b, "newer")
    a.is_current = False
    read = world.submit(a.engine.describe_topic, "t")
    a.process.resume()
    world.simulation.wait_until(lambda: bool(read))
    assert isinstance(read[0], Deposed)
    assert sent
    assert world.values(b) == ["mine", "newer"]


def test_a_new_owner_serves_no_earlier_than_time_had_come(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    a.process.clock.advance(3_600_000)
    world.produce(a, "v")
    a.kill()
    world.must_promote("b")
    assert b.process.clock.now_ms() >= b.state.last_ts > 3_600_000


def test_a_standby_that_restarts_goes_on_from_its_own_files(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    for number in range(5):
        world.produce(a, f"v{number}")
    world.simulation.pass_ms(20)
    position = b.replica.position()
    world.stream.drop_before(position)
    b.restart()
    world.produce(a, "v5")
    world.simulation.pass_ms(20)
    assert b.image() == a.image()


def test_a_copy_that_is_too_old_serves_nothing_while_there_is_nobody_to_copy_from(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    world.are_copied = False
    b.kill()
    for number in range(5):
        world.produce(a, f"v{number}")
    world.stream.drop_before(world.stream.last_seq)
    b.start()
    world.simulation.pass_ms(1000)
    assert "no live broker" in str(b.replica.failure)
    assert not b.replica.is_caught_up()
    refused = world.promote("b")
    world.simulation.wait_until(lambda: bool(refused))
    assert isinstance(refused[0], Unavailable)


def test_files_of_another_stream_are_refused(world: ReplicaWorld, a: Node, b: Node) -> None:
    world.produce(a, "v")
    world.simulation.pass_ms(20)
    b.kill()
    last = world.stream.last_seq
    _, payload = encode_frame(last, 0, 0, [encode_record(TopicCreated(1, 7, "other", 1))])
    world.stream.messages[last] = encode_message(1, last, payload, 1)
    b.start()
    world.simulation.pass_ms(50)
    assert "belongs to another cluster" in str(b.replica.failure)


def test_a_stream_that_lost_its_end_stops_the_owner(world: ReplicaWorld, a: Node) -> None:
    world.produce(a, "one")
    world.produce(a, "two")
    world.stream.lose_tail(world.stream.last_seq - 1)
    outcome = world.submit(a.engine.produce, Produce("t", "", "three", None))
    world.simulation.wait_until(lambda: bool(outcome), most_ms=120_000)
    assert isinstance(outcome[0], Unavailable)
    assert "ends before message" in str(outcome[0])


def test_the_owner_drains_before_it_stops(world: ReplicaWorld, a: Node, b: Node) -> None:
    outcomes = [
        world.submit(a.engine.produce, Produce("t", "", f"v{number}", None)) for number in range(5)
    ]
    drained: list[bool] = []
    a.replica.drain(lambda: drained.append(True))
    world.simulation.wait_until(lambda: bool(drained))
    assert all(outcomes)
    a.close()
    world.must_promote("b")
    assert world.values(b) == [f"v{number}" for number in range(5)]
