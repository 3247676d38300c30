"""Section E: leases and retries, driftq-36 to driftq-38 and driftq-42 to driftq-44."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, eventually, settle_body
from tests.contract.checks import assert_done, assert_invalid, assert_refused, new_name
from tests.contract.conftest import StartBroker
from tests.ndjson import Item, next_of

LATE_S = 1.5
"""How much later than promised a busy machine may be; never used for a lower bound."""


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


# -- driftq-36: the lease ----------------------------------------------------------------------


def test_a_lapse_redelivers_soon_after_the_lease_and_never_before(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-36: no lease can have begun before the produce was sent."""
    lease_s = 0.3
    with broker.consume(topic, lease_ms=300) as stream:
        before = time.monotonic()
        broker.put(topic, "v")
        item = stream.next()
        late = []
        for attempt in range(2, 7):
            previous, item = item, stream.next()
            assert (item.attempts, item.last_error) == (attempt, "ack_timeout")
            assert item.received_at - before >= lease_s * (attempt - 1)
            late.append(item.received_at - previous.received_at - lease_s)
    assert statistics.median(late) <= 0.25, late
    assert max(late) < LATE_S, late


def test_after_a_lapse_the_next_consumer_in_turn_gets_it(broker: BrokerProcess, topic: str) -> None:
    """driftq-36"""
    streams = [broker.open_consume(topic, owner=f"o{n}", lease_ms=150) for n in range(3)]
    broker.put(topic, "v")
    turns = []
    for attempt in range(1, 7):
        index, item = next_of(streams)
        assert item.attempts == attempt
        turns.append(index)
    for stream in streams:
        stream.close()
    assert sorted(turns[:3]) == [0, 1, 2]
    assert turns == turns[:3] * 2


def test_each_stream_has_its_own_lease(broker: BrokerProcess, topic: str) -> None:
    """driftq-36"""
    short = broker.open_consume(topic, owner="short", lease_ms=200)
    long = broker.open_consume(topic, owner="long", lease_ms=60_000)
    broker.put(topic, "0")
    broker.put(topic, "1")
    held = long.next()
    lapsed = short.next()
    short.close()
    again = long.next()
    assert (again.offset, again.attempts) == (lapsed.offset, 2)
    assert_refused(broker.ack(topic, lapsed, owner="short"))
    assert_done(broker.ack(topic, held, owner="long"))
    assert_done(broker.ack(topic, again, owner="long"))
    long.close()


# -- driftq-37, driftq-38: backoff -------------------------------------------------------------


def test_the_wait_doubles_up_to_its_cap_counted_from_the_nack(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-37"""
    broker.put(topic, "v", envelope=policy(9, 150, 500))
    with broker.consume(topic) as stream:
        item = stream.next()
        for wait_s in (0.15, 0.3, 0.5, 0.5):
            before = time.monotonic()
            assert_done(broker.nack(topic, item))
            answered = time.monotonic()
            item = stream.next()
            assert item.received_at - before >= wait_s
            assert item.received_at - answered < wait_s + LATE_S
    assert item.attempts == 5


@pytest.mark.parametrize("envelope", [None, policy(99, 600_000)])
def test_a_nack_with_delay_0_retries_at_once(
    broker: BrokerProcess, topic: str, envelope: dict[str, Any] | None
) -> None:
    """driftq-37: ten in a row, where any backoff would take minutes."""
    broker.put(topic, "v", envelope=envelope)
    with broker.consume(topic) as stream:
        for attempt in range(1, 11):
            item = stream.next()
            assert item.attempts == attempt
            assert_done(broker.nack(topic, item, delay_ms=0))
        assert stream.next().attempts == 11


def test_without_a_policy_a_nack_waits_the_default_backoff_which_doubles(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-37: 250 ms and 500 ms."""
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        item = stream.next()
        for wait_s in (0.25, 0.5):
            before = time.monotonic()
            assert_done(broker.nack(topic, item))
            item = stream.next()
            assert item.received_at - before >= wait_s


def test_a_topics_backoff_and_a_nacks_delay_go_before_the_brokers(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-37"""
    settings = {"retry_backoff_ms": 550, "retry_max_backoff_ms": 550}
    assert_done(broker.client.patch(f"/v1/topics/{topic}", json=settings))
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        item = stream.next()
        waits: list[tuple[float, dict[str, Any]]]
        waits = [(0.55, {}), (0.55, {}), (0.7, {"delay_ms": 700})]
        for wait_s, how in waits:
            before = time.monotonic()
            assert_done(broker.nack(topic, item, **how))
            item = stream.next()
            assert item.received_at - before >= wait_s


@pytest.mark.parametrize("how", [{"delay_ms": -1}, {"delay_ms": 86_400_001}, {"delay_ms": "x"}])
def test_a_wrong_delay_is_400(broker: BrokerProcess, topic: str, how: dict[str, Any]) -> None:
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        item = stream.next()
        assert_invalid(broker.nack(topic, item, **how))
        query = settle_body(topic, item, "g", "o") | how
        assert_invalid(broker.client.post("/v1/nack", params=query))
        assert_done(broker.nack(topic, item))


def test_a_message_that_always_fails_holds_up_nobody(broker: BrokerProcess, topic: str) -> None:
    """driftq-38: 20 messages, one at a time, and the handler fails at offset 3."""
    batch = [{"topic": topic, "value": str(n)} for n in range(20)]
    assert broker.client.post("/v1/produce/batch", json=batch).status_code == 200
    done: list[int] = []
    with broker.consume(topic, prefetch=1) as stream:
        while len(done) < 19:
            item = stream.next()
            if item.offset == 3:
                assert_done(broker.nack(topic, item, reason="poison"))
            else:
                assert_done(broker.ack(topic, item))
                done.append(item.offset)
        assert item.attempts == 1
    assert done == [n for n in range(20) if n != 3]


def test_a_policy_with_a_backoff_alone_retries_without_end(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-16, driftq-42"""
    broker.put(topic, "v", envelope={"retry_policy": {"backoff_ms": 10, "max_backoff_ms": 20}})
    with broker.consume(topic) as stream:
        for attempt in range(1, 16):
            item = stream.next()
            assert item.attempts == attempt
            assert_done(broker.nack(topic, item))
    assert f"dlq.{topic}" not in topics(broker)


def test_a_message_in_backoff_holds_no_place_and_holds_up_nobody(
    start_broker: StartBroker,
) -> None:
    """driftq-23, driftq-38"""
    broker = start_broker("--max-in-flight", "1", memory=True)
    topic = broker.create_topic("t")
    for n in range(5):
        broker.put(topic, str(n), envelope=policy(9, 60_000))
    with broker.consume(topic) as stream:
        for n in range(5):
            item = stream.next(5)
            assert (item.value, item.attempts) == (str(n), 1)
            assert_done(broker.nack(topic, item))


def test_a_mass_of_messages_no_longer_in_memory_is_retried(start_broker: StartBroker) -> None:
    """driftq-37: they are read back from disk, and none is lost on the way."""
    broker = start_broker(
        "--max-in-flight", "5000",
        env={"PENSTOCK_MEMORY_BYTES": str(2**20), "PENSTOCK_SEGMENT_BYTES": str(2**20)},
    )  # fmt: skip
    topic = broker.create_topic("t")
    for start in range(0, 900, 100):
        batch = [{"topic": topic, "value": f"{n}".ljust(3000)} for n in range(start, start + 100)]
        assert broker.client.post("/v1/produce/batch", json=batch).status_code == 200
    with broker.consume(topic) as stream:
        first = stream.take(900, timeout_s=20)
        for item in first:
            assert_done(broker.nack(topic, item))
        again = stream.take(900, timeout_s=20)
    assert {item.attempts for item in again} == {2}
    assert {i.offset: i.value for i in again} == {i.offset: i.value for i in first}


# -- driftq-42 to driftq-44: no end, no consumer, restarts -------------------------------------


@pytest.mark.parametrize("envelope", [None, {"retry_policy": {"max_attempts": 0}}])
def test_without_max_attempts_retries_never_end(
    broker: BrokerProcess, topic: str, envelope: dict[str, Any] | None
) -> None:
    """driftq-42"""
    broker.put(topic, "v", envelope=envelope)
    with broker.consume(topic) as stream:
        for attempt in range(1, 41):
            item = stream.next()
            assert item.attempts == attempt
            assert_done(broker.nack(topic, item, delay_ms=0))
    assert f"dlq.{topic}" not in topics(broker)


def test_dead_lettering_waits_for_no_consumer(broker: BrokerProcess, topic: str) -> None:
    """driftq-43: the only consumer is gone when its lease ends."""
    broker.put(topic, "poison", envelope=policy(1))
    with broker.consume(topic, lease_ms=200) as stream:
        assert stream.next().attempts == 1
    (copy,) = dead_letters(broker, topic, 1)
    assert (copy.envelope or {})["dlq"]["last_error"] == "ack_timeout"


def test_a_nack_with_no_consumer_connected_schedules_the_retry(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-43"""
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        item = stream.next()
    assert_done(broker.nack(topic, item, reason="gone"))
    with broker.consume(topic, owner="next") as stream:
        again = stream.next()
    assert (again.attempts, again.last_error) == (2, "gone")


def test_attempts_last_error_and_backoff_survive_a_kill_and_leases_do_not(
    start_broker: StartBroker,
) -> None:
    """driftq-44: what was under a lease is delivered again at once."""
    broker = start_broker()
    topic = broker.create_topic("t")
    broker.put(topic, "waiting", envelope=policy(9, 2500))
    broker.put(topic, "ready")
    with broker.consume(topic) as stream:
        waiting, ready = stream.take(2)
        for attempt in (1, 2):
            assert ready.attempts == attempt
            assert_done(broker.nack(topic, ready, reason=f"reason {attempt}"))
            ready = stream.next()
        assert_done(broker.nack(topic, ready, reason="reason 3"))
        assert stream.next().attempts == 4
        before = time.monotonic()
        assert_done(broker.nack(topic, waiting, reason="not yet"))
    broker.restart(kill=True)
    with broker.consume(topic, owner="next") as stream:
        first, second = stream.take(2)
    assert (first.value, first.attempts) == ("ready", 5)
    assert (second.value, second.attempts, second.last_error) == ("waiting", 2, "not yet")
    assert 2.5 <= second.received_at - before < 60


def test_the_last_owner_may_ack_after_a_restart(start_broker: StartBroker) -> None:
    """driftq-44: the lease is over, the owner is still known."""
    broker = start_broker()
    topic = broker.create_topic("t")
    broker.put(topic, "v")
    with broker.consume(topic, owner="worker") as stream:
        item = stream.next()
    broker.restart(kill=True)
    assert_refused(broker.ack(topic, item, owner="other"))
    assert_done(broker.ack(topic, item, owner="worker"))
    with broker.consume(topic, owner="next") as stream:
        stream.expect_nothing()


def test_max_attempts_counts_across_a_restart(start_broker: StartBroker) -> None:
    """driftq-44: the second delivery was the last, although the broker was killed between."""
    broker = start_broker()
    topic = broker.create_topic("t")
    broker.put(topic, "poison", envelope=policy(2))
    with broker.consume(topic) as stream:
        assert_done(broker.nack(topic, stream.next()))
        assert stream.next().attempts == 2
    broker.restart(kill=True)
    (copy,) = dead_letters(broker, topic, 1)
    assert (copy.envelope or {})["dlq"]["attempts"] == 2
