"""Section D: ack and extend, driftq-27 to driftq-30 and driftq-34."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess, eventually, settle_body, wait_until
from tests.contract.checks import (
    assert_done,
    assert_invalid,
    assert_refused,
)
from tests.contract.conftest import MakeTopic, StartBroker
from tests.ndjson import Item, next_of


def item_at(partition: Any, offset: Any) -> Item:
    return Item({"partition": partition, "offset": offset}, b"", 0.0)


def extend(
    broker: BrokerProcess, topic: str, item: Item, owner: str = "o", lease_ms: int = 60_000
) -> httpx.Response:
    body = settle_body(topic, item, "g", owner) | {"lease_ms": lease_ms}
    return broker.client.post("/v1/extend", json=body)


# -- driftq-27: ack ----------------------------------------------------------------------------


def test_an_ack_by_the_owner_is_204_and_ends_it_for_the_group(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-27: the leases end meanwhile, and only the other message comes again."""
    broker.put(topic, "acked")
    broker.put(topic, "not acked")
    with broker.consume(topic, lease_ms=300) as stream:
        acked, other = stream.take(2)
        assert_done(broker.ack(topic, acked))
        for attempt in (2, 3):
            again = stream.next()
            assert (again.offset, again.attempts) == (other.offset, attempt)


def test_an_ack_may_come_in_the_query(broker: BrokerProcess, topic: str) -> None:
    """driftq-27"""
    broker.put(topic, "v")
    with broker.consume(topic, lease_ms=200) as stream:
        item = stream.next()
        query = settle_body(topic, item, "g", "o")
        assert_done(broker.client.post("/v1/ack", params=query))
        stream.expect_nothing(400)


def test_an_ack_survives_sigkill_the_moment_after(start_broker: StartBroker) -> None:
    """driftq-27"""
    broker = start_broker()
    topic = broker.create_topic("t")
    for n in range(3):
        broker.put(topic, str(n))
    for n in range(2):
        with broker.consume(topic) as stream:
            item = stream.next()
            assert item.value == str(n)
            assert_done(broker.ack(topic, item))
        broker.restart(kill=True)
    with broker.consume(topic) as stream:
        assert stream.next().value == "2"


# -- driftq-28: owners, extending, fencing -----------------------------------------------------


def test_another_owner_is_409_and_changes_nothing(broker: BrokerProcess, topic: str) -> None:
    """driftq-28"""
    owners = ["a", "b"]
    with broker.consume(topic, owner="a") as a, broker.consume(topic, owner="b") as b:
        broker.put(topic, "v")
        index, item = next_of([a, b])
        holder, other = owners[index], owners[1 - index]
        for reply in (
            broker.ack(topic, item, owner=other),
            broker.nack(topic, item, owner=other),
            extend(broker, topic, item, other),
            broker.ack(topic, item, owner="nobody"),
        ):
            assert_refused(reply)
            assert "not owner" in reply.json()["message"]
        a.expect_nothing(50)
        b.expect_nothing(50)
        assert_done(broker.ack(topic, item, owner=holder))


def test_another_owners_nack_or_extend_moves_no_lease(broker: BrokerProcess, topic: str) -> None:
    """driftq-28"""
    with broker.consume(topic, owner="holder", lease_ms=400) as stream:
        before = time.monotonic()
        broker.put(topic, "v")
        item = stream.next()
        assert_refused(extend(broker, topic, item, "other", 60_000))
        assert_refused(broker.nack(topic, item, owner="other", reason="not mine to say"))
        again = stream.next()
    assert (again.attempts, again.last_error) == (2, "ack_timeout")
    assert 0.4 <= again.received_at - before < 2.5


def test_extend_by_the_owner_moves_the_end_of_the_lease(broker: BrokerProcess, topic: str) -> None:
    """driftq-28: later first, then nearer."""
    broker.put(topic, "v")
    with broker.consume(topic, lease_ms=400) as stream:
        item = stream.next()
        before = time.monotonic()
        assert_done(extend(broker, topic, item, lease_ms=1200))
        again = stream.next()
        assert again.attempts == 2
        assert again.received_at - before >= 1.2
    with broker.consume(topic, owner="patient", lease_ms=60_000) as stream:
        item = stream.next()
        before = time.monotonic()
        assert_done(extend(broker, topic, item, "patient", 300))
        again = stream.next()
        assert 0.3 <= again.received_at - before < 30


@pytest.mark.parametrize("lease_ms", [-1, 1.5, "long"])
def test_a_wrong_lease_in_extend_is_400(broker: BrokerProcess, topic: str, lease_ms: Any) -> None:
    """driftq-28"""
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        body = settle_body(topic, stream.next(), "g", "o") | {"lease_ms": lease_ms}
        assert_invalid(broker.client.post("/v1/extend", json=body))


@pytest.mark.parametrize("route", ["/v1/ack", "/v1/nack", "/v1/extend"])
def test_a_delivery_id_of_an_earlier_attempt_is_refused(
    broker: BrokerProcess, topic: str, route: str
) -> None:
    """driftq-28: the fencing token, when it is sent, must be the present delivery's."""
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        first = stream.next()
        assert_done(broker.nack(topic, first))
        second = stream.next()
        assert first.members["delivery_id"] != second.members["delivery_id"]
        body = settle_body(topic, second, "g", "o")
        if route == "/v1/extend":
            body["lease_ms"] = 60_000
        stale = body | {"delivery_id": first.members["delivery_id"]}
        assert_refused(broker.client.post(route, json=stale))
        fresh = body | {"delivery_id": second.members["delivery_id"]}
        assert_done(broker.client.post(route, json=fresh))


def test_the_same_owner_may_settle_after_its_lease_ended(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    """driftq-28: as long as nobody else was given the message."""
    for settle, replaced in [(broker.ack, False), (broker.nack, True)]:
        topic = make_topic()
        broker.put(topic, "v")
        stream = broker.open_consume(topic, lease_ms=100)
        item = stream.next()
        stream.close()
        wait_until(item.received_at + 0.4)
        assert_refused(broker.ack(topic, item, owner="other"))
        assert_done(settle(topic, item))
        with broker.consume(topic, owner="next") as after:
            if replaced:
                assert (after.next().last_error) == "because"
            else:
                after.expect_nothing()


# -- driftq-29: duplicates and the never delivered ---------------------------------------------


def fingerprint(directory: Path) -> str:
    """Of every byte of every file."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(directory)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def test_a_duplicate_ack_is_204_and_writes_no_record(start_broker: StartBroker) -> None:
    """driftq-29: whoever sends it; and the first ack shows that a record would be seen."""
    broker = start_broker()
    assert broker.data_dir is not None
    topic = broker.create_topic("t")
    broker.put(topic, "v")
    stream = broker.open_consume(topic)
    item = stream.next()
    stream.close()
    delivered = fingerprint(broker.data_dir)
    assert_done(broker.ack(topic, item))
    acked = fingerprint(broker.data_dir)
    assert acked != delivered
    for _ in range(5):
        assert_done(broker.ack(topic, item))
        assert_done(broker.ack(topic, item, owner="somebody else"))
    assert fingerprint(broker.data_dir) == acked
    broker.restart(kill=True)
    assert_done(broker.ack(topic, item))


def test_an_ack_of_what_the_group_never_got_is_409(start_broker: StartBroker) -> None:
    """driftq-29"""
    broker = start_broker("--max-in-flight", "1", memory=True)
    topic = broker.create_topic("t")
    broker.put(topic, "0")
    broker.put(topic, "1")
    assert_refused(broker.ack(topic, item_at(0, 0), "no such group"))
    with broker.consume(topic) as stream:
        first = stream.next()
        assert_refused(broker.ack(topic, item_at(0, 1)))
        assert_refused(broker.nack(topic, item_at(0, 1)))
        assert_refused(broker.ack(topic, first, "no such group"))
        assert_done(broker.ack(topic, first))
        assert stream.next().value == "1"
    with broker.consume(topic, "no such group") as stream:
        assert stream.next().value == "0"


def test_a_nack_of_something_done_is_409(broker: BrokerProcess, topic: str) -> None:
    """driftq-29"""
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        item = stream.next()
        assert_done(broker.ack(topic, item))
        assert_refused(broker.nack(topic, item))
        assert_refused(extend(broker, topic, item))
        stream.expect_nothing(50)


# -- driftq-30: any order, any instant ---------------------------------------------------------


def test_a_sigkill_amid_acks_keeps_each_answered_one(start_broker: StartBroker) -> None:
    """driftq-30: what was answered stays acked; what was never sent comes again."""
    chance = random.Random(30)
    broker = start_broker()
    topic = broker.create_topic("t", 2)
    count = 400
    batch = [{"topic": topic, "key": str(n), "value": str(n)} for n in range(count)]
    assert broker.client.post("/v1/produce/batch", json=batch).status_code == 200
    with broker.consume(topic) as stream:
        items = stream.take(count)
    chance.shuffle(items)
    sent: set[int] = set()
    answered: set[int] = set()

    def acknowledge() -> None:
        with broker.new_client() as client:
            for item in items:
                sent.add(item.offset)
                try:
                    reply = client.post("/v1/ack", json=settle_body(topic, item, "g", "o"))
                except httpx.HTTPError:
                    return
                assert_done(reply)
                answered.add(item.offset)

    worker = threading.Thread(target=acknowledge)
    worker.start()
    eventually(lambda: len(answered), lambda count: count >= 40)
    broker.kill()
    worker.join()
    broker.start()
    assert len(sent) < count, "killed too late to show anything"
    never_sent = set(range(count)) - sent
    again: dict[int, int] = {}
    with broker.consume(topic, owner="next") as stream:
        while not never_sent <= set(again) or stream.has_item:
            item = stream.next()
            again[item.offset] = item.attempts
        stream.expect_nothing()
    assert not set(again) & answered
    assert set(again.values()) == {2}
    assert set(again) | answered | sent == set(range(count))


# -- driftq-34: the freed place ----------------------------------------------------------------


def test_the_freed_place_is_used_at_once(start_broker: StartBroker) -> None:
    """driftq-34: a tick of 250 ms would need at least 5 s for these 40 rounds."""
    broker = start_broker("--max-in-flight", "1")
    topic = broker.create_topic("t")
    for n in range(21):
        broker.put(topic, str(n))
    with broker.consume(topic) as stream:
        item = stream.next()
        started = time.monotonic()
        for n in range(20):
            assert_done(broker.nack(topic, item, delay_ms=0))
            item = stream.next()
            assert (item.value, item.attempts) == (str(n), 2)
            assert_done(broker.ack(topic, item))
            item = stream.next()
            assert (item.value, item.attempts) == (str(n + 1), 1)
        assert time.monotonic() - started < 5
