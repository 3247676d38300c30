"""Section C: consume, driftq-18 to driftq-23 and driftq-26."""

from __future__ import annotations

import functools
import json
import operator
import threading
import time
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import (
    assert_done,
    assert_invalid,
    assert_not_found,
    assert_refused,
    new_name,
)
from tests.contract.conftest import MakeTopic, StartBroker
from tests.ndjson import ConsumeStream, NoItem, next_of

ALWAYS = ["partition", "offset", "attempts", "key", "value", "last_error"]


def get_consume(broker: BrokerProcess, **query: Any) -> httpx.Response:
    """For requests that are refused; one that is not would hang until the timeout."""
    return broker.client.get("/v1/consume", params=query, timeout=5)


# -- driftq-18: the stream ---------------------------------------------------------------------


def test_headers_come_before_the_first_item(broker: BrokerProcess, topic: str) -> None:
    """driftq-18: opening waits for the head, and there is nothing to deliver yet."""
    with broker.consume(topic) as stream:
        assert stream.status == 200
        assert stream.headers["content-type"] == "application/x-ndjson; charset=utf-8"
        broker.put(topic, "a\nb")
        broker.put(topic, "c")
        first, second = stream.take(2)
    assert (first.value, second.value) == ("a\nb", "c")
    assert b"\n" not in first.raw


def test_the_parameters_may_come_as_a_json_body(broker: BrokerProcess, topic: str) -> None:
    """driftq-18: and with a body the query is not read."""
    body = json.dumps({"topic": topic, "group": "g", "owner": "in-body", "lease_ms": 60000})
    target = "/v1/consume?" + urlencode({"topic": "nowhere", "group": "x", "owner": "x"})
    stream = ConsumeStream(broker.port, target, body=body.encode())
    assert stream.status == 200
    broker.put(topic, "v")
    item = stream.next()
    stream.close()
    assert_refused(broker.ack(topic, item, "g", "x"))
    assert_done(broker.ack(topic, item, "g", "in-body"))


@pytest.mark.parametrize("missing", ["topic", "group", "owner"])
@pytest.mark.parametrize("blank", [False, True])
def test_topic_group_and_owner_are_required(
    broker: BrokerProcess, topic: str, missing: str, blank: bool
) -> None:
    """driftq-18"""
    parameters = {"topic": topic, "group": "g", "owner": "o"}
    if blank:
        parameters[missing] = "  "
    else:
        del parameters[missing]
    assert_invalid(get_consume(broker, **parameters))
    assert_invalid(broker.client.request("GET", "/v1/consume", json=parameters, timeout=5))


@pytest.mark.parametrize("lease_ms", [-1, 1.5, "soon"])
def test_a_wrong_lease_is_400(broker: BrokerProcess, topic: str, lease_ms: Any) -> None:
    """driftq-18"""
    parameters = {"topic": topic, "group": "g", "owner": "o", "lease_ms": lease_ms}
    assert_invalid(get_consume(broker, **parameters))
    assert_invalid(broker.client.request("GET", "/v1/consume", json=parameters, timeout=5))


def test_an_unknown_field_in_the_body_is_400_and_in_the_query_ignored(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-18"""
    parameters = {"topic": topic, "group": "g", "owner": "o", "extra": "1"}
    assert_invalid(broker.client.request("GET", "/v1/consume", json=parameters, timeout=5))
    with broker.consume(topic, extra="1") as stream:
        assert stream.status == 200


def test_an_unknown_topic_is_404(broker: BrokerProcess) -> None:
    """driftq-18"""
    assert_not_found(get_consume(broker, topic="nowhere", group="g", owner="o"))


def test_a_lease_of_0_or_none_is_two_seconds(broker: BrokerProcess, make_topic: MakeTopic) -> None:
    """driftq-18: the document's default."""
    absent, zero = make_topic(), make_topic()
    with (
        broker.consume(absent, lease_ms=None) as without,
        broker.consume(zero, lease_ms=0) as with_zero,
    ):
        before = time.monotonic()
        broker.put(absent, "v")
        broker.put(zero, "v")
        for stream in (without, with_zero):
            assert stream.next().attempts == 1
        for stream in (without, with_zero):
            again = stream.next()
            assert again.attempts == 2
            assert 2.0 <= again.received_at - before < 4.0


def test_a_heartbeat_is_a_blank_line(broker: BrokerProcess, topic: str) -> None:
    """driftq-18: an added option, for connections that would be idle."""
    with broker.consume(topic, heartbeat_ms=50) as stream:
        stream.wait_for_blank_lines(2)
        broker.put(topic, "v")
        assert stream.next().value == "v"


# -- driftq-19: the item -----------------------------------------------------------------------


def test_a_plain_item_has_its_members_in_order(broker: BrokerProcess, topic: str) -> None:
    """driftq-19"""
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        item = stream.next()
    assert list(item.members) == [*ALWAYS, "delivery_id"]
    expected: dict[str, Any] = {
        "partition": 0, "offset": 0, "attempts": 1, "key": "", "value": "v", "last_error": "",
    }  # fmt: skip
    delivery_id = item.members["delivery_id"]
    assert item.members == expected | {"delivery_id": delivery_id}
    assert isinstance(delivery_id, str)
    assert delivery_id


def test_an_item_with_an_envelope_has_it_after_last_error(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-19"""
    broker.put(topic, "v", "k", {"run_id": "r"})
    with broker.consume(topic) as stream:
        item = stream.next()
    assert list(item.members) == [*ALWAYS, "envelope", "delivery_id"]


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ({"run_id": "r", "step_id": "", "tenant_id": ""}, {"run_id": "r"}),
        ({"run_id": "", "idempotency_key": ""}, None),
        ({}, None),
        ({"retry_policy": {}}, None),
        ({"partition_override": 0}, {"partition_override": 0}),
        (
            {"retry_policy": {"max_attempts": 3, "backoff_ms": 0}},
            {"retry_policy": {"max_attempts": 3}},
        ),
    ],
)
def test_empty_envelope_members_are_left_out(
    broker: BrokerProcess, topic: str, sent: dict[str, Any], seen: dict[str, Any] | None
) -> None:
    """driftq-19"""
    broker.put(topic, "v", envelope=sent)
    with broker.consume(topic) as stream:
        item = stream.next()
    assert item.envelope == seen
    assert ("envelope" in item.members) == (seen is not None)
    assert "routing" not in item.members


# -- driftq-20, driftq-21: who gets what -------------------------------------------------------


def test_within_a_group_the_consumers_take_turns(broker: BrokerProcess, topic: str) -> None:
    """driftq-20"""
    streams = [broker.open_consume(topic, owner=f"o{n}") for n in range(3)]
    turns = []
    for n in range(9):
        broker.put(topic, str(n))
        index, item = next_of(streams)
        assert item.value == str(n)
        turns.append(index)
    assert sorted(turns[:3]) == [0, 1, 2]
    assert turns == turns[:3] * 3
    for stream in streams:
        stream.expect_nothing(50)
        stream.close()


def test_a_backlog_is_dealt_out_in_turns_and_to_one_consumer_each(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-20"""
    streams = [broker.open_consume(topic, owner=f"o{n}") for n in range(3)]
    for n in range(30):
        broker.put(topic, str(n))
    dealt = [[item.offset for item in stream.take(10)] for stream in streams]
    for stream in streams:
        stream.expect_nothing(50)
        stream.close()
    assert sorted(dealt) == [list(range(start, 30, 3)) for start in range(3)]


def test_each_group_gets_every_message(broker: BrokerProcess, make_topic: MakeTopic) -> None:
    """driftq-21"""
    topic = make_topic(3)
    values = [str(n) for n in range(12)]
    with broker.consume(topic, "early") as early:
        for n, value in enumerate(values):
            broker.put(topic, value, envelope={"partition_override": n % 3})
        seen = early.take(12)
        assert sorted(i.value for i in seen) == sorted(values)
        for item in seen:
            assert_done(broker.ack(topic, item, "early"))
        with broker.consume(topic, "late") as late:
            again = late.take(12)
    assert sorted(i.value for i in again) == sorted(values)
    assert {i.attempts for i in again} == {1}


def test_a_new_group_reads_history_that_is_no_longer_in_memory(start_broker: StartBroker) -> None:
    """driftq-21: with a small memory the old messages are read back from disk."""
    broker = start_broker(
        "--max-in-flight", "5000",
        env={"PENSTOCK_MEMORY_BYTES": str(2**20), "PENSTOCK_SEGMENT_BYTES": str(2**20)},
    )  # fmt: skip
    topic = broker.create_topic("t", 2)
    values = [f"{n}:" + chr(0x4E00 + n % 5000) * 1000 for n in range(2000)]
    with broker.consume(topic, "early") as early:
        for start in range(0, len(values), 200):
            batch = [
                {"topic": topic, "value": v, "envelope": {"partition_override": n % 2}}
                for n, v in enumerate(values[start : start + 200])
            ]
            reply = broker.client.post("/v1/produce/batch", json=batch)
            assert reply.status_code == 200
            for item in early.take(200):
                assert_done(broker.ack(topic, item, "early"))
    with broker.consume(topic, "late") as late:
        seen = late.take(len(values), timeout_s=30)
    assert {i.offset: i.value for i in seen} == dict(enumerate(values))
    for partition in range(2):
        offsets = [i.offset for i in seen if i.partition == partition]
        assert offsets == sorted(offsets)


# -- driftq-22, driftq-23: order and the limit in flight ---------------------------------------


def test_first_deliveries_arrive_in_offset_order_under_load(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    """driftq-22: four producers at once, acks between, three partitions."""
    topic = make_topic(3)
    count, writers = 150, 4

    def write(writer: int) -> None:
        with broker.new_client() as client:
            for n in range(count):
                body = {"topic": topic, "key": f"{writer}-{n}", "value": "v"}
                assert client.post("/v1/produce", json=body).status_code == 200

    threads = [threading.Thread(target=write, args=(n,)) for n in range(writers)]
    with broker.consume(topic) as stream:
        for thread in threads:
            thread.start()
        items = []
        for n in range(count * writers):
            items.append(stream.next())
            if n % 3 == 0:
                assert_done(broker.ack(topic, items[-1]))
    for thread in threads:
        thread.join()
    assert {item.attempts for item in items} == {1}
    assert sorted(item.offset for item in items) == list(range(count * writers))
    for partition in range(3):
        offsets = [item.offset for item in items if item.partition == partition]
        assert offsets == sorted(offsets)
        assert offsets


def test_each_of_several_consumers_sees_offset_order(broker: BrokerProcess, topic: str) -> None:
    """driftq-22"""
    streams = [broker.open_consume(topic, owner=f"o{n}") for n in range(4)]
    batch = [{"topic": topic, "value": str(n)} for n in range(200)]
    assert broker.client.post("/v1/produce/batch", json=batch).status_code == 200
    seen: list[list[int]] = [[] for _ in streams]
    for _ in range(200):
        index, item = next_of(streams)
        seen[index].append(item.offset)
    for stream in streams:
        stream.close()
    assert all(offsets == sorted(offsets) for offsets in seen)
    assert sorted(functools.reduce(operator.iadd, seen, [])) == list(range(200))


def test_in_flight_is_limited_per_partition_over_all_consumers_of_the_group(
    start_broker: StartBroker,
) -> None:
    """driftq-23"""
    broker = start_broker("--max-in-flight", "2", memory=True)
    topic = broker.create_topic("t", 2)
    for n in range(10):
        broker.put(topic, str(n), envelope={"partition_override": n % 2})
    with (
        broker.consume(topic, owner="a") as a,
        broker.consume(topic, owner="b") as b,
        broker.consume(topic, group="other", owner="c") as other,
    ):
        owners = "ab"
        held = [next_of([a, b]) for _ in range(4)]
        assert sorted((i.partition, i.offset) for _, i in held) == [(0, 0), (0, 2), (1, 1), (1, 3)]
        with pytest.raises(NoItem):
            next_of([a, b], 0.2)
        index, item = next(h for h in held if h[1].offset == 2)
        assert_done(broker.ack(topic, item, owner=owners[index]))
        _, freed = next_of([a, b])
        assert (freed.partition, freed.offset) == (0, 4)
        with pytest.raises(NoItem):
            next_of([a, b], 0.1)
        assert sorted(i.offset for i in other.take(4)) == [0, 1, 2, 3]


def test_prefetch_limits_what_one_stream_holds(broker: BrokerProcess, topic: str) -> None:
    """driftq-23: an added option; the group's other consumers go on."""
    for n in range(6):
        broker.put(topic, str(n))
    with broker.consume(topic, owner="a", prefetch=2) as a:
        first, _ = a.take(2)
        a.expect_nothing(100)
        with broker.consume(topic, owner="b", prefetch=3) as b:
            assert [i.value for i in b.take(3)] == ["2", "3", "4"]
            assert_done(broker.ack(topic, first, owner="a"))
            assert a.next().value == "5"


# -- driftq-26: attempts -----------------------------------------------------------------------


def test_attempts_counts_deliveries_from_1(broker: BrokerProcess, topic: str) -> None:
    """driftq-26: nacks and lapses alike."""
    broker.put(topic, "v")
    with broker.consume(topic, owner="short", lease_ms=150) as stream:
        first = stream.next()
        assert_done(broker.nack(topic, first, owner="short"))
        seen = [first, *stream.take(3)]
    assert [item.attempts for item in seen] == [1, 2, 3, 4]
    assert [item.last_error for item in seen] == ["", "because", "ack_timeout", "ack_timeout"]
    eventually(lambda: broker.ack(topic, seen[-1], owner="short").status_code, {204}.__contains__)


def test_attempts_are_counted_for_each_group(broker: BrokerProcess, topic: str) -> None:
    """driftq-26"""
    name = new_name("group")
    broker.put(topic, "v")
    with broker.consume(topic, name) as stream:
        for attempt in range(1, 4):
            item = stream.next()
            assert item.attempts == attempt
            assert_done(broker.nack(topic, item, name))
    with broker.consume(topic, "another") as stream:
        assert stream.next().attempts == 1
