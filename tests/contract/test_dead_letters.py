"""Section E: dead letters, driftq-39 to driftq-41."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess, eventually, settle_body
from tests.contract.checks import assert_done, assert_invalid, assert_refused, new_name
from tests.contract.conftest import MakeTopic, StartBroker
from tests.ndjson import Item


def policy(max_attempts: int, backoff_ms: int = 0, max_backoff_ms: int = 0) -> dict[str, Any]:
    fields = {"max_attempts": max_attempts, "backoff_ms": backoff_ms}
    if max_backoff_ms:
        fields["max_backoff_ms"] = max_backoff_ms
    return {"retry_policy": fields}


def topics(broker: BrokerProcess) -> list[str]:
    names: list[str] = broker.client.get("/v1/topics").json()["topics"]
    return names


def dead_letters(broker: BrokerProcess, topic: str, count: int) -> list[Item]:
    """Exactly `count` copies, read by a group of its own; waits for the topic to be made."""
    name = f"dlq.{topic}"
    eventually(lambda: topics(broker), lambda seen: name in seen)
    with broker.consume(name, group=new_name("audit")) as stream:
        items = stream.take(count)
        stream.expect_nothing()
    return items


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_after_max_attempts_a_copy_is_in_the_dlq_and_the_group_moves_on(
    broker: BrokerProcess, make_topic: MakeTopic, max_attempts: int
) -> None:
    """driftq-39"""
    topic = make_topic(2)
    envelope = policy(max_attempts) | {"partition_override": 1}
    before_ms = int(time.time() * 1000)
    broker.put(topic, "poison", "k", envelope)
    with broker.consume(topic) as stream:
        for attempt in range(1, max_attempts + 1):
            item = stream.next()
            assert item.attempts == attempt
            assert_done(broker.nack(topic, item, reason=f"failure {attempt}"))
        broker.put(topic, "next", envelope={"partition_override": 1})
        assert stream.next().value == "next"
        stream.expect_nothing()
    (copy,) = dead_letters(broker, topic, 1)
    assert (copy.key, copy.value, copy.attempts, copy.last_error) == ("k", "poison", 1, "")
    assert copy.envelope is not None
    dlq = copy.envelope["dlq"]
    assert before_ms <= dlq.pop("routed_at_ms") <= time.time() * 1000
    assert dlq == {
        "original_topic": topic,
        "original_partition": 1,
        "original_offset": 0,
        "group": "g",
        "attempts": max_attempts,
        "last_error": f"failure {max_attempts}",
        "retry_policy": {"max_attempts": max_attempts},
    }
    assert "retry_policy" not in copy.envelope


def test_a_dead_nack_moves_the_message_to_the_dead_letters_at_once(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    """driftq-39: in body and query; in a dead-letter topic it is refused."""
    topic = make_topic(1)
    broker.put(topic, "in the body")
    broker.put(topic, "in the query", envelope=policy(9, 60_000))
    with broker.consume(topic) as stream:
        first, second = stream.take(2)
        assert_invalid(broker.nack(topic, first, dead=True, delay_ms=5))
        assert_invalid(broker.nack(topic, first, dead="yes"))
        assert_done(broker.nack(topic, first, reason="cannot be read", dead=True))
        query = settle_body(topic, second, "g", "o") | {"dead": "true"}
        assert_done(broker.client.post("/v1/nack", params=query))
        stream.expect_nothing()
    copies = dead_letters(broker, topic, 2)
    assert [copy.value for copy in copies] == ["in the body", "in the query"]
    dlq = (copies[0].envelope or {})["dlq"]
    assert (dlq["attempts"], dlq["last_error"]) == (1, "cannot be read")
    with broker.consume(f"dlq.{topic}") as stream:
        assert_refused(broker.nack(f"dlq.{topic}", stream.next(), dead=True))


def test_a_topics_max_attempts_is_for_messages_that_name_none(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    """driftq-39, driftq-42"""
    topic = new_name("topic")
    made = broker.client.post("/v1/topics", json={"name": topic, "max_attempts": 2})
    assert made.status_code == 201, made.text
    assert broker.client.get(f"/v1/topics/{topic}").json()["max_attempts"] == 2
    broker.put(topic, "given up")
    broker.put(topic, "has its own", envelope=policy(3))
    with broker.consume(topic) as stream:
        for item in stream.take(2):
            assert_done(broker.nack(topic, item, delay_ms=0))
        for item in stream.take(2):
            assert_done(broker.nack(topic, item, delay_ms=0))
        last = stream.next()
        assert (last.value, last.attempts) == ("has its own", 3)
    (copy,) = dead_letters(broker, topic, 1)
    assert copy.value == "given up"
    assert "retry_policy" not in (copy.envelope or {})["dlq"]
    assert_done(broker.client.patch(f"/v1/topics/{topic}?max_attempts=0"))
    assert broker.client.get(f"/v1/topics/{topic}").json()["max_attempts"] == 0
    for wrong in ({"max_attempts": -1}, {"retry_backoff_ms": 86_400_001}):
        assert_invalid(broker.client.patch(f"/v1/topics/{topic}", json=wrong))


def test_rows_of_dead_letters_have_the_kept_policy_for_whoever_sends_them_again(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-40"""
    broker.put(topic, "poison", envelope=policy(1, 70))
    with broker.consume(topic) as stream:
        assert_done(broker.nack(topic, stream.next()))
    dead_letters(broker, topic, 1)
    path = f"/v1/topics/dlq.{topic}/partitions/0/records"
    row = broker.client.get(path, params={"format": "ndjson"}).json()
    assert (row["retry_max_attempts"], row["retry_backoff_ms"]) == (1, 70)
    assert row["dlq_original_topic"] == topic


def test_a_dead_letter_produced_again_with_its_kept_policy_dies_again(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-40: attempts count from 1, and it does not loop for ever."""
    broker.put(topic, "poison", envelope=policy(2))
    for died in (1, 2):
        with broker.consume(topic) as stream:
            for attempt in (1, 2):
                item = stream.next()
                assert item.attempts == attempt
                assert_done(broker.nack(topic, item))
        copy = dead_letters(broker, topic, died)[-1]
        kept = (copy.envelope or {})["dlq"]["retry_policy"]
        assert kept == {"max_attempts": 2}
        broker.put(topic, copy.value, envelope={"retry_policy": kept})


def test_the_end_of_the_last_lease_dead_letters_too(broker: BrokerProcess, topic: str) -> None:
    """driftq-39"""
    broker.put(topic, "poison", envelope=policy(2))
    with broker.consume(topic, lease_ms=150) as stream:
        assert [item.attempts for item in stream.take(2)] == [1, 2]
        (copy,) = dead_letters(broker, topic, 1)
        stream.expect_nothing(300)
    assert copy.envelope is not None
    assert copy.envelope["dlq"]["last_error"] == "ack_timeout"
    assert copy.envelope["dlq"]["attempts"] == 2


def test_the_last_owner_may_still_ack_a_dead_letter_and_nothing_changes(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-39"""
    broker.put(topic, "poison", envelope=policy(1))
    with broker.consume(topic) as stream:
        item = stream.next()
        assert_done(broker.nack(topic, item))
        assert_done(broker.ack(topic, item))
        assert_refused(broker.nack(topic, item))
    assert len(dead_letters(broker, topic, 1)) == 1


def test_a_dead_letter_frees_its_room_in_the_partition(start_broker: StartBroker) -> None:
    """driftq-39: progress moves on; driftq-41: the DLQ takes more than its own limit."""
    broker = start_broker("--profile", "contract")
    topic = broker.create_topic("t")
    with broker.consume(topic) as stream:
        for n in range(5):
            broker.put(topic, f"poison {n}", envelope=policy(1))
            assert_done(broker.nack(topic, stream.next()))
    name = f"dlq.{topic}"
    seen = []
    with broker.consume(name) as stream:
        for _ in range(5):
            item = stream.next()
            seen.append(item.value)
            assert_done(broker.ack(name, item))
    assert seen == [f"poison {n}" for n in range(5)]


def test_a_dead_letter_is_moved_once_across_a_crash(start_broker: StartBroker) -> None:
    """driftq-39: killed around the nack of the last attempt, at a random moment."""
    chance = random.Random(39)
    broker = start_broker()
    topic = broker.create_topic("t")
    rounds = 4
    for n in range(rounds):
        broker.put(topic, f"poison {n}", envelope=policy(1))
        with broker.consume(topic, owner=f"o{n}") as stream:
            item = stream.next()
            assert (item.value, item.attempts) == (f"poison {n}", 1)
        body = settle_body(topic, item, "g", f"o{n}")
        worker = threading.Thread(target=post_quietly, args=(broker.url + "/v1/nack", body))
        worker.start()
        worker.join(chance.uniform(0, 0.02))
        broker.kill()
        worker.join()
        broker.start()
    copies = dead_letters(broker, topic, rounds)
    assert [copy.value for copy in copies] == [f"poison {n}" for n in range(rounds)]
    broker.restart()
    assert len(dead_letters(broker, topic, rounds)) == rounds
    with broker.consume(topic) as stream:
        stream.expect_nothing()


def post_quietly(url: str, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.HTTPError):  # the broker may be killed under it
        httpx.post(url, json=body, timeout=5, trust_env=False)


def test_the_dlq_keeps_identity_and_drops_policy_and_routing(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    """driftq-40"""
    topic = make_topic(3)
    identity = {
        "run_id": "r",
        "step_id": "s",
        "parent_step_id": "p",
        "tenant_id": "t",
        "idempotency_key": "i",
    }
    controls = policy(1, 5, 10) | {"target_topic": topic, "partition_override": 2}
    broker.put(topic, "poison", "key", identity | controls)
    with broker.consume(topic) as stream:
        assert_done(broker.nack(topic, stream.next()))
    (copy,) = dead_letters(broker, topic, 1)
    assert (copy.key, copy.value) == ("key", "poison")
    assert copy.envelope is not None
    rest = {k: v for k, v in copy.envelope.items() if k != "dlq"}
    assert rest == identity
    again = broker.client.post("/v1/topics", json={"name": f"dlq.{topic}", "partitions": 3})
    assert again.json() == {"status": "exists", "name": f"dlq.{topic}", "partitions": 3}


def test_the_dlq_is_made_on_demand_only(broker: BrokerProcess, topic: str) -> None:
    """driftq-40"""
    broker.put(topic, "fine", envelope=policy(2))
    with broker.consume(topic) as stream:
        assert_done(broker.nack(topic, stream.next()))
        assert_done(broker.ack(topic, stream.next()))
    assert f"dlq.{topic}" not in topics(broker)


def test_a_dlq_has_no_dlq(broker: BrokerProcess, topic: str) -> None:
    """driftq-40: a copy is retried without end, whatever its source's policy was."""
    broker.put(topic, "poison", envelope=policy(1))
    with broker.consume(topic) as stream:
        assert_done(broker.nack(topic, stream.next()))
    name = f"dlq.{topic}"
    with broker.consume(name) as stream:
        for attempt in range(1, 6):
            item = stream.next()
            assert item.attempts == attempt
            assert_done(broker.nack(name, item, delay_ms=0))
    assert f"dlq.{name}" not in topics(broker)


def test_a_policy_on_a_message_produced_into_a_dlq_makes_no_second_one(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-40"""
    name = broker.create_topic(f"dlq.{topic}")
    broker.put(name, "poison", envelope=policy(1))
    with broker.consume(name) as stream:
        assert_done(broker.nack(name, stream.next()))
        broker.put(name, "next")
        eventually(lambda: stream.next().value, {"next"}.__contains__)
    assert f"dlq.{name}" not in topics(broker)


def test_each_group_dead_letters_for_itself(broker: BrokerProcess, topic: str) -> None:
    """driftq-40: an idempotency key does not swallow the second group's copy."""
    broker.put(topic, "poison", envelope=policy(1) | {"idempotency_key": "once"})
    for group in ("one", "two"):
        with broker.consume(topic, group) as stream:
            assert_done(broker.nack(topic, stream.next(), group, reason=f"by {group}"))
    copies = dead_letters(broker, topic, 2)
    said = [(c.envelope or {})["dlq"] for c in copies]
    assert {(d["group"], d["last_error"]) for d in said} == {("one", "by one"), ("two", "by two")}
    with broker.consume(topic, "three") as stream:
        item = stream.next()
        assert item.attempts == 1
        assert_done(broker.ack(topic, item, "three"))


def test_buffer_limits_do_not_stop_a_copy(start_broker: StartBroker) -> None:
    """driftq-41: the DLQ is full for producers, and takes what dies all the same."""
    broker = start_broker("--profile", "contract", memory=True)
    topic = broker.create_topic("t")
    name = broker.create_topic("dlq.t")
    broker.put(name, "a")
    broker.put(name, "b")
    assert broker.produce(name, "c").status_code == 429
    broker.put(topic, "poison", envelope=policy(1))
    with broker.consume(topic) as stream:
        assert_done(broker.nack(topic, stream.next()))
    with broker.consume(name, lease_ms=60_000) as stream:
        for _ in range(2):
            assert_done(broker.ack(name, stream.next()))
        assert stream.next().value == "poison"
