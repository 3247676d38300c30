"""Section H: idempotent produces, driftq-57 to driftq-60."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx

from tests.broker_process import BrokerProcess, eventually, wait_until
from tests.contract.checks import (
    assert_done,
    assert_not_found,
    assert_overloaded,
    assert_refused,
    new_name,
)
from tests.contract.conftest import MakeTopic, StartBroker
from tests.contract.http_router import HttpRouter


def values(broker: BrokerProcess, topic: str, count: int) -> list[str]:
    """Exactly `count` messages are in the topic; their values by offset."""
    with broker.consume(topic, group=new_name("audit")) as stream:
        items = stream.take(count)
        stream.expect_nothing(100)
    return [item.value for item in sorted(items, key=lambda item: item.offset)]


def keyed(key: str, tenant: str | None = None) -> dict[str, Any]:
    return {"idempotency_key": key} | ({} if tenant is None else {"tenant_id": tenant})


# -- driftq-57: COMMITTED ----------------------------------------------------------------------


def test_the_second_produce_of_a_key_is_200_and_stores_nothing(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-57: JSON and query alike, whatever the second value is."""
    broker.put(topic, "first", envelope=keyed("k", "t"))
    again = broker.produce(topic, "second", envelope=keyed("k", "t"))
    assert again.status_code == 200
    assert again.json() == {"status": "produced", "topic": topic}
    query = {"topic": topic, "value": "third", "tenant": "t", "idem_key": "k"}
    assert broker.client.post("/v1/produce", params=query).status_code == 200
    broker.put(topic, "another key", envelope=keyed("l", "t"))
    assert values(broker, topic, 2) == ["first", "another key"]


def test_a_committed_key_is_known_after_its_message_is_acked(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-57"""
    broker.put(topic, "first", envelope=keyed("k"))
    with broker.consume(topic) as stream:
        assert_done(broker.ack(topic, stream.next()))
        broker.put(topic, "second", envelope=keyed("k"))
        stream.expect_nothing()


# -- driftq-58: PENDING and FAILED -------------------------------------------------------------


def test_of_many_at_once_one_message_is_stored(broker: BrokerProcess, topic: str) -> None:
    """driftq-58: each answer is 409 (the first was still pending) or 200."""
    barrier = threading.Barrier(16)
    statuses: list[int] = []

    def produce(n: int) -> None:
        with broker.new_client() as client:
            client.get("/v1/healthz")
            body = {"topic": topic, "value": str(n), "envelope": keyed("k")}
            barrier.wait()
            reply = client.post("/v1/produce", json=body)
            if reply.status_code == 409:
                assert_refused(reply)
            statuses.append(reply.status_code)

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 16
    assert set(statuses) <= {200, 409}
    assert 200 in statuses
    broker.put(topic, "after", envelope=keyed("k"))
    assert len(values(broker, topic, 1)) == 1


def test_while_the_first_is_pending_the_second_is_409(
    start_broker: StartBroker, http_router: HttpRouter
) -> None:
    """driftq-58: the first is with the router, and nobody knows yet how it will end."""
    broker = start_broker("--router", http_router.url, "--router-timeout-ms", "10000")
    topic = broker.create_topic("t")
    replies: list[httpx.Response] = []

    def produce(where: str) -> threading.Thread:
        http_router.may_answer.clear()
        asked = len(http_router.asked)

        def send() -> None:
            body = {"topic": where, "value": "first", "envelope": keyed("k")}
            with broker.new_client() as client:
                replies.append(client.post("/v1/produce", json=body))

        thread = threading.Thread(target=send)
        thread.start()
        eventually(lambda: len(http_router.asked) > asked)
        return thread

    refused = produce("nowhere")
    http_router.may_answer.set()
    refused.join()
    assert_not_found(replies.pop())
    pending = produce(topic)
    assert_refused(broker.produce(topic, "second", envelope=keyed("k")))
    batch = [{"topic": topic, "value": "third", "envelope": keyed("k")}]
    (result,) = broker.client.post("/v1/produce/batch", json=batch).json()["results"]
    assert (result.get("code"), result.get("error")) == (409, "FAILED_PRECONDITION")
    http_router.may_answer.set()
    pending.join()
    assert replies.pop().status_code == 200
    broker.put(topic, "fourth", envelope=keyed("k"))
    assert values(broker, topic, 1) == ["first"]


def test_a_refused_produce_leaves_its_key_free(start_broker: StartBroker) -> None:
    """driftq-58: whichever way it was refused (429: see driftq-14)."""
    broker = start_broker("--max-message-bytes", "100", memory=True)
    topic = broker.create_topic("t")
    refusals: list[tuple[str, str, dict[str, Any], int]] = [
        ("v", "out of range", {"partition_override": 5}, 400),
        ("v", "expired", {"deadline": "2020-01-01T00:00:00Z"}, 400),
        ("v", "bad policy", {"retry_policy": {"max_attempts": -1}}, 400),
        ("v" * 101, "too large", {}, 413),
        ("v", "unknown target", {"target_topic": "nowhere"}, 404),
    ]
    for value, key, envelope, status in refusals:
        reply = broker.produce(topic, value, envelope=envelope | keyed(key))
        assert reply.status_code == status, (key, reply.text)
    for _, key, _, _ in refusals:
        broker.put(topic, key, envelope=keyed(key))
    assert_not_found(broker.produce("later", "v", envelope=keyed("k")))
    broker.create_topic("later")
    broker.put("later", "v", envelope=keyed("k"))
    assert values(broker, topic, len(refusals)) == [key for _, key, _, _ in refusals]
    assert values(broker, "later", 1) == ["v"]


# -- driftq-59: the scope ----------------------------------------------------------------------


def test_another_tenant_is_another_key(broker: BrokerProcess, topic: str) -> None:
    """driftq-59: an absent tenant is the tenant "", and only that."""
    broker.put(topic, "none", envelope=keyed("k"))
    broker.put(topic, "a", envelope=keyed("k", "a"))
    broker.put(topic, "b", envelope=keyed("k", "b"))
    broker.put(topic, "empty", envelope=keyed("k", ""))
    assert values(broker, topic, 3) == ["none", "a", "b"]


def test_it_is_the_final_topic_that_counts(broker: BrokerProcess, make_topic: MakeTopic) -> None:
    """driftq-59"""
    asked, target = make_topic(), make_topic()
    broker.put(asked, "moved", envelope=keyed("k") | {"target_topic": target})
    broker.put(target, "the same operation", envelope=keyed("k"))
    broker.put(asked, "another", envelope=keyed("k"))
    assert values(broker, target, 1) == ["moved"]
    assert values(broker, asked, 1) == ["another"]


def test_an_empty_key_is_no_key(broker: BrokerProcess, topic: str) -> None:
    """driftq-59"""
    for n in range(3):
        broker.put(topic, str(n), envelope=keyed("", "t"))
    assert values(broker, topic, 3) == ["0", "1", "2"]


def test_tenant_and_key_do_not_run_into_each_other(broker: BrokerProcess, topic: str) -> None:
    """driftq-59: no way of joining them makes two scopes one."""
    pairs = [("a", "b:c"), ("a:b", "c"), ("a\x00b", "c"), ("a", "b\x00c"), ("", "a:b:c")]
    for tenant, key in pairs:
        broker.put(topic, f"{tenant!r} {key!r}", envelope=keyed(key, tenant))
    assert len(values(broker, topic, len(pairs))) == len(pairs)


# -- driftq-60: TTL and size -------------------------------------------------------------------


def test_after_the_ttl_the_key_is_free_and_not_before(start_broker: StartBroker) -> None:
    """driftq-60: a repeat does not prolong it."""
    broker = start_broker("--idempotency-ttl-ms", "1500")
    topic = broker.create_topic("t")
    before = time.monotonic()
    broker.put(topic, "first", envelope=keyed("k"))
    answered = time.monotonic()
    while time.monotonic() < before + 1.2:
        broker.put(topic, "repeated", envelope=keyed("k"))
    assert values(broker, topic, 1) == ["first"]
    wait_until(answered + 2.0)
    broker.put(topic, "second", envelope=keyed("k"))
    assert values(broker, topic, 2) == ["first", "second"]


def test_a_key_beyond_the_bound_is_429_and_none_is_forgotten(start_broker: StartBroker) -> None:
    """driftq-60: the engine's tests say when there is room again."""
    broker = start_broker(memory=True, env={"PENSTOCK_MAX_IDEMPOTENCY_KEYS": "3"})
    topic = broker.create_topic("t")
    for n in range(3):
        broker.put(topic, str(n), envelope=keyed(str(n)))
    assert_overloaded(broker.produce(topic, "x", envelope=keyed("x")), "idempotency_keys")
    for n in range(3):
        broker.put(topic, "again", envelope=keyed(str(n)))
    broker.put(topic, "without a key")
    assert values(broker, topic, 4) == ["0", "1", "2", "without a key"]
