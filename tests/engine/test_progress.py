"""Published progress: all below an offset is done for the group, and counted to the byte."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.core.comparison import comparable
from penstock.core.image import take_image
from penstock.core.invariants import check
from penstock.engine.report import lag
from penstock.model.envelope import Envelope
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    NotYet,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock.model.limits import KIB, Limits
from penstock.model.progress import Reached
from penstock.model.units import utf8_bytes
from penstock.storage.log import WalOptions
from tests.engine.harness import LONG_MS, Broker, on_disk, policy
from tests.storage.faulty_vfs import FLAVOURS

TIGHT = Limits(memory_bytes=12 * KIB, max_partition_msgs=10**6)
SEGMENTS = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)
COUNT = 185


def advance(broker: Broker, nexts: dict[int, int], group: str = "g", topic: str = "t") -> Any:
    """Where the group is then, by partition; or the error."""
    reached = [Reached(partition, offset) for partition, offset in nexts.items()]
    outcome = broker.call(broker.engine.set_progress, topic, group, reached)
    check(broker.state)
    if isinstance(outcome, PenstockError):
        return outcome
    return {each.partition: each.next for each in outcome}


def lag_of(broker: Broker, group: str = "g", partition: int = 0, topic: str = "t") -> int:
    held = broker.state.topics[topic].groups[group]
    return lag(held, held.progress[partition])


def owed_bytes(broker: Broker, group: str = "g", partition: int = 0) -> int:
    topic = broker.state.topics["t"]
    progress = topic.groups[group].progress[partition]
    backlog = topic.partitions[partition].backlog
    return backlog.stored_bytes - progress.finished_bytes + progress.free_bytes


def filled(partitions: int = 1) -> Broker:
    """Rows of many sizes in history, in the log and in memory."""
    broker = on_disk(limits=TIGHT, options=SEGMENTS)
    broker.topic("t", partitions)
    for n in range(COUNT):
        envelope = Envelope(partition_override=n % partitions)
        broker.produce("t", f"{n} ä ".ljust(490 + n % 10, "."), key=f"k{n}", envelope=envelope)
    log = broker.engine.parts.window.log(broker.state.topics["t"].id, 0)
    edge = log.chunks[0]
    assert edge.messages is None, "nothing is evicted: the test is void"
    assert edge.first < log.sealed_end() <= edge.last, "no chunk is sealed in part"
    assert log.chunks[-1].messages, "nothing is in memory"
    return broker


# -- what it means ---------------------------------------------------------------------------------


def test_progress_makes_the_group_and_says_where_it_is():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b", "c")
    assert advance(broker, {0: 2}) == {0: 2}
    assert lag_of(broker) == 1
    assert broker.consume().offsets() == [2]
    broker.close()


def test_progress_only_goes_forward():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b", "c")
    advance(broker, {0: 2})
    before = comparable(take_image(broker.state), 0)
    assert advance(broker, {0: 1}) == {0: 2}
    assert advance(broker, {0: 2}) == {0: 2}
    assert comparable(take_image(broker.state), 0) == before
    assert advance(broker, {0: 3}) == {0: 3}
    broker.close()


def test_progress_that_is_at_the_beginning_makes_the_group_all_the_same():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    assert advance(broker, {0: 0}) == {0: 0}
    assert lag_of(broker) == 1
    broker.close()


def test_partitions_that_are_not_named_stay_where_they_are():
    broker = filled(3)
    assert advance(broker, {1: 100, 2: 3}) == {1: 100, 2: 3}
    assert [lag_of(broker, partition=n) for n in range(3)] == [62, 29, 60]
    broker.close()


@pytest.mark.parametrize(
    ("nexts", "kind"),
    [({0: 4}, NotYet), ({1: 0}, InvalidArgument), ({-1: 0}, InvalidArgument)],
)
def test_what_is_outside_the_topic_is_refused_and_changes_nothing(
    nexts: dict[int, int], kind: type[PenstockError]
):
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b", "c")
    assert type(advance(broker, nexts)) is kind
    assert not broker.state.topics["t"].groups
    assert type(advance(broker, {0: 0}, topic="nobody")) is NotFound
    broker.close()


def test_a_partition_that_is_named_twice_is_refused():
    broker = on_disk()
    broker.topic()
    reached = [Reached(0, 0), Reached(0, 0)]
    outcome = broker.call(broker.engine.set_progress, "t", "g", reached)
    assert isinstance(outcome, InvalidArgument)
    broker.close()


# -- beside consumers ------------------------------------------------------------------------------


def test_what_is_in_flight_below_is_finished_and_the_next_is_given():
    broker = on_disk(limits=Limits(max_in_flight=2))
    broker.topic()
    broker.put("t", "a", "b", "c", "d", "e")
    reader = broker.consume(lease_ms=LONG_MS)
    first, second = reader.take()
    assert advance(broker, {0: 3}) == {0: 3}
    assert [item.offset for item in reader.take()] == [3, 4]
    assert broker.in_flight() == 2
    assert broker.ack(reader, first) is None
    assert isinstance(broker.nack(reader, second), FailedPrecondition)
    assert lag_of(broker) == 2
    broker.close()


def test_a_consumer_s_credit_comes_back():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b", "c", "d")
    reader = broker.consume(lease_ms=LONG_MS, prefetch=2)
    assert [item.offset for item in reader.take()] == [0, 1]
    advance(broker, {0: 1})
    assert [item.offset for item in reader.take()] == [2]
    assert reader.live.outstanding == 2
    broker.close()


def test_a_group_that_waits_for_what_is_read_from_disk_goes_on_behind_it():
    broker = filled()
    broker.scheduler.is_holding_reads = True
    reader = broker.consume(lease_ms=LONG_MS)
    assert reader.take() == []
    outcomes = broker.submit(broker.engine.set_progress, "t", "g", [Reached(0, COUNT - 2)])
    broker.scheduler.held_reads.pop()()
    broker.settle()
    assert outcomes == [[Reached(0, COUNT - 2)]]
    assert reader.offsets() == [COUNT - 2, COUNT - 1]
    broker.scheduler.release_reads()
    broker.settle()
    assert reader.offsets() == [COUNT - 2, COUNT - 1]
    broker.close()


def test_what_is_decided_and_has_not_left_does_not_leave():
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.give_unwritten(reader, "a", "b")
    assert advance(broker, {0: 1}) == {0: 1}
    assert reader.offsets() == [1]
    assert reader.live.outstanding == 1
    broker.close()


def test_unfinished_entries_of_every_state_are_finished():
    broker = on_disk()
    broker.topic()
    late = policy(backoff_ms=60_000)
    broker.produce("t", "in flight")
    broker.produce("t", "waiting", envelope=late)
    broker.produce("t", "dying", envelope=policy(1))
    broker.produce("t", "ready")
    broker.produce("t", "stays")
    reader = broker.consume(lease_ms=LONG_MS)
    flying, waiting, dying, ready, stays = reader.take()
    broker.nack(reader, waiting)
    reader.live.pause()
    broker.nack(reader, ready, delay_ms=0)
    broker.log.has_room = lambda nbytes, *, reserve=False: reserve
    broker.nack(reader, dying)
    assert [e.state for e in broker.state.groups[2].progress[0].unfinished.values()] == [
        0,
        1,
        3,
        2,
        0,
    ]
    assert advance(broker, {0: stays.offset}) == {0: stays.offset}
    del broker.log.has_room
    broker.pass_ms(70_000)
    check(broker.state)
    assert not broker.engine.parts.dead_letters
    assert "dlq.t" not in broker.state.topics
    assert lag_of(broker) == 1
    reader.live.resume()
    broker.settle()
    assert reader.take() == []
    assert broker.ack(reader, flying) is None
    broker.close()


def test_progress_below_the_cursor_finishes_what_came_back_there():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b", "c", "d")
    reader = broker.consume(lease_ms=LONG_MS)
    for item in reader.take()[2:]:
        broker.ack(reader, item)
    assert lag_of(broker) == 2
    assert advance(broker, {0: 1}) == {0: 1}
    assert lag_of(broker) == 1
    assert advance(broker, {0: 2}) == {0: 4}
    assert lag_of(broker) == 0
    assert broker.in_flight() == 0
    broker.close()


def test_an_effect_of_what_is_finished_is_kept_no_longer_than_its_time():
    broker = on_disk(limits=Limits(idempotency_ttl_ms=5000))
    broker.topic()
    broker.produce("t", "a", envelope=Envelope(idempotency_key="once"))
    broker.consume(lease_ms=LONG_MS)
    broker.begin("once")
    broker.commit("once")
    advance(broker, {0: 1})
    assert not broker.state.topics["t"].groups["g"].open_effects
    broker.pass_ms(7000)
    assert len(broker.state.topics["t"].effects) == 0
    check(broker.state)
    broker.close()


# -- counted exactly -------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
def test_it_is_exact_wherever_it_ends(partitions: int):
    broker = filled(partitions)
    sizes = {
        message.offset: utf8_bytes(message.key) + utf8_bytes(message.value)
        for message in broker.stored("t")
    }
    end = broker.state.topics["t"].partitions[0].end_offset
    for offset in range(0, end + 1, 2):
        assert advance(broker, {0: offset}, group=f"group {offset}") == {0: offset}
        advance(broker, {0: offset}, group="one that goes on")
        left = [size for at, size in sizes.items() if at >= offset]
        for group in (f"group {offset}", "one that goes on"):
            assert lag_of(broker, group) == len(left)
            assert owed_bytes(broker, group) == sum(left)
    broker.close()


def test_it_is_exact_after_retention_has_cut_into_a_chunk_and_a_batch():
    broker = filled()
    advance(broker, {0: 97})
    size = broker.state.topics["t"].partitions[0].backlog.retained_bytes()
    broker.must(broker.engine.configure_topic, "t", None, size // 2)
    broker.pass_ms(3000)
    first = broker.state.topics["t"].partitions[0].first_offset
    assert 0 < first <= 97
    broker.seal()
    for offset in (first, first + 1, 97, 98, COUNT - 1, COUNT):
        assert advance(broker, {0: offset}, group=f"group {offset}") == {0: offset}
        assert lag_of(broker, f"group {offset}") == COUNT - offset
    assert advance(broker, {0: first - 1}, group="late") == {0: first}
    broker.close()


@pytest.mark.parametrize("offset", [20, COUNT - 2, COUNT - 1, COUNT])
def test_it_is_exact_though_everything_moves_while_it_is_counted(offset: int):
    broker = filled()
    reader = broker.consume(lease_ms=LONG_MS, prefetch=10)
    broker.scheduler.is_holding_reads = True
    outcomes = broker.submit(broker.engine.set_progress, "t", "g", [Reached(0, offset)])
    for item in reader.take()[:5]:
        broker.ack(reader, item)
    broker.put("t", "new", "newer")
    assert not outcomes
    broker.scheduler.release_reads()
    broker.settle()
    check(broker.state)
    assert outcomes[0][0].next >= offset
    assert lag_of(broker) == COUNT + 2 - offset
    broker.close()


def test_a_group_that_is_deleted_while_it_is_counted_is_made_anew():
    broker = filled()
    broker.consume(lease_ms=LONG_MS)
    broker.scheduler.is_holding_reads = True
    outcomes = broker.submit(broker.engine.set_progress, "t", "g", [Reached(0, 20)])
    broker.must(broker.engine.delete_group, "t", "g")
    broker.scheduler.release_reads()
    broker.settle()
    check(broker.state)
    assert outcomes == [[Reached(0, 20)]]
    assert lag_of(broker) == COUNT - 20
    broker.close()


def test_a_topic_that_is_made_anew_while_it_is_counted_is_another():
    broker = filled()
    broker.scheduler.is_holding_reads = True
    outcomes = broker.submit(broker.engine.set_progress, "t", "g", [Reached(0, 20)])
    broker.must(broker.engine.delete_topic, "t")
    broker.topic()
    broker.scheduler.release_reads()
    broker.settle()
    assert isinstance(outcomes[0], NotFound)
    assert not broker.state.topics["t"].groups
    broker.close()


def test_what_is_sealed_while_it_is_counted_is_counted_all_the_same():
    broker = filled()
    evicted = next(
        chunk
        for chunk in broker.engine.parts.window.log(broker.state.topics["t"].id, 0).chunks
        if chunk.messages is None
    )
    offset = evicted.last
    broker.scheduler.is_holding_reads = True
    outcomes = broker.submit(broker.engine.set_progress, "t", "g", [Reached(0, offset)])
    broker.seal()
    broker.scheduler.release_reads()
    broker.settle()
    assert outcomes == [[Reached(0, offset)]]
    assert lag_of(broker) == COUNT - offset
    check(broker.state)
    broker.close()


def test_a_batch_that_cannot_be_read_is_an_error_of_ours_and_changes_nothing():
    broker = filled()
    log = broker.engine.parts.window.log(broker.state.topics["t"].id, 0)
    ref = log.refs[0]
    log.refs[0] = msgspec.structs.replace(ref, crc=ref.crc ^ 1)
    outcome = advance(broker, {0: ref.first + 1})
    assert outcome.code == "INTERNAL"
    assert not broker.state.topics["t"].groups
    broker.close()


# -- limits and retention --------------------------------------------------------------------------


def test_retention_removes_what_it_says_is_done_and_no_more():
    broker = on_disk()
    broker.topic()
    broker.put("t", *"abcdef")
    advance(broker, {0: 2})
    broker.must(broker.engine.configure_topic, "t", 1000, None)
    broker.pass_ms(5000)
    assert [message.value for message in broker.stored("t")] == list("cdef")
    advance(broker, {0: 5})
    broker.pass_ms(5000)
    assert [message.value for message in broker.stored("t")] == ["f"]
    check(broker.state)
    broker.close()


# -- durable ---------------------------------------------------------------------------------------


def test_it_is_answered_when_it_is_durable_and_a_crash_keeps_it():
    broker = filled(3)
    broker.hold_writes()
    outcomes = broker.submit(broker.engine.set_progress, "t", "g", [Reached(0, 60)])
    broker.scheduler.run()
    assert not outcomes
    broker.disk.release()
    broker.settle()
    assert outcomes == [[Reached(0, 60)]]
    state = comparable(take_image(broker.state), 0)
    broker.crash()
    assert comparable(take_image(broker.state), 0) == state
    broker.seal_and_crash()
    assert comparable(take_image(broker.state), 0) == state
    assert lag_of(broker) == 42
    check(broker.state)
    broker.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_crash_keeps_all_of_it_or_none(flavour: str):
    for seed in range(6):
        broker = filled(3)
        crash_before_its_sync(broker, flavour, seed)
        if broker.state.topics["t"].groups:
            assert [lag_of(broker, partition=n) for n in range(3)] == [42, 42, 41]
        check(broker.state)
        broker.close()


def crash_before_its_sync(broker: Broker, flavour: str, seed: int) -> None:
    broker.hold_writes()
    broker.submit(broker.engine.set_progress, "t", "g", [Reached(n, 60) for n in range(3)])
    broker.scheduler.run()
    broker.scheduler.run_until(lambda: broker.disk.is_held)
    broker.crash(flavour, seed)


def test_without_room_to_record_it_nothing_changes():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b")
    broker.log.has_room = lambda nbytes, *, reserve=False: False
    assert isinstance(advance(broker, {0: 1}), Unavailable)
    assert not broker.state.topics["t"].groups
    del broker.log.has_room
    assert advance(broker, {0: 1}) == {0: 1}
    broker.close()


def test_it_works_in_memory():
    broker = Broker(limits=Limits(memory_bytes=8 * KIB))
    broker.topic()
    for n in range(60):
        outcome = broker.try_produce("t", "x" * 500)
        if isinstance(outcome, ResourceExhausted):
            assert advance(broker, {0: n}) == {0: n}
            break
    assert lag_of(broker) == 0
    broker.put("t", "x")
    check(broker.state)
    broker.close()
