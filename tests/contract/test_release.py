"""`POST /v1/release`: a delivery that nobody began to handle is given back, uncounted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker_process import BrokerProcess, settle_body
from tests.contract.checks import assert_done, assert_error, assert_invalid, assert_refused
from tests.contract.conftest import StartBroker
from tests.ndjson import Item

ONE_ATTEMPT = {"retry_policy": {"max_attempts": 1}}


def release(broker: BrokerProcess, topic: str, item: Item, **changes: Any) -> Any:
    return broker.client.post("/v1/release", json=settle_body(topic, item, "g", "o") | changes)


@pytest.mark.parametrize("form", ["json", "params"])
def test_a_released_delivery_comes_again_at_once_and_uncounted(
    broker: BrokerProcess, topic: str, form: str
) -> None:
    """With its only attempt: it is not dead-lettered. Body and query are alike."""
    broker.put(topic, "v", envelope=ONE_ATTEMPT)
    with broker.consume(topic, lease_ms=60_000) as stream:
        first = stream.next()
        body: Any = settle_body(topic, first, "g", "o")
        assert_done(broker.client.post("/v1/release", **{form: body}))
        again = stream.next()
        assert (again.offset, again.attempts) == (first.offset, 1)
        assert again.members["last_error"] == ""
        assert again.members["delivery_id"] != first.members["delivery_id"]
        stale = {"delivery_id": first.members["delivery_id"]}
        assert_refused(broker.client.post("/v1/ack", json=body | stale))
        assert_done(broker.ack(topic, again))
    assert f"dlq.{topic}" not in broker.client.get("/v1/topics").json()["topics"]


def test_released_deliveries_come_before_those_that_were_never_delivered(
    broker: BrokerProcess, topic: str
) -> None:
    for value in "abcd":
        broker.put(topic, value)
    with broker.consume(topic, lease_ms=60_000, prefetch=2) as stream:
        a, b = stream.take(2)
    assert_done(release(broker, topic, b))
    assert_done(release(broker, topic, a))
    with broker.consume(topic, owner="p", lease_ms=60_000) as stream:
        items = stream.take(4)
        assert [item.value for item in items] == ["a", "b", "c", "d"]
        assert {item.attempts for item in items} == {1}


def test_only_the_owner_of_a_running_lease_releases(broker: BrokerProcess, topic: str) -> None:
    broker.put(topic, "done")
    broker.put(topic, "lapsed")
    with broker.consume(topic, lease_ms=200, prefetch=2) as stream:
        done, lapsed = stream.take(2)
        assert_refused(release(broker, topic, done, owner="thief"))
        assert_done(broker.ack(topic, done))
        assert_refused(release(broker, topic, done))
        again = stream.next()
        assert again.attempts == 2
    stale = {"delivery_id": lapsed.members["delivery_id"]}
    assert_refused(release(broker, topic, lapsed, **stale))
    assert_refused(release(broker, topic, lapsed, offset=99))
    assert_invalid(release(broker, topic, lapsed, partition=7))
    assert_invalid(release(broker, topic, lapsed, owner=" "))
    assert_invalid(release(broker, topic, lapsed, reason="unknown member"))
    assert_error(release(broker, "nowhere", lapsed), 404, "NOT_FOUND")


def test_a_batch_of_releases_has_a_result_per_item_in_order(
    broker: BrokerProcess, topic: str
) -> None:
    for value in "abc":
        broker.put(topic, value)
    with broker.consume(topic, lease_ms=60_000) as stream:
        bodies = [settle_body(topic, item, "g", "o") for item in stream.take(3)]
    bodies[1]["owner"] = "thief"
    reply = broker.client.post("/v1/release/batch", json=[*bodies, {"topic": topic}])
    assert reply.status_code == 200, reply.text
    first, refused, third, invalid = reply.json()["results"]
    assert first == third == {"status": "released"}
    assert (refused["code"], refused["error"]) == (409, "FAILED_PRECONDITION")
    assert (invalid["code"], invalid["error"]) == (400, "INVALID_ARGUMENT")
    with broker.consume(topic, owner="p", lease_ms=60_000) as stream:
        assert [(item.value, item.attempts) for item in stream.take(2)] == [("a", 1), ("c", 1)]
        stream.expect_nothing(100)


def test_a_release_is_durable_when_it_is_answered(start_broker: StartBroker) -> None:
    broker = start_broker()
    topic = broker.create_topic("t")
    broker.put(topic, "v", envelope=ONE_ATTEMPT)
    with broker.consume(topic, lease_ms=60_000) as stream:
        first = stream.next()
    assert_done(release(broker, topic, first))
    broker.restart(kill=True)
    with broker.consume(topic, lease_ms=60_000) as stream:
        again = stream.next()
        assert again.attempts == 1
        assert again.members["delivery_id"] != first.members["delivery_id"]
