"""Section D: nack, driftq-32 and driftq-33."""

from __future__ import annotations

import pytest

from tests.broker_process import BrokerProcess, settle_body
from tests.contract.checks import (
    assert_done,
    new_name,
)
from tests.ndjson import next_of


@pytest.mark.parametrize(
    ("reason", "seen"),
    [("db_deadlock", "db_deadlock"), ("  spaced  ", "spaced"), ("", "nack"), ("  ", "nack")],
)
def test_a_nack_comes_back_with_its_reason(
    broker: BrokerProcess, topic: str, reason: str, seen: str
) -> None:
    """driftq-32"""
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        first = stream.next()
        assert_done(broker.nack(topic, first, reason=reason))
        second = stream.next()
        assert (second.offset, second.attempts, second.last_error) == (0, 2, seen)


def test_a_nack_without_a_reason_and_one_in_the_query(broker: BrokerProcess, topic: str) -> None:
    """driftq-32: and the latest reason is the one that counts."""
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        body = settle_body(topic, stream.next(), "g", "o")
        assert_done(broker.client.post("/v1/nack", json=body))
        assert stream.next().last_error == "nack"
        query = body | {"reason": "upstream & down"}
        assert_done(broker.client.post("/v1/nack", params=query))
        third = stream.next()
        assert (third.attempts, third.last_error) == (3, "upstream & down")


def test_after_a_nack_the_next_consumer_in_turn_gets_it(broker: BrokerProcess, topic: str) -> None:
    """driftq-32"""
    owners = ["a", "b", "c"]
    streams = [broker.open_consume(topic, owner=owner) for owner in owners]
    broker.put(topic, "v")
    turns = []
    for attempt in range(1, 7):
        index, item = next_of(streams)
        assert item.attempts == attempt
        turns.append(index)
        assert_done(broker.nack(topic, item, owner=owners[index]))
    for stream in streams:
        stream.close()
    assert sorted(turns[:3]) == [0, 1, 2]
    assert turns == turns[:3] * 2


def test_a_groups_ack_or_nack_is_invisible_to_others(broker: BrokerProcess, topic: str) -> None:
    """driftq-33"""
    one, two = new_name("one"), new_name("two")
    broker.put(topic, "acked")
    broker.put(topic, "nacked")
    with broker.consume(topic, one) as first, broker.consume(topic, two) as second:
        acked, nacked = first.take(2)
        assert_done(broker.ack(topic, acked, one))
        assert_done(broker.nack(topic, nacked, one))
        assert first.next().attempts == 2
        theirs = second.take(2)
        assert [(i.attempts, i.last_error) for i in theirs] == [(1, ""), (1, "")]
        second.expect_nothing(50)
        for item in theirs:
            assert_done(broker.ack(topic, item, two))
    with broker.consume(topic, "three") as third:
        assert [(i.attempts, i.last_error) for i in third.take(2)] == [(1, ""), (1, "")]
