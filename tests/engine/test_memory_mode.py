"""Without a disk: what every group has finished makes room, and what cannot be kept is refused."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.core.invariants import check
from penstock.model.errors import ResourceExhausted
from penstock.model.limits import KIB, Limits
from tests.engine.harness import LONG_MS, Broker, Reader, policy, values

MEMORY = 200 * KIB
MESSAGE = "x" * 1000
"""With its overhead, more than a hundred fit, and fewer than two hundred."""


def in_memory(**limits: int) -> Broker:
    return Broker(limits=replace(Limits(memory_bytes=MEMORY), **limits))


def is_full(outcome: object) -> bool:
    return isinstance(outcome, ResourceExhausted) and outcome.limit == "memory_bytes"


def ack_all(broker: Broker, reader: Reader) -> None:
    while reader.items:
        for item in reader.take():
            assert broker.ack(reader, item) is None


def test_finished_messages_make_room():
    """No more is kept than memory_bytes allow, for ever."""
    broker = in_memory()
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    for _ in range(2000):
        broker.produce("t", MESSAGE)
        ack_all(broker, reader)
        assert broker.engine.parts.window.used_bytes <= MEMORY + 2 * KIB
    check(broker.state)
    broker.close()


def test_without_room_a_produce_is_refused_until_something_is_finished():
    """429 with its limit named."""
    broker = in_memory()
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    outcome = None
    for _ in range(300):
        outcome = broker.try_produce("t", MESSAGE)
        if isinstance(outcome, ResourceExhausted):
            break
    assert is_full(outcome)
    ack_all(broker, reader)
    broker.produce("t", MESSAGE)
    check(broker.state)
    broker.close()


def test_messages_that_no_group_reads_are_kept_and_fill_the_memory():
    """driftq-21: a group that comes later must find them."""
    broker = in_memory()
    broker.topic()
    while not is_full(outcome := broker.try_produce("t", MESSAGE)):
        assert not isinstance(outcome, ResourceExhausted), outcome
    stored = broker.state.topics["t"].next_offset
    reader = broker.consume(lease_ms=LONG_MS)
    assert len(reader.items) == stored
    broker.close()


def test_one_unfinished_message_does_not_keep_the_memory_of_all_others():
    """What is finished elsewhere makes room, though something older is not finished."""
    broker = in_memory()
    broker.topic("stuck")
    broker.topic("unread")
    broker.topic("t")
    broker.put("stuck", "a")
    broker.put("unread", "b")
    broker.consume("stuck", lease_ms=LONG_MS)
    reader = broker.consume("t", lease_ms=LONG_MS)
    for _ in range(1000):
        broker.produce("t", MESSAGE)
        ack_all(broker, reader)
    check(broker.state)
    broker.close()


def test_trimming_and_reclaiming_count_every_message_once():
    """driftq-70: retention took a part of what memory takes whole later."""
    broker = in_memory()
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.must(broker.engine.configure_topic, "t", None, 20_000)
    for n in range(600):
        broker.produce("t", MESSAGE)
        ack_all(broker, reader)
        if n == 50:
            broker.pass_ms(1100)
        check(broker.state)
    broker.pass_ms(1100)
    check(broker.state)
    assert broker.state.topics["t"].partitions[0].backlog.retained_bytes() <= 21_000
    broker.close()


def test_the_contract_holds_without_a_disk():
    """driftq-17: the same engine, on a log that keeps nothing."""
    broker = in_memory()
    assert not broker.engine.capabilities.wal_enabled
    broker.topic("t", 2)
    broker.produce("t", "a", envelope=policy(1, partition_override=0))
    broker.produce("t", "b", envelope=policy(0, 300, partition_override=1))
    reader = broker.consume(lease_ms=1000)
    assert values(reader.items) == ["a", "b"]
    for item in reader.take():
        assert broker.nack(reader, item) is None
    assert values(broker.stored("dlq.t", 0)) == ["a"]
    broker.pass_ms(310)
    assert (reader.items[0].value, reader.items[0].attempts) == ("b", 2)
    broker.pass_ms(1620)
    assert reader.items[-1].last_error == "ack_timeout"
    broker.must(broker.engine.delete_topic, "t")
    assert reader.ended
    check(broker.state)
    broker.close()
