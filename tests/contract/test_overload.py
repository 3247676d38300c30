"""Section B: overload, driftq-14 and driftq-15."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import (
    assert_done,
    assert_overloaded,
    new_name,
)
from tests.contract.conftest import StartBroker


@pytest.fixture(scope="module")
def small() -> Iterator[BrokerProcess]:
    """The documents' own values: 2 in flight, 2 messages, 20 bytes a partition."""
    with BrokerProcess(None, "--profile", "contract") as process:
        yield process


def refused(broker: BrokerProcess, topic: str, **options: Any) -> httpx.Response:
    reply = broker.produce(topic, "x", **options)
    assert_overloaded(reply, "partition_msgs")
    return reply


def test_a_full_partition_refuses_with_429(small: BrokerProcess) -> None:
    """driftq-14"""
    topic = small.create_topic(new_name())
    small.put(topic, "0")
    small.put(topic, "1")
    refused(small, topic)
    query = small.client.post("/v1/produce", params={"topic": topic, "value": "x"})
    assert_overloaded(query, "partition_msgs")
    with small.consume(topic) as stream:
        assert [item.value for item in stream.take(2)] == ["0", "1"]


def test_bytes_of_key_and_value_are_limited_too(small: BrokerProcess) -> None:
    """driftq-14: 20 bytes fit, the 21st does not."""
    topic = small.create_topic(new_name())
    small.put(topic, "1234", "ключ")
    assert_overloaded(small.produce(topic, "123456789"), "partition_bytes")
    small.put(topic, "12345678")
    topic = small.create_topic(new_name())
    small.put(topic, "1234", "ключ")
    assert_overloaded(small.produce(topic, "12345", "kkkk"), "partition_bytes")
    small.put(topic, "1234", "kkkk")


def test_other_partitions_are_not_affected_by_a_full_one(small: BrokerProcess) -> None:
    """driftq-14"""
    topic = small.create_topic(new_name(), 2)
    small.put(topic, "0")
    small.put(topic, "1")
    refused(small, topic)
    small.put(topic, "2", envelope={"partition_override": 1})
    small.put(topic, "3", envelope={"partition_override": 1})
    refused(small, topic, envelope={"partition_override": 1})


def test_an_ack_that_frees_room_lets_the_next_one_in(small: BrokerProcess) -> None:
    """driftq-14"""
    topic = small.create_topic(new_name())
    small.put(topic, "0")
    small.put(topic, "1")
    with small.consume(topic) as stream:
        first, second = stream.take(2)
        refused(small, topic)
        assert_done(small.ack(topic, second))
        small.put(topic, "2")
        refused(small, topic)
        assert_done(small.ack(topic, first))
        small.put(topic, "3")
        assert [item.value for item in stream.take(2)] == ["2", "3"]


def test_the_refused_idempotency_key_may_be_used_again(small: BrokerProcess) -> None:
    """driftq-14"""
    topic = small.create_topic(new_name())
    small.put(topic, "0")
    small.put(topic, "1")
    envelope = {"idempotency_key": "k"}
    refused(small, topic, envelope=envelope)
    with small.consume(topic) as stream:
        first, _ = stream.take(2)
        assert_done(small.ack(topic, first))
        small.put(topic, "again", envelope=envelope)
        assert stream.next().value == "again"


def test_the_group_furthest_behind_is_what_counts(small: BrokerProcess) -> None:
    """driftq-15"""
    topic = small.create_topic(new_name())
    with small.consume(topic, "fast") as fast, small.consume(topic, "slow") as slow:
        small.put(topic, "0")
        small.put(topic, "1")
        for item in fast.take(2):
            assert_done(small.ack(topic, item, "fast"))
        refused(small, topic)
        for item in slow.take(2):
            assert_done(small.ack(topic, item, "slow"))
        small.put(topic, "2")
        small.put(topic, "3")
        refused(small, topic)


def test_acks_in_different_groups_do_not_add_up(small: BrokerProcess) -> None:
    """driftq-15: each group still owes one of the two, so one fits and no more."""
    topic = small.create_topic(new_name())
    with small.consume(topic, "a") as a, small.consume(topic, "b") as b:
        small.put(topic, "0")
        small.put(topic, "1")
        assert_done(small.ack(topic, a.take(2)[0], "a"))
        assert_done(small.ack(topic, b.take(2)[1], "b"))
        small.put(topic, "2")
        refused(small, topic)


def test_a_topic_without_groups_counts_all_it_retains(small: BrokerProcess) -> None:
    """driftq-15"""
    topic = small.create_topic(new_name())
    small.put(topic, "0")
    small.put(topic, "1")
    refused(small, topic)
    with small.consume(topic) as stream:
        for item in stream.take(2):
            assert_done(small.ack(topic, item))
        small.put(topic, "2")


def test_a_new_group_on_finished_history_does_not_block_producers(small: BrokerProcess) -> None:
    """driftq-15"""
    topic = small.create_topic(new_name())
    small.put(topic, "0")
    small.put(topic, "1")
    with small.consume(topic, "old") as old:
        for item in old.take(2):
            assert_done(small.ack(topic, item, "old"))
        with small.consume(topic, "new") as new:
            history = new.take(2)
            small.put(topic, "2")
            small.put(topic, "3")
            refused(small, topic)
            for item in history:
                assert_done(small.ack(topic, item, "new"))
            refused(small, topic)
            for stream, group in [(old, "old"), (new, "new")]:
                for item in stream.take(2):
                    assert_done(small.ack(topic, item, group))
            small.put(topic, "4")
            small.put(topic, "5")
            refused(small, topic)


def test_a_new_group_is_charged_what_was_counted_when_it_appeared(small: BrokerProcess) -> None:
    """driftq-15"""
    topic = small.create_topic(new_name())
    with small.consume(topic, "old") as old:
        small.put(topic, "0")
        small.put(topic, "1")
        first, second = old.take(2)
        assert_done(small.ack(topic, first, "old"))
        with small.consume(topic, "new") as new:
            assert_done(small.ack(topic, second, "old"))
            small.put(topic, "2")
            refused(small, topic)
            for item in new.take(2):
                assert_done(small.ack(topic, item, "new"))
            small.put(topic, "3")
            refused(small, topic)


def test_a_group_exists_from_its_first_consume_across_a_restart(start_broker: StartBroker) -> None:
    """driftq-15: it took nothing, and still it is owed what was produced since."""
    broker = start_broker("--profile", "contract")
    topic = broker.create_topic("t")
    broker.open_consume(topic, "absent").close()
    broker.restart(kill=True)
    with broker.consume(topic, "present") as present:
        broker.put(topic, "0")
        broker.put(topic, "1")
        for item in present.take(2):
            assert_done(broker.ack(topic, item, "present"))
        refused(broker, topic)
        with broker.consume(topic, "absent") as absent:
            for item in absent.take(2):
                assert_done(broker.ack(topic, item, "absent"))
        broker.put(topic, "2")


def test_what_is_buffered_is_counted_the_same_after_a_restart(start_broker: StartBroker) -> None:
    """driftq-15: history that was free for a group stays free."""
    broker = start_broker("--profile", "contract")
    topic = broker.create_topic("t")
    broker.put(topic, "0")
    broker.put(topic, "1")
    with broker.consume(topic, "old") as old:
        for item in old.take(2):
            assert_done(broker.ack(topic, item, "old"))
    broker.open_consume(topic, "new").close()
    broker.put(topic, "2")
    broker.restart(kill=True)
    broker.put(topic, "3")
    refused(broker, topic)
    with broker.consume(topic, "new", owner="o2") as new:
        for item in new.take(2):
            assert_done(broker.ack(topic, item, "new", "o2"))
        refused(broker, topic)
