"""Section C: consumers that are slow or leave, driftq-24 and driftq-25."""

from __future__ import annotations

import time

from tests.broker_process import PROMPT_S, BrokerProcess
from tests.contract.checks import (
    assert_done,
    assert_refused,
)
from tests.contract.conftest import MakeTopic, StartBroker
from tests.ndjson import ConsumeStream, Item, NoItem

BIG = 32 * 1024


def fill(broker: BrokerProcess, topic: str, count: int) -> None:
    """`count` messages of 32 KiB, in batches."""
    for start in range(0, count, 100):
        batch = [
            {"topic": topic, "value": f"{n}:".ljust(BIG, "x")}
            for n in range(start, min(count, start + 100))
        ]
        assert broker.client.post("/v1/produce/batch", json=batch).status_code == 200


def test_a_reader_that_stands_still_holds_up_nobody_and_memory_stays_bounded(
    start_broker: StartBroker,
) -> None:
    """driftq-24: 25 groups that do not read; buffering for them would take 25 * 32 MB."""
    broker = start_broker("--max-in-flight", "5000", env={"PENSTOCK_MEMORY_BYTES": str(16 * 2**20)})
    topic = broker.create_topic("t")
    count = 1000
    fill(broker, topic, count)
    with broker.consume(topic, "measured") as reader:
        assert len(reader.take(count, timeout_s=30)) == count
    before = broker.rss_bytes()
    stalled = [broker.open_consume(topic, f"stalled-{n}", receive_buffer=4096) for n in range(25)]
    with broker.consume(topic, "other") as other:
        seen = other.take(count, timeout_s=30)
    assert [i.offset for i in seen] == list(range(count))
    started = time.monotonic()
    broker.put(topic, "still answers")
    assert time.monotonic() - started < PROMPT_S
    grown = broker.rss_bytes() - before
    assert grown < 250 * 2**20, f"{grown / 2**20:.0f} MiB for 25 readers that do not read"
    for stream in stalled:
        stream.close()


def test_a_backlog_of_large_messages_comes_whole_from_every_partition(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    """driftq-24: a connection that is full for a moment forgets no partition."""
    topic = make_topic(4)
    for start in range(0, 120, 20):
        batch = [
            {"topic": topic, "value": "x" * 100_000, "envelope": {"partition_override": n % 4}}
            for n in range(start, start + 20)
        ]
        assert broker.client.post("/v1/produce/batch", json=batch).status_code == 200
    for group in ("one", "two", "three"):
        with broker.consume(topic, group) as stream:
            assert sorted(item.offset for item in stream.take(120)) == list(range(120))


def test_a_consumer_that_stands_still_leaves_the_rest_to_others_of_its_group(
    start_broker: StartBroker,
) -> None:
    """driftq-24"""
    broker = start_broker("--max-in-flight", "5000", memory=True)
    topic = broker.create_topic("t")
    stalled = broker.open_consume(topic, owner="stalled", receive_buffer=4096)
    count = 1000
    with broker.consume(topic, owner="eager") as eager:
        fill(broker, topic, count)
        # Sockets may hold some megabytes for the one that does not read; never half of 32 MB.
        assert len(eager.take(count // 2 + 100, timeout_s=30)) == count // 2 + 100
    stalled.close()


def test_after_a_disconnect_each_item_is_either_leased_or_with_another_consumer(
    start_broker: StartBroker,
) -> None:
    """driftq-25: unwritten items move at once and uncounted; written ones stay with their owner."""
    broker = start_broker("--max-in-flight", "5000", memory=True)
    topic = broker.create_topic("t")
    leaver = broker.open_consume(topic, owner="leaver", receive_buffer=4096)
    count = 800
    fill(broker, topic, count)
    stayer = broker.open_consume(topic, owner="stayer")
    got: list[Item] = []
    drain(stayer, got)
    leaver.close()
    drain(stayer, got)
    stayer.close()
    assert {item.attempts for item in got} == {1}
    mine = {item.offset for item in got}
    assert len(mine) == len(got)
    theirs = set(range(count)) - mine
    assert theirs, "nothing was written to the first consumer, although it was alone at first"
    for offset in theirs:
        item = Item({"partition": 0, "offset": offset}, b"", 0.0)
        assert_done(broker.ack(topic, item, owner="leaver"))
    for item in got[-5:]:
        assert_refused(broker.ack(topic, item, owner="leaver"))
        assert_done(broker.ack(topic, item, owner="stayer"))


def drain(stream: ConsumeStream, into: list[Item]) -> None:
    """Everything that comes until nothing has come for a while."""
    while True:
        try:
            into.append(stream.next(0.5))
        except NoItem:
            return


def test_what_was_written_waits_for_its_lease_after_a_disconnect(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-25"""
    stream = broker.open_consume(topic, owner="leaver", lease_ms=700)
    before = time.monotonic()
    broker.put(topic, "v")
    assert stream.next().attempts == 1
    stream.close()
    with broker.consume(topic, owner="stayer") as other:
        again = other.next()
    assert (again.attempts, again.last_error) == (2, "ack_timeout")
    assert again.received_at - before >= 0.7


def test_a_departed_owner_may_still_ack(broker: BrokerProcess, topic: str) -> None:
    """driftq-25"""
    broker.put(topic, "first")
    stream = broker.open_consume(topic, owner="leaver")
    item = stream.next()
    stream.close()
    with broker.consume(topic, owner="stayer") as other:
        broker.put(topic, "second")
        assert other.next().value == "second"
        assert_refused(broker.ack(topic, item, owner="stayer"))
        assert_done(broker.ack(topic, item, owner="leaver"))


def test_a_departed_consumer_gets_no_further_turn(broker: BrokerProcess, topic: str) -> None:
    """driftq-25: everything produced after it left reaches the one that stayed, at once."""
    leaver = broker.open_consume(topic, owner="leaver")
    with broker.consume(topic, owner="stayer") as stayer:
        leaver.close()
        for n in range(20):
            broker.put(topic, str(n))
        items = stayer.take(20, timeout_s=5)
    assert [(i.value, i.attempts) for i in items] == [(str(n), 1) for n in range(20)]
