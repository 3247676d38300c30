"""What counts as buffered, and that knowing it costs the same with any history."""

from __future__ import annotations

import pytest

from penstock.core.invariants import check
from penstock.model.errors import ResourceExhausted
from penstock.model.limits import Limits
from tests.engine.harness import LONG_MS, Broker, on_disk


def buffered(broker: Broker, topic: str = "t", partition: int = 0) -> tuple[int, int]:
    backlog = broker.state.topics[topic].partitions[partition].backlog
    return backlog.buffered_msgs(), backlog.buffered_bytes()


def is_full(outcome: object, limit: str = "partition_msgs") -> bool:
    return isinstance(outcome, ResourceExhausted) and outcome.limit == limit


def test_the_group_furthest_behind_counts():
    """driftq-15, 14: an ack that frees room lets the next one in."""
    broker = on_disk(limits=Limits(max_partition_msgs=3))
    broker.topic()
    quick = broker.consume(group="quick", lease_ms=LONG_MS)
    slow = broker.consume(group="slow", lease_ms=LONG_MS)
    broker.put("t", "a", "b", "c")
    for offset in range(3):
        assert broker.ack(quick, offset) is None
    assert is_full(broker.try_produce("t", "d"))
    assert broker.ack(slow, 2) is None, "in any order"
    broker.put("t", "d")
    assert is_full(broker.try_produce("t", "e"))
    broker.must(broker.engine.delete_group, "t", "slow")
    broker.put("t", "e", "f")
    assert is_full(broker.try_produce("t", "g"))
    check(broker.state)
    broker.close()


def test_bytes_are_counted_like_messages():
    """driftq-14: key and value, in UTF-8."""
    broker = on_disk(limits=Limits(max_partition_bytes=20))
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.produce("t", "ä" * 4, key="kk")
    assert buffered(broker) == (1, 10)
    assert is_full(broker.try_produce("t", "x" * 11), "partition_bytes")
    broker.produce("t", "x" * 10)
    assert is_full(broker.try_produce("t", "y"), "partition_bytes")
    assert broker.ack(reader, 0) is None
    broker.produce("t", "y" * 10)
    broker.close()


@pytest.mark.parametrize("restart", [Broker.restart, Broker.crash, Broker.seal_and_crash])
def test_what_is_buffered_is_the_same_after_a_restart(restart):
    """driftq-51: with free history, groups that came and went, and what was trimmed."""
    broker = on_disk(limits=Limits(max_partition_msgs=50))
    broker.topic()
    first = broker.consume(group="first", lease_ms=LONG_MS)
    broker.put("t", *[f"v{n}" for n in range(8)])
    for offset in (0, 1, 2, 5):
        assert broker.ack(first, offset) is None
    late = broker.consume(group="late", lease_ms=LONG_MS)
    assert broker.ack(late, 6) is None
    broker.must(broker.engine.delete_group, "t", "first")
    broker.must(broker.engine.configure_topic, "t", None, 4)
    broker.pass_ms(2000)
    before = buffered(broker)
    restart(broker)
    assert buffered(broker) == before
    check(broker.state)
    broker.close()


@pytest.mark.parametrize("history", [0, 5000])
def test_a_produce_at_the_limit_looks_at_no_history(history: int):
    """driftq-15: O(1) per produce, refused or not, however much was ever finished."""
    broker = on_disk(limits=Limits(max_partition_msgs=10, max_in_flight=100_000))
    broker.topic()
    groups = [broker.consume(group=f"g{n}", lease_ms=LONG_MS) for n in range(3)]
    for first in range(0, history, 10):
        commands = [broker.command("t", "v") for _ in range(10)]
        broker.must(broker.engine.produce_many, commands)
        for reader in groups:
            acks = [broker.naming(reader, first + n) for n in range(10)]
            assert broker.must(broker.engine.ack_many, acks) == [None] * 10
    broker.must(broker.engine.produce_many, [broker.command("t", "v") for _ in range(10)])
    backlog = broker.state.topics["t"].partitions[0].backlog
    calls = _count_calls(lambda: broker.submit(broker.engine.produce, broker.command("t", "v")))
    assert calls < 200, "the cost depends on history"
    assert backlog.buffered_msgs() == 10
    broker.close()


def _count_calls(action) -> int:
    """Python functions entered: a measure of work that no other process disturbs."""
    import sys

    count = 0

    def tally(frame, event, argument):
        nonlocal count
        if event == "call":
            count += 1

    sys.setprofile(tally)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count
