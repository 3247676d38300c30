"""Section A: topics and partitions, driftq-1 to driftq-8."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import (
    assert_error,
    assert_invalid,
    assert_nothing_stored,
    assert_refused,
    new_name,
)
from tests.contract.conftest import MakeTopic, StartBroker

KEYS = ["user:1", "user:2", "a", "0", " ", "ключ", "鍵", "🔑", "k" * 300]


def fnv1a_32(text: str) -> int:
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def topics(broker: BrokerProcess) -> list[str]:
    names: list[str] = broker.client.get("/v1/topics").json()["topics"]
    return names


def partitions_by_value(broker: BrokerProcess, topic: str, count: int) -> dict[str, int]:
    with broker.consume(topic, group=new_name("audit")) as stream:
        items = stream.take(count)
        stream.expect_nothing()
    assert len({item.value for item in items}) == count
    return {item.value: item.partition for item in items}


# -- driftq-1: creating ------------------------------------------------------------------------


def test_a_topic_is_created_from_a_json_body(broker: BrokerProcess) -> None:
    """driftq-1"""
    name = new_name()
    reply = broker.client.post("/v1/topics", json={"name": name, "partitions": 3})
    assert reply.status_code == 201
    assert reply.json() == {"status": "created", "name": name, "partitions": 3}
    assert name in topics(broker)


def test_a_topic_is_created_from_the_query(broker: BrokerProcess) -> None:
    """driftq-1"""
    name = new_name()
    reply = broker.client.post("/v1/topics", params={"name": name, "partitions": "3"})
    assert reply.status_code == 201
    assert reply.json() == {"status": "created", "name": name, "partitions": 3}


def test_partitions_left_out_is_one(broker: BrokerProcess) -> None:
    """driftq-1"""
    in_body, in_query = new_name(), new_name()
    reply = broker.client.post("/v1/topics", json={"name": in_body})
    assert (reply.status_code, reply.json()["partitions"]) == (201, 1)
    reply = broker.client.post("/v1/topics", params={"name": in_query})
    assert (reply.status_code, reply.json()["partitions"]) == (201, 1)


def test_a_name_is_trimmed(broker: BrokerProcess) -> None:
    """driftq-1"""
    name = new_name()
    reply = broker.client.post("/v1/topics", json={"name": f"  {name} "})
    assert reply.json()["name"] == name
    broker.put(f" {name}  ", "reaches it")


def test_with_a_body_the_query_is_not_read(broker: BrokerProcess) -> None:
    """driftq-1"""
    name, other = new_name(), new_name()
    reply = broker.client.post(
        "/v1/topics", params={"name": other, "partitions": "9"}, json={"name": name}
    )
    assert reply.json() == {"status": "created", "name": name, "partitions": 1}
    assert other not in topics(broker)


# -- driftq-2: refusing ------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [0, -1, 1.5, "3", "many", True, [], {}])
def test_partitions_in_json_that_are_no_count_are_400(
    broker: BrokerProcess, partitions: Any
) -> None:
    """driftq-2"""
    name = new_name()
    assert_invalid(broker.client.post("/v1/topics", json={"name": name, "partitions": partitions}))
    assert name not in topics(broker)


@pytest.mark.parametrize("partitions", ["0", "-1", "1.5", "many", "0x3"])
def test_partitions_in_the_query_that_are_no_count_are_400(
    broker: BrokerProcess, partitions: str
) -> None:
    """driftq-2"""
    name = new_name()
    parameters = {"name": name, "partitions": partitions}
    assert_invalid(broker.client.post("/v1/topics", params=parameters))
    assert name not in topics(broker)


@pytest.mark.parametrize(
    "body", [{}, {"name": ""}, {"name": " \t "}, {"name": 7}, {"partitions": 2}]
)
def test_a_missing_or_blank_name_is_400(broker: BrokerProcess, body: dict[str, Any]) -> None:
    """driftq-2"""
    before = topics(broker)
    assert_invalid(broker.client.post("/v1/topics", json=body))
    assert topics(broker) == before


def test_a_missing_or_blank_name_in_the_query_is_400(broker: BrokerProcess) -> None:
    """driftq-2"""
    assert_invalid(broker.client.post("/v1/topics"))
    assert_invalid(broker.client.post("/v1/topics", params={"name": "  "}))


def test_an_unknown_field_is_400_and_makes_no_topic(broker: BrokerProcess) -> None:
    """driftq-2"""
    name = new_name()
    assert_invalid(broker.client.post("/v1/topics", json={"name": name, "replicas": 2}))
    assert name not in topics(broker)


# -- driftq-3: again ---------------------------------------------------------------------------


def test_creating_it_again_with_the_same_count_says_exists(broker: BrokerProcess) -> None:
    """driftq-3"""
    name = broker.create_topic(new_name(), 2)
    broker.put(name, "kept")
    reply = broker.client.post("/v1/topics", json={"name": name, "partitions": 2})
    assert reply.status_code == 200
    assert reply.json() == {"status": "exists", "name": name, "partitions": 2}
    with broker.consume(name) as stream:
        assert stream.next().value == "kept"


@pytest.mark.parametrize("other", [1, 3])
def test_creating_it_again_with_another_count_is_409(broker: BrokerProcess, other: int) -> None:
    """driftq-3"""
    name = broker.create_topic(new_name(), 2)
    assert_refused(broker.client.post("/v1/topics", json={"name": name, "partitions": other}))
    reply = broker.client.post("/v1/topics", json={"name": name, "partitions": 2})
    assert (reply.status_code, reply.json()["status"]) == (200, "exists")
    assert broker.produce(name, "v", envelope={"partition_override": 1}).status_code == 200
    assert broker.produce(name, "v", envelope={"partition_override": 2}).status_code == 400


# -- driftq-4: listing -------------------------------------------------------------------------


def test_topics_are_listed_sorted(start_broker: StartBroker) -> None:
    """driftq-4"""
    broker = start_broker(memory=True)
    assert broker.client.get("/v1/topics").json() == {"topics": []}
    names = ["b", "a.b", "a", "Z", "ä", "10", "9", "tasks.enrich"]
    for name in names:
        broker.create_topic(name)
    reply = broker.client.get("/v1/topics")
    assert reply.status_code == 200
    assert reply.json() == {"topics": sorted(names)}


# -- driftq-5, driftq-6: which partition -------------------------------------------------------


def test_the_tests_own_hash_is_fnv_1a() -> None:
    """driftq-5: published vectors, so that the tests below compare with the right thing."""
    assert fnv1a_32("") == 0x811C9DC5
    assert fnv1a_32("a") == 0xE40C292C
    assert fnv1a_32("foobar") == 0xBF9CF968


@pytest.mark.parametrize("count", [1, 3, 7, 64])
def test_a_key_goes_to_its_hash_modulo_the_count(
    make_topic: MakeTopic, count: int, broker: BrokerProcess
) -> None:
    """driftq-5"""
    topic = make_topic(count)
    for key in KEYS:
        broker.put(topic, f"of {key}", key)
    seen = partitions_by_value(broker, topic, len(KEYS))
    assert seen == {f"of {key}": fnv1a_32(key) % count for key in KEYS}


def test_without_a_key_it_is_partition_0(broker: BrokerProcess, make_topic: MakeTopic) -> None:
    """driftq-5"""
    topic = make_topic(5)
    broker.put(topic, "empty key", "")
    broker.client.post("/v1/produce", json={"topic": topic, "value": "no key"})
    broker.client.post("/v1/produce", params={"topic": topic, "value": "none in the query"})
    assert set(partitions_by_value(broker, topic, 3).values()) == {0}


def test_a_key_keeps_its_partition_across_a_restart(start_broker: StartBroker) -> None:
    """driftq-5"""
    broker = start_broker()
    topic = broker.create_topic("t", 7)
    for key in KEYS:
        broker.put(topic, f"1 {key}", key)
    broker.restart(kill=True)
    for key in KEYS:
        broker.put(topic, f"2 {key}", key)
    seen = partitions_by_value(broker, topic, 2 * len(KEYS))
    for key in KEYS:
        assert seen[f"1 {key}"] == seen[f"2 {key}"] == fnv1a_32(key) % 7


def test_an_override_beats_the_key(broker: BrokerProcess, make_topic: MakeTopic) -> None:
    """driftq-5"""
    topic = make_topic(3)
    elsewhere = (fnv1a_32("user:1") + 1) % 3
    broker.put(topic, "moved", "user:1", {"partition_override": elsewhere})
    assert partitions_by_value(broker, topic, 1) == {"moved": elsewhere}


def test_override_0_is_an_override(broker: BrokerProcess, make_topic: MakeTopic) -> None:
    """driftq-6"""
    topic = make_topic(3)
    key = next(key for key in KEYS if fnv1a_32(key) % 3 != 0)
    broker.put(topic, "in json", key, {"partition_override": 0})
    query = {"topic": topic, "value": "in query", "key": key, "partition_override": "0"}
    assert broker.client.post("/v1/produce", params=query).status_code == 200
    assert partitions_by_value(broker, topic, 2) == {"in json": 0, "in query": 0}


@pytest.mark.parametrize("override", [-1, 3, 10**6, 1.5, "1", True])
def test_an_override_out_of_range_is_400_and_stores_nothing(
    broker: BrokerProcess, make_topic: MakeTopic, override: Any
) -> None:
    """driftq-6"""
    topic = make_topic(3)
    assert_invalid(broker.produce(topic, "v", "k", {"partition_override": override}))
    assert_nothing_stored(broker, topic)


@pytest.mark.parametrize("override", ["-1", "3", "1.5", "one"])
def test_an_override_out_of_range_in_the_query_is_400(
    broker: BrokerProcess, make_topic: MakeTopic, override: str
) -> None:
    """driftq-6"""
    topic = make_topic(3)
    query = {"topic": topic, "value": "v", "partition_override": override}
    assert_invalid(broker.client.post("/v1/produce", params=query))
    assert_nothing_stored(broker, topic)


# -- driftq-7, driftq-8: offsets and restarts --------------------------------------------------


def test_offsets_rise_by_one_across_partitions_and_go_on_after_a_restart(
    start_broker: StartBroker,
) -> None:
    """driftq-7"""
    broker = start_broker()
    topic = broker.create_topic("t", 3)
    other = broker.create_topic("other")
    for n in range(6):
        broker.put(topic, str(n), envelope={"partition_override": n % 3})
        broker.put(other, str(n))
    broker.restart(kill=True)
    for n in range(6, 9):
        broker.put(topic, str(n), envelope={"partition_override": 2 - n % 3})
    broker.restart()
    broker.put(topic, "9")
    with broker.consume(topic) as stream:
        items = stream.take(10)
    assert {item.value: item.offset for item in items} == {str(n): n for n in range(10)}


def test_empty_topics_and_partitions_survive_a_restart(start_broker: StartBroker) -> None:
    """driftq-8"""
    broker = start_broker()
    broker.create_topic("empty", 4)
    broker.create_topic("first-only", 3)
    broker.put("first-only", "v", envelope={"partition_override": 0})
    made = [("empty", 4), ("first-only", 3)]
    for kill in (True, False):
        broker.restart(kill=kill)
        assert topics(broker) == ["empty", "first-only"]
        for name, count in made:
            again = broker.client.post("/v1/topics", json={"name": name, "partitions": count})
            assert again.json() == {"status": "exists", "name": name, "partitions": count}
    for name, count in made:
        broker.put(name, "last", envelope={"partition_override": count - 1})
        past_it = broker.produce(name, "v", envelope={"partition_override": count})
        assert_error(past_it, 400, "INVALID_ARGUMENT")
