"""Group progress over HTTP: what it finishes, who sees it, what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import (
    assert_done,
    assert_error,
    assert_invalid,
    assert_not_found,
    assert_overloaded,
    assert_refused,
)
from tests.contract.conftest import MakeTopic, StartBroker


def publish(broker: BrokerProcess, topic: str, *nexts: int, group: str = "g") -> httpx.Response:
    """One `next` for each partition, from 0 on."""
    partitions = [{"partition": index, "next": offset} for index, offset in enumerate(nexts)]
    path = f"/v1/topics/{topic}/groups/{group}/progress"
    return broker.client.post(path, json={"partitions": partitions})


def described(broker: BrokerProcess, topic: str) -> dict[str, Any]:
    reply = broker.client.get(f"/v1/topics/{topic}")
    assert reply.status_code == 200
    found: dict[str, Any] = reply.json()
    return found


def lags(broker: BrokerProcess, topic: str) -> list[int]:
    groups = described(broker, topic)["groups"]
    return [partition["lag"] for group in groups for partition in group["partitions"]]


def test_progress_makes_the_group_and_its_lag_is_seen(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    topic = make_topic(2)
    for n in range(10):
        broker.put(topic, f"v{n}", envelope={"partition_override": n % 2})
    reply = publish(broker, topic, 4, 10)
    assert reply.status_code == 200
    assert reply.json() == {
        "partitions": [{"partition": 0, "next": 4}, {"partition": 1, "next": 10}]
    }
    assert lags(broker, topic) == [3, 0]
    with broker.consume(topic) as stream:
        assert [stream.next().offset for _ in range(3)] == [4, 6, 8]


def test_progress_only_goes_forward_and_says_where_it_is(broker: BrokerProcess, topic: str) -> None:
    for n in range(5):
        broker.put(topic, f"v{n}")
    publish(broker, topic, 4)
    reply = publish(broker, topic, 2)
    assert (reply.status_code, reply.json()) == (200, {"partitions": [{"partition": 0, "next": 4}]})
    assert lags(broker, topic) == [1]


def test_a_connected_consumer_goes_on_behind_published_progress(start_broker: StartBroker) -> None:
    broker = start_broker("--max-in-flight", "2")
    topic = broker.create_topic("t")
    for n in range(6):
        broker.put(topic, f"v{n}")
    with broker.consume(topic) as stream:
        first, second = stream.next(), stream.next()
        assert publish(broker, topic, 4).status_code == 200
        assert [stream.next().offset for _ in range(2)] == [4, 5]
        assert_done(broker.ack(topic, first))
        assert_refused(broker.nack(topic, second))
        assert lags(broker, topic) == [2]
    broker.restart(kill=True)
    assert lags(broker, topic) == [2]


def test_published_progress_makes_room_in_a_full_partition(start_broker: StartBroker) -> None:
    broker = start_broker(env={"PENSTOCK_MAX_PARTITION_MSGS": "2"})
    topic = broker.create_topic("t")
    broker.put(topic, "a")
    broker.put(topic, "b")
    assert_overloaded(broker.produce(topic, "c"), "partition_msgs")
    assert publish(broker, topic, 1).status_code == 200
    broker.put(topic, "c")
    assert_overloaded(broker.produce(topic, "d"), "partition_msgs")


def test_retention_waits_for_published_progress(start_broker: StartBroker) -> None:
    broker = start_broker()
    topic = broker.create_topic("t")
    for n in range(4):
        broker.put(topic, f"v{n}")
    publish(broker, topic, 3)
    assert_done(broker.client.patch(f"/v1/topics/{topic}", json={"retention_ms": 1}))
    eventually(lambda: described(broker, topic)["partitions"][0]["first_offset"] == 3)
    assert described(broker, topic)["partitions"][0]["retained_msgs"] == 1
    assert broker.client.get(f"/v1/topics/{topic}/offsets").json()["partitions"][0] == {
        "partition": 0,
        "earliest": 3,
        "next": 4,
    }


def test_published_progress_survives_a_kill_right_after_the_answer(
    start_broker: StartBroker,
) -> None:
    broker = start_broker()
    topic = broker.create_topic("t")
    for n in range(50):
        broker.put(topic, f"v{n}")
        assert publish(broker, topic, n + 1).status_code == 200
    broker.restart(kill=True)
    assert lags(broker, topic) == [0]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"partitions": []}',
        b'{"partitions": [{}]}',
        b'{"partitions": [{"partition": 0}]}',
        b'{"partitions": [{"partition": 0, "next": -1}]}',
        b'{"partitions": [{"partition": 0, "next": "1"}]}',
        b'{"partitions": [{"partition": -1, "next": 0}]}',
        b'{"partitions": [{"partition": 1, "next": 0}]}',
        b'{"partitions": [{"partition": 0, "next": 0}, {"partition": 0, "next": 0}]}',
        b'{"partitions": [{"partition": 0, "next": 0, "more": 1}]}',
        b'{"partitions": [{"partition": 0, "next": 99999999999999999999}]}',
        b'{"partitions": [' + b",".join([b'{"partition": 0, "next": 0}'] * 1025) + b"]}",
    ],
)
def test_what_says_nothing_is_400(broker: BrokerProcess, topic: str, body: bytes) -> None:
    broker.put(topic, "a")
    assert_invalid(broker.client.post(f"/v1/topics/{topic}/groups/g/progress", content=body))
    assert described(broker, topic)["groups"] == []


def test_beyond_the_end_is_416_and_elsewhere_404(broker: BrokerProcess, topic: str) -> None:
    broker.put(topic, "a")
    assert_error(publish(broker, topic, 2), 416, "OUT_OF_RANGE")
    assert_not_found(publish(broker, "nobody", 0))
    assert_not_found(broker.client.post(f"/v1/topics/{topic}/groups//progress", json={}))
    assert described(broker, topic)["groups"] == []


def test_other_methods_are_405(broker: BrokerProcess, topic: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        reply = broker.client.request(method, f"/v1/topics/{topic}/groups/g/progress")
        assert reply.status_code == 405
